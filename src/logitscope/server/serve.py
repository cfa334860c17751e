"""A server process: the application on uvicorn."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence

import uvicorn

from logitscope.engines.base import Engine
from logitscope.errors import OptionError
from logitscope.server.app import make_app
from logitscope.server.runner import Limits, Runner

_ENDING_S = 30


def serve(
    engine: Engine,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    limits: Limits | None = None,
    body_bytes: int = 64 * 10**6,
    origins: Sequence[str] = (),
    shared_memory: bool = True,
    ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve an engine until the process is told to end: then what runs is finished, the rest is refused.

    Args:
        engine: that nobody else uses; it is closed at the end.
        host: to listen at.
        port: 0 takes a free one.
        api_key: that clients must send as a bearer token; None asks for none.
        limits: what is taken on.
        body_bytes: the largest body that is read.
        origins: web pages of these origins may ask, too (CORS).
        shared_memory: whether clients on this host may get rows through shared memory.
        ready: is called with the address, as soon as it is taken.

    Raises:
        OptionError: the address is taken or not ours.
    """
    listening = _listening(host, port)
    with contextlib.closing(listening):
        name = f"[{host}]" if ":" in host else host
        ready(f"http://{name}:{listening.getsockname()[1]}")
        config = uvicorn.Config(
            make_app(
                Runner(engine, limits),
                api_key=api_key,
                body_bytes=body_bytes,
                origins=origins,
                shared_memory=shared_memory,
            ),
            log_level="warning",
            timeout_graceful_shutdown=_ENDING_S,
        )
        uvicorn.Server(config).run(sockets=[listening])


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(2048)
    except OSError as error:
        found.close()
        raise OptionError(
            "cannot listen there",
            where=f"{host}:{port}",
            got=str(error),
            fix="Name another port, or end the program that has it.",
        ) from error
    return found
