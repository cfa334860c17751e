"""Rows of which only some columns were kept: the same few of each row, or each row its own."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from logitscope import tensors
from logitscope.errors import InputError
from logitscope.rows import NO_TARGET, Entries, Ids, Select


class CutRows(abc.ABC):
    """Some columns of rows ``[rows, vocab_size]``; what was not kept is unknown, and not zero.

    Attributes:
        values: the kept logits.
        ids: their token ids, int32.
        counts: how often each was drawn, int32; None unless the columns were drawn.
        best: whether they are the best tokens of their row, best first.
        shape: ``(rows, vocab_size)``.
    """

    values: Any
    ids: Ids
    counts: Ids | None = None
    best: bool = False
    shape: tuple[int, int]

    @property
    def dtype(self) -> Any:
        """Of the kept logits."""
        return self.values.dtype

    def __len__(self) -> int:
        return self.shape[0]

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes of everything that is held."""

    @property
    @abc.abstractmethod
    def lengths(self) -> Ids:
        """Kept columns of each row, int32 ``[rows]``."""

    @abc.abstractmethod
    def __getitem__(self, index: slice | NDArray[Any]) -> Self:
        """Some of the rows."""

    @abc.abstractmethod
    def entries(self) -> Entries:
        """Everything row after row."""

    @abc.abstractmethod
    def arrays(self) -> dict[str, Any]:
        """What is held, by name, so that `CutRows.of` makes the same again."""

    @abc.abstractmethod
    def with_values(self, values: Any) -> Self:
        """The same columns with other values, in the order of `entries`."""

    @abc.abstractmethod
    def joined(self, before: Any) -> Self:
        """Rows of an earlier part, then these."""

    @staticmethod
    def of(arrays: dict[str, Any], vocab_size: int, *, best: bool) -> CutRows:
        """The rows that such `arrays` describe."""
        if "lengths" in arrays:
            return SparseRows(Entries(**arrays), vocab_size, best=best)
        return ColumnRows(arrays["values"], arrays["ids"], vocab_size)

    def place(self, ids: NDArray[Any]) -> NDArray[np.int64]:
        """Where the id ``ids[i]`` is among the kept columns of row ``i``; -1 where it was dropped."""
        entries = self.entries()
        rows = np.repeat(np.arange(len(self)), entries.lengths)
        hits = np.flatnonzero(entries.ids == ids[rows])
        first = np.cumsum(entries.lengths, dtype=np.int64) - entries.lengths
        found = np.full(len(self), NO_TARGET, np.int64)
        found[rows[hits]] = hits - first[rows[hits]]
        return found

    def at(self, places: NDArray[np.int64]) -> NDArray[np.float32]:
        """The logit at a place of each row, float32 ``[rows]``; NaN where there is none."""
        entries = self.entries()
        first = np.cumsum(entries.lengths, dtype=np.int64) - entries.lengths
        there = (places >= 0) & (places < entries.lengths)
        found = np.full(len(self), np.nan, np.float32)
        found[there] = entries.values[(first + places)[there]].astype(np.float32)
        return found

    def sums(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """Sums over the kept columns of each row of values ``[entries]``, float64 ``[rows]``."""
        ends = np.cumsum(self.lengths, dtype=np.int64)
        running = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
        found: NDArray[np.float64] = running[ends] - running[ends - self.lengths]
        return found

    def dense(self, fill: float) -> NDArray[Any]:
        """Rows ``[rows, vocab_size]`` with ``fill`` where nothing was kept."""
        entries = self.entries()
        found = np.full(self.shape, fill, entries.values.dtype)
        found[np.repeat(np.arange(len(self)), entries.lengths), entries.ids] = entries.values
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        raise InputError(
            "rows of which only some columns were kept are no full array",
            where="np.asarray",
            got=repr(self),
            fix="Take dense(fill=…), or values and ids.",
        )


class ColumnRows(CutRows):
    """The same columns of every row.

    Args:
        values: ``[rows, columns]``.
        ids: of the columns, ``[columns]``.
        vocab_size: columns of a full row.
    """

    def __init__(self, values: Any, ids: Any, vocab_size: int) -> None:
        self.values, self.ids = values, np.asarray(ids, np.int32)
        self.shape = (len(values), vocab_size)

    @property
    def nbytes(self) -> int:
        """Bytes of the values; the ids are the same for all rows."""
        return int(self.values.nbytes)

    @property
    def lengths(self) -> Ids:
        """As many as there are ids."""
        return np.full(len(self), len(self.ids), np.int32)

    def __getitem__(self, index: slice | NDArray[Any]) -> Self:
        if tensors.is_torch(self.values) and not (isinstance(index, slice) and (index.step or 1) > 0):
            index = tensors.to_torch(np.arange(len(self))[index]).to(self.values.device)
        return type(self)(self.values[index], self.ids, self.shape[1])

    def entries(self) -> Entries:
        """Everything row after row; a copy of the ids for each."""
        return Entries(self.lengths, np.tile(self.ids, len(self)), tensors.to_numpy(self.values).reshape(-1))

    def arrays(self) -> dict[str, Any]:
        """Values and ids."""
        return {"values": self.values, "ids": self.ids}

    def with_values(self, values: Any) -> Self:
        """The same columns with other values."""
        return type(self)(values.reshape(self.values.shape), self.ids, self.shape[1])

    def joined(self, before: Any) -> Self:
        """Rows of an earlier part, then these."""
        return type(self)(np.concatenate([before.values, self.values]), self.ids, self.shape[1])

    def place(self, ids: NDArray[Any]) -> NDArray[np.int64]:
        """Where an id is among the columns; -1 where it was dropped."""
        table = np.full(self.shape[1] + 1, NO_TARGET, np.int64)
        table[self.ids] = np.arange(len(self.ids))
        found: NDArray[np.int64] = table[ids]  # -1, for no target, is the last entry
        return found

    def __repr__(self) -> str:
        return f"ColumnRows {list(self.values.shape)} of {list(self.shape)}, {self.nbytes:,} bytes"


class SparseRows(CutRows):
    """Columns of its own for each row.

    Args:
        entries: row after row.
        vocab_size: columns of a full row.
        best: whether they are the best tokens of their row, best first.
    """

    def __init__(self, entries: Entries, vocab_size: int, *, best: bool) -> None:
        self._entries, self.best = entries, best
        self.values, self.ids, self.counts = entries.values, entries.ids, entries.counts
        self.shape = (len(entries), vocab_size)

    @property
    def nbytes(self) -> int:
        """Bytes of lengths, ids, values and counts."""
        return int(sum(array.nbytes for array in self._entries.arrays().values()))

    @property
    def lengths(self) -> Ids:
        """Kept columns of each row, int32 ``[rows]``."""
        return self._entries.lengths

    def __getitem__(self, index: slice | NDArray[Any]) -> Self:
        return type(self)(self._entries.rows(index), self.shape[1], best=self.best)

    def entries(self) -> Entries:
        """What is held."""
        return self._entries

    def arrays(self) -> dict[str, Any]:
        """Lengths, ids, values, and counts where there are any."""
        return self._entries.arrays()

    def with_values(self, values: Any) -> Self:
        """The same columns with other values."""
        entries = dataclasses.replace(self._entries, values=values)
        return type(self)(entries, self.shape[1], best=self.best)

    def joined(self, before: Any) -> Self:
        """Rows of an earlier part, then these."""
        parts = [before.entries(), self._entries]
        entries = Entries.joined(parts, self.dtype, counted=self.counts is not None)
        return type(self)(entries, self.shape[1], best=self.best)

    def __repr__(self) -> str:
        drawn = "drawn entries" if self.counts is not None else "entries"
        return f"SparseRows {list(self.shape)} with {len(self.ids):,} {drawn}, {self.nbytes:,} bytes"


def cut_rows(select: Select, stored: Any, vocab_size: int) -> CutRows:
    """What was kept of a selection's rows: ``[rows, ids]``, or entries."""
    if isinstance(stored, Entries):
        return SparseRows(stored, vocab_size, best=select.best)
    return ColumnRows(stored, select.vocab, vocab_size)
