"""What every engine is: prompts in, a stream of row blocks out, and results made of it."""

from __future__ import annotations

import abc
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

import numpy as np

from logitscope.encodings import dtype_of, encoding, kept_format
from logitscope.engines.inputs import Inputs, Selects, check_ids, per_prompt, read_inputs, resolved
from logitscope.engines.memory import available_bytes, human
from logitscope.engines.results import Generation
from logitscope.errors import (
    ContextLengthError,
    EmptyInputError,
    EngineClosedError,
    HiddenRowsWarning,
    MemoryLimitError,
    OptionError,
    SelectError,
    TokenIdError,
    UnsupportedError,
)
from logitscope.logits import Logits, LogitsBatch
from logitscope.logits.collect import Collected, Collector
from logitscope.rows import (
    HIDDEN_FORMS,
    NO_IDS,
    SUMMARIES,
    SUMMARY_DTYPES,
    Buffer,
    End,
    Identity,
    Joining,
    Request,
    Sampling,
    Select,
    Stage,
    Stream,
    row_count,
)
from logitscope.tokenizer import Tokenizer

Device: TypeAlias = Literal["host", "keep"]
Progress: TypeAlias = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """What an engine can give besides raw rows; what it cannot, it refuses by name."""

    generate: bool = True
    processed: bool = False
    hidden_states: bool = False
    attentions: bool = False
    keep_on_device: bool = False
    hidden: bool = False


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes that a list of requests needs.

    Attributes:
        result_bytes: of the collected result: exact when scoring, an upper bound when generating.
        working_bytes: beyond it while the engine runs, as planned.
    """

    result_bytes: int
    working_bytes: int

    @property
    def total_bytes(self) -> int:
        """Result and working memory together."""
        return self.result_bytes + self.working_bytes


class Engine(abc.ABC):
    """A model that gives rows of logits.

    One engine serves one call at a time from one thread; results stay valid after later calls and after
    `close`. An engine implements `open`, `_run`, `_working_bytes` and the attributes below.

    Attributes:
        name: the engine's name in the registry.
        joins: whether requests can join a stream while it generates.
        identity: what made the rows.
        tokenizer: None when the model came without one (then only ids go in).
        capabilities: what it can give besides raw rows.
        head: rebuilds rows from hidden ones; None where the engine does not give them.
        context_length: tokens that the model can read; None when it states no bound.
        memory_limit_bytes: of a collected request; None is half of the memory that is free.
    """

    name: str
    joins: bool = False
    identity: Identity
    tokenizer: Tokenizer | None
    capabilities: Capabilities
    context_length: int | None
    memory_limit_bytes: int | None = None
    head: Any = None
    _closed: bool = False
    _fills_buffers: bool = True
    """Whether `_run` computes values where a buffer says; if not, they come in memory of their own."""

    @classmethod
    @abc.abstractmethod
    def open(cls, model: Any) -> Self:
        """Open a model; each engine adds its own typed options."""

    @classmethod
    def option_names(cls) -> list[str]:
        """Names of the options that `open` takes."""
        return [name for name in inspect.signature(cls.open).parameters if name != "model"]

    @abc.abstractmethod
    def _run(self, requests: Sequence[Request], buffer: Buffer | None) -> Stream:
        """Yield the blocks and ends of checked requests; closing the generator aborts."""

    def _run_joined(self, requests: list[Request], buffer: Buffer | None, joining: Joining) -> Stream:
        """The same, asking ``joining`` between steps, whose requests are added to the list."""
        return self._run(requests, buffer)

    @abc.abstractmethod
    def _working_bytes(self, requests: Sequence[Request]) -> int:
        """Memory beyond the result while `_run` runs, in bytes, as planned."""

    # -- what users call -------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """Columns of every row."""
        return self.identity.vocab_size

    def logits(
        self,
        inputs: Inputs,
        *,
        select: Selects = None,
        logits_to_keep: int | None = None,
        encode: str | None = None,
        summary: bool | Sequence[str] = False,
        hidden_states: Sequence[int] = (),
        attentions: Sequence[int] = (),
        device: Device = "host",
        progress: Progress | None = None,
    ) -> Logits | LogitsBatch:
        """Complete logits of prompts, without generating: rows ``0 … L-1``, ``[L, vocab_size]`` each.

        Args:
            inputs: text, token ids or chat messages; one, or a list.
            select: which rows and columns to keep; all by default. A list has one for each prompt.
            logits_to_keep: keep the last so many rows, as in Transformers; 0 keeps all.
            encode: ``float32``, ``bfloat16``, ``float16``; None is the model's own dtype. ``q16``, ``q8``,
                ``float8`` keep codes with a stated error. ``hidden`` keeps
                the head's input, and rows are rebuilt when they are read (``hidden-float16``: rounded);
                an engine that cannot do that for a model warns and gives plain rows.
            summary: True for all per-row summaries, or their names.
            hidden_states: layers whose hidden states ride along (0: embeddings, i: after layer i).
            attentions: layers whose attention weights ride along, ``[rows, heads, L]`` each.
            device: ``keep`` leaves the values as tensors on the engine's device.
            progress: called with (rows done, rows in all).

        Returns:
            `Logits` for one input, `LogitsBatch` for a list.

        Raises:
            InputError: empty input, ids outside the vocabulary, too long, bad options.
            MemoryLimitError: the result would need more than the limit; nothing was computed.
            NonFiniteError: the model computed NaN.
        """
        like = _kept(encode, summary, hidden_states, attentions, device)
        requests, single = self._requests(inputs, 1, like, _last_rows(select, logits_to_keep) or Select())
        members = [found.logits for found in self._collect(requests, progress) if found.logits is not None]
        return members[0] if single else LogitsBatch(members)

    def generate(
        self,
        inputs: Inputs,
        *,
        max_new_tokens: int = 16,
        return_logits: bool = False,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        n: int = 1,
        select: Selects = None,
        logits_to_keep: int | None = None,
        encode: str | None = None,
        summary: bool | Sequence[str] = False,
        processed: bool = False,
        hidden_states: Sequence[int] = (),
        attentions: Sequence[int] = (),
        device: Device = "host",
        progress: Progress | None = None,
    ) -> Generation | list[Generation]:
        """Generate from prompts, greedily unless ``temperature`` is above 0.

        Args:
            inputs: text, token ids or chat messages; one, or a list.
            max_new_tokens: at most so many tokens a sequence, 1 or more.
            return_logits: keep raw rows ``0 … L+n-2`` (prompt and generated tokens).
            n: samples of each prompt; they differ only when ``temperature`` is above 0.
            select, logits_to_keep, encode, summary, hidden_states, attentions, device: as in `logits`.
            processed: also keep the generated rows after processors and warpers, just before the draw.

            The other options are those of `logitscope.rows.Sampling`.

        Returns:
            `Generation` for one input and ``n=1``, else a flat list: all samples of the first prompt,
            then of the second.

        Raises:
            InputError, MemoryLimitError, NonFiniteError: as in `logits`.
        """
        sampling = Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            logit_bias=dict(logit_bias or {}),
            seed=seed,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(stop_token_ids),
            ignore_eos=ignore_eos,
        )
        kept = _generation_select(
            return_logits, _last_rows(select, logits_to_keep), encode, summary, processed
        )
        if max_new_tokens < 1:
            raise OptionError(
                "value outside its range",
                where="max_new_tokens",
                expected="an int ≥ 1",
                got=max_new_tokens,
                fix="To score a prompt, call logits().",
            )
        like = dataclasses.replace(
            _kept(encode, summary, hidden_states, attentions, device),
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            processed=processed,
        )
        requests, single = self._requests(inputs, n, like, kept)
        collected = self._collect(requests, progress)
        results = [Generation.of(r, found) for r, found in zip(requests, collected, strict=True)]
        return results[0] if single and n == 1 else results

    def requests(
        self,
        inputs: Inputs,
        *,
        max_new_tokens: int = 0,
        sampling: Sampling | None = None,
        n: int = 1,
        select: Selects = None,
        encode: str | None = None,
        summary: bool | Sequence[str] = False,
        processed: bool = False,
        hidden_states: Sequence[int] = (),
        attentions: Sequence[int] = (),
        device: Device = "host",
    ) -> list[Request]:
        """The checked requests of a call, for `stream` and `estimate`; ``max_new_tokens=0`` scores."""
        like = dataclasses.replace(
            _kept(encode, summary, hidden_states, attentions, device),
            max_new_tokens=max_new_tokens,
            sampling=sampling or Sampling(),
            processed=processed,
        )
        return self._check(self._requests(inputs, n, like, select or Select())[0])

    def stream(
        self, requests: Iterable[Request], *, buffer: Buffer | None = None, joining: Joining | None = None
    ) -> Stream:
        """Row blocks of many requests, as they are computed: bounded memory, whatever the length.

        Blocks are interleaved over requests and in order within one; each request closes with one `End`.
        Closing the stream aborts. Blocks are the consumer's own memory: nothing writes to them later.

        Args:
            requests: from `requests`, or made by hand.
            buffer: where values are to be written; fresh arrays without it.
            joining: tells what joins a generation between its steps, and what is no longer wanted, where the
                engine can do that (`joins`); else it is not asked.
        """
        listed = self._check(list(requests))
        self._check_memory(0, self._working_bytes(listed), listed)
        return self._run(listed, buffer) if joining is None else self._run_joined(listed, buffer, joining)

    def estimate(self, requests: Sequence[Request]) -> Estimate:
        """Bytes that these requests would need when their results are collected; runs nothing."""
        return self._estimate(self._check(list(requests)))

    def counters(self) -> dict[str, int]:
        """What an engine counts of its own work, by name; none by default."""
        return {}

    def close(self) -> None:
        """Let go of the model. Results stay valid; later calls raise `EngineClosedError`."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        i = self.identity
        quantization = f", {i.quantization}" if i.quantization else ""
        state = "closed" if self._closed else f"{i.dtype} on {i.device}{quantization}"
        context = f", context {self.context_length:,}" if self.context_length else ""
        return f"<{type(self).__name__} {i.model}: vocab {i.vocab_size:,}{context}, {state}>"

    # -- requests --------------------------------------------------------------------------------------

    def _requests(self, inputs: Inputs, n: int, like: Request, select: Selects) -> tuple[list[Request], bool]:
        """``n`` requests for each prompt, all of them ``like`` one; and whether the input was no list."""
        self._check_open()
        if n < 1:
            raise OptionError("value outside its range", where="n", expected="an int ≥ 1", got=n)
        prompts, single = read_inputs(
            inputs,
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            generate=like.max_new_tokens > 0,
        )
        selects = per_prompt(select, len(prompts))
        return [
            dataclasses.replace(
                like,
                token_ids=prompt.token_ids,
                select=resolved(one, prompt, self.tokenizer, like.max_new_tokens),
                prompt_index=i,
                sample_index=j,
            )
            for i, (prompt, one) in enumerate(zip(prompts, selects, strict=True))
            for j in range(n)
        ], single

    # -- checks before a run ---------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine was closed", where=self.identity.model, fix="Open it again.")

    def _check(self, requests: list[Request]) -> list[Request]:
        self._check_open()
        if not requests:
            raise EmptyInputError("an empty batch", where="requests", expected="one request or more")
        requests = self._without_hidden(requests)
        for i, request in enumerate(requests):
            where = f"request {i}"
            check_ids(np.asarray(request.token_ids), self.vocab_size, where)
            self._check_length(request, where)
            self._check_capabilities(request, where)
            encoding(request.value_format("raw", self.identity.dtype))
            for token_id in (*request.sampling.logit_bias, *request.sampling.stop_token_ids):
                if not 0 <= token_id < self.vocab_size:
                    raise TokenIdError(
                        "id outside the vocabulary",
                        where="logit_bias or stop_token_ids",
                        expected=f"0 … {self.vocab_size - 1}",
                        got=token_id,
                    )
            if request.sampling.stop and self.tokenizer is None:
                raise OptionError("stop strings need a tokenizer", where="stop", fix="Use stop_token_ids.")
            if request.select is not None:
                if not request.max_new_tokens:
                    request.select.rows(prompt_length=request.prompt_length, new_tokens=0)
                request.select.check_columns(self.vocab_size, request.max_rows)
        return requests

    def _without_hidden(self, requests: list[Request]) -> list[Request]:
        """Requests for hidden rows as requests for plain ones where there are none, with a warning."""
        if self.capabilities.hidden or all(request.encode not in HIDDEN_FORMS for request in requests):
            return requests
        warnings.warn(
            f"{self.identity.model}: the {self.name} engine has no hidden rows of it; rows are kept whole",
            HiddenRowsWarning,
            stacklevel=4,
        )
        return [
            dataclasses.replace(request, encode=None) if request.encode in HIDDEN_FORMS else request
            for request in requests
        ]

    def _check_length(self, request: Request, where: str) -> None:
        rows = row_count(request.prompt_length, request.max_new_tokens)
        if self.context_length is not None and rows > self.context_length:
            raise ContextLengthError(
                "longer than the model's context",
                where=where,
                expected=f"at most {self.context_length:,} tokens to read",
                got=f"{request.prompt_length:,} prompt tokens"
                + (f" and {request.max_new_tokens:,} new ones" if request.max_new_tokens else ""),
                fix="Cut the prompt, or score it in windows.",
            )

    def _check_capabilities(self, request: Request, where: str) -> None:
        asked = {
            "generate": request.max_new_tokens > 0,
            "processed": request.processed,
            "hidden_states": bool(request.hidden_states),
            "attentions": bool(request.attentions),
            "keep_on_device": request.keep_on_device,
        }
        for name, wanted in asked.items():
            if wanted and not getattr(self.capabilities, name):
                raise UnsupportedError(f"the {self.name} engine cannot give {name}", where=where)

    def _estimate(self, requests: Sequence[Request]) -> Estimate:
        return Estimate(sum(self._result_bytes(r) for r in requests), self._working_bytes(requests))

    def _result_bytes(self, request: Request) -> int:
        if request.select is None:
            return 0
        rows = request.max_rows
        size = rows * (self._row_bytes(request, "raw") + self._extras_bytes(request))
        if request.processed:
            size += min(rows, request.max_new_tokens) * self._row_bytes(request, "processed")
        return size

    def _row_bytes(self, request: Request, stage: Stage) -> int:
        size = sum(np.dtype(SUMMARY_DTYPES[name]).itemsize for name in request.summary)
        row = kept_format(request, stage, self.identity)
        if row is not None:
            size += row.nbytes
        elif request.select is not None and request.select.cut:
            itemsize = dtype_of(request.value_format(stage, self.identity.dtype)).itemsize
            drawn = request.select.sample is not None
            size += 4 + most_entries(request.select, self.vocab_size) * (itemsize + (8 if drawn else 4))
        return size

    def _extras_bytes(self, request: Request) -> int:
        """Bytes a row of hidden states and attention weights; an engine that gives them says how many."""
        return 0

    def _check_memory(self, result_bytes: int, working_bytes: int, requests: Sequence[Request]) -> None:
        limit = self.memory_limit_bytes
        if limit is None:
            limit = available_bytes() // 2
        needed = result_bytes + working_bytes
        if needed <= limit:
            return
        raise MemoryLimitError(
            f"the request is too large for the memory ({human(needed)}, limit {human(limit)})",
            needed_bytes=needed,
            limit_bytes=limit,
            fix=self._what_fits(requests, working_bytes, limit),
        )

    def _what_fits(self, requests: Sequence[Request], working_bytes: int, limit: int) -> str:
        every = tuple(SUMMARIES)
        cut = any(request.select is not None and request.select.cut for request in requests)
        ways = {
            **({"encode='hidden'": dict(encode="hidden")} if self.capabilities.hidden and not cut else {}),
            "encode='float16'": dict(encode="float16"),
            "select=Select(positions='generated')": dict(select=Select("generated")),
            "select=Select(positions='last')": dict(select=Select("last"), processed=False),
            "select=Select(top_k=64)": dict(select=Select(top_k=64), encode=None, keep_on_device=False),
            "select=Select(vocab=None), summary=True": dict(select=Select(vocab=None), summary=every),
        }
        fitting = []
        for name, change in ways.items():
            if "generated" in name and not all(r.max_new_tokens for r in requests):
                continue
            changed = [dataclasses.replace(r, **change) for r in requests if r.select is not None]  # type: ignore[arg-type]
            size = sum(self._result_bytes(r) for r in changed) + working_bytes
            if changed and size <= limit:
                fitting.append(f"{name} ({human(size)})")
        stream = "engine.stream(), which holds a few blocks at a time"
        return f"What would fit: {'; '.join([*fitting, stream])}. Or raise memory_limit_bytes in open()."

    # -- collecting ------------------------------------------------------------------------------------

    def _collect(self, requests: Sequence[Request], progress: Progress | None) -> list[Collected]:
        checked = self._check(list(requests))
        estimate = self._estimate(checked)
        self._check_memory(estimate.result_bytes, estimate.working_bytes, checked)
        collector = Collector(
            checked,
            identity=self.identity,
            vocabulary=self.tokenizer,
            # A head that is elsewhere is fetched when it is asked for.
            head=self.head if any(r.encode in HIDDEN_FORMS for r in checked) else None,
        )
        done, total = 0, sum(r.max_rows for r in checked)
        for item in self._run(checked, collector.buffer if self._fills_buffers else None):
            if isinstance(item, End):
                collector.finish(item)
                continue
            collector.add(item)
            done += len(item)
            if progress is not None:
                progress(done, total)
        return collector.results()


def _generation_select(
    return_logits: bool,
    select: Selects,
    encode: str | None,
    summary: bool | Sequence[str],
    processed: bool,
) -> Selects:
    if return_logits:
        return select or Select()
    for name, given in (
        ("select", select),
        ("encode", encode),
        ("summary", summary),
        ("processed", processed),
    ):
        if given:
            raise OptionError(
                f"{name} was given, but no logits were asked for", where=name, fix="Add return_logits=True."
            )
    return None


def _last_rows(select: Selects, logits_to_keep: int | None) -> Selects:
    """The selection that ``logits_to_keep`` stands for."""
    if logits_to_keep is None:
        return select
    if select is not None:
        raise SelectError("rows are selected twice", where="logits_to_keep", expected="no select beside it")
    if type(logits_to_keep) is not int or logits_to_keep < 0:
        raise SelectError(
            "no number of rows", where="logits_to_keep", expected="an int ≥ 0", got=repr(logits_to_keep)
        )
    return Select(slice(-logits_to_keep, None)) if logits_to_keep else Select()


def _summary_names(summary: bool | Sequence[str]) -> tuple[str, ...]:
    if isinstance(summary, bool):
        return SUMMARIES if summary else ()
    return (summary,) if isinstance(summary, str) else tuple(summary)


def most_entries(select: Select, vocab_size: int) -> int:
    """Upper bound of the kept columns of a row that has its own; exact for a top-k."""
    if isinstance(select.vocab, tuple):
        return max(len(ids) for ids in select.vocab)
    return min(select.top_k or select.sample or vocab_size, vocab_size)


def _kept(
    encode: str | None,
    summary: bool | Sequence[str],
    hidden_states: Sequence[int],
    attentions: Sequence[int],
    device: Device,
) -> Request:
    """What is kept of the selected rows, as a request without a prompt and a selection."""
    if device not in ("host", "keep"):
        raise OptionError("unknown device", where="device", expected="'host' or 'keep'", got=repr(device))
    return Request(
        NO_IDS,
        select=None,
        encode=encode,
        summary=_summary_names(summary),
        hidden_states=tuple(hidden_states),
        attentions=tuple(attentions),
        keep_on_device=device == "keep",
    )
