"""The HTTP application over an engine: its routes, the key, what is counted.

Every error of our own routes is ``{"error": {"type", "what", "where", "expected", "got", "fix"}}``, of the
others ``{"error": {"message", "type", "param", "code"}}``, with a status: 400 for what cannot be asked, 401
without the key, 404 for what there is not, 413 for what is too large, 429 when the server is busy, 503 when
it ends, and 500 for rows that could not be given.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from pydantic.json_schema import models_json_schema
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

import logitscope
from logitscope.errors import InputError, LogitscopeError, RowsError
from logitscope.server.answers import own_form, refusal
from logitscope.server.bodies import JSON_TYPE, Route, openapi_body
from logitscope.server.lending import Lender
from logitscope.server.metrics import TEXT_TYPE, Counting, Metrics
from logitscope.server.native import Native
from logitscope.server.openai import OpenAI, openai_form
from logitscope.server.runner import Runner
from logitscope.server.service import Service
from logitscope.wire.shared import shares_memory


def make_app(
    runner: Runner,
    *,
    api_key: str | None = None,
    body_bytes: int = 64 * 10**6,
    origins: Sequence[str] = (),
    shared_memory: bool = True,
) -> FastAPI:
    """The application.

    Args:
        runner: of the engine.
        api_key: that clients must send as a bearer token; None asks for none.
        body_bytes: the largest body that is read.
        origins: web pages of these origins may ask, too (CORS).
        shared_memory: whether clients on this host may get rows through shared memory.
    """
    service = Service(runner, body_bytes)
    metrics = Metrics(runner)
    native, openai = Native(service), OpenAI(service)
    routes = [*native.routes, *openai.routes]

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if shared_memory and shares_memory():
            with contextlib.suppress(OSError):  # such as one that is read-only: rows go with the stream
                service.lender = Lender(
                    limit_bytes=runner.limits.segments_bytes, least_bytes=runner.limits.lent_bytes
                )
        yield
        await run_in_threadpool(runner.close)
        if service.lender is not None:
            service.lender.close()

    app = FastAPI(
        title="logitscope",
        version=logitscope.__version__,
        description="Complete logits of a language model.",
        lifespan=lifespan,
        exception_handlers={HTTPException: _http_error},
    )
    for route in (
        Route("GET", "/health", native.health),
        Route("GET", "/metrics", metrics.page, gives=(TEXT_TYPE,)),
    ):
        _add(app, route, route.handler)
    for route in routes:
        _add(app, route, _guarded(route, api_key))
    _describe(app, [route.body for route in routes if route.body is not None])
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(Counting, metrics=metrics)
    return app


Handler = Callable[[HttpRequest], Any]

_log = logging.getLogger(__name__)

_ANSWERS: dict[int | str, dict[str, Any]] = {
    status: {"description": description, "content": {JSON_TYPE: {}}}
    for status, description in (
        (400, "It cannot be asked like this."),
        (401, "The key is missing or wrong."),
        (404, "There is no such thing."),
        (413, "It is too large."),
        (429, "The server is busy."),
        (503, "The server ends."),
    )
}


def _add(app: FastAPI, route: Route, handler: Handler) -> None:
    given: dict[str, Any] = {"content": {media_type: {} for media_type in route.gives}}
    app.add_api_route(
        route.path,
        handler,
        methods=[route.method],
        response_class=Response,
        responses={200: given, **_ANSWERS},
        openapi_extra=None if route.body is None else openapi_body(route.body),
    )


def _guarded(route: Route, api_key: str | None) -> Handler:
    """A route's handler that asks for the key, and whose errors are answers."""

    async def handle(request: HttpRequest) -> Response:
        given = request.headers.get("authorization", "")
        if api_key is not None and not hmac.compare_digest(given.encode(), f"Bearer {api_key}".encode()):
            error = InputError("no key, or a wrong one", where="Authorization", expected="Bearer KEY")
            return refusal(error, route.refused, status=401)
        try:
            answer: Response = await route.handler(request)
        except LogitscopeError as error:
            return refusal(error, route.refused)
        except HTTPException:
            raise
        except Exception as error:  # noqa: BLE001 - the others go on; a message may hold a prompt
            name = type(error).__name__
            _log.error("%s: %s", request.url.path, name, exc_info=_log.isEnabledFor(logging.DEBUG))
            wrong = RowsError(f"an error of the server ({name})", where=request.url.path)
            return refusal(wrong, route.refused)
        return answer

    handle.__doc__, handle.__name__ = route.handler.__doc__, route.handler.__name__
    return handle


async def _http_error(request: HttpRequest, error: Any) -> Response:
    """An error of the HTTP layer itself, such as an unknown path, in the form of all others there."""
    found = InputError(error.detail, where=request.url.path)
    openai = request.url.path.startswith("/v1/")
    answer = refusal(found, _both_forms if openai else own_form, status=error.status_code)
    answer.headers.update(error.headers or {})
    return answer


def _both_forms(error: LogitscopeError, status: int) -> dict[str, Any]:
    """OpenAI's form of an error, and ours: either's client may have been given a path that there is not."""
    return {**own_form(error, status), **openai_form(error, status)}


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
