"""The HTTP application over an engine: its routes, the key, what is counted.

Every error of our own routes is ``{"error": {"type", "what", "where", "expected", "got", "fix"}}`` with a
status: 400 for what cannot be asked, 401 without the key, 413 for what is too large, 429 when the server is
busy, 503 when it ends, and 500 for rows that could not be given.
"""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from pydantic.json_schema import models_json_schema
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

import logitscope
from logitscope.errors import InputError, LogitscopeError
from logitscope.server.answers import http_error, refusal
from logitscope.server.bodies import openapi_body
from logitscope.server.metrics import Counting, Metrics
from logitscope.server.native import Native
from logitscope.server.runner import Runner
from logitscope.server.service import Service
from logitscope.wire.errors import error_to_json


def make_app(
    runner: Runner,
    *,
    api_key: str | None = None,
    body_bytes: int = 64 * 2**20,
    origins: Sequence[str] = (),
) -> FastAPI:
    """The application.

    Args:
        runner: of the engine.
        api_key: that clients must send as a bearer token; None asks for none.
        body_bytes: the largest body that is read.
        origins: web pages of these origins may ask, too (CORS).
    """
    service = Service(runner, body_bytes)
    native, metrics = Native(service), Metrics(runner)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(runner.close)

    app = FastAPI(
        title="logitscope",
        version=logitscope.__version__,
        description="Complete logits of a language model.",
        lifespan=lifespan,
        exception_handlers={HTTPException: http_error},
    )
    app.add_api_route("/health", native.health, response_model=None)
    app.add_api_route("/metrics", metrics.page, response_model=None)
    models = []
    for method, path, handler, body in native.routes:
        app.add_api_route(
            path,
            _guarded(handler, api_key),
            methods=[method],
            response_model=None,
            responses=_ANSWERS,
            openapi_extra=None if body is None else openapi_body(body),
        )
        models += [] if body is None else [body]
    _describe(app, models)
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(Counting, metrics=metrics)
    return app


Handler = Callable[[HttpRequest], Any]

_ANSWERS: dict[int | str, dict[str, Any]] = {
    400: {"description": "It cannot be asked like this."},
    401: {"description": "The key is missing or wrong."},
    404: {"description": "There is no such thing."},
    413: {"description": "It is too large."},
    429: {"description": "The server is busy."},
    503: {"description": "The server ends."},
}


def _guarded(handler: Handler, api_key: str | None) -> Handler:
    """A handler that asks for the key, and whose errors are answers."""

    async def handle(request: HttpRequest) -> Response:
        given = request.headers.get("authorization", "")
        if api_key is not None and not hmac.compare_digest(given.encode(), f"Bearer {api_key}".encode()):
            error = InputError("no key, or a wrong one", where="Authorization", expected="Bearer KEY")
            return JSONResponse({"error": error_to_json(error)}, 401, {"WWW-Authenticate": "Bearer"})
        try:
            answer: Response = await handler(request)
        except LogitscopeError as error:
            return refusal(error)
        return answer

    handle.__doc__, handle.__name__ = handler.__doc__, handler.__name__
    return handle


def _describe(app: FastAPI, models: Sequence[Any]) -> None:
    """Add the forms of the bodies to the OpenAPI description: the routes read them themselves."""
    plain = app.openapi

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            template = "#/components/schemas/{model}"
            _, made = models_json_schema([(one, "validation") for one in models], ref_template=template)
            found = plain()
            found.setdefault("components", {}).setdefault("schemas", {}).update(made["$defs"])
        return plain()

    app.openapi = described  # type: ignore[method-assign]
