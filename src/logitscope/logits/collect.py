"""The consumer that makes results of a stream: blocks in, complete `Logits` out, or an error."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from logitscope import tensors
from logitscope.encodings import EncodedRows, RowHead, dtype_of, encoding, kept_format
from logitscope.errors import EncodingError, IncompleteError, InputError
from logitscope.logits.cut import ColumnRows, SparseRows, cut_rows
from logitscope.logits.sequence import Logits
from logitscope.rows import (
    SUMMARY_DTYPES,
    Buffer,
    End,
    Entries,
    Identity,
    Ids,
    Request,
    RowBlock,
    Stage,
    Vocabulary,
    row_count,
)

_BLOCK_ROWS = 256


@dataclasses.dataclass(frozen=True, eq=False)
class Collected:
    """What became of one request.

    Attributes:
        logits: the raw rows; None when no rows were asked for.
        processed: the processed rows, when asked.
        end: how it ended.
    """

    logits: Logits | None
    processed: Logits | None
    end: End


class Collector:
    """Puts the blocks of a list of requests together, each in its place, and checks that none is missing.

    Values are written once: an engine that asks `buffer` for room writes them where they stay, and values
    that come with a room of their own stay in it. Rows of a scoring batch with equal numbers of rows lie in
    one block ``[batch, rows, vocab_size]``.

    Args:
        requests: as they were streamed.
        identity: what makes the rows.
        vocabulary: gives the results their token texts.
        head: rebuilds rows that are kept hidden.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        identity: Identity,
        vocabulary: Vocabulary | None = None,
        head: RowHead | None = None,
    ) -> None:
        self._requests, self._identity, self._vocabulary = list(requests), identity, vocabulary
        self._head = head
        self._even = even(self._requests, identity)
        self._block: NDArray[Any] | None = None
        self._open: dict[tuple[int, Stage], _Rows] = {}
        self._token_ids: dict[int, list[Ids]] = {}
        self._done: dict[int, Collected] = {}

    def buffer(self, index: int, stage: Stage, first: int, rows: int) -> NDArray[Any]:
        """Room for a request's kept rows ``first … first + rows - 1``: `logitscope.rows.Buffer`."""
        store = self._rows(index, stage)
        if first < 0 or first + rows > store.capacity:
            raise IncompleteError(
                "more rows than the request has",
                where=f"request {index}, {stage}",
                expected=f"at most {store.capacity}",
                got=first + rows,
            )
        return store.room()[first : first + rows]

    def add(self, block: RowBlock) -> None:
        """Take the next block of a request.

        Raises:
            IncompleteError: rows out of order, repeated, of no open request, or without a part that was
                asked for.
            EncodingError: values, summaries or extras of another dtype or shape than was asked for.
        """
        store = self._rows(block.index, block.stage)
        if len(block):
            store.add(block)
        if len(block.token_ids):
            self._token_ids.setdefault(block.index, []).append(block.token_ids)

    def finish(self, end: End) -> None:
        """Close a request: its rows must be exactly those that it selected.

        Raises:
            IncompleteError: rows or token ids are missing or too many; the message names them.
        """
        where = f"request {end.index}"
        raw = self._rows(end.index, "raw")
        request = self._requests[end.index]
        self._check_ids(end, request, where)
        wanted = _wanted(request, len(end.generated_ids))
        raw.check(wanted, end.rows, f"{where}, raw")
        processed = self._rows(end.index, "processed")
        later = wanted[wanted >= request.prompt_length - 1] if request.processed else wanted[:0]
        processed.check(later, end.processed_rows, f"{where}, processed")
        self._done[end.index] = Collected(
            self._logits(raw, end) if request.select is not None else None,
            self._logits(processed, end) if request.processed and request.select is not None else None,
            end,
        )
        del self._open[end.index, "raw"], self._open[end.index, "processed"]

    def results(self) -> list[Collected]:
        """What became of every request, in their order.

        Raises:
            IncompleteError: the stream ended before a request did.
        """
        missing = [i for i in range(len(self._requests)) if i not in self._done]
        if missing:
            raise IncompleteError(
                "the stream ended before these requests did",
                where="stream",
                expected=f"{len(self._requests)} ends",
                got=f"none of request {_listed(missing)}",
            )
        return [self._done[i] for i in range(len(self._requests))]

    def _rows(self, index: int, stage: Stage) -> _Rows:
        if not 0 <= index < len(self._requests) or index in self._done:
            raise IncompleteError(
                "rows of a request that is not open",
                where=f"request {index}",
                expected=f"one of {len(self._requests)} requests that has not ended",
                got="one that has ended" if index in self._done else "no such request",
            )
        if (index, stage) not in self._open:
            self._open[index, stage] = _Rows(
                self._requests[index],
                stage,
                identity=self._identity,
                part=functools.partial(self._part, index) if self._even else None,
            )
        return self._open[index, stage]

    def _part(self, index: int) -> NDArray[Any]:
        """The request's part of the block of an even batch."""
        if self._block is None:
            row = kept_format(self._requests[0], "raw", self._identity)
            assert row is not None
            shape = (len(self._requests), self._requests[0].max_rows, row.width)
            self._block = tensors.empty(shape, row.dtype)
        part: NDArray[Any] = self._block[index]
        return part

    def _check_ids(self, end: End, request: Request, where: str) -> None:
        brought = np.concatenate([np.empty(0, np.int32), *self._token_ids.pop(end.index, [])])
        if brought.size and not np.array_equal(brought, end.generated_ids):
            raise IncompleteError(
                "the blocks brought other token ids than the end",
                where=where,
                expected=_listed(end.generated_ids.tolist()),
                got=_listed(brought.tolist()),
            )
        least = min(request.max_new_tokens, 1)
        if not least <= len(end.generated_ids) <= request.max_new_tokens:
            raise IncompleteError(
                "another number of generated tokens than was asked for",
                where=where,
                expected=f"{least} … {request.max_new_tokens}",
                got=len(end.generated_ids),
            )

    def _logits(self, rows: _Rows, end: End) -> Logits:
        request = rows.request
        return Logits(
            values=_held(rows.values(), request, rows.stage, self._identity, self._head),
            positions=rows.positions[: rows.count],
            token_ids=np.concatenate([request.token_ids, end.generated_ids]).astype(np.int32, copy=False),
            prompt_length=request.prompt_length,
            identity=self._identity,
            summary=rows.parts("summary"),
            stage=rows.stage,
            encoding=request.encode,
            hidden_states=rows.parts("hidden_states"),
            attentions={k: a[:, :, : rows.keys] for k, a in rows.parts("attentions").items()},
            vocabulary=self._vocabulary,
            verification=end.verification,
        )


class _Rows:
    """Kept rows of one request at one stage, filled from the front."""

    def __init__(
        self,
        request: Request,
        stage: Stage,
        *,
        identity: Identity,
        part: Callable[[], NDArray[Any]] | None,
    ) -> None:
        self.request, self.stage = request, stage
        self.capacity = request.max_rows
        self.count = 0
        self.keys = 0
        self.positions = np.empty(self.capacity, np.int64)
        self._identity, self._part_of_block = identity, part
        self._room: NDArray[Any] | None = None
        self._adopted = False
        self._format = kept_format(request, stage, identity)
        self._sparse = request.select is not None and request.select.container == "sparse"
        self._dtype = dtype_of(request.value_format(stage, identity.dtype)) if self._sparse else None
        self._entries: list[Entries] = []
        self._tensors: list[Any] = []
        raw = stage == "raw"
        # Without a block nothing is known of an extra's size; with one, its array replaces these.
        self._parts: dict[str, dict[Any, NDArray[Any]]] = {
            "summary": {name: np.empty(0, SUMMARY_DTYPES[name]) for name in request.summary},
            "hidden_states": {k: np.empty((0, 0), np.float32) for k in request.hidden_states if raw},
            "attentions": {k: np.empty((0, 0, 0), np.float32) for k in request.attentions if raw},
        }

    def room(self) -> NDArray[Any]:
        """Where all the values go; untouched pages of it cost nothing."""
        if self._room is None:
            self._room = self._own_room()
        return self._room

    def _own_room(self) -> NDArray[Any]:
        if self._part_of_block is not None:
            return self._part_of_block()
        assert self._format is not None
        return tensors.empty((self.capacity, self._format.width), self._format.dtype)

    def add(self, block: RowBlock) -> None:
        where = f"request {block.index}, {block.stage}"
        self._check_order(block, where)
        self._check_parts(block, where)
        rows = slice(self.count, self.count + len(block))
        if block.entries is not None:
            self._put_entries(block.entries, rows, where)
        elif self._format is not None:
            self._put_values(block.values, rows, where, block.room)
        for field in ("summary", "hidden_states"):
            for name, array in getattr(block, field).items():
                self._part(field, name, array, array.shape[1:], rows)[rows] = array
        for layer, array in block.attentions.items():
            self._put_attention(layer, array, rows)
        self.positions[rows] = block.positions
        self.count = rows.stop

    def values(self) -> Any:
        """The values of all rows: a view of the room, one tensor, or entries."""
        if self._sparse:
            assert self.request.select is not None
            return Entries.joined(self._entries, self._dtype, counted=self.request.select.sample is not None)
        if self._format is None:
            return None
        if not self.request.keep_on_device:
            return self.room()[: self.count]
        torch = tensors.require("torch")
        if not self._tensors:
            shape, dtype = (0, self._format.width), getattr(torch, self._format.dtype.name)
            return torch.empty(shape, dtype=dtype, device=self._identity.device)
        return self._tensors[0] if len(self._tensors) == 1 else torch.cat(self._tensors)

    def parts(self, field: str) -> dict[Any, NDArray[Any]]:
        """Summaries, hidden states or attention weights of all rows, by name or layer."""
        return {name: array[: self.count] for name, array in self._parts[field].items()}

    def check(self, wanted: NDArray[np.int64], stated: int, where: str) -> None:
        """Whether the rows are the wanted ones, as many as the end states."""
        seen = self.positions[: self.count]
        missing, extra = np.setdiff1d(wanted, seen), np.setdiff1d(seen, wanted)
        if missing.size or extra.size:
            raise IncompleteError(
                "rows are missing" if missing.size else "rows that were not asked for",
                where=where,
                expected=f"{len(wanted)} rows",
                got=f"{self.count}; "
                + "; ".join(
                    f"{name} positions {_listed(found.tolist())}"
                    for name, found in (("without", missing), ("with", extra))
                    if found.size
                ),
            )
        if stated != self.count:
            raise IncompleteError(
                "the end states another number of rows", where=where, expected=stated, got=self.count
            )

    def _check_order(self, block: RowBlock, where: str) -> None:
        before = self.positions[self.count - 1 : self.count] if self.count else np.array([-1], np.int64)
        steps = np.diff(np.concatenate([before, block.positions]))
        if (steps <= 0).any():
            raise IncompleteError(
                "rows repeated or out of order",
                where=where,
                expected=f"positions ascending after {before[0]}",
                got=_listed(block.positions.tolist()),
            )
        if self.count + len(block) > self.capacity:
            raise IncompleteError(
                "more rows than the request has",
                where=where,
                expected=f"at most {self.capacity}",
                got=self.count + len(block),
            )

    def _check_parts(self, block: RowBlock, where: str) -> None:
        wanted: dict[str, set[Any]] = {
            "values": set() if self._format is None else {"values"},
            "entries": {"entries"} if self._sparse else set(),
        }
        wanted |= {field: set(parts) for field, parts in self._parts.items()}
        given: dict[str, set[Any]] = {
            "values": set() if block.values is None else {"values"},
            "entries": set() if block.entries is None else {"entries"},
            "summary": set(block.summary),
            "hidden_states": set(block.hidden_states),
            "attentions": set(block.attentions),
        }
        for field, names in wanted.items():
            if given[field] != names:
                raise IncompleteError(
                    f"{field} of a block are not those that were asked for",
                    where=f"{where}, rows {block.positions[0]} … {block.positions[-1]}",
                    expected=sorted(names),
                    got=sorted(given[field]),
                )

    def _put_entries(self, entries: Entries, rows: slice, where: str) -> None:
        arrays = entries.arrays()
        dtypes = {name: str(array.dtype) for name, array in arrays.items()}
        stated = {"lengths": "int32", "ids": "int32", "values": str(self._dtype)}
        assert self.request.select is not None
        if self.request.select.sample is not None:
            stated["counts"] = "int32"
        total = int(entries.lengths.sum())
        sizes = {name: len(array) for name, array in arrays.items()}
        right = {name: rows.stop - rows.start if name == "lengths" else total for name in stated}
        if dtypes != stated or sizes != right:
            raise EncodingError(
                "entries of another number or dtype",
                where=where,
                expected=f"{right} of {stated}",
                got=f"{sizes} of {dtypes}",
            )
        self._entries.append(entries)

    def _put_values(self, values: Any, rows: slice, where: str, room: NDArray[Any] | None) -> None:
        assert self._format is not None
        shape = (rows.stop - rows.start, self._format.width)
        dtype = str(values.dtype).removeprefix("torch.")
        if tuple(values.shape) != shape or dtype != self._format.dtype.name:
            raise EncodingError(
                "values of another shape or dtype",
                where=where,
                expected=f"{list(shape)} {self._format.dtype.name}",
                got=f"{list(values.shape)} {dtype}",
            )
        if self.request.keep_on_device:
            self._tensors.append(values)
            return
        if self._room is None and room is not None and len(room) <= self.capacity:
            self._room, self._adopted = room, True
        place = self.room()[rows]
        if values.ctypes.data == place.ctypes.data:
            return
        if self._adopted:  # what is beyond the rows that came may not be written to
            before, self._room, self._adopted = self.room(), self._own_room(), False
            self._room[: rows.start] = before[: rows.start]
            place = self._room[rows]
        place[...] = values

    def _put_attention(self, layer: int, array: NDArray[Any], rows: slice) -> None:
        heads, keys = array.shape[1:]
        most = row_count(self.request.prompt_length, self.request.max_new_tokens)
        if keys > most:
            raise EncodingError(
                "attention weights of more keys than tokens", expected=f"at most {most}", got=keys
            )
        self._part("attentions", layer, array, (heads, most), rows)[rows, :, :keys] = array
        self.keys = max(self.keys, keys)

    def _part(
        self, field: str, name: Any, array: NDArray[Any], shape: tuple[int, ...], rows: slice
    ) -> NDArray[Any]:
        """Where an array of these rows goes, ``[capacity, *shape]``."""
        held = self._parts[field]
        if not self.count:
            held[name] = np.zeros((self.capacity, *shape), array.dtype)
        place = held[name]
        fits = len(array) == rows.stop - rows.start and place.shape[1:] == shape
        if not fits or array.dtype != place.dtype:
            raise EncodingError(
                "an array of another shape or dtype",
                where=f"{field}[{name!r}]",
                expected=f"{rows.stop - rows.start} × {list(place.shape[1:])} {place.dtype}",
                got=f"{len(array)} × {list(shape)} {array.dtype}",
            )
        return place


def block_logits(
    block: RowBlock,
    request: Request,
    token_ids: Ids,
    *,
    identity: Identity,
    vocabulary: Vocabulary | None = None,
    head: RowHead | None = None,
) -> Logits:
    """The rows of one block as a result of their own, for those who take a stream piece by piece.

    Args:
        block: of the request.
        request: that is answered.
        token_ids: prompt and generated ids so far.
        identity: what makes the rows.
        vocabulary: gives the result its token texts.
        head: rebuilds rows that are kept hidden.

    Raises:
        EncodingError: the block's arrays do not fit its positions and the vocabulary.
    """
    stored = block.values if block.entries is None else block.entries
    try:
        return Logits(
            values=_held(stored, request, block.stage, identity, head),
            positions=block.positions,
            token_ids=token_ids,
            prompt_length=request.prompt_length,
            identity=identity,
            summary=block.summary,
            stage=block.stage,
            encoding=request.encode,
            hidden_states=block.hidden_states,
            attentions=block.attentions,
            vocabulary=vocabulary,
        )
    except InputError as error:
        raise EncodingError(
            "a block that does not fit its request", where=f"request {block.index}", got=str(error)
        ) from error


def _held(stored: Any, request: Request, stage: Stage, identity: Identity, head: RowHead | None) -> Any:
    """Values or entries, as a result holds them."""
    if request.select is not None and request.select.cut:
        return cut_rows(request.select, stored, identity.vocab_size)
    if stored is None or request.keep_on_device:
        return stored
    return encoding(request.value_format(stage, identity.dtype)).held(stored, identity, head)


def row_blocks(result: Logits, index: int, buffer: Buffer | None = None) -> Iterator[RowBlock]:
    """The rows of a result as blocks again.

    Args:
        result: complete.
        index: its place in the stream.
        buffer: where values are to be written; views of the result without it.
    """
    values = result.values
    stored = values.stored if isinstance(values, EncodedRows) else values
    for first in range(0, len(result), _BLOCK_ROWS):
        rows = slice(first, min(first + _BLOCK_ROWS, len(result)))
        kept = None if stored is None else stored[rows]
        block = RowBlock(
            index,
            result.positions[rows],
            None if isinstance(kept, SparseRows) else kept.values if isinstance(kept, ColumnRows) else kept,
            {name: array[rows] for name, array in result.summary.items()},
            stage=result.stage,
            entries=kept.entries() if isinstance(kept, SparseRows) else None,
        )
        if block.values is not None and buffer is not None:
            place = buffer(index, result.stage, first, len(block))
            place[...] = block.values
            block.values = place
        yield block


def even(requests: Sequence[Request], identity: Identity) -> bool:
    """Whether the host rows of a scoring batch fill one block ``[batch, rows, vocab_size]``."""
    dense = all(
        r.select is not None and r.select.container == "dense" and not (r.keep_on_device or r.max_new_tokens)
        for r in requests
    )
    kinds = {(r.max_rows, kept_format(r, "raw", identity)) for r in requests if dense}
    return dense and len(requests) > 1 and len(kinds) == 1


def _wanted(request: Request, new_tokens: int) -> NDArray[np.int64]:
    if request.select is None:
        return np.empty(0, np.int64)
    return request.select.rows(
        prompt_length=request.prompt_length,
        new_tokens=new_tokens,
        ended_early=new_tokens < request.max_new_tokens,
    )


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(str(n) for n in numbers[:8])
    return f"{shown}, … ({len(numbers)})" if len(numbers) > 8 else shown
