"""SGLang's own HTTP server: ``return_logits`` in ``POST /generate``, and the route ``POST /logits``.

Source of every name: SGLang 0.5.23.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from logitscope.errors import LogitscopeError, OptionError
from logitscope.logits import Logits
from logitscope.plugins.sglang.frontend import RESULT, folded
from logitscope.wire import MEDIA_TYPE, RowWriter
from logitscope.wire.requests import known
from logitscope.wire.results import blocks_of, logits_to_json, request_of

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
    asked = (await request.json()).get("return_logits")
    if asked is None or asked is False:
        return await original(obj, request)
    try:
        given = {"prompt": obj.text, "input_ids": obj.input_ids, "sampling_params": obj.sampling_params}
        obj.sampling_params = folded(given, asked, form="json")[0]
    except LogitscopeError as error:
        return server._create_error_response(error)
    if obj.stream:
        return await original(obj, request)
    try:
        found = await server._global_state.tokenizer_manager.generate_request(obj, request).__anext__()
    except ValueError as error:
        return server._create_error_response(error)
    for answer in found if isinstance(found, list) else [found]:
        result = answer["meta_info"].get(RESULT)
        if result is not None and "error" in result:
            return server.orjson_response({"error": {"message": result["error"]}}, status_code=500)
    return server.orjson_response(found)


async def logits(server: Any, request: Any) -> Any:
    """``POST /logits``: rows ``0 … L-1`` of each prompt.

    The body has ``text`` or ``input_ids`` (one or a list), ``select``, ``encode``, ``summary``, and
    ``format``: ``"arrow"``, a stream that `logitscope.wire.results.read_results` reads, or ``"json"``.
    """
    from sglang.srt.managers.io_struct import GenerateReqInput
    from starlette.responses import StreamingResponse

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
        params, _ = folded(given, options)
        obj = GenerateReqInput(text=given["prompt"], input_ids=given["input_ids"], sampling_params=params)
        found = await server._global_state.tokenizer_manager.generate_request(obj, request).__anext__()
    except ValueError as error:  # ours and SGLang's
        return server._create_error_response(error)
    answers = found if isinstance(found, list) else [found]
    results = [answer["meta_info"].get(RESULT) for answer in answers]
    for result in results:
        if not isinstance(result, Logits):
            message = str(result) if isinstance(result, LogitscopeError) else "SGLang gave no rows"
            return server.orjson_response({"error": {"message": message}}, status_code=500)
    if form == "json":
        listed = [logits_to_json(result) for result in results]
        return server.orjson_response({"logits": listed if isinstance(found, list) else listed[0]})
    return StreamingResponse(_arrow(results), media_type=MEDIA_TYPE)


def _arrow(results: Sequence[Logits]) -> Iterator[bytes]:
    sink: Any = _Pieces()
    writer = RowWriter(sink, results[0].identity, [request_of(r, i) for i, r in enumerate(results)])
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
