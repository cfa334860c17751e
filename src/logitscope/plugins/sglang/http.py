"""SGLang's own HTTP server: ``return_logits`` in its routes, and the route ``POST /logits``.

Source of every name: SGLang 0.5.23.
"""

from __future__ import annotations

import functools
import io
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from logitscope.errors import LogitscopeError, OptionError, UnsupportedError
from logitscope.logits import Logits
from logitscope.plugins.common.options import KEY, read_options
from logitscope.plugins.sglang.frontend import FORM, RESULT, carrying, checked, folded
from logitscope.rows import Select
from logitscope.wire import MEDIA_TYPE, RowWriter
from logitscope.wire.requests import known
from logitscope.wire.results import blocks_of, request_of

_FIELDS = ("text", "input_ids", "select", "encode", "summary", "format")
_FORMATS = ("arrow", "json")


def extend_server(server: Any) -> None:
    """Give SGLang's HTTP module both; once."""
    if isinstance(server.serve_generate_request, functools.partial):
        return
    server.serve_generate_request = functools.partial(generate, server, server.serve_generate_request)

    async def route(request: Any) -> Any:
        return await logits(server, request)

    route.__annotations__ = {"request": server.Request}  # by which FastAPI knows what to give
    server.app.add_api_route("/logits", route, methods=["POST"], response_model=None)


async def generate(server: Any, original: Callable[..., Any], obj: Any, request: Any) -> Any:
    """Around ``serve_generate_request``: with ``return_logits``, ``meta_info.logits`` holds base64 arrays."""
    return_logits = (await request.json()).get("return_logits", _carried(obj.sampling_params))
    if return_logits is None or return_logits is False:
        return await original(obj, request)
    try:
        given = {"prompt": obj.text, "input_ids": obj.input_ids, "sampling_params": obj.sampling_params}
        obj.sampling_params, asked = folded(given, return_logits, form="json")
    except LogitscopeError as error:
        return server._create_error_response(error)
    if obj.stream:
        return await original(obj, request)
    try:
        found = await server._global_state.tokenizer_manager.generate_request(obj, request).__anext__()
    except ValueError as error:
        return server._create_error_response(error)
    try:
        return server.orjson_response(checked(found, asked))
    except LogitscopeError as error:
        return server.orjson_response({"error": {"message": str(error)}}, status_code=500)


def _carried(params: Any) -> Any:
    """What the sampling parameters of ``POST /generate`` ask in ``custom_params``; None when nothing."""
    if isinstance(params, list):
        found = [_carried(one) for one in params]
        return found if any(found) else None
    custom = params.get("custom_params") if isinstance(params, Mapping) else None
    return custom.get(KEY) if isinstance(custom, Mapping) else None


async def openai(original: Callable[..., Any], self: Any, request: Any, raw_request: Any) -> Any:
    """Around ``OpenAIServingBase.handle_request``: completions and chats ask in ``custom_params.logitscope``.

    ``return_logits`` in the body is the same.
    """
    if not hasattr(request, "custom_params"):
        return await original(self, request, raw_request)
    custom = request.custom_params or {}
    try:
        options = read_options(custom[KEY] if KEY in custom else await _body_field(raw_request))
        if options is not None:
            _check_openai(request)
            request.custom_params = carrying(custom, options, "json")
    except LogitscopeError as error:
        return self.create_error_response(str(error))
    return await original(self, request, raw_request)


async def _body_field(raw_request: Any) -> Any:
    """``return_logits`` of a request, which SGLang's models of OpenAI's bodies leave out."""
    return (await raw_request.json()).get("return_logits") if hasattr(raw_request, "json") else None


def _check_openai(request: Any) -> None:
    from logitscope.plugins.sglang.hooks import check

    check()
    if request.stream:
        raise UnsupportedError(
            "no complete logits in a stream of the OpenAI routes",
            where="stream",
            expected="false",
            fix="Streams of POST /generate have them.",
        )


def openai_answer(original: Callable[..., Any], self: Any, request: Any, ret: Any, created: int) -> Any:
    """Around ``_build_completion_response`` and ``_build_chat_response``: ``logits`` in each choice."""
    if FORM not in (request.custom_params or {}):
        return original(self, request, ret, created)
    try:
        checked(ret, [True] * len(ret))
    except LogitscopeError as error:
        return self.create_error_response(str(error), "InternalServerError", 500)
    found = [answer["meta_info"].pop(RESULT) for answer in ret]
    response = original(self, request, ret, created)
    if not hasattr(response, "choices"):  # SGLang's own error
        return response
    from sglang.srt.utils.json_response import orjson_response

    content = response.model_dump(mode="json", by_alias=True)
    for choice, rows in zip(content["choices"], found, strict=True):
        choice[RESULT] = rows
    return orjson_response(content)


async def logits(server: Any, request: Any) -> Any:
    """``POST /logits``: rows ``0 … L-1`` of each prompt.

    The body has ``text`` or ``input_ids`` (one or a list), ``select``, ``encode``, ``summary``, and
    ``format``: ``"arrow"``, a stream that `logitscope.wire.results.read_results` reads, or ``"json"``.
    """
    from sglang.srt.managers.io_struct import GenerateReqInput

    try:
        body = known(await request.json(), _FIELDS, "POST /logits")
        form = body.get("format", "arrow")
        if form not in _FORMATS:
            raise OptionError(
                "unknown format", where="format", expected=" or ".join(_FORMATS), got=repr(form)
            )
        options = {name: body.get(name) for name in ("select", "encode", "summary")}
        given = {
            "prompt": body.get("text"),
            "input_ids": body.get("input_ids"),
            "sampling_params": {"max_new_tokens": 0},
        }
        wanted = read_options(options)
        assert wanted is not None
        assert wanted.select is not None
        params, _ = folded(given, wanted, form=form)
        obj = GenerateReqInput(text=given["prompt"], input_ids=given["input_ids"], sampling_params=params)
        found = await server._global_state.tokenizer_manager.generate_request(obj, request).__anext__()
    except (ValueError, LogitscopeError) as error:  # SGLang's and ours
        # SGLang's tasks for a batch and their error hold each other, and rows that are there already.
        traceback.clear_frames(error.__traceback__)
        return server._create_error_response(error)
    answers = found if isinstance(found, list) else [found]
    try:
        checked(answers, [True] * len(answers))
    except LogitscopeError as error:
        return server.orjson_response({"error": {"message": str(error)}}, status_code=500)
    results = [answer["meta_info"][RESULT] for answer in answers]
    if form == "json":
        return server.orjson_response({"logits": results if isinstance(found, list) else results[0]})
    return _closing_response()(_arrow(results, wanted.select), media_type=MEDIA_TYPE)


@functools.cache
def _closing_response() -> type:
    from starlette.responses import StreamingResponse

    class ClosingResponse(StreamingResponse):
        def __init__(self, rows: Any, **options: Any) -> None:
            super().__init__(rows, **options)
            self._rows = rows

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            try:
                await super().__call__(scope, receive, send)
            finally:
                self._rows.close()  # a client that went away would leave the rows to the garbage collector

    return ClosingResponse


def _arrow(results: Sequence[Logits], select: Select) -> Iterator[bytes]:
    sink: Any = _Pieces()
    requests = [request_of(result, i, select) for i, result in enumerate(results)]
    writer = RowWriter(sink, results[0].identity, requests)
    for i, result in enumerate(results):
        for item in blocks_of(result, i):
            writer.write(item)
            yield from sink.taken()
    writer.close()
    yield from sink.taken()


class _Pieces(io.RawIOBase):
    """What is written into it, to be taken piece by piece."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, data: Any) -> int:
        """Keep a piece."""
        self._pieces.append(bytes(data))
        return len(data)

    def taken(self) -> Iterator[bytes]:
        """The pieces since the last time."""
        pieces, self._pieces = self._pieces, []
        yield from pieces
