"""Hidden rows with a residual, so that every machine rebuilds the same bits.

Libraries and processors multiply float32 in other orders, and last bits differ. The residual is the
difference of the rows from a product in float64, which rounds to the same number everywhere but for the few
values that lie too near a border between two; those are kept as they are.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from logitscope.encodings.hidden import HiddenRows
from logitscope.errors import FileFormatError

BLOCK_ROWS = 16
"""Rows whose residual is compressed together."""

_COUNT = np.dtype("<i8")


@dataclasses.dataclass(frozen=True)
class Residual:
    """Compressed differences of rows, by blocks of `BLOCK_ROWS`.

    Attributes:
        data: of all blocks, uint8 ``[bytes]``.
        ends: of each block in it, int64 ``[blocks]``.
    """

    data: NDArray[np.uint8]
    ends: NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        """Of both."""
        return int(self.data.nbytes + self.ends.nbytes)

    @classmethod
    def of(cls, rows: HiddenRows) -> Self:
        """The residual of rows as this machine rebuilds them."""
        blocks = []
        for first in range(0, len(rows), BLOCK_ROWS):
            part = rows[first : first + BLOCK_ROWS]
            head = part.own_head()
            wide, low, high = (head.wide_rows(part.hidden, shift) for shift in (0, -1, 1))
            blocks.append(_compressed(part.decode(), wide, low, high))
        ends = np.cumsum([len(block) for block in blocks], dtype=np.int64)
        return cls(np.frombuffer(b"".join(blocks), np.uint8), ends)

    def apply(self, block: int, wide: NDArray[np.float64], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Rows of a block, from their product in float64.

        Raises:
            FileFormatError: the residual is of other rows, or damaged.
        """
        first = int(self.ends[block - 1]) if block else 0
        return _restored(self.data[first : int(self.ends[block])].tobytes(), wide, dtype)


class ExactRows(HiddenRows):
    """Hidden rows that are rebuilt with their residual.

    Args:
        hidden: all rows of the residual, ``[rows, hidden_size]``.
        head: that they are the input of.
        residual: of the rows.
        chosen: which of the rows these are; None is all of them.
    """

    def __init__(
        self, hidden: NDArray[Any], head: Any, residual: Residual, chosen: NDArray[np.int64] | None = None
    ) -> None:
        self._all, self.residual = hidden, residual
        self._chosen = np.arange(len(hidden)) if chosen is None else chosen
        super().__init__(hidden[self._chosen], head)

    @property
    def nbytes(self) -> int:
        """Bytes of the hidden rows and of the residual, which parts of a result share."""
        return int(self.hidden.nbytes) + self.residual.nbytes

    def __getitem__(self, index: slice | NDArray[Any]) -> ExactRows:
        return ExactRows(self._all, self.head, self.residual, self._chosen[index])

    def decode(self, ids: NDArray[Any] | None = None) -> NDArray[Any]:
        """The rows ``[rows, vocab_size]``, or some columns of them."""
        head = self.own_head()
        found = np.empty((len(self), self.shape[1] if ids is None else len(ids)), self.dtype)
        blocks = self._chosen // BLOCK_ROWS
        for block in np.unique(blocks):
            hidden = self._all[block * BLOCK_ROWS : (block + 1) * BLOCK_ROWS]
            rows = self.residual.apply(int(block), head.wide_rows(hidden), self.dtype)
            here = np.flatnonzero(blocks == block)
            own = rows[self._chosen[here] - block * BLOCK_ROWS]
            found[here] = own if ids is None else own[:, ids]
        return found

    def __repr__(self) -> str:
        return f"ExactRows, {super().__repr__()}, residual of {self.residual.nbytes:,} bytes"


def _compressed(
    rows: NDArray[Any], wide: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64]
) -> bytes:
    """Differences of rows from their float64 product, which lies between ``low`` and ``high`` everywhere."""
    import pyarrow

    base, least, most = (_rounded(values, rows.dtype) for values in (wide, low, high))
    unsure = least != most
    places = np.flatnonzero(unsure | ~np.isfinite(wide)).astype(_COUNT)
    bits = np.ascontiguousarray(rows).reshape(-1).view(f"<u{rows.dtype.itemsize}")
    difference = (_order(rows) - base).reshape(-1)
    difference[places] = 0
    folded = ((difference << 1) ^ (difference >> 63)).astype("<u8")  # small ones of both signs are small
    planes = folded.view(np.uint8).reshape(-1, 8)[:, : rows.dtype.itemsize + 1].T
    raw = b"".join(
        [
            np.array([len(places)], _COUNT).tobytes(),
            places.tobytes(),
            bits[places].tobytes(),
            planes.tobytes(),
        ]
    )
    size = np.array([len(raw)], _COUNT).tobytes()
    return size + bytes(pyarrow.compress(raw, codec="zstd", asbytes=True))


def _restored(data: bytes, wide: NDArray[np.float64], dtype: np.dtype[Any]) -> NDArray[Any]:
    import pyarrow

    try:
        size = int(np.frombuffer(data, _COUNT, 1)[0])
        raw = pyarrow.decompress(data[_COUNT.itemsize :], size, codec="zstd", asbytes=True)
        count = int(np.frombuffer(raw, _COUNT, 1)[0])
        places = np.frombuffer(raw, _COUNT, count, _COUNT.itemsize)
        at = _COUNT.itemsize * (1 + count)
        bits = np.frombuffer(raw, f"<u{dtype.itemsize}", count, at)
        planes = np.frombuffer(raw, np.uint8, offset=at + bits.nbytes).reshape(dtype.itemsize + 1, wide.size)
    except (ValueError, OSError) as error:
        raise FileFormatError(
            "a residual of other rows, or a damaged one", got=f"{type(error).__name__}: {error}"
        ) from error
    folded = np.zeros((wide.size, 8), np.uint8)
    folded[:, : dtype.itemsize + 1] = planes.T
    whole = folded.reshape(-1).view("<u8")
    difference = (whole >> 1).astype(np.int64) ^ -(whole & 1).astype(np.int64)
    found = _unordered(_rounded(wide, dtype).reshape(-1) + difference, dtype)
    found.view(f"<u{dtype.itemsize}")[places] = bits
    return found.reshape(wide.shape)


def _rounded(values: NDArray[np.float64], dtype: np.dtype[Any]) -> NDArray[np.int64]:
    """The `_order` of values rounded to a dtype; those beyond its range are infinite."""
    with np.errstate(over="ignore"):
        return _order(values.astype(dtype))


def _order(values: NDArray[Any]) -> NDArray[np.int64]:
    """Floats as integers that ascend with them, one step from one float to the next."""
    width = values.dtype.itemsize
    bits = np.ascontiguousarray(values).view(f"<i{width}").astype(np.int64)
    lowest = -(1 << (8 * width - 1))
    return np.where(bits < 0, lowest - bits - 1, bits)


def _unordered(order: NDArray[np.int64], dtype: np.dtype[Any]) -> NDArray[Any]:
    width = dtype.itemsize
    lowest = -(1 << (8 * width - 1))
    return np.where(order < 0, lowest - order - 1, order).astype(f"<i{width}").view(dtype)
