"""Values of a stream that lie in shared memory: how a batch says where, and how a reader comes to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from logitscope.encodings import dtype_of
from logitscope.errors import FileFormatError
from logitscope.rows import End, RowBlock
from logitscope.wire.shared import Attached, Ticket, attach, is_own


@dataclasses.dataclass(frozen=True)
class Loan:
    """Where a block's values lie in a segment that holds rows of one width.

    Attributes:
        ticket: of the segment.
        rows: that it has room for.
        room: the first of them that belongs to the block's sequence, and the one after its last.
        first: with which the block begins.
    """

    ticket: Ticket
    rows: int
    room: tuple[int, int]
    first: int


def loan_facts(block: RowBlock, loan: Loan) -> dict[str, Any]:
    """What a batch says of values that it does not carry, as an object that ``json`` takes."""
    return {
        "ticket": dataclasses.astuple(loan.ticket),
        "dtype": str(block.values.dtype),
        "shape": [loan.rows, *block.values.shape[1:]],
        "room": loan.room,
        "first": loan.first,
    }


class Borrowed:
    """The segments that a stream's values lie in, each attached once, while more of it comes."""

    def __init__(self) -> None:
        self._held: dict[Ticket, _Held] = {}
        self._alone: dict[int, list[Ticket]] = {}
        self._given: _Held | None = None

    def fill(self, block: RowBlock, facts: Mapping[str, Any]) -> None:
        """Give a block its values.

        Raises:
            FileFormatError: they do not lie there.
        """
        ticket, (begin, end), first = Ticket(*facts["ticket"]), facts["room"], facts["first"]
        if ticket not in self._held:
            if not is_own(ticket.path, "segment"):
                raise FileFormatError("no segment of shared memory", where=ticket.path)
            attached = attach(ticket, live=True)
            rows = attached.array(0, facts["shape"], dtype_of(facts["dtype"]))
            self._held[ticket] = _Held(attached, rows)
            if (begin, end) == (0, len(rows)):
                self._alone.setdefault(block.index, []).append(ticket)
        held = self._given = self._held[ticket]
        if not 0 <= begin <= first <= first + len(block) <= end <= len(held.rows):
            raise FileFormatError("rows outside their room", where=f"request {block.index}", got=first)
        block.room, block.values = held.rows[begin:end], held.rows[first : first + len(block)]
        held.taken_bytes += block.values.nbytes

    def taken(self, item: RowBlock | End) -> None:
        """The consumer has an item: the owner may go on, or have the memory of its sequence back."""
        if self._given is not None:
            self._given.attached.done(self._given.taken_bytes)
            self._given = None
        if isinstance(item, End):
            for ticket in self._alone.pop(item.index, []):
                del self._held[ticket]


@dataclasses.dataclass
class _Held:
    """The rows of a segment, and how much of them was taken."""

    attached: Attached
    rows: NDArray[Any]
    taken_bytes: int = 0
