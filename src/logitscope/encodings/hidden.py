"""Hidden rows: the head's input is kept, and rows are rebuilt by the head when they are read.

A row costs ``hidden_size`` values in place of ``vocab_size``: 85 times less for a vocabulary of 49,152 and a
hidden size of 576. The head is held once, whatever the number of rows, and known by its hash.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from numpy.typing import NDArray

from logitscope.encodings.base import EncodedRows, RowFormat, RowHead
from logitscope.encodings.dense import DTYPES, rounded_into
from logitscope.errors import EncodingError
from logitscope.rows import Identity


@dataclasses.dataclass(frozen=True)
class Hidden:
    """Hidden rows ``[rows, hidden_size]``.

    Attributes:
        name: ``hidden`` keeps the dtype in which the head reads them: nothing is rounded. ``hidden-float16``
            rounds to nearest; half the size for a float32 model.
        dtype_name: of the kept values; None is the model's own.
    """

    name: str
    dtype_name: str | None = None
    of_hidden = True
    expected = "at most 65504 in absolute value"

    def row_format(self, identity: Identity) -> RowFormat:
        """``hidden_size`` values of the dtype."""
        if identity.hidden_size is None or identity.hidden_dtype is None:
            raise EncodingError("the engine does not show its head's input", where="encode", got=self.name)
        return RowFormat(DTYPES[self.dtype_name or identity.hidden_dtype], identity.hidden_size)

    def encode(self, rows: Any, out: Any) -> Any | None:
        """Write hidden rows, a tensor ``[rows, hidden_size]``, into the tensor ``out``.

        Returns:
            None, or a boolean tensor: whether a finite value became infinite.
        """
        return rounded_into(rows, out)

    def held(self, stored: NDArray[Any], identity: Identity, head: RowHead | None) -> HiddenRows:
        """The hidden rows with their head.

        Raises:
            EncodingError: there is none.
        """
        if head is None:
            raise EncodingError(
                "hidden rows without a head", where="encode", got=self.name, fix="Give the head."
            )
        return HiddenRows(stored, head)


class HiddenRows(EncodedRows):
    """Hidden rows and the head that makes logits of them.

    Args:
        hidden: ``[rows, hidden_size]``.
        head: that they are the input of.
        state: of the head when they were made; None is now.
    """

    def __init__(self, hidden: NDArray[Any], head: RowHead, state: tuple[int, ...] | None = None) -> None:
        self.stored = self.hidden = hidden
        self.head = head
        self.shape = (len(hidden), head.vocab_size)
        self.dtype = head.rows_dtype
        self._state = head.state if state is None else state

    @property
    def nbytes(self) -> int:
        """Bytes of the hidden rows; the head is shared."""
        return int(self.hidden.nbytes)

    def __getitem__(self, index: slice | NDArray[Any]) -> HiddenRows:
        return HiddenRows(self.hidden[index], self.head, self._state)

    def decode(self, ids: NDArray[Any] | None = None) -> NDArray[Any]:
        """The rows ``[rows, vocab_size]``, or some columns of them.

        Raises:
            EncodingError: the head's weights were changed since the rows were made.
        """
        return self.own_head().rows(self.hidden, ids)

    def own_head(self) -> RowHead:
        """The head, if it is still what the rows were made for.

        Raises:
            EncodingError: its weights were changed since.
        """
        if self.head.state != self._state:
            raise EncodingError(
                "the head's weights were changed after these rows were captured",
                where="hidden rows",
                fix="Decode before training on, as with to_numpy(), or open the engine on a copy.",
            )
        return self.head

    def __repr__(self) -> str:
        rows, size = self.hidden.shape
        return f"HiddenRows [{rows}, {size}] {self.hidden.dtype.name} of [{rows}, {self.shape[1]}]"
