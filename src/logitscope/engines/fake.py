"""An engine without a model: rows that are a hash of what was read. NumPy only.

It keeps the whole contract, so that what consumes engines can be tested in milliseconds; and it can be told
to break it in one of `FAULTS`, so that tests can prove that a fault is found.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

import logitscope
from logitscope.encodings import DTYPES, Dense, encoding, kept_format
from logitscope.engines.base import Capabilities, Engine
from logitscope.errors import OptionError
from logitscope.numerics import host
from logitscope.rows import (
    NO_TARGET,
    Buffer,
    End,
    Entries,
    FinishReason,
    Identity,
    Ids,
    Request,
    RowBlock,
    Sampling,
    Stage,
    Stream,
    targets,
)
from logitscope.tokenizer import Tokenizer

_SCALE = 7.0  # logits lie in -7 … 7, with a standard deviation of 2.9
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_DTYPES = ("float32", "bfloat16", "float16")


def fake_rows(
    token_ids: Sequence[int] | NDArray[Any], vocab_size: int, *, seed: int = 0
) -> NDArray[np.float32]:
    """Row ``p`` as a function of ``t[0..p]`` and nothing else: float32 ``[L, vocab_size]``."""
    return _rows(_states(token_ids, seed), vocab_size)


def _states(token_ids: Sequence[int] | NDArray[Any], seed: int) -> NDArray[np.uint64]:
    """A hash of each prefix, ``[L]``."""
    states = np.empty(len(token_ids), np.uint64)
    state = np.array([seed], np.uint64)
    for p, token_id in enumerate(token_ids):
        state = _mixed((state ^ np.uint64(int(token_id) + 1)) * _GOLDEN)
        states[p] = state[0]
    return states


def _rows(states: NDArray[np.uint64], vocab_size: int) -> NDArray[np.float32]:
    bits = _mixed(states[:, None] + np.arange(vocab_size, dtype=np.uint64) * _GOLDEN)
    halves = (bits >> np.uint64(32)).astype(np.float64) + (bits & np.uint64(2**32 - 1)).astype(np.float64)
    return ((halves * 2.0**-32 - 1.0) * _SCALE).astype(np.float32)


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Source: Steele et al., 2014, "Fast splittable pseudorandom number generators", SplitMix64."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


class FakeEngine(Engine):
    """Rows of `fake_rows`, rounded to the dtype; everything else as of a real engine.

    Attributes:
        seed: of the rows.
        eos_token_id: ends a generation.
        block_rows: rows of a block.
    """

    name = "fake"

    def __init__(
        self,
        identity: Identity,
        *,
        tokenizer: Tokenizer | None,
        context_length: int | None,
        eos_token_id: int | None,
        block_rows: int,
        seed: int,
        memory_limit_bytes: int | None,
        fault: str | None,
    ) -> None:
        self.identity, self.tokenizer, self.context_length = identity, tokenizer, context_length
        self.eos_token_id, self.block_rows, self.seed = eos_token_id, block_rows, seed
        self.memory_limit_bytes = memory_limit_bytes
        self.capabilities = Capabilities(processed=True)
        self.fault = fault
        self.interrupted = False
        self.held: list[Any] = []

    @classmethod
    def open(
        cls,
        model: Any = "fake",
        *,
        vocab_size: int = 1001,
        tokenizer: Any = None,
        dtype: str = "float32",
        context_length: int | None = None,
        eos_token_id: int | None = None,
        block_rows: int = 8,
        seed: int = 0,
        memory_limit_bytes: int | None = None,
        fault: str | None = None,
    ) -> Self:
        """An engine of that name; nothing is loaded.

        Args:
            model: what the identity calls it.
            vocab_size: columns of a row.
            tokenizer: a Transformers tokenizer; without it only token ids go in.
            dtype: that the rows are rounded to.
            context_length: tokens that it reads at most; None is without bound.
            eos_token_id: ends a generation.
            block_rows: rows of a block.
            seed: of the rows: another seed is another model.
            memory_limit_bytes: larger requests are refused; None is half of the free memory.
            fault: one of `FAULTS`, to break the contract with.

        Raises:
            OptionError: a value outside its range.
        """
        for option, value, good, expected in (
            ("vocab_size", vocab_size, vocab_size >= 1, "a positive int"),
            ("block_rows", block_rows, block_rows >= 1, "a positive int"),
            ("dtype", dtype, dtype in _DTYPES, f"one of {', '.join(_DTYPES)}"),
            ("fault", fault, fault is None or fault in FAULTS, f"one of {', '.join(FAULTS)}"),
        ):
            if not good:
                raise OptionError("value outside its range", where=option, expected=expected, got=repr(value))
        wrapped = None if tokenizer is None else Tokenizer(tokenizer)
        identity = Identity(
            model=str(model),
            weights_hash=f"fake-{seed}",
            tokenizer_hash=None if wrapped is None else wrapped.hash,
            vocab_size=vocab_size,
            tokenizer_size=None if wrapped is None else len(wrapped),
            dtype=dtype,
            engine=cls.name,
            engine_version=logitscope.__version__,
            device="cpu",
            version=logitscope.__version__,
        )
        return cls(
            identity,
            tokenizer=wrapped,
            context_length=context_length,
            eos_token_id=eos_token_id,
            block_rows=block_rows,
            seed=seed,
            memory_limit_bytes=memory_limit_bytes,
            fault=fault,
        )

    def rows(self, states: NDArray[np.uint64]) -> NDArray[Any]:
        """Rows of prefixes in the engine's dtype."""
        return _rows(states, self.vocab_size).astype(DTYPES[self.identity.dtype])

    def _working_bytes(self, requests: Sequence[Request]) -> int:
        widest = max(r.max_rows for r in requests)
        return 8 * self.vocab_size * min(widest, self.block_rows)

    def _run(self, requests: Sequence[Request], buffer: Buffer | None) -> Stream:
        running = [_Sequence(self, index, request, buffer).run() for index, request in enumerate(requests)]
        stream = _in_turn(running)
        yield from stream if self.fault is None else FAULTS[self.fault](self, requests, stream)


def _in_turn(running: list[Stream]) -> Stream:
    """One item of each in turn, until all have ended."""
    while running:
        for one in list(running):
            item = next(one, None)
            if item is None:
                running.remove(one)
            else:
                yield item


class _Sequence:
    """One request while it runs."""

    def __init__(self, engine: FakeEngine, index: int, request: Request, buffer: Buffer | None) -> None:
        self.engine, self.index, self.request, self.buffer = engine, index, request, buffer
        self.ids = [int(i) for i in request.token_ids]
        self.processed: list[NDArray[np.float32]] = []
        sampling = request.sampling
        self.seed = None if sampling.greedy else sampling.seed
        if not sampling.greedy and self.seed is None:
            self.seed = secrets.randbits(63)
        key = np.array([self.seed or 0, request.sample_index], dtype=np.uint64)
        self.uniforms = np.random.Generator(np.random.Philox(key=key))

    def run(self) -> Stream:
        """Tokens first, as they are chosen; then raw rows, then processed ones, then the end."""
        request, end = self.request, End(self.index, np.empty(0, np.int32), rows=0)
        if request.max_new_tokens:
            end = yield from self._generate()
        positions = self._positions()
        later = positions[positions >= request.prompt_length - 1] if request.processed else positions[:0]
        states = _states(self.ids, self.engine.seed)
        for chosen in self._cut(positions):
            yield self._block("raw", positions, chosen, self.engine.rows(states[chosen]))
        for chosen in self._cut(later):
            rows = np.stack([self.processed[p - request.prompt_length + 1] for p in chosen])
            yield self._block("processed", later, chosen, rows)
        yield dataclasses.replace(end, rows=len(positions), processed_rows=len(later))

    def _positions(self) -> NDArray[np.int64]:
        if self.request.select is None:
            return np.empty(0, np.int64)
        return self.request.select.rows(
            prompt_length=self.request.prompt_length,
            new_tokens=len(self.ids) - self.request.prompt_length,
            ended_early=self.request.max_new_tokens > 0,
        )

    def _cut(self, positions: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        for first in range(0, len(positions), self.engine.block_rows):
            yield positions[first : first + self.engine.block_rows]

    def _block(
        self, stage: Stage, every: NDArray[np.int64], positions: NDArray[np.int64], rows: NDArray[Any]
    ) -> RowBlock:
        request, engine = self.request, self.engine
        block = RowBlock(self.index, positions, stage=stage)
        if request.summary:
            scored = targets(np.array(self.ids, np.int32), positions)
            block.summary = host.summaries(rows, scored, request.summary)
        row = kept_format(request, stage, engine.identity)
        if row is not None:
            kind = encoding(request.value_format(stage, engine.identity.dtype))
            if self.buffer is None:
                block.values = np.empty((len(positions), row.width), row.dtype)
            else:
                first = int(np.searchsorted(every, positions[0]))
                block.values = self.buffer(self.index, stage, first, len(positions))
            if isinstance(kind, Dense):  # without PyTorch
                assert request.select is not None
                kept = rows if request.select.container == "dense" else rows[:, list(request.select.vocab)]
                np.copyto(block.values, kept, casting="unsafe")
            else:
                from logitscope.extract import tensor_over

                kind.encode(tensor_over(rows), tensor_over(block.values))
        elif request.select is not None and request.select.cut:
            block.entries = self._entries(stage, positions, rows)
        return block

    def _entries(self, stage: Stage, positions: NDArray[np.int64], rows: NDArray[Any]) -> Entries | None:
        """What the real extractor keeps of rows with columns of their own."""
        from logitscope.extract import Extractor, LogitsChunk, tensor_over

        extractor = Extractor(self.request, self.index, identity=self.engine.identity, stage=stage)
        chunk = LogitsChunk(tensor_over(rows), positions, np.full(len(rows), NO_TARGET, np.int32))
        return extractor.extract(chunk).wait().entries

    def _generate(self) -> Generator[RowBlock, None, End]:
        while True:
            token_id = self._next_id()
            self.ids.append(token_id)
            yield RowBlock(self.index, np.empty(0, np.int64), token_ids=np.array([token_id], np.int32))
            ending = self._ending()
            if ending is not None:
                return self._end(*ending)

    def _next_id(self) -> int:
        sampling = self.request.sampling
        raw = self.engine.rows(_states(self.ids, self.engine.seed)[-1:])[0].astype(np.float32)
        processed = _process(raw, sampling, self.ids)
        self.processed.append(processed)
        if sampling.greedy:
            return int(processed.argmax())
        shares = np.exp(processed.astype(np.float64) - processed.max())
        cumulative = shares.cumsum()
        return int(np.searchsorted(cumulative, self.uniforms.random() * cumulative[-1], side="right"))

    def _ending(self) -> tuple[FinishReason, str | int | None] | None:
        sampling, new = self.request.sampling, self._generated()
        last = int(new[-1])
        if last in sampling.stop_token_ids or (last == self.engine.eos_token_id and not sampling.ignore_eos):
            return "stop", last
        if sampling.stop and self.engine.tokenizer is not None:
            text = self.engine.tokenizer.decode(new)
            found = [(text.find(stop), stop) for stop in sampling.stop if stop in text]
            if found:
                return "stop", min(found)[1]
        return ("length", None) if len(new) == self.request.max_new_tokens else None

    def _end(self, reason: FinishReason, stop: str | int | None) -> End:
        text, tokenizer = None, self.engine.tokenizer
        new = self._generated()
        if tokenizer is not None:
            text = tokenizer.decode(new[:-1] if isinstance(stop, int) else new)
            text = text.split(stop, 1)[0] if isinstance(stop, str) else text
        return End(self.index, new, rows=0, finish_reason=reason, stop=stop, text=text, seed=self.seed)

    def _generated(self) -> Ids:
        return np.array(self.ids[self.request.prompt_length :], np.int32)


def _process(raw: NDArray[np.float32], sampling: Sampling, history: Sequence[int]) -> NDArray[np.float32]:
    """One row ``[vocab]`` just before the draw; the rules are those of `logitscope.sampling`."""
    row = raw.copy()
    seen = np.unique(history)
    penalty = sampling.repetition_penalty
    row[seen] = np.where(row[seen] < 0, row[seen] * penalty, row[seen] / penalty)
    for token_id, bias in sampling.logit_bias.items():
        row[token_id] += bias
    if sampling.greedy:
        return row
    row /= np.float32(sampling.temperature)
    if sampling.top_k:
        row[row < np.sort(row)[-min(sampling.top_k, len(row))]] = -np.inf
    if sampling.top_p < 1.0:
        order = np.argsort(-row, kind="stable")
        shares = _softmax(row)[order]
        row[order[np.cumsum(shares) - shares >= sampling.top_p]] = -np.inf
    shares = _softmax(row)
    row[shares < sampling.min_p * shares.max()] = -np.inf
    return row


def _softmax(row: NDArray[np.float32]) -> NDArray[np.float64]:
    shares = np.exp(row.astype(np.float64) - row.max())
    return np.asarray(shares / shares.sum())


# -- faults ------------------------------------------------------------------------------------------------

Fault: TypeAlias = Callable[[FakeEngine, Sequence[Request], Stream], Stream]
"""What a fault makes of the engine's own stream."""


def _drop_block(engine: FakeEngine, requests: Sequence[Request], stream: Stream) -> Stream:
    blocks = 0
    for item in stream:
        blocks += _has_rows(item)
        if not (_has_rows(item) and blocks == 2):
            yield item


def _repeat_block(engine: FakeEngine, requests: Sequence[Request], stream: Stream) -> Stream:
    for item in stream:
        yield item
        if _has_rows(item):
            yield item


def _swap_blocks(engine: FakeEngine, requests: Sequence[Request], stream: Stream) -> Stream:
    held: dict[int, RowBlock] = {}
    for item in stream:
        before = held.pop(item.index, None)
        if isinstance(item, RowBlock) and before is None and _has_rows(item):
            held[item.index] = item
            continue
        yield item
        if before is not None and isinstance(item, RowBlock):
            yield before


def _hang_up(engine: FakeEngine, requests: Sequence[Request], stream: Stream) -> Stream:
    yield next(stream)
    yield next(stream)


def _extra_row(engine: FakeEngine, requests: Sequence[Request], stream: Stream) -> Stream:
    last: dict[int, RowBlock] = {}
    for item in stream:
        if isinstance(item, RowBlock):
            if _has_rows(item):
                last[item.index] = item
            yield item
        elif item.index in last and item.finish_reason:
            block = last[item.index]
            rows = {name: array[-1:] for name, array in block.summary.items()}
            values = None if block.values is None else block.values[-1:].copy()
            yield dataclasses.replace(block, positions=block.positions[-1:] + 1, values=values, summary=rows)
            yield dataclasses.replace(item, rows=item.rows + 1)
        else:
            yield item


def _lose_last_row(engine: FakeEngine, requests: Sequence[Request], stream: Stream) -> Stream:
    for item in stream:
        if isinstance(item, End):
            yield dataclasses.replace(item, rows=max(item.rows - 1, 0))
            continue
        end = requests[item.index].prompt_length + requests[item.index].max_new_tokens - 1
        keep = item.positions < end - (requests[item.index].max_new_tokens > 0)
        if keep.all():
            yield item
        else:
            summary = {name: array[keep] for name, array in item.summary.items()}
            values = None if item.values is None else item.values[keep]
            yield dataclasses.replace(item, positions=item.positions[keep], values=values, summary=summary)


def _reuse_buffer(engine: FakeEngine, requests: Sequence[Request], stream: Stream) -> Stream:
    for item in stream:
        yield item
        if isinstance(item, RowBlock) and item.values is not None:
            item.values[...] = 0


def _stale_after_close(engine: FakeEngine, requests: Sequence[Request], stream: Stream) -> Stream:
    for item in stream:
        if engine.interrupted and isinstance(item, RowBlock) and item.values is not None:
            engine.interrupted = False
            item.values += 1
        engine.interrupted, before = True, engine.interrupted
        yield item
        engine.interrupted = before


def _in_each_block(change: Callable[[FakeEngine, Request, RowBlock], None]) -> Fault:
    """A fault that changes the values or summaries of a block."""

    def fault(engine: FakeEngine, requests: Sequence[Request], stream: Stream) -> Stream:
        for item in stream:
            if isinstance(item, RowBlock) and item.values is not None:
                change(engine, requests[item.index], item)
            yield item

    return fault


def _has_rows(item: RowBlock | End) -> bool:
    return isinstance(item, RowBlock) and len(item) > 0


def _nan(engine: FakeEngine, request: Request, block: RowBlock) -> None:
    block.values[-1, 0] = np.nan


def _shift(engine: FakeEngine, request: Request, block: RowBlock) -> None:
    block.values[1:] = block.values[:-1].copy()


def _border(engine: FakeEngine, request: Request, block: RowBlock) -> None:
    if block.positions[0]:
        before = _states(request.token_ids[: block.positions[0]], engine.seed)[-1:]
        block.values[0] = engine.rows(before)[0]


def _raw_processed(engine: FakeEngine, request: Request, block: RowBlock) -> None:
    if not request.sampling.greedy and block.stage == "raw":
        block.values[block.positions >= request.prompt_length - 1] /= request.sampling.temperature


def _batch(engine: FakeEngine, request: Request, block: RowBlock) -> None:
    block.values += block.values.dtype.type(0.1 * block.index)


def _padded(engine: FakeEngine, request: Request, block: RowBlock) -> None:
    if "logsumexp" in block.summary:
        block.summary["logsumexp"] = np.logaddexp(block.summary["logsumexp"], np.float32(np.log(24.0)))


def _narrowed(engine: FakeEngine, request: Request, block: RowBlock) -> None:
    block.values[...] = block.values.astype(np.float16)


def _mixed_samples(engine: FakeEngine, request: Request, block: RowBlock) -> None:
    if request.sample_index:
        block.values[block.positions >= request.prompt_length - 1] = 0


def _objects(engine: FakeEngine, request: Request, block: RowBlock) -> None:
    engine.held.append(block.values.tolist())


FAULTS: dict[str, Fault] = {
    "drop_block": _drop_block,
    "repeat_block": _repeat_block,
    "swap_blocks": _swap_blocks,
    "hang_up": _hang_up,
    "extra_row": _extra_row,
    "lose_last_row": _lose_last_row,
    "reuse_buffer": _reuse_buffer,
    "stale_after_close": _stale_after_close,
    "nan": _in_each_block(_nan),
    "shift": _in_each_block(_shift),
    "border": _in_each_block(_border),
    "raw_processed": _in_each_block(_raw_processed),
    "batch_dependent": _in_each_block(_batch),
    "padded_columns": _in_each_block(_padded),
    "narrowed": _in_each_block(_narrowed),
    "mixed_samples": _in_each_block(_mixed_samples),
    "python_objects": _in_each_block(_objects),
}
"""Ways to break the contract, each a trap that engines have shipped:

- ``drop_block``, ``repeat_block``, ``swap_blocks``: the second block is lost; each comes twice; two change
  places.
- ``hang_up``: the stream ends after two items, without an end marker.
- ``extra_row``: one more row after the last token. ``lose_last_row``: the row of the last token is missing.
- ``reuse_buffer``: a block's values are overwritten once the next one is asked for.
- ``stale_after_close``: after an abort, the next request begins with wrong rows.
- ``nan``: each block ends with a NaN. ``shift``: a row holds the logits of the one before it.
- ``border``: the first row of each block repeats the one before the border.
- ``raw_processed``: raw generated rows are divided by the temperature.
- ``batch_dependent``: rows depend on their place in the batch.
- ``padded_columns``: 24 columns of padding take part in ``logsumexp``.
- ``narrowed``: float32 values went through float16. ``mixed_samples``: samples after the first are empty.
- ``python_objects``: a Python float for each value.
"""
