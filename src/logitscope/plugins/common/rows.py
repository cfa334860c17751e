"""A request's rows inside a foreign engine: from its logits, over shared memory, to a `Logits`.

`RequestRows` lives where the logits are. Rows are written to their place by their position, so that chunks,
repeats after preemption, and tokens that are computed but never given out need no bookkeeping; what was
given out is looked at when the request ends. `received` lives where the user is.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from logitscope.encodings import RowHead, dtype_of, encoding
from logitscope.errors import EncodingError, IncompleteError, UnsupportedError
from logitscope.extract import Extractor, LogitsChunk, PendingBlock
from logitscope.logits import Logits
from logitscope.logits.cut import CutRows
from logitscope.plugins.common.heads import CapturedHead, Comparison
from logitscope.rows import (
    SUMMARY_DTYPES,
    Entries,
    Identity,
    Ids,
    Request,
    Select,
    Stage,
    Verification,
    Vocabulary,
    row_count,
    targets,
)
from logitscope.wire import Pool, Segment, Ticket, attach, release

_AHEAD = 2
_ALIGNMENT_BYTES = 64


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a request's arrays lie in its segment: what is small first, so that values may grow at the end.

    Attributes:
        rows: that fit.
        tokens: of prompt and output that fit.
        names: of the summaries.
        width, dtype: of a kept row; no values when ``width`` is 0.
        columns: token ids that are kept of every row; 0 for all columns.
        entries: kept entries of rows that have columns of their own; None for other rows.
        counted: whether those were drawn.
    """

    rows: int
    tokens: int
    names: tuple[str, ...]
    width: int
    dtype: str
    columns: int = 0
    entries: int | None = None
    counted: bool = False

    @property
    def keep(self) -> bool:
        """Whether there are values."""
        return self.width > 0

    @functools.cached_property
    def places(self) -> dict[str, tuple[int, tuple[int, ...], np.dtype[Any]]]:
        """First byte, shape and dtype of each array."""
        arrays: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {
            "token_ids": ((self.tokens,), np.dtype(np.int32)),
            "positions": ((self.rows,), np.dtype(np.int64)),
            **{name: ((self.rows,), np.dtype(SUMMARY_DTYPES[name])) for name in self.names},
        }
        if self.columns:
            arrays["ids"] = ((self.columns,), np.dtype(np.int32))
        if self.entries is not None:
            arrays["lengths"] = ((self.rows,), np.dtype(np.int32))
            for name in ("ids", *(["counts"] if self.counted else [])):
                arrays[name] = ((self.entries,), np.dtype(np.int32))
            arrays["values"] = ((self.entries,), dtype_of(self.dtype))
        if self.keep:
            arrays["values"] = ((self.rows, self.width), dtype_of(self.dtype))
        found, first = {}, 0
        for name, (shape, dtype) in arrays.items():
            found[name] = (first, shape, dtype)
            size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            first += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return found

    def size(self, rows: int) -> int:
        """Bytes up to the end of so many rows of values."""
        first, shape, dtype = self.places[next(reversed(self.places))]
        width = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
        return first + (rows if self.keep else shape[0]) * width


class RequestRows:
    """Rows of one request while its engine works on it.

    Args:
        request: with the prompt as it is fed, and the most tokens that are generated.
        pool: of shared memory.
        identity: of the engine.
        head: that hidden rows are compared with; None when none are asked for.
        stage: of the rows; ``processed`` ones are those of generated tokens only.

    Attributes:
        error: why there will be no rows; None while all is well.
        last: position of the newest row that the engine computed.
    """

    def __init__(
        self,
        request: Request,
        pool: Pool,
        *,
        identity: Identity,
        head: CapturedHead | None = None,
        stage: Stage = "raw",
    ) -> None:
        self.request, self.head, self.stage, self.last = request, head, stage, -1
        self.error: str | None = None
        self._pool = pool
        self._select = request.select or Select(vocab=None)
        self._wanted = _wanted(request, stage)
        self._filled = np.zeros(len(self._wanted), dtype=bool)
        # Ids that the rows were computed to score; at the end they must be those that were given out.
        self._scored: Ids = np.full(len(self._wanted), -1, np.int32)
        self._extractor = Extractor(request, 0, identity=identity, stage=stage, buffer=lambda *_: self._room)
        row = self._extractor.format
        self._layout = Layout(
            rows=len(self._wanted),
            tokens=request.prompt_length + request.max_new_tokens,
            names=request.summary,
            width=0 if row is None else row.width,
            dtype=dtype_of(self._extractor.encoding.name).name if row is None else row.dtype.name,
            columns=len(self._select.vocab) if self._select.container == "columns" else 0,
        )
        self._sparse = self._select.container == "sparse"
        # Of rows with columns of their own; a row that is computed again replaces what it was.
        self._entries: list[Entries] = []
        self._places = np.full((len(self._wanted), 2), -1, np.int64)
        self._compared, self._worst, self._allowed = 0, 0.0, 0.0
        self._segment: Segment | None = None
        self._room: Any = None
        self._given = 0
        self._waiting: collections.deque[tuple[PendingBlock, slice, Any, Any]] = collections.deque()

    @property
    def first_prompt_row(self) -> int | None:
        """The first wanted row before those that score generated tokens; None when there is none."""
        before = self._wanted[self._wanted < self._first_generated]
        return int(before[0]) if before.size else None

    @property
    def _first_generated(self) -> int:
        length = self.request.prompt_length
        return length - 1 if self.request.max_new_tokens else length

    def put_prompt(self, logits: Any, first: int, hidden: Any = None) -> None:
        """Rows ``first …`` that score prompt tokens: a tensor ``[rows, vocab_size]``, read at once.

        ``hidden`` is the head's input for them, ``[rows, hidden_size]``.
        """
        last = min(first + len(logits), self._first_generated)
        wanted = slice(*np.searchsorted(self._wanted, [first, last]))
        positions = self._wanted[wanted]
        if not positions.size:
            return
        scored = targets(self.request.token_ids, positions)
        self._put(wanted, logits, positions - first, scored, hidden)

    def generates(self, position: int) -> bool:
        """Whether this row scores a generated token."""
        return position >= self._first_generated

    def wants(self, position: int) -> bool:
        """Whether this row of a generated token is kept."""
        if not self.generates(position):
            return False
        at = int(np.searchsorted(self._wanted, position))
        return at < len(self._wanted) and int(self._wanted[at]) == position

    def put_generated(self, logits: Any, position: int, target: Any, hidden: Any = None) -> None:
        """The row at ``position``, a tensor ``[1, vocab_size]``, and the id it scores, a tensor ``[1]``."""
        at = int(np.searchsorted(self._wanted, position))
        self._put(slice(at, at + 1), logits, np.zeros(1, np.int64), target, hidden)

    def fail(self, error: BaseException) -> None:
        """There will be no rows."""
        self.error = f"{type(error).__name__}: {error}"
        self.drop()

    def drop(self) -> None:
        """Give back what was taken."""
        self._waiting.clear()
        self._entries.clear()
        self._room = None
        if self._segment is not None:
            self._segment.take_back()
            self._segment = None

    def ticket(self, generated_ids: Sequence[int], *, ended: bool) -> dict[str, Any]:
        """The rows that were not given out yet, for `received`; after the last ones nothing is left here.

        Args:
            generated_ids: that the engine gives out up to now.
            ended: whether there will be no more.

        Raises:
            IncompleteError: a row is missing, or was made for another token.
        """
        self._settle(0)
        request, new = self.request, len(generated_ids)
        token_ids = np.concatenate([request.token_ids, np.asarray(generated_ids, np.int32)]).astype(np.int32)
        chosen = self._chosen(new, ended=ended)
        self._check(chosen, token_ids)
        layout = self._layout
        arrays: dict[str, NDArray[Any]] = {"token_ids": token_ids, "positions": self._wanted[chosen]}
        if layout.columns:
            arrays["ids"] = np.array(self._select.vocab, np.int32)
        if self._sparse:
            entries = self._entries_of(chosen)
            arrays |= entries.arrays()
            layout = dataclasses.replace(layout, entries=len(entries.ids), counted=entries.counts is not None)
        if ended and not self._given and not self._sparse and np.array_equal(chosen, np.arange(len(chosen))):
            segment, self._segment = self._held(), None
        else:
            segment = self._copied(chosen, layout)
        self._given = int(chosen[-1]) + 1 if chosen.size else self._given
        for name, array in arrays.items():
            self._array(segment, name, slice(len(array)), layout)[...] = array
        segment.room(layout.size(len(chosen)), (0,), np.uint8)
        ticket = segment.lend(layout.size(len(chosen)))
        if ended:
            self.drop()
        return {
            "ticket": dataclasses.astuple(ticket),
            "layout": dataclasses.asdict(layout),
            "best": self._select.best,
            "rows": len(chosen),
            "tokens": len(token_ids),
            "prompt_length": request.prompt_length,
            "encode": request.encode,
            "format": self._extractor.encoding.name,
            "stage": self.stage,
            "head": None if self.head is None else (self.head.token, self.head.serial),
            "verification": None
            if self.head is None
            else (self._compared, len(self.head.columns), self._worst, self._allowed),
        }

    # -- writing ---------------------------------------------------------------------------------------

    def _put(self, wanted: slice, logits: Any, places: NDArray[np.int64], scored: Any, hidden: Any) -> None:
        positions = self._wanted[wanted]
        rows = _rows_at(logits, places)
        states = compared = None
        if self.head is not None:
            if hidden is None:
                raise UnsupportedError("the engine gave no hidden rows", where=f"position {positions[0]}")
            states = _rows_at(hidden, places)
            compared = self.head.compare(states, rows, rounded=self.request.encode == "hidden-float16")
        segment = self._held()
        self._room = self._array(segment, "values", wanted) if self._layout.keep else None
        pending = self._extractor.extract(LogitsChunk(rows, positions, scored, states))
        self._waiting.append((pending, wanted, scored, compared))
        self._filled[wanted] = True
        self._settle(_AHEAD)

    def _settle(self, ahead: int) -> None:
        """Wait for all blocks but the newest few, and put their summaries in their places."""
        while len(self._waiting) > ahead:
            pending, wanted, scored, compared = self._waiting.popleft()
            block = pending.wait()
            if block.entries is not None:
                self._places[wanted, 0] = len(self._entries)
                self._places[wanted, 1] = np.arange(len(block))
                self._entries.append(block.entries)
            for name, array in block.summary.items():
                self._array(self._held(), name, wanted)[...] = array
            self._scored[wanted] = scored if isinstance(scored, np.ndarray) else scored.cpu().numpy()
            if compared is not None:
                self._verify(compared, self._wanted[wanted])

    def _verify(self, compared: Comparison, positions: NDArray[np.int64]) -> None:
        difference, bound = float(compared.difference), float(compared.bound)
        if not float(compared.excess) <= 0:
            raise EncodingError(
                "hidden rows do not give the engine's rows",
                where=f"positions {positions[0]} … {positions[-1]}",
                expected=f"a difference of at most {bound:.2g}",
                got=f"{difference:.2g}",
                fix="Ask for plain rows: encode='float16' or 'float32'.",
            )
        self._compared += len(positions)
        self._worst, self._allowed = max(self._worst, difference), max(self._allowed, bound)

    def _held(self) -> Segment:
        if self._segment is None:
            self._segment = self._pool.take(self._layout.size(self._layout.rows))
            weakref.finalize(self, _abandon, self._segment, self._segment.use)
        return self._segment

    def _entries_of(self, chosen: NDArray[np.int64]) -> Entries:
        """Entries of some of the rows."""
        parts, at = [], 0
        places = self._places[chosen]
        while at < len(places):
            block, row = places[at]
            count = 1
            while at + count < len(places) and (places[at + count] == (block, row + count)).all():
                count += 1
            parts.append(self._entries[block].rows(slice(row, row + count)))
            at += count
        return Entries.joined(parts, dtype_of(self._layout.dtype), counted=self._select.sample is not None)

    def _array(self, segment: Segment, name: str, rows: slice, layout: Layout | None = None) -> NDArray[Any]:
        """Part of an array of the segment."""
        first, shape, dtype = (layout or self._layout).places[name]
        begin, end, _ = rows.indices(shape[0])
        width = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
        return segment.room(first + begin * width, (end - begin, *shape[1:]), dtype)

    # -- giving out ------------------------------------------------------------------------------------

    def _chosen(self, new: int, *, ended: bool) -> NDArray[np.int64]:
        """Places of the rows that are due: of the whole sequence at its end, else those not given yet."""
        length, select = self.request.prompt_length, self.request.select
        assert select is not None
        if ended and select.from_the_end:  # which processed rows never are
            due = select.rows(prompt_length=length, new_tokens=new, ended_early=True)
            return np.searchsorted(self._wanted, due)
        known = 0 if select.from_the_end else row_count(length, new)
        if self.request.max_new_tokens and not new:
            known = 0
        return np.arange(self._given, int(np.searchsorted(self._wanted, known)))

    def _check(self, chosen: NDArray[np.int64], token_ids: Ids) -> None:
        missing = self._wanted[chosen[~self._filled[chosen]]]
        if missing.size:
            raise IncompleteError(
                "rows are missing",
                where=f"positions {missing[:8].tolist()}",
                expected=f"{len(chosen)} rows",
                got=len(chosen) - len(missing),
            )
        truth = targets(token_ids, self._wanted[chosen])
        scored = self._scored[chosen]
        # A row that scores nothing yet was made before its token was known, or scores the end.
        wrong = (scored != truth) & (truth >= 0)
        if wrong.any():
            at = int(self._wanted[chosen[wrong]][0])
            raise IncompleteError(
                "a row was made for another token than the engine gave out",
                where=f"position {at}",
                expected=int(truth[wrong][0]),
                got=int(scored[wrong][0]),
            )

    def _copied(self, chosen: NDArray[np.int64], layout: Layout) -> Segment:
        """A segment of their own for some of the rows."""
        copy = self._pool.take(layout.size(len(chosen)))
        names = [*self._layout.names, *(["values"] if self._layout.keep else [])]
        for name in names if chosen.size else ():
            run = slice(int(chosen[0]), int(chosen[-1]) + 1)
            rows = self._array(self._held(), name, run)
            self._array(copy, name, slice(len(chosen)), layout)[...] = rows[chosen - chosen[0]]
        return copy


def received(
    ticket: Mapping[str, Any],
    identity: Identity,
    vocabulary: Vocabulary | None,
    head: Callable[[tuple[str, int]], RowHead] | None = None,
) -> Logits:
    """The rows of a `RequestRows.ticket`, over the memory they were written to.

    Args:
        ticket: for the rows.
        identity: of the engine.
        vocabulary: gives the texts of tokens.
        head: finds the head of hidden rows by what the ticket says of it.

    Raises:
        FileFormatError: the memory is gone.
    """
    layout = Layout(**ticket["layout"])
    attached = attach(Ticket(*ticket["ticket"]))
    arrays = {}
    for name, (first, shape, dtype) in layout.places.items():
        count = {"token_ids": ticket["tokens"], "ids": shape[0]}.get(name, ticket["rows"])
        if layout.entries is not None and name in ("values", "counts"):
            count = shape[0]
        arrays[name] = attached.array(first, (count, *shape[1:]), dtype)
    values: Any = arrays.get("values")
    if "ids" in arrays:
        parts = ("lengths", "ids", "values", "counts")
        kept: dict[str, Any] = {name: arrays[name] for name in parts if name in arrays}
        values = CutRows.of(kept, identity.vocab_size, best=ticket["best"])
    elif values is not None:
        found = None if ticket["head"] is None or head is None else head(tuple(ticket["head"]))
        values = encoding(ticket["format"]).held(values, identity, found)
    return Logits(
        values=values,
        positions=arrays["positions"],
        token_ids=arrays["token_ids"],
        prompt_length=ticket["prompt_length"],
        identity=identity,
        summary={name: arrays[name] for name in layout.names},
        encoding=ticket["encode"],
        stage=ticket["stage"],
        vocabulary=vocabulary,
        verification=None if ticket["verification"] is None else Verification(*ticket["verification"]),
    )


def discarded(ticket: Mapping[str, Any]) -> None:
    """Nobody waits for these rows any more."""
    if "ticket" in ticket:
        release(Ticket(*ticket["ticket"]))


def _rows_at(rows: Any, places: NDArray[np.int64]) -> Any:
    """Rows of a tensor at ascending places, without a copy where they are consecutive."""
    consecutive = places[-1] - places[0] + 1 == len(places)
    return rows[places[0] : places[-1] + 1] if consecutive else rows[places.tolist()]


def _wanted(request: Request, stage: Stage) -> NDArray[np.int64]:
    """Every row that may be kept: what counts from the end of a generation is known only there."""
    length, new, select = request.prompt_length, request.max_new_tokens, request.select
    if select is None:
        return np.empty(0, np.int64)
    if new and select.from_the_end:
        return np.arange(row_count(length, new), dtype=np.int64)
    rows = select.rows(prompt_length=length, new_tokens=new)
    return rows if stage == "raw" else rows[rows >= length - 1]


def _abandon(segment: Segment, use: int) -> None:
    """A request that ended without a word gives its memory back."""
    if segment.use == use and segment.held:
        segment.take_back()
