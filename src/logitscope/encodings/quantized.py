"""What the quantized encodings share: distances below the maximum, tiles, and rows that are decoded."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from logitscope.encodings.base import EncodedRows, RowFormat, RowHead
from logitscope.rows import Identity


@dataclasses.dataclass(frozen=True)
class Quantized(abc.ABC):
    """An encoding of codes; the decoded values are float32, and within `error_bound` of the engine's.

    Attributes:
        name: as in ``encode=…``.
    """

    name: str
    of_hidden = False
    formula = ""
    expected = "finite values and -inf, at most 3.4e38 apart, one of them finite"

    @abc.abstractmethod
    def row_format(self, identity: Identity) -> RowFormat:
        """The format of a kept row."""

    @abc.abstractmethod
    def encode(self, rows: Any, out: Any) -> Any:
        """Write rows into codes."""

    @abc.abstractmethod
    def decode(self, stored: NDArray[Any], ids: NDArray[Any] | None = None) -> NDArray[np.float32]:
        """Values of codes."""

    @abc.abstractmethod
    def error_bound(self, stored: NDArray[Any]) -> NDArray[np.float32]:
        """Bound of ``|decoded - value|`` in each row."""

    def held(self, stored: NDArray[Any], identity: Identity, head: RowHead | None) -> QuantizedRows:
        """The codes as rows that are decoded when they are read."""
        return QuantizedRows(stored, self, identity.vocab_size)


class QuantizedRows(EncodedRows):
    """Codes, and the encoding that reads them.

    Args:
        stored: ``[rows, width]``.
        encoding: that made them.
        vocab_size: columns of a decoded row.
    """

    dtype = np.dtype(np.float32)

    def __init__(self, stored: NDArray[Any], encoding: Quantized, vocab_size: int) -> None:
        self.stored, self.encoding = stored, encoding
        self.shape = (len(stored), vocab_size)

    @property
    def nbytes(self) -> int:
        """Bytes of the codes."""
        return int(self.stored.nbytes)

    def __getitem__(self, index: slice | NDArray[Any]) -> QuantizedRows:
        return QuantizedRows(self.stored[index], self.encoding, self.shape[1])

    def decode(self, ids: NDArray[Any] | None = None) -> NDArray[Any]:
        """The values ``[rows, vocab_size]``, or of some columns, float32."""
        return self.encoding.decode(self.stored, ids)

    def error_bound(self) -> NDArray[np.float32]:
        """Bound of ``|decoded - value|`` in each row, float32 ``[rows]``."""
        return self.encoding.error_bound(self.stored)

    def __repr__(self) -> str:
        return f"QuantizedRows {list(self.shape)} in {self.encoding.name}, {self.nbytes:,} bytes"


@dataclasses.dataclass
class Below:
    """Rows as distances below the maximum; tensors.

    Attributes:
        top: the maximum, float32 ``[rows, 1]``.
        distance: float32 ``[rows, vocab_size]``, 0 where the value is -inf.
        deepest: the largest distance, float32 ``[rows, 1]``.
        masked: where the value is -inf; None when none is.
        bad: whether a row has no finite maximum, or too large a range.
    """

    top: Any
    distance: Any
    deepest: Any
    masked: Any
    bad: Any

    def mask(self, codes: Any, code: int) -> None:
        """Write a code where the value is -inf."""
        if self.masked is not None:
            codes.masked_fill_(self.masked, code)

    def roots(self) -> None:
        """Take the square root of the distances."""
        self.distance.sqrt_()
        self.deepest.sqrt_()


def below(rows: Any) -> Below:
    """Distances of values below the maximum of their row."""
    values = rows.float()
    low, top = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    distance = top - values
    masked = None
    if values.device.type != "cpu" or bool(low.isinf().any()):
        masked = values == -float("inf")
        distance.masked_fill_(masked, 0.0)
        deepest = distance.amax(1, keepdim=True)
    else:
        deepest = top - low
    return Below(top, distance, deepest, masked, ~(top.isfinite() & deepest.isfinite()).all())


def decoded(top: NDArray[Any], root: NDArray[np.float32], masked: NDArray[Any]) -> NDArray[np.float32]:
    """Values from the roots of their distances, in place."""
    np.multiply(root, root, out=root)
    np.subtract(top, root, out=root)
    root[masked] = -np.inf
    return root


def stated(bound: NDArray[np.float64]) -> NDArray[np.float32]:
    """A bound as float32, not below what it was, nor below the smallest difference of two numbers."""
    return (bound * (1 + 2.0**-20) + 2.0**-148).astype(np.float32)
