"""Several engines as one: requests are shared out, and rows come back in one stream."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import queue
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Self

from logitscope.engines.base import Engine
from logitscope.engines.remote import RemoteEngine, check_same_model
from logitscope.errors import ConnectionFailedError, OptionError
from logitscope.rows import Buffer, End, Request, RowBlock, Stream
from logitscope.wire.errors import error_from_json

_SHARE_TOKENS, _SHARE_REQUESTS = 1024, 32
_AHEAD_BLOCKS = 4


class ParallelEngine(Engine):
    """Engines of one model that share the requests of a call.

    Each has a share of the requests at a time, the longest first, so that none is left with the longest at
    the end. Blocks of a request come in order; those of different requests come as they are ready.

    Attributes:
        engines: that share the work.
    """

    name = "parallel"
    _fills_buffers = False

    def __init__(self, engines: Sequence[Engine], workers: Sequence[_Worker] = ()) -> None:
        self.engines, self._workers = list(engines), list(workers)
        first = engines[0]
        for engine in engines[1:]:
            check_same_model(
                first.identity,
                engine.identity,
                what="engines of different models cannot share work",
                where=f"{first.identity.model} and {engine.identity.model}",
            )
        devices = ", ".join(dict.fromkeys(engine.identity.device for engine in engines))
        self.identity = dataclasses.replace(first.identity, device=devices)
        self.tokenizer = first.tokenizer
        self.capabilities = first.capabilities
        self.context_length = first.context_length
        self.memory_limit_bytes = first.memory_limit_bytes

    @classmethod
    def open(
        cls,
        model: Any,
        *,
        engine: str = "transformers",
        workers: int | None = None,
        devices: Sequence[str] | None = None,
        options: dict[str, Any] | None = None,
    ) -> Self:
        """Open a model in several processes, or connect to several servers.

        Args:
            model: a name, folder or file, or a list of servers' addresses.
            engine: that each process opens.
            workers: processes, which share the cores of this machine evenly.
            devices: one process for each, as ``["cuda:0", "cuda:1"]``.
            options: of the engine, or of the connections.

        Raises:
            OptionError: both or none of workers and devices, or a model object, which lives in this process.
        """
        given = dict(options or {})
        if isinstance(model, list | tuple):
            if workers is not None or devices is not None or not model:
                raise OptionError(
                    "a list of servers", where="open", expected="addresses and no workers or devices"
                )
            return cls([RemoteEngine.open(address, **given) for address in model])
        shares = _shares(workers, devices)
        if not isinstance(model, str | os.PathLike):
            raise OptionError(
                "a model object lives in this process",
                where="workers or devices",
                expected="a name, a folder or a file",
                got=type(model).__name__,
            )
        started = [_Worker(str(model), engine, {**given, **own}, cores) for own, cores in shares]
        engines: list[Engine] = []
        try:
            engines += [worker.engine() for worker in started]
            return cls(engines, started)
        except BaseException:
            for worker in started:
                worker.end()
            raise

    @property
    def head(self) -> Any:
        """Of the first engine."""
        return self.engines[0].head

    def close(self) -> None:
        """Let go of all engines, and end the processes that were started for them."""
        super().close()
        for engine in self.engines:
            engine.close()
        for worker in self._workers:
            worker.end()

    def _working_bytes(self, requests: Sequence[Request]) -> int:
        """That of every engine."""
        return sum(engine._working_bytes(requests) for engine in self.engines)

    def _extras_bytes(self, request: Request) -> int:
        return self.engines[0]._extras_bytes(request)

    def _run(self, requests: Sequence[Request], buffer: Buffer | None) -> Stream:
        run = _Run(self.engines, requests)
        given: dict[tuple[int, str], int] = {}
        try:
            for item in run.items():
                if isinstance(item, RowBlock) and buffer is not None and item.values is not None:
                    key = (item.index, item.stage)
                    first = given.get(key, 0)
                    place = buffer(item.index, item.stage, first, len(item))
                    place[...] = item.values
                    item.values, item.room, given[key] = place, None, first + len(item)
                yield item
        finally:
            run.end()


class _Run:
    """One call's requests on their way through the engines, a thread for each."""

    def __init__(self, engines: Sequence[Engine], requests: Sequence[Request]) -> None:
        self._requests = requests
        self._shares = collections.deque(_shared_out(requests, len(engines)))
        self._given: queue.Queue[Any] = queue.Queue(_AHEAD_BLOCKS * len(engines))
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(engine,), daemon=True) for engine in engines
        ]
        for thread in self._threads:
            thread.start()

    def items(self) -> Iterator[RowBlock | End]:
        """Blocks and ends, as they come.

        Raises:
            LogitscopeError: an engine's; the others stop.
        """
        missing = len(self._requests)
        while missing:
            item = self._given.get()
            if isinstance(item, BaseException):
                raise item
            missing -= isinstance(item, End)
            yield item

    def end(self) -> None:
        """Stop the engines where they are."""
        self._ended.set()
        for thread in self._threads:
            while thread.is_alive():
                with contextlib.suppress(queue.Empty):
                    self._given.get_nowait()
                thread.join(0.01)

    def _work(self, engine: Engine) -> None:
        try:
            while not self._ended.is_set():
                try:
                    share = self._shares.popleft()
                except IndexError:
                    return
                stream = engine._run([self._requests[i] for i in share], None)
                with contextlib.closing(stream):  # type: ignore[type-var]
                    for item in stream:
                        self._given.put(dataclasses.replace(item, index=share[item.index]))
                        if self._ended.is_set():
                            return
        except BaseException as error:  # noqa: BLE001 - raised where the rows are read
            self._given.put(error)


class _Worker:
    """A process with an engine of its own."""

    def __init__(self, model: str, engine: str, options: dict[str, Any], cores: Sequence[int]) -> None:
        self._key = secrets.token_hex(16)
        given = json.dumps({"model": model, "engine": engine, "options": options, "cores": list(cores)})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "logitscope.server.worker", given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "LOGITSCOPE_WORKER_KEY": self._key},
        )

    def engine(self) -> RemoteEngine:
        """The engine, once its process is ready.

        Raises:
            LogitscopeError: why the model could not be opened there.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ConnectionFailedError(
                "a worker ended before it was ready", where="workers", got=f"status {self._process.wait()}"
            )
        found = json.loads(line)
        if "error" in found:
            raise error_from_json(found["error"])
        return RemoteEngine.open(found["address"], api_key=self._key)

    def end(self) -> None:
        """End the process."""
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _shares(workers: int | None, devices: Sequence[str] | None) -> list[tuple[dict[str, Any], list[int]]]:
    """Options and cores of each process."""
    if (workers is None) == (devices is None):
        raise OptionError("workers and devices contradict each other", where="open", expected="one of them")
    if devices is not None:
        if not devices or isinstance(devices, str):
            raise OptionError("no list of devices", where="devices", got=repr(devices))
        return [({"device": device}, []) for device in devices]
    assert workers is not None
    every = (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else list(range(os.cpu_count() or 1))
    )
    if type(workers) is not int or workers < 1:
        raise OptionError(
            "value outside its range", where="workers", expected="an int ≥ 1", got=repr(workers)
        )
    each = max(len(every) // workers, 1)
    return [
        ({"device": "cpu"}, [every[(i * each + k) % len(every)] for k in range(each)]) for i in range(workers)
    ]


def _shared_out(requests: Sequence[Request], engines: int) -> list[list[int]]:
    """Places of requests that go together: the longest first, and no share so large that an engine waits."""
    sizes = [request.prompt_length + request.max_new_tokens for request in requests]
    most = min(_SHARE_TOKENS, max(sum(sizes) // (4 * engines), 1))
    shares: list[list[int]] = []
    held = 0
    for i in sorted(range(len(requests)), key=lambda i: -sizes[i]):
        if not shares or held + sizes[i] > most or len(shares[-1]) == _SHARE_REQUESTS:
            shares.append([])
            held = 0
        shares[-1].append(i)
        held += sizes[i]
    return shares
