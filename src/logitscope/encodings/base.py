"""What an encoding is, and rows that are decoded when they are read."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from logitscope.rows import Identity


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """How a kept row lies in memory: ``width`` entries of ``dtype``."""

    dtype: np.dtype[Any]
    width: int

    @property
    def nbytes(self) -> int:
        """Exact size of a row."""
        return self.width * self.dtype.itemsize


class Encoding(Protocol):
    """A value format of kept rows."""

    @property
    def name(self) -> str:
        """As in ``encode=…``."""

    @property
    def of_hidden(self) -> bool:
        """Whether it keeps the head's input and not the logits."""

    def row_format(self, identity: Identity) -> RowFormat:
        """The format of a kept row of these models.

        Raises:
            EncodingError: such rows cannot be kept in it.
        """

    def encode(self, rows: Any, out: Any) -> Any | None:
        """Write rows, a tensor of logits or hidden rows, into the tensor ``out`` of the row format.

        Returns:
            None, or a boolean tensor on the rows' device: whether a finite value became infinite.
        """


class EncodedRows(abc.ABC):
    """Rows ``[rows, vocab_size]`` that are decoded when they are read.

    Attributes:
        shape: ``(rows, vocab_size)``.
        dtype: of the decoded values.
    """

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
    def decode(self) -> NDArray[Any]:
        """The values ``[rows, vocab_size]``, a new array.

        Raises:
            EncodingError: what was kept does not give them any more.
        """

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("rows are decoded into a new array, and copy=False forbids one")
        return self.decode().astype(dtype or self.dtype, copy=False)
