"""Rows in shared memory for clients on this host: which sequences of a call go there, and for how long.

The engine writes their values into segments of a pool; the stream says where they lie. A segment is free
again when the engine has stopped writing to it and the client has let go of its last array, or is gone.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from logitscope.encodings import kept_format
from logitscope.encodings.base import RowFormat
from logitscope.errors import EncodingError, InputError, OutOfMemoryError
from logitscope.logits.collect import even
from logitscope.rows import Identity, Request, RowBlock, Stage
from logitscope.wire import Loan, Pool, Segment, Ticket, sweep
from logitscope.wire.shared import PROOF_HEADER, Proof

_MOST_SEGMENTS = 128


class Lender:
    """Shared memory of a server, and the proof that a client is on its host.

    Args:
        limit_bytes: that all segments together may have; None is half of what shared memory has free.
        least_bytes: of a sequence's rows; fewer go with the stream.

    Raises:
        OSError: there is no shared memory that can be written to.
    """

    def __init__(self, *, limit_bytes: int | None, least_bytes: int) -> None:
        sweep()
        self._least_bytes = least_bytes
        self._proof = Proof()
        self.pool = Pool(limit_bytes=limit_bytes, most=_MOST_SEGMENTS)
        self.lock = threading.Lock()

    @property
    def proof_path(self) -> str:
        """Where the proof lies."""
        return str(self._proof.path)

    def check(self, shown: str) -> None:
        """Whether a client is on this host.

        Raises:
            InputError: it showed another secret.
        """
        if not self._proof.holds(shown):
            raise wrong_proof()

    def lent(self, requests: Sequence[Request], identity: Identity) -> Lent:
        """Room for the sequences of a call."""
        formats = {
            (i, stage): (row, rows)
            for i, request in enumerate(requests)
            for stage, rows in _stages(request).items()
            if (row := _format(request, stage, identity)) is not None and rows
        }
        if formats and even(requests, identity):  # in one piece, as results hold it
            row, rows = formats[0, "raw"]
            parts = [_Part(row, len(requests) * rows, set(formats))]
            places = {key: (parts[0], key[0] * rows, (key[0] + 1) * rows) for key in formats}
        else:
            places = {key: (_Part(row, rows, {key}), 0, rows) for key, (row, rows) in formats.items()}
        large = {key: place for key, place in places.items() if place[0].nbytes >= self._least_bytes}
        return Lent(self, large)

    def close(self) -> None:
        """Leave nothing behind; clients keep what they have."""
        self._proof.remove()
        self.pool.close()


def wrong_proof() -> InputError:
    """The refusal of a client that is not on this host, or knows another server."""
    return InputError(
        "no proof of the same host",
        where=PROOF_HEADER,
        expected="the secret in the file that GET /info names",
        fix="Connect again, or ask without it.",
    )


@dataclasses.dataclass(eq=False)
class _Part:
    """What lies in one segment.

    Attributes:
        row: its form.
        rows: of all its sequences.
        sequences: that lie there, by place in the call and stage.
        open: those that the engine still writes.
        segment: once the first row was written.
        use: of the segment.
        first_byte: address of its data.
        ticket: once a row was sent.
        sent_bytes: of rows, up to now.
        refused: there was no memory.
    """

    row: RowFormat
    rows: int
    sequences: set[tuple[int, Stage]]
    open: set[tuple[int, Stage]] = dataclasses.field(default_factory=set)
    segment: Segment | None = None
    use: int = 0
    first_byte: int = 0
    ticket: Ticket | None = None
    sent_bytes: int = 0
    refused: bool = False

    @property
    def nbytes(self) -> int:
        """Of all rows."""
        return self.rows * self.row.nbytes

    @property
    def own(self) -> Segment | None:
        """The segment while it is this part's."""
        return self.segment if self.segment is not None and self.segment.use == self.use else None


class Lent:
    """The segments of one call. The runner's thread writes, the event loop sends.

    Args:
        lender: whose pool they come from.
        places: part, first row there, and the one after its last, of each sequence that goes through them.
    """

    def __init__(self, lender: Lender, places: dict[tuple[int, Stage], tuple[_Part, int, int]]) -> None:
        self._lender, self._places = lender, places
        self._parts = list(dict.fromkeys(part for part, _, _ in places.values()))
        self._gone = False

    # -- for the engine --------------------------------------------------------------------------------

    def room(self, index: int, stage: Stage, first: int, rows: int) -> NDArray[Any] | None:
        """Memory for rows of a sequence; None where they go with the stream."""
        part, begin, end = self._places.get((index, stage), (None, 0, 0))
        if part is None or part.refused or begin + first + rows > end:
            return None
        try:
            segment = self._segment(part)
            if segment is None:
                return None
            place = (begin + first) * part.row.nbytes
            found = segment.room(place, (rows, part.row.width), part.row.dtype)
        except OutOfMemoryError:
            part.refused = True
            return None
        part.first_byte = found.ctypes.data - place
        return found

    def _segment(self, part: _Part) -> Segment | None:
        with self._lender.lock:
            if part.segment is None and not self._gone:
                part.segment = self._lender.pool.take(part.nbytes)
                part.segment.writing, part.use, part.open = True, part.segment.use, set(part.sequences)
            return part.segment

    def written(self, index: int | None = None) -> None:
        """The engine writes no more of a sequence, or of none."""
        for part in self._parts:
            part.open = {key for key in part.open if index is not None and key[0] != index}
            if not part.open and part.own is not None:
                part.own.writing = False

    def reset(self) -> None:
        """The call will be run again; nothing of it was sent."""
        with self._lender.lock:
            self._take_back()
            for part in self._parts:
                part.segment, part.refused = None, False

    # -- for the stream --------------------------------------------------------------------------------

    def loan(self, block: RowBlock) -> Loan | None:
        """Where a block's values lie; None where they are not in a segment."""
        found = self._find(block)
        if found is None:
            return None
        part, room, first = found
        assert part.segment is not None
        if part.ticket is None:
            with self._lender.lock:
                part.ticket = part.segment.lend(part.nbytes)
        part.sent_bytes += block.values.nbytes
        return Loan(part.ticket, part.rows, room, first)

    def holds(self, block: RowBlock) -> bool:
        """Whether a block's values lie in a segment."""
        return self._find(block) is not None

    @property
    def taken_bytes(self) -> int:
        """Of values that were sent: what the client is done with."""
        owned = [(part, part.own) for part in self._parts if part.ticket is not None]
        return sum(part.sent_bytes if own is None else own.done_bytes for part, own in owned)

    @property
    def waiting(self) -> bool:
        """Whether a ticket was sent that the client has not attached yet."""
        return any(part.own is not None and part.own.lent for part in self._parts)

    def leave(self) -> None:
        """The client has all, or is gone: what it did not attach comes back."""
        with self._lender.lock:
            self._gone = True
            self._take_back()

    def _take_back(self) -> None:
        for part in self._parts:
            if part.own is not None:
                part.own.take_back()

    def _find(self, block: RowBlock) -> tuple[_Part, tuple[int, int], int] | None:
        """The part, the sequence's room in it, and the block's first row."""
        part, begin, end = self._places.get((block.index, block.stage), (None, 0, 0))
        values = block.values
        if part is None or part.segment is None or not isinstance(values, np.ndarray) or not values.nbytes:
            return None
        first, rest = divmod(values.ctypes.data - part.first_byte, part.row.nbytes)
        inside = begin <= first and first + len(values) <= end
        return (part, (begin, end), first) if inside and not rest and values.flags.c_contiguous else None


def _stages(request: Request) -> dict[Stage, int]:
    """How many rows there may be of each stage."""
    found: dict[Stage, int] = {"raw": request.max_rows}
    if request.processed:
        found["processed"] = min(request.max_rows, request.max_new_tokens)
    return found


def _format(request: Request, stage: Stage, identity: Identity) -> RowFormat | None:
    """How rows lie in memory; None for those that are no array on the host."""
    if request.keep_on_device:
        return None
    try:
        return kept_format(request, stage, identity)
    except EncodingError:
        return None
