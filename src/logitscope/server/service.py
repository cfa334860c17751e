"""What every route stands on: bodies are read, requests go to the runner, items and results come back."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from logitscope.errors import InputError, LogitscopeError, MemoryLimitError, OptionError, UnsupportedError
from logitscope.logits.collect import Collected, Collector
from logitscope.rows import End, Request, RowBlock
from logitscope.server.answers import ClosingResponse, Pieces
from logitscope.server.lending import Lender, Lent, wrong_proof
from logitscope.server.runner import Call, Item, Runner, item_bytes
from logitscope.wire import MEDIA_TYPE, RowWriter

BodyType = TypeVar("BodyType", bound=BaseModel)

_LARGE_BODY_BYTES = 1 << 20


class Service:
    """An engine and its runner, for the routes.

    Args:
        runner: of the engine.
        body_bytes: the largest body that is read.

    Attributes:
        lender: of shared memory, while the server runs; None where there is none.
    """

    def __init__(self, runner: Runner, body_bytes: int) -> None:
        self.runner, self.engine, self.body_bytes = runner, runner.engine, body_bytes
        self.lender: Lender | None = None
        self._reading = threading.Lock()  # tokenizers change their state while they read a text

    @property
    def tokenizer(self) -> Any:
        """The engine's tokenizer.

        Raises:
            UnsupportedError: it has none.
        """
        if self.engine.tokenizer is None:
            raise UnsupportedError("the model came without a tokenizer", where="tokenizer")
        return self.engine.tokenizer

    async def body(self, request: HttpRequest, kind: type[BodyType]) -> BodyType:
        """The body of a request, as its model says it.

        Raises:
            InputError: no JSON.
            OptionError: not of that form.
            MemoryLimitError: larger than what is read.
        """
        data = await self._bytes(request)
        if len(data) < _LARGE_BODY_BYTES:
            return _parsed(data, kind, request.url.path)
        return await run_in_threadpool(_parsed, data, kind, request.url.path)

    async def read(self, read: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call what reads texts, one at a time and beside the event loop."""

        def locked() -> Any:
            with self._reading:
                return read(*arguments, **options)

        return await run_in_threadpool(locked)

    def submitted(
        self, requests: Sequence[Request], lent: Lent | None = None
    ) -> tuple[Call, asyncio.Queue[Item]]:
        """Requests in the runner's hands, and where their items will come.

        Raises:
            BusyError, MemoryLimitError, EngineClosedError: they are not taken on.
        """
        queue: asyncio.Queue[Item] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def give(item: Item) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(queue.put_nowait, item)

        return self.runner.submit(requests, give, lent), queue

    async def items(self, call: Call, queue: asyncio.Queue[Item]) -> AsyncGenerator[RowBlock | End, None]:
        """Blocks and ends of submitted requests, until all have ended; closing it aborts."""
        ends = 0
        try:
            while ends < len(call.requests):
                item = await queue.get()
                if isinstance(item, LogitscopeError):
                    raise item
                size = item_bytes(item)
                if isinstance(item, RowBlock) and call.lent is not None and call.lent.holds(item):
                    size -= item.values.nbytes  # which its reader takes from where they lie
                yield item
                self.runner.taken(call, size)
                ends += isinstance(item, End)
        finally:
            self.runner.leave(call)

    async def collected(self, http: HttpRequest, requests: Sequence[Request]) -> list[Collected]:
        """Complete results of requests; a client that goes away aborts them."""
        collector = self.collector(requests)
        async with contextlib.aclosing(self.attended(http, requests)) as items:
            async for item in items:
                if isinstance(item, End):
                    collector.finish(item)
                else:
                    collector.add(item)
        return collector.results()

    async def attended(
        self, http: HttpRequest, requests: Sequence[Request]
    ) -> AsyncGenerator[RowBlock | End, None]:
        """Blocks and ends of requests whose answer comes at once; a client that goes away aborts them."""
        call, queue = self.submitted(requests)
        leaving = asyncio.create_task(self._leave_with(http, call, queue))
        try:
            async with contextlib.aclosing(self.items(call, queue)) as items:
                async for item in items:
                    yield item
        finally:
            leaving.cancel()

    def collector(self, requests: Sequence[Request]) -> Collector:
        """Where the items of requests become results."""
        engine = self.engine
        return Collector(requests, identity=engine.identity, vocabulary=engine.tokenizer, head=engine.head)

    def stream(self, requests: Sequence[Request], *, proof: str | None = None) -> Response:
        """Every block and end of requests, as an Arrow stream.

        Args:
            requests: to answer.
            proof: that the client is on this host: large values then go through shared memory.

        Raises:
            InputError: it is none.
            BusyError, MemoryLimitError, EngineClosedError: the requests are not taken on.
        """
        lent = None if proof is None else self._lent(requests, proof)
        call, queue = self.submitted(requests, lent)
        return self.closing(call, self._pieces(call, queue), MEDIA_TYPE)

    def closing(self, call: Call, content: AsyncIterator[Any], media_type: str) -> Response:
        """An answer that comes as a stream; a client that goes away aborts the call."""
        return ClosingResponse(content, media_type=media_type, closed=functools.partial(self._left, call))

    async def _leave_with(self, http: HttpRequest, call: Call, queue: asyncio.Queue[Item]) -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        self.runner.leave(call)
        queue.put_nowait(InputError("the client went away", where=http.url.path))

    def _lent(self, requests: Sequence[Request], proof: str) -> Lent:
        if self.lender is None:
            raise wrong_proof()
        self.lender.check(proof)
        return self.lender.lent(requests, self.engine.identity)

    def _left(self, call: Call) -> None:
        """Nobody waits for a call any more."""
        self.runner.leave(call)
        if call.lent is not None:
            call.lent.leave()

    async def _pieces(self, call: Call, queue: asyncio.Queue[Item]) -> AsyncIterator[memoryview]:
        sink: Any = Pieces()
        loan = None if call.lent is None else call.lent.loan
        writer = RowWriter(sink, self.engine.identity, call.requests, loan=loan)
        try:
            async with contextlib.aclosing(self.items(call, queue)) as items:
                async for item in items:
                    writer.write(item)
                    for piece in sink.taken():
                        yield piece
            writer.close()
        except LogitscopeError as error:
            writer.fail(error)
        for piece in sink.taken():
            yield piece
        wait_s = 0.0005
        while call.lent is not None and call.lent.waiting:  # the client has not come to its tickets yet
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, 0.02)

    async def _bytes(self, request: HttpRequest) -> bytes:
        stated = request.headers.get("content-length", "")
        size = int(stated) if stated.isdecimal() else 0
        chunks: list[bytes] = []
        if size <= self.body_bytes:
            size = 0
            try:
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > self.body_bytes:
                        break
                    chunks.append(chunk)
            except ClientDisconnect as error:
                raise InputError("the client went away", where=request.url.path) from error
        if size > self.body_bytes:
            raise MemoryLimitError(
                "a larger body than the server reads",
                needed_bytes=size,
                limit_bytes=self.body_bytes,
                fix="Ask in several calls.",
            )
        return b"".join(chunks)


def _parsed(data: bytes, kind: type[BodyType], path: str) -> BodyType:
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise _named(error, kind, path) from error


def _named(error: ValidationError, kind: type[BaseModel], path: str) -> LogitscopeError:
    """The first of a model's complaints as an error of ours."""
    found = error.errors(include_url=False)
    first = found[0]
    if first["type"] == "json_invalid":
        return InputError("no JSON", where=path, got=first["msg"])
    if not first["loc"]:
        return OptionError("no object", where=path, expected=f"an object with {', '.join(kind.model_fields)}")
    where = _field(first["loc"], kind)
    if first["type"] == "extra_forbidden":
        return OptionError(
            "unknown name",
            where=where,
            expected=f"an object with {', '.join(kind.model_fields)}",
            got=repr(str(first["loc"][-1])),
        )
    expected = dict.fromkeys(one["msg"] for one in found if _field(one["loc"], kind) == where)
    return OptionError(
        "missing" if first["type"] == "missing" else "a value of another type",
        where=where,
        expected="; or ".join(expected),
        got=None if first["type"] == "missing" else repr(first["input"])[:80],
    )


def _field(location: Sequence[str | int], kind: type[BaseModel]) -> str:
    """Where in a body: names of fields and places in lists, without the names of alternatives."""
    name = str(location[0])
    field = kind.model_fields.get(name)
    inner = None if field is None else field.annotation
    if len(location) > 1 and isinstance(inner, type) and issubclass(inner, BaseModel):
        return f"{name}.{_field(location[1:], inner)}"
    return name
