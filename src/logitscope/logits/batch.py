"""`LogitsBatch`: a ragged ``[batch, seq_len, vocab]``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from logitscope import tensors
from logitscope.encodings import EncodedRows
from logitscope.errors import EmptyInputError, IdentityMismatchError, InputError
from logitscope.logits.sequence import Logits, RowArrays, check_same_vocabulary, write_page
from logitscope.rows import NO_TARGET, SUMMARIES

_SHOWN = 4


class LogitsBatch(RowArrays, Sequence[Logits]):
    """Sequences of one model, each with its own number of rows; padding exists only in dense views.

    Args:
        members: one or more `Logits` of the same identity, stage and dtype.

    Attributes:
        identity: what made the rows, the same for all members.

    Raises:
        EmptyInputError: no member.
        IdentityMismatchError: members of different models.
        InputError: members of different stages, encodings, dtypes or devices.
    """

    def __init__(self, members: Sequence[Logits]) -> None:
        if not members:
            raise EmptyInputError("a batch without a member", where="LogitsBatch", expected="one or more")
        self._members = tuple(members)
        self.identity = members[0].identity
        for i, member in enumerate(self._members):
            self._check(i, member)

    # -- shape -----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Logits]:
        return iter(self._members)

    @overload
    def __getitem__(self, index: int) -> Logits: ...

    @overload
    def __getitem__(self, index: slice) -> LogitsBatch: ...

    def __getitem__(self, index: int | slice) -> Logits | LogitsBatch:
        """One sequence, or a batch of some; nothing is copied."""
        if isinstance(index, slice):
            return LogitsBatch(self._members[index])
        return self._members[index]

    @property
    def vocab_size(self) -> int:
        """Columns of a row."""
        return self.identity.vocab_size

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Rows of each sequence, int64 ``[batch]``."""
        return np.array([len(member) for member in self._members], dtype=np.int64)

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(batch, max_len, vocab_size)`` of the dense view."""
        return len(self), max(len(member) for member in self._members), self.vocab_size

    @property
    def dtype(self) -> Any:
        """NumPy dtype of the values, torch dtype when they lie on the device, None when not kept."""
        return self._members[0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all members, without padding."""
        return sum(member.nbytes for member in self._members)

    def mask(self) -> NDArray[np.bool_]:
        """Which rows of the dense view are real, bool ``[batch, max_len]``."""
        real: NDArray[np.bool_] = np.arange(self.shape[1]) < self.lengths[:, None]
        return real

    @property
    def positions(self) -> NDArray[np.int64]:
        """Position of each row in its sequence, int64 ``[batch, max_len]``; -1 where padded."""
        return self._padded([member.positions for member in self._members])

    # -- parts -----------------------------------------------------------------------------------------

    @property
    def prompt(self) -> LogitsBatch:
        """The `Logits.prompt` of every member; views."""
        return LogitsBatch([member.prompt for member in self._members])

    @property
    def generated(self) -> LogitsBatch:
        """The `Logits.generated` of every member; views."""
        return LogitsBatch([member.generated for member in self._members])

    @property
    def last(self) -> LogitsBatch:
        """The `Logits.last` of every member; views."""
        return LogitsBatch([member.last for member in self._members])

    # -- what the rows say -----------------------------------------------------------------------------

    def summaries(self, names: Sequence[str] = SUMMARIES) -> dict[str, NDArray[Any]]:
        """Several summaries by name, each ``[batch, max_len]``, padded with NaN and -1.

        Raises:
            OptionError: an unknown name.
            UnavailableError: neither the summary nor the values were kept.
        """
        found = [member.summaries(names) for member in self._members]
        return {name: self._padded([one[name] for one in found]) for name in names}

    # -- hand-over -------------------------------------------------------------------------------------

    def dense(self, pad: float = 0.0) -> Any:
        """The values ``[batch, max_len, vocab_size]``, padded at the end of the sequence axis.

        A host array, or a tensor when rows were kept on the device. A view when all members have the
        same number of rows in one block of memory, as the engines give them; else a copy.

        Raises:
            UnavailableError: only summaries were kept.
        """
        if any(isinstance(member.values, EncodedRows) for member in self._members):
            return self._dense_array((member._exported() for member in self._members), pad)
        values = [member._exported() for member in self._members]
        if tensors.is_torch(values[0]):
            return self._dense_tensor(values, pad)
        block = _one_block(values)
        if block is not None:
            return block
        return self._dense_array(values, pad)

    def to_numpy(self, pad: float = 0.0) -> NDArray[Any]:
        """`dense` as a NumPy array ``[batch, max_len, vocab_size]``."""
        return tensors.to_numpy(self.dense(pad))

    def to_torch(self, pad: float = 0.0) -> Any:
        """`dense` as a PyTorch tensor ``[batch, max_len, vocab_size]``."""
        return tensors.to_torch(self.dense(pad))

    def to_jax(self, pad: float = 0.0) -> Any:
        """`dense` as a JAX array ``[batch, max_len, vocab_size]``."""
        return tensors.to_jax(self.dense(pad))

    def to_tensorflow(self, pad: float = 0.0) -> Any:
        """`dense` as a TensorFlow tensor ``[batch, max_len, vocab_size]``."""
        return tensors.to_tensorflow(self.dense(pad))

    def to_pandas(self) -> Any:
        """The members' data frames below each other, with their number in ``sample``."""
        pandas = tensors.require("pandas")
        frames = [member.to_pandas() for member in self._members]
        for i, frame in enumerate(frames):
            frame.insert(0, "sample", i)
        return pandas.concat(frames, ignore_index=True)

    def to_arrow(self) -> Any:
        """The members' tables as chunks of one, with their number in ``sample``; values are not copied."""
        pyarrow = tensors.require("pyarrow")
        tables = []
        for i, member in enumerate(self._members):
            samples = pyarrow.array(np.full(len(member), i, dtype=np.int64))
            tables.append(member.to_arrow().add_column(0, "sample", samples))
        return pyarrow.concat_tables(tables)

    def save(self, path: str | PathLike[str], *, exact: bool = False) -> None:
        """Write everything to ``.npz`` or ``.safetensors``, by the suffix; `logitscope.logits.load` reads it.

        Args:
            path: of the file.
            exact: add to hidden rows a compressed residual, with which every machine rebuilds the bits that
                this one does; else another processor or library may differ in the last ones.

        Raises:
            OptionError: another suffix.
        """
        from logitscope.logits.files import save

        save(self, path, exact=exact)

    # -- views -----------------------------------------------------------------------------------------

    def to_html(self, path: str | PathLike[str] | None = None) -> str:
        """One self-contained HTML page of all members; also written to ``path`` when given."""
        return write_page(self, path)

    def _repr_html_(self) -> str:
        shown = [member._repr_html_() for member in self._members[:_SHOWN]]
        rest = len(self) - len(shown)
        return "\n".join([*shown, f"<p>{rest} more sequences</p>"] if rest else shown)

    def __repr__(self) -> str:
        lines = [f"LogitsBatch {list(self.shape)}, {len(self)} sequences, lengths {_few(self.lengths)}"]
        for i, member in enumerate(self._members[:_SHOWN]):
            lines.append(f"  [{i}] {member._head()}")
        if len(self) > _SHOWN:
            lines.append(f"  … {len(self) - _SHOWN} more")
        return "\n".join(lines)

    # -- inside ----------------------------------------------------------------------------------------

    def _check(self, i: int, member: Logits) -> None:
        first = self._members[0]
        check_same_vocabulary(first, member)
        if member.identity != first.identity:
            raise IdentityMismatchError(
                "members of one batch have one identity",
                where=f"members[{i}]",
                expected=first.identity,
                got=member.identity,
            )
        for name in ("stage", "encoding", "dtype"):
            if getattr(member, name) != getattr(first, name):
                raise InputError(
                    f"members of one batch have one {name}",
                    where=f"members[{i}]",
                    expected=getattr(first, name),
                    got=getattr(member, name),
                )

    def _exported(self) -> Any:
        return self.dense()

    def _padded(self, arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
        dtype = arrays[0].dtype
        pad = np.nan if np.issubdtype(dtype, np.floating) else NO_TARGET
        padded = np.full(self.shape[:2], pad, dtype=dtype)
        for row, array in zip(padded, arrays, strict=True):
            row[: len(array)] = array
        return padded

    def _dense_array(self, values: Iterable[NDArray[Any]], pad: float) -> NDArray[Any]:
        dense = tensors.empty(self.shape, self.dtype)
        for row, array in zip(dense, values, strict=True):
            row[: len(array)] = array
            row[len(array) :] = pad
        return dense

    def _dense_tensor(self, values: Sequence[Any], pad: float) -> Any:
        dense = values[0].new_full(self.shape, pad)
        for row, tensor in zip(dense, values, strict=True):
            row[: len(tensor)] = tensor
        return dense


def _one_block(values: Sequence[NDArray[Any]]) -> NDArray[Any] | None:
    """The arrays as a view ``[batch, rows, vocab]`` of memory that they share, if they lie evenly in it."""
    first, owner = values[0], values[0].base
    if len(values) == 1:
        return first[None]
    same = all(a.shape == first.shape and a.flags.c_contiguous and a.base is owner for a in values)
    if not same or not isinstance(owner, np.ndarray) or not owner.flags.c_contiguous:
        return None
    starts = np.array([a.ctypes.data for a in values], dtype=np.int64)
    steps = np.diff(starts)
    if steps[0] < first.nbytes or (steps != steps[0]).any():
        return None
    strides = (int(steps[0]), *first.strides)
    offset = int(starts[0]) - owner.ctypes.data
    raw = owner.reshape(-1).view(np.uint8)
    block = np.ndarray((len(values), *first.shape), first.dtype, raw, offset, strides)
    if not all(a.flags.writeable for a in values):
        block.flags.writeable = False
    return block


def _few(lengths: NDArray[np.int64]) -> str:
    shown = ", ".join(str(n) for n in lengths[:8])
    return f"{shown}, …" if len(lengths) > 8 else shown
