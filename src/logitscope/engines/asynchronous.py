"""Engines from an event loop: their calls in threads, awaited, and ended when the task is."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

from logitscope.engines.base import Engine
from logitscope.engines.connection import CURRENT, Call
from logitscope.rows import Buffer, End, Request, RowBlock

_THREADS = 128

P = ParamSpec("P")
T = TypeVar("T")


def _awaited(
    method: Callable[Concatenate[Engine, P], T],
) -> Callable[Concatenate[AsyncCalls, P], Coroutine[Any, Any, T]]:
    """A method of an engine as a coroutine, with the same arguments."""

    @functools.wraps(method)
    async def awaited(self: AsyncCalls, /, *arguments: P.args, **options: P.kwargs) -> T:
        run = functools.partial(getattr(self, method.__name__), *arguments, **options)
        found: T = await self._in_thread(Call(), run)
        return found

    awaited.__name__ = f"a{method.__name__}"
    awaited.__qualname__ = f"AsyncCalls.{awaited.__name__}"
    awaited.__doc__ = (
        f"`{method.__name__}`, awaited: the event loop goes on, and cancelling the task ends the call at the "
        f"server.\n\nCallbacks are called in another thread. For the rest, as `{method.__name__}`:\n\n"
        f"{method.__doc__}"
    )
    return awaited


class AsyncCalls(Engine):
    """An engine whose calls can be awaited, many at once; it must be safe to use from many threads.

    A call runs in a thread of the engine's own, at most 128 at once; further ones wait for their turn.
    """

    alogits = _awaited(Engine.logits)
    agenerate = _awaited(Engine.generate)
    arequests = _awaited(Engine.requests)

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "logitscope")

    async def astream(
        self, requests: Iterable[Request], *, buffer: Buffer | None = None
    ) -> AsyncGenerator[RowBlock | End, None]:
        """Row blocks of many requests, as they are computed: `stream` for ``async for``.

        Cancelling the task, or leaving the loop early, ends the stream at the server. ``contextlib.aclosing``
        does so at once; without it, that is when Python lets go of the generator.

        Args:
            requests: from `requests` or `arequests`, or made by hand.
            buffer: where values are to be written, called in another thread; fresh arrays without it.
        """
        call = Call()
        stream = await self._in_thread(call, functools.partial(self.stream, requests, buffer=buffer))
        try:
            while (item := await self._in_thread(call, functools.partial(next, stream, None))) is not None:
                yield item
        except BaseException:
            call.abort()
            with contextlib.suppress(ValueError):  # a thread is in it, and is at its end at once
                stream.close()  # type: ignore[attr-defined]
            raise

    def close(self) -> None:
        """Refuse further calls; what runs goes on to its end."""
        super().close()
        self._threads.shutdown(wait=False)

    async def _in_thread(self, call: Call, run: Callable[[], T]) -> T:
        self._check_open()
        context = contextvars.copy_context()
        context.run(CURRENT.set, call)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, context.run, run)
        except asyncio.CancelledError:
            call.abort()
            raise
