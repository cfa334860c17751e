"""`Logits`: rows of one sequence, and what they say about each token."""

from __future__ import annotations

import abc
import dataclasses
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from logitscope import tensors
from logitscope.encodings import Dense, EncodedRows, HiddenRows, QuantizedRows, encoding
from logitscope.errors import (
    IdentityMismatchError,
    InputError,
    OptionError,
    SelectError,
    UnavailableError,
)
from logitscope.logits.cut import CutRows
from logitscope.numerics import checked_names, host
from logitscope.rows import (
    NO_TARGET,
    SUMMARIES,
    Identity,
    Ids,
    Kind,
    Stage,
    Verification,
    Vocabulary,
    kinds,
    row_count,
    targets,
)

if TYPE_CHECKING:
    from rich.table import Table

_EDGE_ROWS = 3
_DECODED_ROWS = 256
_MASS_ERROR = 4e-6  # of a sum of probabilities whose logsumexp is float32
_TARGET_SUMMARIES = ("target_logit", "target_logprob", "target_rank")


@dataclasses.dataclass(frozen=True, eq=False)
class TopK:
    """The best tokens of each row, best first; equal logits by id.

    Attributes:
        token_ids: int32 ``[rows, k]``.
        logits: ``[rows, k]`` in the dtype of the values.
        logprobs: float32 ``[rows, k]``, natural log, over the full vocabulary.
    """

    token_ids: Ids
    logits: NDArray[Any]
    logprobs: NDArray[np.float32]


class RowArrays(abc.ABC):
    """What one sequence and a batch have in common: summaries by name, and the exchange protocols.

    Summaries are over the full vocabulary, in natural log: host arrays ``[rows]``, or of a batch
    ``[batch, max_len]`` padded with NaN and -1. They come from what was kept, else from the values.
    """

    identity: Identity

    @abc.abstractmethod
    def summaries(self, names: Sequence[str] = SUMMARIES) -> dict[str, NDArray[Any]]:
        """Several summaries by name, computed together.

        Raises:
            OptionError: an unknown name.
            UnavailableError: neither the summary nor the values were kept.
        """

    @abc.abstractmethod
    def _exported(self) -> Any:
        """The values that the protocols hand over."""

    @abc.abstractmethod
    def to_arrow(self) -> Any:
        """A ``pyarrow.Table``, one line a row."""

    def logsumexp(self) -> NDArray[np.float32]:
        """Log of the sum of exponentials, float32."""
        return self.summaries(("logsumexp",))["logsumexp"]

    def max(self) -> NDArray[np.float32]:
        """Highest logit, float32."""
        return self.summaries(("max",))["max"]

    def argmax(self) -> Ids:
        """Id of the highest logit, the lowest of equals, int32."""
        return self.summaries(("argmax",))["argmax"]

    def entropy(self) -> NDArray[np.float32]:
        """Entropy of the distribution in nats, float32."""
        return self.summaries(("entropy",))["entropy"]

    def varentropy(self) -> NDArray[np.float32]:
        """Variance of the surprisal in nats², float32."""
        return self.summaries(("varentropy",))["varentropy"]

    def target_logit(self) -> NDArray[np.float32]:
        """Logit of the token that the row scores, float32; NaN without a target."""
        return self.summaries(("target_logit",))["target_logit"]

    def target_logprob(self) -> NDArray[np.float32]:
        """Log-probability of the token that the row scores, float32; NaN without a target."""
        return self.summaries(("target_logprob",))["target_logprob"]

    def target_rank(self) -> Ids:
        """Rank of the token that the row scores, 1 is best, int32; -1 without a target."""
        return self.summaries(("target_rank",))["target_rank"]

    def top1_margin(self) -> NDArray[np.float32]:
        """Highest logit minus the second highest, float32."""
        return self.summaries(("top1_margin",))["top1_margin"]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        exported = self._exported()
        array = tensors.to_numpy(exported)
        moved = tensors.is_torch(exported) and exported.device.type != "cpu"
        if copy is False and (moved or (dtype is not None and np.dtype(dtype) != array.dtype)):
            raise ValueError("the values cannot be given without a copy, and copy=False forbids one")
        return array.astype(dtype or array.dtype, copy=bool(copy) and not moved)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        return tensors.dlpack(
            self._exported(), stream=stream, max_version=max_version, dl_device=dl_device, copy=copy
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return tensors.dlpack_device(self._exported())

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self.to_arrow().__arrow_c_stream__(requested_schema)


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Logits(RowArrays):
    """Rows of one sequence, ``[rows, vocab_size]``. Row ``p`` scores the token at ``p + 1``.

    Attributes:
        values: logits ``[rows, vocab_size]``: a host array, a torch tensor when rows were kept on the
            device, encoded rows that are decoded when they are read (`logitscope.encodings.EncodedRows`),
            rows of which some columns were kept (`logitscope.logits.cut.CutRows`), or None when only
            summaries were kept.
        positions: of the rows, int64 ``[rows]``.
        token_ids: the whole sequence, prompt then generated tokens, int32 ``[N]``.
        prompt_length: ``L``, how many of them are the prompt.
        identity: what made the rows.
        summary: the per-row summaries that were kept, each ``[rows]``.
        stage: ``raw`` or ``processed``.
        encoding: the value format that was asked for; None is the model's own dtype.
        hidden_states: layer → ``[rows, hidden_size]``.
        attentions: layer → ``[rows, heads, keys]``; keys beyond a row's position are 0.
        vocabulary: gives the text of tokens; None shows ids only.
        verification: how rows rebuilt from hidden ones compared with the engine's own; else None.
    """

    values: Any
    positions: NDArray[np.int64]
    token_ids: Ids
    prompt_length: int
    identity: Identity
    summary: Mapping[str, NDArray[Any]] = dataclasses.field(default_factory=dict)
    stage: Stage = "raw"
    encoding: str | None = None
    hidden_states: Mapping[int, NDArray[Any]] = dataclasses.field(default_factory=dict)
    attentions: Mapping[int, NDArray[Any]] = dataclasses.field(default_factory=dict)
    vocabulary: Vocabulary | None = None
    verification: Verification | None = None

    def __post_init__(self) -> None:
        rows = len(self.positions)
        if self.values is not None and tuple(self.values.shape) != (rows, self.vocab_size):
            raise InputError(
                "values do not fit the positions and the vocabulary",
                where="values",
                expected=(rows, self.vocab_size),
                got=tuple(self.values.shape),
            )
        for field, arrays in self._by_row().items():
            for name, array in arrays.items():
                if len(array) != rows:
                    raise InputError(
                        "as many entries as rows", where=f"{field}[{name!r}]", expected=rows, got=len(array)
                    )
        if not 1 <= self.prompt_length <= len(self.token_ids):
            raise InputError(
                "the prompt is no part of the sequence",
                where="prompt_length",
                expected=f"1 … {len(self.token_ids)}",
                got=self.prompt_length,
            )
        count = row_count(self.prompt_length, self._new_tokens)
        if rows and not 0 <= self.positions.min() <= self.positions.max() < count:
            raise InputError("positions outside the sequence", where="positions", expected=f"0 … {count - 1}")

    # -- shape -----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[Any]:
        """The values ``[vocab_size]`` of one row after the other."""
        self._exported_or_error()
        for part in self._decoded():
            yield from part.values

    @property
    def vocab_size(self) -> int:
        """Columns of a row."""
        return self.identity.vocab_size

    @property
    def shape(self) -> tuple[int, int]:
        """``(rows, vocab_size)``, also when only summaries were kept."""
        return len(self), self.vocab_size

    @property
    def dtype(self) -> Any:
        """NumPy dtype of the values, torch dtype when they lie on the device, None when not kept."""
        return None if self.values is None else self.values.dtype

    @property
    def cut(self) -> bool:
        """Whether some columns of the rows were kept and others were not."""
        return isinstance(self.values, CutRows)

    @property
    def available(self) -> tuple[str, ...]:
        """Names of the summaries that can be had: kept ones, and those that the values give exactly."""
        if self.values is None:
            return tuple(name for name in SUMMARIES if name in self.summary)
        if not isinstance(self.values, CutRows):
            return SUMMARIES
        return tuple(name for name in SUMMARIES if name in self.summary or self._missing(name) is None)

    @property
    def best_known(self) -> int:
        """How many of the best tokens are known of every row."""
        if self.values is None or not isinstance(self.values, CutRows):
            return 0 if self.values is None else self.vocab_size
        return int(self.values.lengths.min(initial=self.vocab_size)) if self.values.best else 0

    @property
    def model_dtype(self) -> str:
        """Name of the dtype that the model computed in."""
        return self.identity.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the values, summaries, hidden states and attention weights."""
        values = 0 if self.values is None else self.values.nbytes
        return int(values + sum(a.nbytes for arrays in self._by_row().values() for a in arrays.values()))

    # -- tokens ----------------------------------------------------------------------------------------

    @property
    def targets(self) -> Ids:
        """Ids that the rows score, int32 ``[rows]``; -1 where the sequence ends."""
        return targets(self.token_ids, self.positions)

    @property
    def kinds(self) -> list[Kind]:
        """Kind of each row: ``prompt``, ``generated`` or ``next``."""
        return kinds(self.positions, prompt_length=self.prompt_length, new_tokens=self._new_tokens)

    @property
    def tokens(self) -> list[str]:
        """Text of the last token that each row has read.

        Raises:
            UnavailableError: there is no vocabulary.
        """
        return self._vocabulary().pieces(self.token_ids[self.positions])

    @property
    def target_tokens(self) -> list[str]:
        """Text of the token that each row scores; empty where there is none.

        Raises:
            UnavailableError: there is no vocabulary.
        """
        ids = self.targets
        pieces = iter(self._vocabulary().pieces(ids[ids != NO_TARGET]))
        return [next(pieces) if token_id != NO_TARGET else "" for token_id in ids]

    # -- parts -----------------------------------------------------------------------------------------

    @property
    def prompt(self) -> Logits:
        """Rows ``0 … L-2``, which score the prompt's own tokens; a view."""
        return self._where(self.positions < self.prompt_length - 1)

    @property
    def generated(self) -> Logits:
        """Rows ``L-1 …`` of a generation, one a generated token; a view."""
        return self._where((self.positions >= self.prompt_length - 1) & (self._new_tokens > 0))

    @property
    def next(self) -> Logits:
        """Row ``L-1`` of a scored prompt, the distribution of what comes next; a view."""
        return self._where((self.positions >= self.prompt_length - 1) & (self._new_tokens == 0))

    @property
    def last(self) -> Logits:
        """The sequence's last row; a view, empty when that row was not kept."""
        return self._where(self.positions == row_count(self.prompt_length, self._new_tokens) - 1)

    @overload
    def __getitem__(self, index: int | np.integer[Any]) -> Any: ...

    @overload
    def __getitem__(self, index: slice | Sequence[int] | Sequence[bool] | NDArray[Any]) -> Logits: ...

    def __getitem__(self, index: Any) -> Any:
        """Values ``[vocab_size]`` of row ``index``; `Logits` for a slice (a view), int array or bool mask.

        Raises:
            IndexError: no such row.
            SelectError: a mask of the wrong length, or no index at all.
            UnavailableError: one row's values, of which only summaries were kept.
        """
        if isinstance(index, int | np.integer):
            row = range(len(self))[index]
            return self._take(slice(row, row + 1))._exported()[0]
        if isinstance(index, slice):
            return self._take(index)
        chosen = np.asarray(index)
        if chosen.dtype == np.bool_ and chosen.shape == self.positions.shape:
            return self._take(np.flatnonzero(chosen))
        if chosen.ndim != 1 or not (np.issubdtype(chosen.dtype, np.integer) or chosen.size == 0):
            raise SelectError(
                "no index of rows",
                where="Logits[…]",
                expected=f"an int, a slice, a flat int array, or a bool mask of {len(self)} rows",
                got=f"{type(index).__name__} of {chosen.dtype}, shape {chosen.shape}",
            )
        chosen = chosen.astype(np.int64)
        if chosen.size and not -len(self) <= chosen.min() <= chosen.max() < len(self):
            raise IndexError(f"row outside 0 … {len(self) - 1}")
        return self._take(np.where(chosen < 0, chosen + len(self), chosen))

    def at(self, position: int) -> Any:
        """Values ``[vocab_size]`` of the row at a position of the sequence.

        Raises:
            SelectError: that row was not kept.
            UnavailableError: only summaries were kept.
        """
        found = np.flatnonzero(self.positions == position)
        if not found.size:
            raise SelectError(
                "no row at that position", where="at", expected=_spans(self.positions), got=position
            )
        return self[int(found[0])]

    # -- what the rows say -----------------------------------------------------------------------------

    def summaries(self, names: Sequence[str] = SUMMARIES) -> dict[str, NDArray[Any]]:
        """Several summaries by name, each ``[rows]``, computed together where they were not kept.

        Raises:
            OptionError: an unknown name.
            UnavailableError: neither the summary nor the values were kept, or the kept columns do not
                give it.
        """
        missing = [name for name in checked_names(names) if name not in self.summary]
        computed = self._computed(missing) if missing else {}
        return {name: computed[name] if name in computed else self.summary[name] for name in names}

    def logprobs(self) -> Any:
        """Log-probabilities, float32 ``[rows, vocab_size]``, natural log; a tensor when the values are.

        Of rows of which only some columns were kept, a `CutRows` with their exact log-probabilities.

        Raises:
            UnavailableError: only summaries were kept, or columns without their logsumexp.
        """
        if isinstance(self.values, CutRows):
            return self.values.with_values(self._cut_logprobs())
        self._exported_or_error()
        found = [self._numerics().log_softmax(part.values) for part in self._decoded()]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def top_k(self, k: int) -> TopK:
        """The ``k`` best tokens of each row.

        Raises:
            OptionError: ``k`` outside ``1 … vocab_size``.
            UnavailableError: only summaries were kept, or fewer of the best tokens.
        """
        if isinstance(self.values, CutRows):
            return self._cut_top_k(self.values, k)
        self._exported_or_error()
        parts = [part._top_k(k) for part in self._decoded()]
        columns = zip(*parts, strict=True)
        return TopK(*(column[0] if len(parts) == 1 else np.concatenate(column) for column in columns))

    def dropped_mass(self) -> NDArray[np.float32]:
        """Probability of the columns that were not kept, float32 ``[rows]``; 0 for whole rows.

        Raises:
            UnavailableError: only summaries were kept, or columns without their logsumexp.
        """
        if self.values is None:
            raise self._no_values()
        if not isinstance(self.values, CutRows):
            return np.zeros(len(self), np.float32)
        kept = self.values.sums(np.exp(self._cut_logprobs().astype(np.float64)))
        return np.clip(1 - kept, 0.0, 1.0).astype(np.float32)

    def bounds(self, name: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The least and the most that a summary can be, float32 ``[rows]`` each; equal where it is known.

        For rows of which only some columns were kept. The dropped mass is known; at most it is spread evenly
        over the dropped tokens, at least it is on as few of them as it can be, where no dropped token of a
        row of best tokens is likelier than the last kept one.

        Args:
            name: ``entropy`` (nats), ``target_logprob`` (nats) or ``target_rank``.

        Raises:
            OptionError: another summary.
            UnavailableError: only summaries were kept, or columns without their logsumexp.
        """
        if name not in ("entropy", "target_logprob", "target_rank"):
            raise OptionError(
                "no bounds of it", where="bounds", expected="entropy, target_logprob or target_rank", got=name
            )
        if name in self.available:
            exact = self.summaries((name,))[name].astype(np.float32)
            return exact, exact
        if not isinstance(self.values, CutRows):
            raise self._no_values()
        return self._cut_bounds(self.values, name)

    def error_bound(self) -> NDArray[np.float32]:
        """Bound of ``|value - the engine's own|`` in each row, float32 ``[rows]``; 0 where none is rounded.

        For rows rebuilt on another machine or library than the engine's, bounds of hidden rows are what was
        allowed when they were verified (`Logits.verification`).

        Raises:
            UnavailableError: only summaries were kept.
        """
        if self.values is None:
            raise self._no_values()
        if isinstance(self.values, QuantizedRows):
            return self.values.error_bound()
        if isinstance(self.values, HiddenRows):
            bound = np.nan if self.verification is None else self.verification.bound
            return np.full(len(self), bound, np.float32)
        kind = encoding(self.encoding or self.model_dtype)
        if not isinstance(kind, Dense) or not kind.relative_error(self.model_dtype):
            return np.zeros(len(self), np.float32)
        return kind.error_bound(self._largest(), self.model_dtype)

    # -- hand-over -------------------------------------------------------------------------------------

    def dense(self, fill: float | None = None) -> NDArray[Any]:
        """The values as an array ``[rows, vocab_size]`` on the host.

        Args:
            fill: stands where a column was not kept; without it, rows that lack columns are an error.

        Raises:
            UnavailableError: only summaries were kept, or only some columns and no ``fill`` was given.
        """
        if isinstance(self.values, CutRows) and fill is not None:
            return self.values.dense(fill)
        return self.to_numpy()

    def to_scipy_sparse(self, of: Literal["logits", "logprobs", "probs"] = "logits") -> Any:
        """Rows of which some columns were kept as a ``scipy.sparse.csr_array`` ``[rows, vocab_size]``.

        What is not stored was dropped, which is no 0 unless probabilities are taken; float32.

        Args:
            of: what is stored.

        Raises:
            UnavailableError: the rows are whole, or have no logsumexp and it is needed.
        """
        sparse = tensors.require("scipy.sparse", "scipy")
        indptr, ids, values = self._compressed(of)
        return sparse.csr_array((values, ids, indptr), shape=self.shape)

    def to_torch_sparse(self, of: Literal["logits", "logprobs", "probs"] = "logits") -> Any:
        """As `to_scipy_sparse`, a ``torch.sparse_csr`` tensor."""
        torch = tensors.require("torch")
        indptr, ids, values = (torch.from_numpy(array) for array in self._compressed(of))
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "Sparse", UserWarning
            )  # PyTorch: these tensors may still change
            return torch.sparse_csr_tensor(indptr, ids, values, size=self.shape, check_invariants=True)

    def to_numpy(self) -> NDArray[Any]:
        """The values as a NumPy array ``[rows, vocab_size]``; sharing is as in `logitscope.tensors`.

        Raises:
            UnavailableError: only summaries were kept.
        """
        return tensors.to_numpy(self._exported())

    def to_torch(self) -> Any:
        """The values as a PyTorch tensor ``[rows, vocab_size]``; else as `to_numpy`."""
        return tensors.to_torch(self._exported())

    def to_jax(self) -> Any:
        """The values as a JAX array ``[rows, vocab_size]``; else as `to_numpy`."""
        return tensors.to_jax(self._exported())

    def to_tensorflow(self) -> Any:
        """The values as a TensorFlow tensor ``[rows, vocab_size]``; else as `to_numpy`."""
        return tensors.to_tensorflow(self._exported())

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame``, one line a row: tokens, targets and all summaries that can be had.

        A missing target is -1 in ids and ranks, NaN in numbers, None in texts.
        """
        pandas = tensors.require("pandas")
        return pandas.DataFrame(self._columns())

    def to_arrow(self) -> Any:
        """A ``pyarrow.Table``: the columns of `to_pandas`, and ``logits`` when the values were kept.

        A missing target is null. The values are not copied; bfloat16 are ``uint16`` codes, and the field
        says so. Rows of which some columns were kept have lists ``kept_ids``, ``logits`` (float32 for
        bfloat16) and, when drawn, ``counts``. The schema's metadata holds identity (JSON), stage and
        encoding.
        """
        pyarrow = tensors.require("pyarrow")
        no_target = self.targets == NO_TARGET
        fields, arrays = [], []
        for name, column in self._columns().items():
            masked = name == "target_id" or name in _TARGET_SUMMARIES
            kind = pyarrow.string() if name in ("kind", "token", "target") else None
            array = pyarrow.array(column, type=kind, mask=no_target if masked else None)
            fields.append(pyarrow.field(name, array.type))
            arrays.append(array)
        if isinstance(self.values, CutRows):
            for name, lists in tensors.lists_to_arrow(self.values.entries()).items():
                fields.append(pyarrow.field(name, lists.type))
                arrays.append(lists)
        elif self.values is not None:
            field, lists = tensors.to_arrow(self._exported(), "logits")
            fields.append(field)
            arrays.append(lists)
        return pyarrow.Table.from_arrays(arrays, schema=pyarrow.schema(fields, metadata=self._metadata()))

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

    def table(self, top: int = 5) -> Table:
        """A ``rich`` table, one line a row, with the ``top`` best tokens."""
        from logitscope.logits.text import table

        return table(self, top=top)

    def to_html(self, path: str | PathLike[str] | None = None) -> str:
        """One self-contained HTML page; also written to ``path`` when given."""
        return write_page(self, path)

    def _repr_html_(self) -> str:
        from logitscope.logits.html import html_fragment

        return html_fragment(self)

    def __repr__(self) -> str:
        return "\n".join([f"Logits {self._head()}", *self._edge_lines()])

    # -- inside ----------------------------------------------------------------------------------------

    @property
    def _new_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_length

    def _by_row(self) -> dict[str, Mapping[Any, NDArray[Any]]]:
        return {
            "summary": self.summary,
            "hidden_states": self.hidden_states,
            "attentions": self.attentions,
        }

    def _exported(self) -> Any:
        values = self._exported_or_error()
        return values.decode() if isinstance(values, EncodedRows) else values

    def _exported_or_error(self) -> Any:
        if self.values is None:
            raise self._no_values()
        if isinstance(self.values, CutRows):
            raise UnavailableError(
                "only some columns of the rows were kept",
                where="Logits",
                got=repr(self.values),
                fix="Take values.ids and values.values, or dense(fill=…); or ask for Select(vocab='all').",
            )
        return self.values

    def _no_values(self) -> UnavailableError:
        return UnavailableError(
            "the values were not kept, only summaries",
            where="Logits",
            fix="Ask the engine for Select(vocab='all').",
        )

    def _decoded(self) -> Iterator[Logits]:
        """The rows in parts whose values are at hand: encoded ones are decoded some at a time."""
        if not isinstance(self.values, EncodedRows):  # and nobody asks this of cut rows
            yield self
            return
        for first in range(0, max(len(self), 1), _DECODED_ROWS):
            part = self._take(slice(first, first + _DECODED_ROWS))
            yield dataclasses.replace(part, values=part._exported())

    def _top_k(self, k: int) -> tuple[Ids, NDArray[Any], NDArray[np.float32]]:
        numerics, values = self._numerics(), self.values
        ids, best = numerics.top_k(values, k)
        # The best token's log-probability has no large number in it, and the others are differences from it.
        first = numerics.summaries(values, ids[:, 0], ("target_logprob",))["target_logprob"]
        best, first = tensors.to_numpy(best), tensors.to_numpy(first)
        wide = best.astype(np.float64)
        logprobs = wide - wide[:, :1] + first.astype(np.float64)[:, None]
        return tensors.to_numpy(ids), best, logprobs.astype(np.float32)

    def _vocabulary(self) -> Vocabulary:
        if self.vocabulary is None:
            raise UnavailableError(
                "the texts of tokens are not known",
                where="Logits.vocabulary",
                fix="Open the engine with a tokenizer, or give load() a vocabulary.",
            )
        return self.vocabulary

    def _where(self, mask: NDArray[np.bool_]) -> Logits:
        found = np.flatnonzero(mask)
        if found.size and found[-1] - found[0] + 1 != found.size:
            return self._take(found)
        return self._take(slice(found[0], found[-1] + 1) if found.size else slice(0, 0))

    def _take(self, index: slice | NDArray[np.int64]) -> Logits:
        values = self.values
        if tensors.is_torch(values) and not (isinstance(index, slice) and (index.step or 1) > 0):
            rows = np.arange(len(self))[index] if isinstance(index, slice) else index
            values = values[tensors.to_torch(rows).to(values.device)]
        elif values is not None:
            values = values[index]
        return dataclasses.replace(
            self,
            values=values,
            positions=self.positions[index],
            summary={name: array[index] for name, array in self.summary.items()},
            hidden_states={layer: array[index] for layer, array in self.hidden_states.items()},
            attentions={layer: array[index] for layer, array in self.attentions.items()},
        )

    def _numerics(self) -> Any:
        if not tensors.is_torch(self.values):
            return host
        from logitscope.numerics import device

        return device

    def _computed(self, names: Sequence[str]) -> dict[str, NDArray[Any]]:
        if self.values is None:
            raise UnavailableError(
                f"neither {names[0]} nor the values were kept",
                where="Logits",
                fix="Ask the engine for summary=True, or for Select(vocab='all').",
            )
        if isinstance(self.values, CutRows):
            return self._of_cut(self.values, names)
        parts = [part._measured(names) for part in self._decoded()]
        return parts[0] if len(parts) == 1 else {n: np.concatenate([p[n] for p in parts]) for n in names}

    # -- rows of which some columns were kept ----------------------------------------------------------

    def _missing(self, name: str) -> str | None:
        """Why kept columns do not give a summary; None when they do."""
        values = self.values
        assert isinstance(values, CutRows)
        if name in ("max", "argmax", "top1_margin"):
            least = 2 if name == "top1_margin" else 1
            if values.best and int(values.lengths.min(initial=least)) >= least:
                return None
            return "the best tokens of a row are not among what was kept"
        if name not in ("target_logit", "target_logprob", "target_rank"):
            return "it is taken over all columns"
        if name == "target_rank" and not values.best:
            return "what was kept of a row are not its best tokens"
        if name == "target_logprob" and "logsumexp" not in self.summary:
            return "the logsumexp was not kept"
        ids = self.targets
        dropped = (ids != NO_TARGET) & (values.place(ids) < 0)
        if dropped.any():
            return f"the token that position {self.positions[dropped][0]} scores was dropped"
        return None

    def _of_cut(self, values: CutRows, names: Sequence[str]) -> dict[str, NDArray[Any]]:
        for name in names:
            why = self._missing(name)
            if why is not None:
                bounded = name in ("entropy", "target_logprob", "target_rank")
                raise UnavailableError(
                    f"{name} of rows of which only some columns were kept: {why}",
                    where="Logits",
                    fix=f"Ask the engine for summary=[{name!r}] as well"
                    + (f", or take bounds({name!r})." if bounded else "."),
                )
        return {name: self._cut_summary(values, name) for name in names}

    def _cut_summary(self, values: CutRows, name: str) -> NDArray[Any]:
        first = np.zeros(len(self), np.int64)
        if name == "argmax":
            entries = values.entries()
            starts = np.cumsum(entries.lengths, dtype=np.int64) - entries.lengths
            best: NDArray[Any] = entries.ids[starts]
            return best
        if name == "max":
            return values.at(first)
        if name == "top1_margin":
            return values.at(first) - values.at(first + 1)
        places = values.place(self.targets)
        if name == "target_rank":
            return np.where(places < 0, NO_TARGET, places + 1).astype(np.int32)
        found = values.at(places)
        return found if name == "target_logit" else found - self.summary["logsumexp"]

    def _cut_logprobs(self) -> NDArray[np.float32]:
        """Of the kept entries, ``[entries]``."""
        assert isinstance(self.values, CutRows)
        if "logsumexp" not in self.summary:
            raise UnavailableError(
                "log-probabilities of columns that were kept without their logsumexp",
                where="Logits",
                fix="Ask for Select(…, logsumexp=True).",
            )
        entries = self.values.entries()
        wide = entries.values.astype(np.float64)
        return (wide - np.repeat(self.summary["logsumexp"].astype(np.float64), entries.lengths)).astype(
            np.float32
        )

    def _cut_top_k(self, values: CutRows, k: int) -> TopK:
        if not 1 <= k <= self.vocab_size:
            raise OptionError("value outside its range", where="k", expected=f"1 … {self.vocab_size}", got=k)
        if k > self.best_known:
            raise UnavailableError(
                "fewer of the best tokens were kept",
                where="top_k",
                expected=f"at most {self.best_known}",
                got=k,
                fix=f"Ask the engine for Select(top_k={k}).",
            )
        entries, logprobs = values.entries(), self._cut_logprobs()
        first = np.cumsum(entries.lengths, dtype=np.int64) - entries.lengths
        at = first[:, None] + np.arange(k)
        return TopK(entries.ids[at], entries.values[at], logprobs[at])

    def _cut_bounds(self, values: CutRows, name: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        logprobs = self._cut_logprobs().astype(np.float64)
        lengths, targets = values.lengths.astype(np.int64), self.targets
        rest = self.vocab_size - lengths
        mass = np.where(rest > 0, 1 - values.sums(np.exp(logprobs)), 0.0)
        least_mass = np.clip(mass - _MASS_ERROR, 0.0, 1.0)
        most_mass = np.where(rest > 0, np.clip(mass + _MASS_ERROR, 0.0, 1.0), 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            # No dropped token is likelier than the last of the best that were kept, nor than all of them.
            last = values.with_values(logprobs).at(lengths - 1) if values.best else np.zeros(len(self))
            likeliest = np.minimum(np.nan_to_num(last, nan=0.0), np.log(most_mass))
            places = values.place(targets)
            dropped = (places < 0) & (targets != NO_TARGET)
            if name == "entropy":
                kept = -values.sums(np.where(logprobs > -np.inf, np.exp(logprobs) * logprobs, 0.0))
                least = kept + np.where(least_mass > 0, -least_mass * likeliest, 0.0)
                spread = -most_mass * (np.log(most_mass) - np.log(rest))
                return _outward(least, kept + np.where(most_mass > 0, np.maximum(spread, 0.0), 0.0))
            if name == "target_logprob":
                own = values.with_values(logprobs).at(places).astype(np.float64)
                return _outward(np.where(dropped, -np.inf, own), np.where(dropped, likeliest, own))
        low = np.where(dropped, lengths + 1, places + 1) if values.best else np.ones(len(self))
        high = (
            np.where(dropped, self.vocab_size, places + 1)
            if values.best
            else np.full(len(self), self.vocab_size)
        )
        low, high = (np.where(targets == NO_TARGET, NO_TARGET, bound) for bound in (low, high))
        return low.astype(np.float32), high.astype(np.float32)

    def _compressed(self, of: str) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
        """Row pointers, ids in ascending order within a row, and float32 values."""
        if not isinstance(self.values, CutRows):
            raise UnavailableError(
                "the rows are whole", where="Logits", fix="Ask for Select(top_k=…), or take to_numpy()."
            )
        if of not in ("logits", "logprobs", "probs"):
            raise OptionError("unknown", where="of", expected="logits, logprobs or probs", got=repr(of))
        entries = self.values.entries()
        values = entries.values.astype(np.float32) if of == "logits" else self._cut_logprobs()
        if of == "probs":
            values = np.exp(values)
        rows = np.repeat(np.arange(len(self)), entries.lengths)
        order = np.lexsort((entries.ids, rows))
        indptr = np.concatenate([[0], np.cumsum(entries.lengths, dtype=np.int64)])
        return indptr, entries.ids[order].astype(np.int64), values[order]

    def _largest(self) -> NDArray[np.float64]:
        """The largest absolute finite value of each row, ``[rows]``."""
        if isinstance(self.values, CutRows):
            entries = self.values.entries()
            rows = np.repeat(np.arange(len(self)), entries.lengths)
            found = np.zeros(len(self))
            sizes = np.abs(entries.values.astype(np.float64))
            np.maximum.at(found, rows, np.where(np.isfinite(sizes), sizes, 0.0))
            return found
        sizes = np.abs(tensors.to_numpy(self.values).astype(np.float32))
        largest: NDArray[np.float64] = np.where(np.isfinite(sizes), sizes, 0.0).max(axis=1).astype(np.float64)
        return largest

    def _measured(self, names: Sequence[str]) -> dict[str, NDArray[Any]]:
        ids: Any = self.targets
        if tensors.is_torch(self.values):
            ids = tensors.to_torch(ids).to(self.values.device)
        computed = self._numerics().summaries(self.values, ids, tuple(names))
        return {name: tensors.to_numpy(array) for name, array in computed.items()}

    def _columns(self) -> dict[str, Any]:
        ids = self.targets
        known = self.vocabulary is not None
        nothing = [None] * len(self)
        return {
            "position": self.positions,
            "kind": self.kinds,
            "token_id": self.token_ids[self.positions],
            "token": self.tokens if known else nothing,
            "target_id": ids,
            "target": [
                text if token_id != NO_TARGET else None
                for text, token_id in zip(self.target_tokens if known else nothing, ids, strict=True)
            ],
            **self.summaries(self.available),
        }

    def _metadata(self) -> dict[str, str]:
        found = {"identity": json.dumps(dataclasses.asdict(self.identity)), "stage": self.stage}
        return found if self.encoding is None else {**found, "encoding": self.encoding}

    def _head(self) -> str:
        every = self.kinds
        parts = ", ".join(f"{every.count(kind)} {kind}" for kind in dict.fromkeys(every)) or "no rows"
        return (
            f"{list(self.shape)} {_values_text(self)}, {self.stage}, {self.identity.model}, "
            f"positions {_spans(self.positions)} ({parts})"
        )

    def _edge_lines(self) -> list[str]:
        """A short table of the first and last rows; computes over no others."""
        if len(self) == 0:
            return []
        first = range(min(_EDGE_ROWS, len(self)))
        edge = [*first, *range(max(len(first), len(self) - _EDGE_ROWS), len(self))]
        part = self[edge]
        names = [name for name in ("target_logprob", "target_rank", "entropy") if name in self.available]
        columns = part.summaries(names)
        lines = [
            f"  {part.positions[i]:>8}  {pair:<32}" + "".join(f"{_cell(columns[n][i]):>16}" for n in names)
            for i, pair in enumerate(part._pairs())
        ]
        if len(self) > len(edge):
            lines.insert(len(first), f"  {'…':>8}")
        head = f"  {'position':>8}  {'token → scored':<32}" + "".join(f"{name:>16}" for name in names)
        return [head, *lines]

    def _pairs(self) -> list[str]:
        if self.vocabulary is None:
            read, scored = [str(i) for i in self.token_ids[self.positions]], [str(i) for i in self.targets]
        else:
            read, scored = [repr(t) for t in self.tokens], [repr(t) for t in self.target_tokens]
        return [
            f"{_short(a)} → {_short(b) if token_id != NO_TARGET else '(next)'}"
            for a, b, token_id in zip(read, scored, self.targets, strict=True)
        ]


def check_same_vocabulary(a: RowArrays, b: RowArrays) -> None:
    """Refuse to combine results whose ids do not mean the same.

    Raises:
        IdentityMismatchError: vocabulary sizes or tokenizers differ.
    """
    for name in ("vocab_size", "tokenizer_hash"):
        ours, theirs = getattr(a.identity, name), getattr(b.identity, name)
        if ours != theirs:
            raise IdentityMismatchError(
                f"two results that must not be combined: {name} differs",
                where=f"{a.identity.model} and {b.identity.model}",
                expected=ours,
                got=theirs,
            )


def write_page(shown: Logits | Sequence[Logits], path: str | PathLike[str] | None) -> str:
    """One HTML page of one or several sequences; also written to ``path``, whole or not at all."""
    from logitscope.logits.files import atomic_write
    from logitscope.logits.html import html_page

    page = html_page(shown)
    if path is not None:
        with atomic_write(path) as file:
            file.write(page.encode())
    return page


def _spans(positions: NDArray[np.int64]) -> str:
    """Positions as text: ``0 … 4, 7, 9 … 11``; at most four spans."""
    if not len(positions):
        return "none"
    runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    texts = [f"{run[0]} … {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs[:4]]
    return ", ".join(texts) + (", …" if len(runs) > 4 else "")


def _values_text(logits: Logits) -> str:
    if logits.values is None:
        return "summaries only"
    text = str(logits.dtype).removeprefix("torch.")
    if isinstance(logits.values, CutRows):
        kept = logits.values.lengths
        least, most = int(kept.min(initial=0 if not len(kept) else kept[0])), int(kept.max(initial=0))
        return f"{least if least == most else f'{least} … {most}'} columns a row in {text}"
    if isinstance(logits.values, EncodedRows):
        return f"{text} from {logits.encoding}"
    return f"{text} on {logits.values.device}" if tensors.is_torch(logits.values) else text


def _outward(low: Any, high: Any) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """A pair of bounds as float32, a little wider than they were."""
    slack = 1e-6 * (1 + np.abs(np.where(np.isfinite(low), low, 0.0)))
    return (low - slack).astype(np.float32), (high + slack).astype(np.float32)


def _short(text: str) -> str:
    return text if len(text) <= 14 else text[:13] + "…"


def _cell(value: Any) -> str:
    if isinstance(value, np.floating):
        return "" if np.isnan(value) else f"{value:.3f}"
    return "" if value == NO_TARGET else str(value)
