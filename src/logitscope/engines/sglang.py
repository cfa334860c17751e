"""SGLang as an engine: the same calls and results as in the embedded one, from an unmodified SGLang.

Rows come through the plugin (`logitscope.plugins.sglang`). Greedy tokens are SGLang's own; where anything
changes a row before the choice (temperature, penalties, biases), `logitscope.sampling` chooses inside
SGLang's scheduler, so that seeds mean the same in every engine.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import inspect
import secrets
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np

from logitscope.engines.base import Capabilities, Engine
from logitscope.engines.results import generated_text
from logitscope.errors import (
    IncompleteError,
    MissingDependencyError,
    ModelLoadError,
    OptionError,
    RowsError,
)
from logitscope.logits import Logits
from logitscope.logits.collect import row_blocks
from logitscope.plugins.common.options import Options
from logitscope.plugins.sglang.frontend import PROCESSED, RESULT
from logitscope.rows import NO_IDS, Buffer, End, FinishReason, Ids, Request, RowBlock, Stream
from logitscope.tokenizer import Tokenizer

_OWN_OPTIONS = ("memory_limit_bytes", "requests_in_flight")


class SGLangEngine(Engine):
    """Complete logits of a model in SGLang, in processes of its own.

    Rows are float32, which SGLang computes whatever the model's dtype.

    Attributes:
        wrapped: the ``sglang.Engine``.
    """

    name = "sglang"

    def __init__(
        self, wrapped: Any, *, owned: bool, memory_limit_bytes: int | None, requests_in_flight: int
    ) -> None:
        self.wrapped, self._owned = wrapped, owned
        self.memory_limit_bytes, self._in_flight = memory_limit_bytes, requests_in_flight
        manager = wrapped.tokenizer_manager
        self.tokenizer = None if manager.tokenizer is None else Tokenizer(manager.tokenizer)
        # Source: SGLang 0.5.23, tp_worker.get_worker_info: what a prompt may have beside a few new tokens.
        self.context_length = int(manager.max_req_input_len) - 1
        probe = wrapped.logits(input_ids=[0], select="last")
        self.identity = probe.identity
        self.capabilities = Capabilities(processed=True, hidden=self.identity.hidden_size is not None)

    @classmethod
    def open(
        cls,
        model: Any,
        *,
        memory_limit_bytes: int | None = None,
        requests_in_flight: int = 256,
        **server_args: Any,
    ) -> Self:
        """Start SGLang with a model, or take an ``sglang.Engine`` that runs.

        Args:
            model: a folder or hub name, or an ``sglang.Engine``, which `close` then leaves running.
            memory_limit_bytes: larger requests are refused; None is half of the free memory.
            requests_in_flight: that SGLang is given at once; their rows lie in shared memory until they are
                read.
            **server_args: SGLang's own, such as ``tp_size``, ``dtype``, ``mem_fraction_static``.

        Raises:
            MissingDependencyError: SGLang is not installed.
            OptionError: a value outside its range, or options for an engine that runs already.
            ModelLoadError: SGLang did not start.
        """
        sglang = _sglang()
        if requests_in_flight < 1:
            raise OptionError(
                "value outside its range",
                where="requests_in_flight",
                expected="a positive int",
                got=requests_in_flight,
            )
        running = not isinstance(model, str) and hasattr(model, "tokenizer_manager")
        if running and server_args:
            raise OptionError(
                "the engine runs already",
                where="open",
                expected="no options of its start",
                got=", ".join(server_args),
            )
        try:
            wrapped = model if running else sglang.Engine(model_path=str(model), **server_args)
        except (OSError, RuntimeError, ValueError, AssertionError) as error:
            raise ModelLoadError(
                "SGLang did not start", where=str(model), got=f"{type(error).__name__}: {error}"
            ) from error
        return cls(
            wrapped,
            owned=not running,
            memory_limit_bytes=memory_limit_bytes,
            requests_in_flight=requests_in_flight,
        )

    @classmethod
    def option_names(cls) -> list[str]:
        """SGLang's options and our own."""
        _sglang()
        from sglang.srt.server_args import ServerArgs

        theirs = [name for name in inspect.signature(ServerArgs).parameters if name != "model_path"]
        return [*_OWN_OPTIONS, *theirs]

    @property
    def head(self) -> Any:
        """The ``logitscope.head.Head`` of the model, gathered from SGLang's processes at the first use."""
        if not self.capabilities.hidden or self._closed:
            return None
        probe = self.wrapped.logits(input_ids=[0], select="last", encode="hidden")
        return probe.values.head

    def close(self) -> None:
        """End SGLang, if it was started here; results stay valid."""
        if not self._closed and self._owned:
            self.wrapped.shutdown()
        super().close()
        self.wrapped = None

    def _working_bytes(self, requests: Sequence[Request]) -> int:
        """Rows in shared memory: those of the largest requests that are in flight together."""
        sizes = sorted((self._result_bytes(request) for request in requests), reverse=True)
        return sum(sizes[: self._in_flight])

    def _run(self, requests: Sequence[Request], buffer: Buffer | None) -> Stream:
        loop = self.wrapped.loop
        waiting = collections.deque(enumerate(requests))
        running: dict[asyncio.Task[Any], _Asked] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self._in_flight:
                    asked = _Asked(*waiting.popleft())
                    running[loop.create_task(self._ask(asked))] = asked
                done, _ = loop.run_until_complete(asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED))
                for task in sorted(done, key=lambda task: running[task].index):
                    asked = running.pop(task)
                    yield from self._items(asked, task.result(), buffer)
        finally:
            self._abort(running)

    def _abort(self, running: dict[asyncio.Task[Any], _Asked]) -> None:
        """Whoever closes a stream waits until SGLang has let go of its requests."""
        for asked in running.values():
            self.wrapped.tokenizer_manager.abort_request(asked.rid)
        if running:
            self.wrapped.loop.run_until_complete(asyncio.gather(*running, return_exceptions=True))

    async def _ask(self, asked: _Asked) -> Any:
        options = Options.of(asked.request)
        try:
            return await self.wrapped.async_generate(
                input_ids=asked.request.token_ids.tolist(),
                sampling_params=_sampling_params(asked.request),
                return_logits=None if options.idle else options,
                rid=asked.rid,
            )
        except ValueError as error:  # SGLang's refusals
            if isinstance(error, RowsError):
                raise
            raise RowsError(str(error), where=f"request {asked.index}") from error

    def _items(self, asked: _Asked, answer: Any, buffer: Buffer | None) -> Iterator[RowBlock | End]:
        request, meta = asked.request, answer["meta_info"]
        generated = _generated(answer, asked)
        reason, stop = _ending(meta["finish_reason"], asked)
        if reason == "length" and generated.size < request.max_new_tokens:
            raise IncompleteError(
                "SGLang gave fewer tokens than were asked for",
                where=f"request {asked.index}",
                expected=request.max_new_tokens,
                got=generated.size,
            )
        if generated.size:
            yield RowBlock(asked.index, np.empty(0, np.int64), token_ids=generated)
        rows = {"raw": 0, "processed": 0}
        verification = None
        for stage, name in (("raw", RESULT), ("processed", PROCESSED)):
            found = meta.get(name)
            if isinstance(found, Logits):
                rows[stage] = len(found)
                verification = found.verification or verification
                yield from row_blocks(found, asked.index, buffer)
        yield End(
            asked.index,
            generated,
            rows=rows["raw"],
            processed_rows=rows["processed"],
            finish_reason=reason,
            stop=stop,
            text=generated_text(self.tokenizer, generated, stop) if request.max_new_tokens else None,
            seed=request.sampling.seed if request.max_new_tokens and not request.sampling.greedy else None,
            verification=verification,
        )


@dataclasses.dataclass
class _Asked:
    """A request that SGLang has."""

    index: int
    request: Request
    rid: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        if not sampling.greedy and sampling.seed is None:
            seeded = dataclasses.replace(sampling, seed=secrets.randbits(63))
            self.request = dataclasses.replace(self.request, sampling=seeded)


def _sampling_params(request: Request) -> dict[str, Any]:
    """SGLang's greedy parameters: what changes a row is done by `Options.sampling`."""
    sampling = request.sampling
    params: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": request.max_new_tokens}
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    elif sampling.ignore_eos:
        params["ignore_eos"] = True
    return params


def _generated(answer: Any, asked: _Asked) -> Ids:
    if not asked.request.max_new_tokens:
        return NO_IDS
    return np.asarray(answer["output_ids"], np.int32)


def _ending(reason: Any, asked: _Asked) -> tuple[FinishReason | None, str | int | None]:
    """Why SGLang ended a request.

    Raises:
        IncompleteError: it did so before the request was complete.
    """
    kind = (reason or {}).get("type")
    if kind == "abort":
        raise IncompleteError(
            "SGLang ended the request", where=f"request {asked.index}", got=reason.get("message")
        )
    if not asked.request.max_new_tokens:
        return None, None
    if kind == "stop":
        return "stop", reason.get("matched")
    return "length", None


def _sglang() -> Any:
    try:
        import sglang
    except ModuleNotFoundError as error:
        if error.name != "sglang":
            raise
        raise MissingDependencyError(
            "sglang is not installed", where="open", fix="pip install sglang==0.5.23"
        ) from error
    return sglang
