"""What an encoding is, and rows that are decoded when they are read."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from logitscope.rows import Identity

_TILE_VALUES = 400_000
"""On a CPU: with its work arrays a tile stays in the cache. 8 rows of a vocabulary of 49,152."""


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """How a kept row lies in memory: ``width`` entries of ``dtype``."""

    dtype: np.dtype[Any]
    width: int

    @property
    def nbytes(self) -> int:
        """Exact size of a row."""
        return self.width * self.dtype.itemsize


class RowHead(Protocol):
    """What rebuilds rows; `logitscope.head.Head` is one."""

    @property
    def vocab_size(self) -> int:
        """Columns of a row."""

    @property
    def rows_dtype(self) -> np.dtype[Any]:
        """Of the rows."""

    @property
    def state(self) -> tuple[int, ...]:
        """Changes when the weights do."""

    @property
    def hash(self) -> str:
        """Equal for equal heads."""

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Its weights on the host, by name."""

    def facts(self) -> dict[str, Any]:
        """What it is beside its weights, for JSON."""

    def rows(self, hidden: NDArray[Any], ids: NDArray[Any] | None = None) -> NDArray[Any]:
        """Rows ``[rows, vocab_size]``, or some columns of them, of hidden rows ``[rows, hidden_size]``."""

    def wide_rows(self, hidden: NDArray[Any], shift: int = 0) -> NDArray[np.float64]:
        """The same from a product in float64; with ``shift`` -1 or 1 the least or the most it may be."""


class Encoding(Protocol):
    """A value format of kept rows."""

    @property
    def name(self) -> str:
        """As in ``encode=…``."""

    @property
    def of_hidden(self) -> bool:
        """Whether it keeps the head's input and not the logits."""

    @property
    def expected(self) -> str:
        """What values must be to fit."""

    def row_format(self, identity: Identity) -> RowFormat:
        """The format of a kept row of these models.

        Raises:
            EncodingError: such rows cannot be kept in it.
        """

    def encode(self, rows: Any, out: Any) -> Any | None:
        """Write rows, a tensor of logits or hidden rows, into the tensor ``out`` of the row format.

        Returns:
            None, or a boolean tensor on the rows' device: whether a value did not fit.
        """

    def held(self, stored: NDArray[Any], identity: Identity, head: RowHead | None) -> Any:
        """What `logitscope.logits.Logits` holds as values: the kept rows, or `EncodedRows` over them."""


class EncodedRows(abc.ABC):
    """Rows ``[rows, vocab_size]`` that are decoded when they are read.

    Attributes:
        stored: ``[rows, width]``, as kept.
        shape: ``(rows, vocab_size)``.
        dtype: of the decoded values.
    """

    stored: NDArray[Any]

    shape: tuple[int, int]
    dtype: np.dtype[Any]

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes that are held, without what several results share."""

    def __len__(self) -> int:
        return self.shape[0]

    @abc.abstractmethod
    def __getitem__(self, index: slice | NDArray[Any]) -> Self:
        """Some of the rows, not decoded yet; a slice is a view."""

    @abc.abstractmethod
    def decode(self, ids: NDArray[Any] | None = None) -> NDArray[Any]:
        """The values ``[rows, vocab_size]``, or ``[rows, len(ids)]`` of some columns; a new array.

        Raises:
            EncodingError: what was kept does not give them any more.
        """

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("rows are decoded into a new array, and copy=False forbids one")
        return self.decode().astype(dtype or self.dtype, copy=False)


def tiles(rows: Any, values: int = _TILE_VALUES) -> Iterator[slice]:
    """Rows of so many values at a time on a CPU, all of them elsewhere."""
    count = len(rows)
    step = max(1, values // rows.shape[1]) if rows.device.type == "cpu" else max(count, 1)
    for first in range(0, count, step):
        yield slice(first, min(first + step, count))
