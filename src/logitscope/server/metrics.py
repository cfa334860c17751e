"""What is counted, for Prometheus."""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import CounterMetricFamily
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from logitscope.server.runner import Runner

TEXT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """The counters of one server.

    Args:
        runner: whose queue and work are told.
    """

    def __init__(self, runner: Runner) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "logitscope_http_requests", "Answers by route and status.", ["route", "status"], registry=registry
        )
        self.seconds = Histogram(
            "logitscope_http_request_seconds",
            "From the first byte of a request to the last of its answer.",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.sent = Counter("logitscope_sent_bytes", "Bytes of answers.", registry=registry)
        for name, text, value in (
            ("waiting_sequences", "That wait for their turn.", lambda: runner.waiting_sequences),
            ("running_sequences", "That the engine works on.", lambda: runner.running_sequences),
            ("buffered_bytes", "Rows that clients have not taken yet.", lambda: runner.buffered_bytes),
        ):
            Gauge(f"logitscope_{name}", text, registry=registry).set_function(value)
        registry.register(_Totals(runner))

    async def page(self, request: HttpRequest) -> Response:
        """Everything, in Prometheus's text form."""
        return Response(generate_latest(self.registry), media_type=TEXT_TYPE)


class _Totals:
    """What the runner counts itself."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def collect(self) -> Any:
        """The counters now."""
        runner, found = self._runner, self._runner.engine.counters()
        for name, text, value in (
            ("sequences", "Sequences that were answered.", runner.served),
            ("refused_calls", "Calls that were refused because the server was busy.", runner.refused),
            ("prompt_tokens", "Tokens of prompts whose sequences ended.", runner.prompt_tokens),
            ("generated_tokens", "Tokens that were generated.", runner.generated_tokens),
        ):
            yield CounterMetricFamily(f"logitscope_{name}", text, value)
        for name, value in found.items():
            yield CounterMetricFamily(f"logitscope_engine_{name}", "Of the engine.", value)


class Counting:
    """Counts the answers of an application.

    Args:
        app: whose answers are counted.
        metrics: where they are.
    """

    def __init__(self, app: Any, *, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, and its answer back."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, begun = 499, time.monotonic()  # 499: the client went away before an answer began

        async def counting(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                self.metrics.sent.inc(len(message.get("body", b"")))
            await send(message)

        try:
            await self.app(scope, receive, counting)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.seconds.labels(route).observe(time.monotonic() - begun)
