"""The thread that runs the engine for many clients: short requests share forwards, long ones take turns.

What is small runs together in one stream, and is buffered for its client; a generation that arrives later
joins the one that runs, between two steps. What is large has a stream of its own, which waits while its
client does not read. Streams take turns block by block and step by step, and short texts come first, so that
a long generation does not keep them waiting.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from logitscope.encodings import kept_format
from logitscope.engines.base import Engine
from logitscope.engines.memory import human
from logitscope.errors import (
    BusyError,
    EngineClosedError,
    IncompleteError,
    LogitscopeError,
    MemoryLimitError,
)
from logitscope.rows import End, Request, RowBlock, Stage, Stream
from logitscope.server.lending import Lent

_SLICE_S = 0.05
_LOOK_S = 0.005
_JOINING_TOKENS = 512

Item: TypeAlias = "RowBlock | End | LogitscopeError"


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the server takes on.

    Attributes:
        waiting_sequences: that may wait for their turn; more are refused.
        shared_bytes: of a call's rows, up to which it runs together with others and is buffered whole.
        buffered_bytes: of rows of all clients that may be buffered; more calls are refused meanwhile.
        ahead_bytes: that a larger call may run ahead of its client.
        call_sequences: of one call.
        call_tokens: of one call, prompts and new ones.
        lent_bytes: of a sequence's rows, from which they go through shared memory to a client on this host.
        segments_bytes: that all shared memory together may have; None is half of what is free at the start.
    """

    waiting_sequences: int = 4096
    shared_bytes: int = 32 * 2**20
    buffered_bytes: int = 1 << 30
    ahead_bytes: int = 32 * 2**20
    call_sequences: int = 1024
    call_tokens: int = 4 * 2**20
    lent_bytes: int = 1 << 20
    segments_bytes: int | None = None


class Call:
    """Sequences that one client asked for together.

    Args:
        requests: checked by the engine.
        size_bytes: of all their rows, as estimated.
        give: is called in the runner's thread with each block, end and error.
        lent: shared memory that rows are written to; None for a client that reads them from the stream.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        size_bytes: int,
        give: Callable[[Item], None],
        lent: Lent | None = None,
    ) -> None:
        self.requests, self.size_bytes, self.give, self.lent = list(requests), size_bytes, give, lent
        self.given_bytes = self.taken_bytes = 0
        self.ended = 0
        self.gone = False

    @property
    def waiting_bytes(self) -> int:
        """Given and not taken yet."""
        taken = self.taken_bytes + (0 if self.lent is None else self.lent.taken_bytes)
        return self.given_bytes - taken

    @property
    def done(self) -> bool:
        """Whether there will be nothing more."""
        return self.gone or self.ended == len(self.requests)


class _Running:
    """A stream of the engine and the calls that it serves."""

    def __init__(self, engine: Engine, calls: Sequence[Call], *, shared: bool) -> None:
        self.calls, self.shared, self.identity = list(calls), shared, engine.identity
        self.places = [(call, i) for call in calls for i in range(len(call.requests))]
        self.joining: collections.deque[Call] = collections.deque()
        self.open = shared and engine.joins and bool(calls[0].requests[0].max_new_tokens)
        # Rows of a generation that others join are few a step, and sequences may end without a word.
        self.lends = not self.open and any(call.lent is not None for call in calls)
        self.stream: Stream = engine.stream(
            [call.requests[i] for call, i in self.places],
            buffer=self._room if self.lends else None,
            joining=self if self.open else None,
        )

    def arrivals(self, room: int) -> list[Request]:
        """Requests of calls that wait to join, as many as there is room for."""
        arrived: list[Request] = []
        while self.joining and len(arrived) + len(self.joining[0].requests) <= room:
            call = self.joining.popleft()
            if not call.gone:
                self.calls.append(call)
                self.places += [(call, i) for i in range(len(call.requests))]
                arrived += call.requests
        return arrived

    def wanted(self, index: int) -> bool:
        """Whether the client of a sequence is still there."""
        return not self.places[index][0].gone

    def blocked(self, ahead_bytes: int) -> bool:
        """Whether its client must read first."""
        return not self.shared and self.calls[0].waiting_bytes > ahead_bytes

    @property
    def short(self) -> bool:
        """Whether it only scores, for clients who share it: done in a few steps."""
        return self.shared and not self.calls[0].requests[0].max_new_tokens

    @property
    def needed(self) -> bool:
        """Whether somebody still waits for it."""
        return any(not call.done for call in (*self.calls, *self.joining))

    def _room(self, index: int, stage: Stage, first: int, rows: int) -> NDArray[Any]:
        """Where the engine writes values: into shared memory, or else into an array of their own."""
        call, i = self.places[index]
        found = None if call.lent is None else call.lent.room(i, stage, first, rows)
        if found is None:
            row = kept_format(call.requests[i], stage, self.identity)
            assert row is not None
            return np.empty((rows, row.width), row.dtype)
        return found

    def request(self, item: RowBlock | End) -> Request:
        """Which one an item belongs to."""
        call, index = self.places[item.index]
        return call.requests[index]

    def step(self) -> RowBlock | End | None:
        """Hand on the next block or end; None when there is none."""
        item = next(self.stream, None)
        if item is None:
            return None
        call, index = self.places[item.index]
        if isinstance(item, End) and call.lent is not None:
            call.lent.written(index)
        if not call.gone:
            call.given_bytes += item_bytes(item)
            call.ended += isinstance(item, End)
            call.give(dataclasses.replace(item, index=index))
        return item

    def finish(self) -> list[Call]:
        """The stream has ended: who is not done gets nothing more; who waited to join may be run now."""
        self.stop_writing()
        for call in self.calls:
            if not call.done:
                call.ended = len(call.requests)
                call.give(IncompleteError("the engine's stream ended before the request did", where="serve"))
        return [call for call in self.joining if not call.gone]

    def fail(self, error: LogitscopeError) -> list[Call]:
        """Give the error to those who have rows already, or are alone; the others may be run again."""
        self.stop_writing()
        again = [call for call in self.joining if not call.gone]
        for call in self.calls:
            if call.done:
                continue
            if len(self.calls) > 1 and not call.given_bytes and not call.ended:
                if call.lent is not None:
                    call.lent.reset()
                again.append(call)
                continue
            call.ended = len(call.requests)
            call.give(error)
        return again

    def close(self) -> None:
        """Abort the stream."""
        self.stream.close()  # type: ignore[attr-defined]
        self.stop_writing()

    def stop_writing(self) -> None:
        """The engine writes to no shared memory any more."""
        for call in self.calls:
            if call.lent is not None:
                call.lent.written()


class Runner:
    """Runs an engine in a thread of its own.

    Args:
        engine: that nobody else uses meanwhile.
        limits: what is taken on.
    """

    def __init__(self, engine: Engine, limits: Limits | None = None) -> None:
        self.engine, self.limits = engine, limits or Limits()
        self.refused = self.served = self.prompt_tokens = self.generated_tokens = 0
        self._waiting: collections.deque[Call] = collections.deque()
        self._alone: collections.deque[Call] = collections.deque()
        self._running: list[_Running] = []
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="logitscope-runner", daemon=True)
        self._thread.start()

    # -- for clients' threads --------------------------------------------------------------------------

    def submit(
        self, requests: Sequence[Request], give: Callable[[Item], None], lent: Lent | None = None
    ) -> Call:
        """Queue sequences.

        Raises:
            BusyError: too many wait, or too many rows are buffered.
            MemoryLimitError: more sequences than a call may have.
            EngineClosedError: the server ends.
        """
        size = self.engine.estimate(requests).result_bytes
        call = Call(requests, size, give, lent)
        with self._changed:
            self._check(call)
            self._waiting.append(call)
            self._changed.notify()
        return call

    def taken(self, call: Call, size_bytes: int) -> None:
        """The client took so many bytes of its rows."""
        with self._changed:
            call.taken_bytes += size_bytes
            self._changed.notify()

    def leave(self, call: Call) -> None:
        """The client is gone, or has all that it wants."""
        with self._changed:
            call.gone = True
            self._changed.notify()

    def close(self) -> None:
        """Finish what runs, refuse what waits, and let go of the engine."""
        with self._changed:
            self._closing = True
            refused = [*self._waiting, *self._alone]
            self._waiting.clear()
            self._alone.clear()
            self._changed.notify()
        for call in refused:
            call.ended = len(call.requests)
            call.give(EngineClosedError("the server ends", where="serve", fix="Ask again later."))
        self._thread.join()
        self.engine.close()

    @property
    def waiting_sequences(self) -> int:
        """That wait for their turn."""
        with self._changed:
            return self._waiting_sequences()

    @property
    def running_sequences(self) -> int:
        """That the engine works on."""
        with self._changed:
            calls = [call for running in self._running for call in running.calls if not call.done]
            return sum(len(call.requests) - call.ended for call in calls)

    @property
    def buffered_bytes(self) -> int:
        """Rows that were given and not taken yet."""
        with self._changed:
            return self._buffered()

    def _waiting_sequences(self) -> int:
        return sum(len(call.requests) for call in self._queued() if not call.gone)

    def _queued(self) -> list[Call]:
        """Calls that have not begun."""
        joining = [call for running in self._running for call in tuple(running.joining)]
        return [*self._waiting, *self._alone, *joining]

    def _buffered(self) -> int:
        calls = [call for running in self._running for call in running.calls]
        reserved = [call for call in self._queued() if call.size_bytes <= self.limits.shared_bytes]
        return sum(call.waiting_bytes for call in calls if not call.gone) + sum(
            c.size_bytes for c in reserved
        )

    def _check(self, call: Call) -> None:
        limits, count = self.limits, len(call.requests)
        if self._closing:
            raise EngineClosedError("the server ends", where="serve", fix="Ask again later.")
        tokens = sum(request.prompt_length + request.max_new_tokens for request in call.requests)
        for name, found, most in (
            ("sequences", count, limits.call_sequences),
            ("tokens", tokens, limits.call_tokens),
        ):
            if found > most:
                self.refused += 1
                raise MemoryLimitError(
                    f"more {name} in one call than the server takes ({found:,}, limit {most:,})",
                    needed_bytes=call.size_bytes,
                    limit_bytes=limits.buffered_bytes,
                    fix="Ask for fewer at once.",
                )
        waiting, buffered = self._waiting_sequences(), self._buffered()
        if waiting and waiting + count > limits.waiting_sequences:
            self.refused += 1
            raise BusyError(
                "too many sequences wait",
                where="serve",
                expected=f"at most {limits.waiting_sequences}",
                got=waiting + count,
                fix="Ask again in a second.",
            )
        shared = call.size_bytes <= limits.shared_bytes
        if shared and buffered and buffered + call.size_bytes > limits.buffered_bytes:
            self.refused += 1
            raise BusyError(
                "too many rows are buffered for clients that do not read",
                where="serve",
                expected=f"at most {human(limits.buffered_bytes)}",
                got=human(buffered + call.size_bytes),
                fix="Ask again in a second.",
            )

    # -- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._turn():
            for running in list(self._running):
                self._advance(running)

    def _turn(self) -> bool:
        """Wait for something to do and begin new streams; False when the runner ends."""
        with self._changed:
            while True:
                self._drop_unwanted()
                ready = [r for r in self._running if not r.blocked(self.limits.ahead_bytes)]
                if ready or self._waiting or self._alone:
                    break
                if self._closing and not self._running:
                    return False
                # What a client takes from shared memory, nobody tells us.
                self._changed.wait(_LOOK_S if any(r.lends for r in self._running) else None)
            shared = [call for call in self._waiting if not call.gone and self._shares(call)]
            alone = [
                call for call in (*self._alone, *self._waiting) if not call.gone and not self._shares(call)
            ]
            alone += [call for call in self._alone if not call.gone and self._shares(call)]
            self._waiting.clear()
            self._alone.clear()
        scoring = [call for call in shared if not call.requests[0].max_new_tokens]
        generating = [call for call in shared if call.requests[0].max_new_tokens and not self._joins(call)]
        for calls in (scoring, generating):
            if calls:
                self._begin(calls, shared=True)
        for call in alone:
            self._begin([call], shared=self._shares(call))
        return True

    def _joins(self, call: Call) -> bool:
        """Whether a call goes on in a generation that runs already; then it waits there."""
        tokens = sum(request.prompt_length for request in call.requests)
        if tokens > _JOINING_TOKENS or any(request.attentions for request in call.requests):
            return False
        for running in self._running:
            if running.open:
                running.joining.append(call)
                return True
        return False

    def _shares(self, call: Call) -> bool:
        return call.size_bytes <= self.limits.shared_bytes

    def _begin(self, calls: Sequence[Call], *, shared: bool) -> None:
        try:
            running = _Running(self.engine, calls, shared=shared)
        except Exception as error:  # noqa: BLE001 - whatever it is, the server goes on
            for call in calls:
                call.ended = len(call.requests)
                call.give(_named(error))
            return
        with self._changed:
            self._running.append(running)

    def _advance(self, running: _Running) -> None:
        """One step of a stream; of a short one as many as a slice of time has room for."""
        late = time.monotonic() + (_SLICE_S if running.short else 0)
        while not running.blocked(self.limits.ahead_bytes):
            if not self._step(running) or time.monotonic() >= late:
                return

    def _step(self, running: _Running) -> bool:
        """The next item of a stream; whether there may be another."""
        again: list[Call] = []
        going = False
        try:
            item = running.step()
            going = item is not None
            if item is None:
                again = running.finish()
            elif isinstance(item, End):
                self.served += 1
                self.prompt_tokens += running.request(item).prompt_length
            else:
                self.generated_tokens += len(item.token_ids)
        except Exception as error:  # noqa: BLE001 - whatever it is, the server goes on
            again = running.fail(_named(error))
        if not going:
            with self._changed:
                self._running.remove(running)
                self._alone.extend(again)
        return going

    def _drop_unwanted(self) -> None:
        for running in [r for r in self._running if not r.needed]:
            self._running.remove(running)
            running.close()


def _named(error: BaseException) -> LogitscopeError:
    if isinstance(error, LogitscopeError):
        return error
    from logitscope.wire.errors import error_from_json, error_to_json

    return error_from_json(error_to_json(error))


def item_bytes(item: RowBlock | End) -> int:
    """Bytes of the rows that an item brings, and something for the item itself."""
    if isinstance(item, End):
        return 256
    arrays: list[Any] = [*item.summary.values(), *item.hidden_states.values(), *item.attentions.values()]
    arrays += [] if item.values is None else [item.values]
    arrays += [] if item.entries is None else list(item.entries.arrays().values())
    return 256 + sum(int(array.nbytes) for array in arrays)
