"""The HTTP application over an engine: rows as an Arrow stream or as JSON.

Every error is ``{"error": {"type", "what", "where", "expected", "got", "fix"}}`` with a status: 400 for what
cannot be asked, 401 without the key, 413 for what is too large, 429 when the server is busy, 503 when it
ends, and 500 for rows that could not be given.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import io
import json
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import numpy as np
from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

import logitscope
from logitscope.engines.results import Generation
from logitscope.errors import (
    BusyError,
    EngineClosedError,
    InputError,
    LogitscopeError,
    MemoryLimitError,
    OptionError,
    UnsupportedError,
)
from logitscope.logits.collect import Collector
from logitscope.rows import HIDDEN_FORMS, End, Request, Sampling
from logitscope.server.runner import Call, Item, Runner, item_bytes
from logitscope.wire import MEDIA_TYPE, RowWriter, request_from_json, select_from_json, summary_from_json
from logitscope.wire.errors import error_to_json
from logitscope.wire.requests import known
from logitscope.wire.results import logits_to_json

PIECE_BYTES = 1 << 20
_STATUS: tuple[tuple[type[LogitscopeError], int], ...] = (
    (MemoryLimitError, 413),
    (BusyError, 429),
    (EngineClosedError, 503),
    (InputError, 400),
    (UnsupportedError, 400),
)
_KEPT = ("select", "encode", "summary")
_LOGITS_FIELDS = ("text", "input_ids", "messages", *_KEPT, "format")
_GENERATE_FIELDS = ("text", "input_ids", "messages", "sampling_params", "return_logits", "stream")
_SAMPLING_FIELDS = (
    *(field.name for field in dataclasses.fields(Sampling) if field.name != "seed"),
    "max_new_tokens",
    "n",
    "sampling_seed",
)


def make_app(runner: Runner, *, api_key: str | None = None, body_bytes: int = 64 * 2**20) -> FastAPI:
    """The application.

    Args:
        runner: of the engine.
        api_key: that clients must send as a bearer token; None asks for none.
        body_bytes: the largest body that is read.
    """
    service = _Service(runner, body_bytes)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(runner.close)

    app = FastAPI(
        title="logitscope",
        version=logitscope.__version__,
        lifespan=lifespan,
        exception_handlers={HTTPException: _http_error},
    )
    app.add_api_route("/health", _open(service.health), response_model=None)
    for path, handler, method in (
        ("/info", service.info, "GET"),
        ("/rows", service.rows, "POST"),
        ("/logits", service.logits, "POST"),
        ("/generate", service.generate, "POST"),
        ("/tokenize", service.tokenize, "POST"),
        ("/detokenize", service.detokenize, "POST"),
        ("/vocabulary", service.vocabulary, "GET"),
        ("/heads/{name}", service.head, "GET"),
    ):
        app.add_api_route(path, _guarded(handler, api_key), methods=[method], response_model=None)
    return app


Handler = Callable[[HttpRequest], Any]


def _open(handler: Handler) -> Handler:
    async def handle(request: HttpRequest) -> Response:
        try:
            answer: Response = await handler(request)
        except LogitscopeError as error:
            return _refusal(error)
        return answer

    handle.__doc__ = handler.__doc__
    return handle


def _guarded(handler: Handler, api_key: str | None) -> Handler:
    inner = _open(handler)

    async def handle(request: HttpRequest) -> Response:
        given = request.headers.get("authorization", "")
        if api_key is not None and not hmac.compare_digest(given.encode(), f"Bearer {api_key}".encode()):
            error = InputError("no key, or a wrong one", where="Authorization", expected="Bearer KEY")
            return JSONResponse({"error": error_to_json(error)}, 401, {"WWW-Authenticate": "Bearer"})
        answer: Response = await inner(request)
        return answer

    handle.__doc__ = handler.__doc__
    return handle


def _refusal(error: LogitscopeError) -> JSONResponse:
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    return JSONResponse({"error": error_to_json(error)}, status, headers)


async def _http_error(request: HttpRequest, error: Any) -> JSONResponse:
    found = {"type": "InputError", "what": error.detail, "where": request.url.path}
    return JSONResponse({"error": found}, error.status_code, error.headers)


class _Service:
    """What the routes do."""

    def __init__(self, runner: Runner, body_bytes: int) -> None:
        self.runner, self.engine, self.body_bytes = runner, runner.engine, body_bytes
        self._reading = threading.Lock()  # tokenizers change their state while they read a text

    async def health(self, request: HttpRequest) -> Response:
        """Whether it lives, and how much it has to do."""
        runner = self.runner
        return JSONResponse(
            {
                "status": "ok",
                "waiting_sequences": runner.waiting_sequences,
                "buffered_bytes": runner.buffered_bytes,
                "served_sequences": runner.served,
                "refused_calls": runner.refused,
            }
        )

    async def info(self, request: HttpRequest) -> Response:
        """What a client must know of the engine."""
        engine = self.engine
        tokenizer = engine.tokenizer
        return JSONResponse(
            {
                "server": "logitscope",
                "identity": dataclasses.asdict(engine.identity),
                "capabilities": dataclasses.asdict(engine.capabilities),
                "context_length": engine.context_length,
                "head": None if engine.head is None or not engine.capabilities.hidden else engine.head.hash,
                "tokenizer": None
                if tokenizer is None
                else {
                    "size": len(tokenizer),
                    "hash": tokenizer.hash,
                    "eos_token_id": tokenizer.eos_token_id,
                    "special_ids": sorted(tokenizer.special_ids),
                    "has_chats": tokenizer.has_chats,
                },
            }
        )

    async def rows(self, request: HttpRequest) -> Response:
        """Requests of the wire, answered with their blocks and ends."""
        body = known(await self._body(request), ("requests",), "POST /rows")
        given = body.get("requests")
        if not isinstance(given, list):
            raise OptionError("no list of requests", where="requests", got=type(given).__name__)
        return await self._stream([request_from_json(one) for one in given])

    async def logits(self, request: HttpRequest) -> Response:
        """Rows ``0 … L-1`` of prompts."""
        body = known(await self._body(request), _LOGITS_FIELDS, "POST /logits")
        form = body.get("format", "arrow")
        if form not in ("arrow", "json"):
            raise OptionError("unknown format", where="format", expected="arrow or json", got=repr(form))
        inputs, single = _inputs(body)
        kept = _kept({name: body.get(name) for name in _KEPT})
        requests = await self._read(self.engine.requests, inputs, **kept)
        if form == "arrow":
            return await self._stream(requests)
        _check_json(requests)
        found = await self._collected(requests)
        listed = [logits_to_json(one.logits) for one in found]
        return _json({"logits": listed[0] if single else listed})

    async def generate(self, request: HttpRequest) -> Response:
        """Generations in SGLang's form, with their rows where they are asked for."""
        body = known(await self._body(request), _GENERATE_FIELDS, "POST /generate")
        if body.get("stream"):
            raise UnsupportedError("no streams of generations in this version", where="stream")
        inputs, single = _inputs(body)
        sampling, new_tokens, samples = _sampling(body.get("sampling_params") or {})
        asked = body.get("return_logits")
        kept = _kept({} if asked is None or isinstance(asked, bool) else known(asked, _KEPT, "return_logits"))
        requests = await self._read(
            self.engine.requests, inputs, max_new_tokens=new_tokens, sampling=sampling, n=samples, **kept
        )
        if not asked:
            requests = [dataclasses.replace(one, select=None, summary=()) for one in requests]
        _check_json(requests)
        found = await self._collected(requests)
        answers = [_answer(Generation.of(r, one)) for r, one in zip(requests, found, strict=True)]
        return _json(answers[0] if single and samples == 1 else answers)

    async def tokenize(self, request: HttpRequest) -> Response:
        """Ids of texts or of a chat."""
        fields = ("text", "messages", "generate", "special")
        body = known(await self._body(request), fields, "POST /tokenize")
        tokenizer = self._tokenizer()
        if "messages" in body:
            chat, generate = body["messages"], bool(body.get("generate"))
            if not isinstance(chat, list) or not all(isinstance(one, Mapping) for one in chat) or not chat:
                raise InputError("no chat", where="messages", expected="a list of messages")
            ids = await self._read(tokenizer.encode_chat, chat, generate=generate)
            return JSONResponse({"token_ids": ids.tolist()})
        text = body.get("text")
        if not isinstance(text, str):
            raise OptionError("no text", where="text", expected="a string", got=type(text).__name__)
        special = body.get("special", True)
        ids = await self._read(tokenizer.encode if special else tokenizer.text_ids, text)
        return JSONResponse({"token_ids": [int(i) for i in ids]})

    async def detokenize(self, request: HttpRequest) -> Response:
        """Text of ids."""
        body = known(await self._body(request), ("token_ids", "special"), "POST /detokenize")
        ids = body.get("token_ids")
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise OptionError("no list of ids", where="token_ids", got=repr(ids)[:80])
        return JSONResponse({"text": self._tokenizer().decode(ids, special=bool(body.get("special")))})

    async def vocabulary(self, request: HttpRequest) -> Response:
        """Text of every id by itself."""
        tokenizer = self._tokenizer()
        pieces = await run_in_threadpool(tokenizer.pieces, range(self.engine.vocab_size))
        return _json({"pieces": pieces})

    async def head(self, request: HttpRequest) -> Response:
        """The head that hidden rows are rebuilt with, as a safetensors file."""
        head = self.engine.head
        name = request.path_params["name"]
        if head is None or not self.engine.capabilities.hidden or head.hash != name:
            raise HTTPException(404, "no such head")
        return Response(await run_in_threadpool(head_file, head), media_type="application/octet-stream")

    # -- inside ----------------------------------------------------------------------------------------

    async def _read(self, read: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call what reads texts, one at a time and beside the event loop."""

        def locked() -> Any:
            with self._reading:
                return read(*arguments, **options)

        return await run_in_threadpool(locked)

    def _tokenizer(self) -> Any:
        if self.engine.tokenizer is None:
            raise UnsupportedError("the model came without a tokenizer", where="tokenizer")
        return self.engine.tokenizer

    async def _body(self, request: HttpRequest) -> Any:
        chunks, size = [], 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > self.body_bytes:
                raise MemoryLimitError(
                    "a larger body than the server reads",
                    needed_bytes=size,
                    limit_bytes=self.body_bytes,
                    fix="Ask in several calls.",
                )
            chunks.append(chunk)
        try:
            return json.loads(b"".join(chunks))
        except (ValueError, RecursionError) as error:
            raise InputError("no JSON", where=request.url.path, got=str(error)[:200]) from error

    def _submitted(self, requests: Sequence[Request]) -> tuple[Call, asyncio.Queue[Item]]:
        queue: asyncio.Queue[Item] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def give(item: Item) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(queue.put_nowait, item)

        return self.runner.submit(requests, give), queue

    async def _items(self, call: Call, queue: asyncio.Queue[Item]) -> AsyncIterator[Any]:
        ends = 0
        try:
            while ends < len(call.requests):
                item = await queue.get()
                if isinstance(item, LogitscopeError):
                    raise item
                yield item
                self.runner.taken(call, item_bytes(item))
                ends += isinstance(item, End)
        finally:
            self.runner.leave(call)

    async def _collected(self, requests: Sequence[Request]) -> Any:
        call, queue = self._submitted(requests)
        collector = Collector(
            call.requests,
            identity=self.engine.identity,
            vocabulary=self.engine.tokenizer,
            head=self.engine.head,
        )
        async for item in self._items(call, queue):
            if isinstance(item, End):
                collector.finish(item)
            else:
                collector.add(item)
        return collector.results()

    async def _stream(self, requests: Sequence[Request]) -> Response:
        call, queue = self._submitted(requests)
        return _RowsResponse(self._pieces(call, queue), media_type=MEDIA_TYPE)

    async def _pieces(self, call: Call, queue: asyncio.Queue[Item]) -> AsyncIterator[memoryview]:
        sink = _Pieces()
        writer = RowWriter(sink, self.engine.identity, call.requests)  # type: ignore[arg-type]
        try:
            async for item in self._items(call, queue):
                writer.write(item)
                for piece in sink.taken():
                    yield piece
            writer.close()
        except LogitscopeError as error:
            writer.fail(error)
        for piece in sink.taken():
            yield piece


class _RowsResponse(StreamingResponse):
    """Closes its rows when the client goes away."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            closing: Any = self.body_iterator
            await closing.aclose()


class _Pieces(io.RawIOBase):
    """What is written into it, to be taken in pieces of at most `PIECE_BYTES`."""

    def __init__(self) -> None:
        self._held: list[memoryview] = []

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, data: Any) -> int:
        """Keep a view of what is large, and a copy of what is small."""
        view = memoryview(data).cast("B")
        self._held.append(view if len(view) >= PIECE_BYTES else memoryview(bytes(view)))
        return len(view)

    def taken(self) -> list[memoryview]:
        """Everything since the last time; small parts together."""
        pieces: list[memoryview] = []
        small = bytearray()
        for view in self._held:
            if len(view) < PIECE_BYTES // 4:
                small += view
                continue
            if small:
                pieces.append(memoryview(bytes(small)))
                small = bytearray()
            pieces += [view[a : a + PIECE_BYTES] for a in range(0, len(view), PIECE_BYTES)]
        if small:
            pieces.append(memoryview(bytes(small)))
        self._held.clear()
        return pieces


def head_file(head: Any) -> bytes:
    """A head as the bytes of a safetensors file, its facts in the metadata."""
    from safetensors.numpy import save

    from logitscope import tensors

    arrays = {
        name: array.view(np.uint16) if array.dtype == tensors.BFLOAT16 else np.ascontiguousarray(array)
        for name, array in head.arrays().items()
    }
    dtypes = {name: array.dtype.name for name, array in head.arrays().items()}
    facts = {"facts": json.dumps(head.facts()), "dtypes": json.dumps(dtypes), "hash": head.hash}
    return bytes(save(arrays, metadata=facts))


def _inputs(body: Mapping[str, Any]) -> tuple[Any, bool]:
    """The prompts of a call, and whether it is one that is no list."""
    given = [name for name in ("text", "input_ids", "messages") if body.get(name) is not None]
    if len(given) != 1:
        raise OptionError(
            "one kind of prompts",
            where="body",
            expected="one of text, input_ids, messages",
            got=" and ".join(given) or "none",
        )
    inputs = body[given[0]]
    if given[0] == "text":
        if not isinstance(inputs, str | list):
            raise InputError("no text", where="text", expected="a string or a list", got=repr(inputs)[:80])
        return inputs, isinstance(inputs, str)
    if not isinstance(inputs, list):
        raise InputError("no list", where=given[0], expected="a list", got=repr(inputs)[:80])
    return inputs, not inputs or not isinstance(inputs[0], list)


def _kept(given: Mapping[str, Any]) -> dict[str, Any]:
    select, encode = given.get("select"), given.get("encode")
    if encode is not None and not isinstance(encode, str):
        raise OptionError("no name of an encoding", where="encode", got=repr(encode)[:80])
    return {
        "select": None if select is None else select_from_json(select),
        "encode": encode,
        "summary": summary_from_json(given.get("summary")),
    }


def _sampling(given: Any) -> tuple[Sampling, int, int]:
    """How tokens are chosen, how many, and how many samples there are."""
    fields = dict(known(given, _SAMPLING_FIELDS, "sampling_params"))
    new_tokens, samples = fields.pop("max_new_tokens", 128), fields.pop("n", 1)
    for name, value in (("max_new_tokens", new_tokens), ("n", samples)):
        if type(value) is not int:
            raise OptionError("no int", where=name, got=repr(value)[:80])
    if "sampling_seed" in fields:
        fields["seed"] = fields.pop("sampling_seed")
    if "logit_bias" in fields:
        fields["logit_bias"] = {int(i): float(b) for i, b in dict(fields["logit_bias"]).items()}
    if fields.get("top_k") == -1:  # SGLang's word for all
        fields["top_k"] = 0
    try:
        return Sampling(**fields), new_tokens, samples
    except TypeError as error:
        raise OptionError("a value of another type", where="sampling_params", got=str(error)) from error


def _check_json(requests: Sequence[Request]) -> None:
    if any(request.encode in HIDDEN_FORMS and request.select is not None for request in requests):
        raise UnsupportedError(
            "hidden rows are not given as JSON", where="encode", fix="Ask for the Arrow stream."
        )


def _answer(generation: Generation) -> dict[str, Any]:
    rows = {} if generation.logits is None else {"logits": logits_to_json(generation.logits)}
    return {
        "text": generation.text,
        "output_ids": generation.token_ids.tolist(),
        "meta_info": {
            "finish_reason": {"type": generation.finish_reason, "matched": generation.stop},
            "prompt_tokens": len(generation.prompt_token_ids),
            "completion_tokens": len(generation.token_ids),
            "seed": generation.seed,
            **rows,
        },
    }


def _json(content: Any) -> Response:
    return Response(json.dumps(content, allow_nan=False).encode(), media_type="application/json")
