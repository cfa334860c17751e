"""What the conformance suite needs to know of an engine: the engine, its oracle, and a few facts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray

from logitscope.engines.base import Engine
from logitscope.engines.results import Generation
from logitscope.logits import Logits, LogitsBatch
from logitscope.rows import End, Ids, RowBlock, Stream
from logitscope.testing.asserts import assert_rows_close
from logitscope.tokenizer import Tokenizer

Oracle: TypeAlias = Callable[[Sequence[int] | NDArray[Any]], NDArray[Any]]
"""Token ids ``[L]`` to true rows ``[L, vocab_size]``, float64 or float32."""

ENGINE_PROPERTY = "engine"
MEASURED_PROPERTY = "measured"
"""Under these names a check tells the report its case, and what it measured."""


@dataclasses.dataclass
class EngineCase:
    """An engine under test.

    Attributes:
        engine: opened; the suite uses it for all its checks and never closes it.
        oracle: the true rows of a sequence.
        name: what the report calls it.
        eos_token_id: an id that ends a generation; None when the model has none.
        reopen: opens the same model once more, with a forward of at most so many tokens when a number
            is given; None when that costs too much.
        repeatable: whether the same call gives the same bits again.
        measured: what the checks published, largest value by name.
    """

    engine: Engine
    oracle: Oracle
    name: str
    eos_token_id: int | None = None
    reopen: Callable[[int | None], Engine] | None = None
    repeatable: bool = True
    measured: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def dtype(self) -> str:
        """Name of the dtype that the model computes in, which decides the budgets."""
        return self.engine.identity.dtype

    @property
    def vocab_size(self) -> int:
        """Columns of every row."""
        return self.engine.vocab_size

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's tokenizer; without one the check is skipped."""
        if self.engine.tokenizer is None:
            pytest.skip("the engine has no tokenizer")
        return self.engine.tokenizer

    def opened(self, forward_tokens: int | None = None) -> Engine:
        """A second engine over the same model; the check is skipped where there is none."""
        if self.reopen is None:
            pytest.skip("the case does not open the model again")
        return self.reopen(forward_tokens)

    def require(self, capability: str) -> None:
        """Skip the check unless the engine has a capability of that name."""
        if not getattr(self.engine.capabilities, capability):
            pytest.skip(f"the engine does not give {capability}")

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        """Ids without special tokens, the same for the same arguments."""
        draw = np.random.default_rng([seed, length])
        special = self.special_token_ids
        allowed = np.setdiff1d(np.arange(self.vocab_size), np.asarray(special, dtype=np.int64))
        return [int(i) for i in draw.choice(allowed, length)]

    @property
    def special_token_ids(self) -> list[int]:
        """Ids that are no plain text: the tokenizer's special ones, and end of sequence."""
        tokenizer = self.engine.tokenizer
        found = [] if tokenizer is None else sorted(tokenizer.special_ids)
        return found if self.eos_token_id is None else [*found, self.eos_token_id]

    def publish(self, what: str, value: float) -> None:
        """Keep the largest value of a name for the report."""
        self.measured[what] = max(value, self.measured.get(what, value))

    def assert_true(self, logits: Logits, *, what: str = "rows") -> None:
        """Check every kept value of a result against the oracle, row by row, and publish the worst."""
        read = logits.token_ids[: int(logits.positions.max()) + 1] if len(logits) else logits.token_ids
        truth = self.oracle(read)[logits.positions]
        worst = assert_rows_close(logits.values, truth, dtype=self.dtype, what=what)
        self.publish("worst difference from the oracle", worst)

    # -- calls with the result's type ------------------------------------------------------------------

    def score(self, inputs: Any, **options: Any) -> Logits:
        """`Engine.logits` of one input."""
        result = self.engine.logits(inputs, **options)
        assert isinstance(result, Logits), f"one input gave {type(result).__name__}"
        return result

    def score_batch(self, inputs: Any, **options: Any) -> LogitsBatch:
        """`Engine.logits` of a list of inputs."""
        result = self.engine.logits(inputs, **options)
        assert isinstance(result, LogitsBatch), f"a batch gave {type(result).__name__}"
        return result

    def generate(self, inputs: Any, **options: Any) -> Generation:
        """`Engine.generate` of one input, with all raw rows unless told otherwise."""
        result = self.engine.generate(inputs, **{"return_logits": True, **options})
        assert isinstance(result, Generation), f"one input gave {type(result).__name__}"
        return result

    def generate_batch(self, inputs: Any, **options: Any) -> list[Generation]:
        """`Engine.generate` of a list of inputs or of several samples."""
        result = self.engine.generate(inputs, **{"return_logits": True, **options})
        assert isinstance(result, list), f"a batch gave {type(result).__name__}"
        return result


@dataclasses.dataclass
class Streamed:
    """One request's part of a stream, put together by the suite's own, slow rules."""

    positions: NDArray[np.int64]
    values: Any
    processed_positions: NDArray[np.int64]
    token_ids: Ids
    end: End
    blocks: int


def read_stream(stream: Stream | Iterable[RowBlock | End], requests: int) -> list[Streamed]:
    """Read a stream to its end, copying each block, and check what holds for every stream.

    Raises:
        AssertionError: a block after its request's end, positions that do not ascend, an end that counts
            other rows than came, or a request without an end.
    """
    blocks: dict[int, list[RowBlock]] = {i: [] for i in range(requests)}
    ends: dict[int, End] = {}
    for item in stream:
        assert 0 <= item.index < requests, f"request {item.index} of {requests}"
        assert item.index not in ends, f"request {item.index} goes on after its end"
        if isinstance(item, End):
            ends[item.index] = item
        else:
            blocks[item.index].append(dataclasses.replace(item, values=_copied(item.values)))
    assert sorted(ends) == list(range(requests)), f"ends of {sorted(ends)}, of {requests} requests"
    return [_streamed(blocks[i], ends[i]) for i in range(requests)]


def _copied(values: Any) -> Any:
    return None if values is None else np.array(values)


def _streamed(blocks: list[RowBlock], end: End) -> Streamed:
    raw = [b for b in blocks if b.stage == "raw" and len(b)]
    processed = [b for b in blocks if b.stage == "processed" and len(b)]
    positions, processed_positions = (
        np.concatenate([np.empty(0, np.int64), *[b.positions for b in part]]) for part in (raw, processed)
    )
    for found, stated in ((positions, end.rows), (processed_positions, end.processed_rows)):
        assert (np.diff(found) > 0).all(), f"request {end.index}: positions {found} do not ascend"
        assert len(found) == stated, f"request {end.index}: {len(found)} rows, its end states {stated}"
    brought = [b.token_ids for b in blocks if len(b.token_ids)]
    ids = np.concatenate([np.empty(0, np.int32), *brought])
    assert not brought or np.array_equal(ids, end.generated_ids), (
        f"request {end.index}: other ids than its end"
    )
    kept = [b.values for b in raw if b.values is not None]
    values = np.concatenate(kept) if kept else None
    return Streamed(positions, values, processed_positions, end.generated_ids, end, len(blocks))
