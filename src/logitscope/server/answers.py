"""What the server answers with: errors, JSON, and rows in pieces."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, Protocol

import orjson
from starlette.responses import JSONResponse, Response, StreamingResponse

from logitscope.errors import (
    BusyError,
    EngineClosedError,
    InputError,
    LogitscopeError,
    MemoryLimitError,
    ModelNotFoundError,
    UnsupportedError,
)
from logitscope.wire.errors import error_to_json

PIECE_BYTES = 1 << 19

_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    429: {"Retry-After": "1"},
    503: {"Retry-After": "1"},
}

_STATUS: tuple[tuple[type[LogitscopeError], int], ...] = (
    (MemoryLimitError, 413),
    (BusyError, 429),
    (EngineClosedError, 503),
    (ModelNotFoundError, 404),
    (InputError, 400),
    (UnsupportedError, 400),
)


def status_of(error: LogitscopeError) -> int:
    """The HTTP status of an error: 500 for what is nobody's request's fault."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


class Refused(Protocol):
    """How a route says an error: the body of the answer, by the error and its status."""

    def __call__(self, error: LogitscopeError, status: int) -> dict[str, Any]:
        """The object that stands under ``error``."""


def own_form(error: LogitscopeError, status: int) -> dict[str, Any]:
    """An error in our own form."""
    return error_to_json(error)


def refusal(error: LogitscopeError, refused: Refused = own_form, *, status: int | None = None) -> Response:
    """An error as an answer.

    Args:
        error: what is wrong.
        refused: the form of its body.
        status: where it is not `status_of` the error.
    """
    status = status or status_of(error)
    return JSONResponse({"error": refused(error, status)}, status, _HEADERS.get(status))


def json_bytes(content: Any) -> bytes:
    """JSON of what may hold NumPy arrays; numbers that are not finite become null."""
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def json_answer(content: Any) -> Response:
    """The same as an answer."""
    return Response(json_bytes(content), media_type="application/json")


class ClosingResponse(StreamingResponse):
    """A stream that is closed when the client goes away.

    Args:
        content: asynchronous pieces.
        media_type: of them.
        closed: is called at the end, also when the client went away before the first piece.
    """

    def __init__(self, content: Any, *, media_type: str, closed: Callable[[], None] = lambda: None) -> None:
        super().__init__(content, media_type=media_type)
        self._closed = closed

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send everything, and close what it came from."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            closing: Any = self.body_iterator
            try:
                await closing.aclose()
            finally:
                self._closed()


class Pieces(io.RawIOBase):
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
