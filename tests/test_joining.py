"""Requests that join a generation between its steps, and those that leave it."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from test_server import health, serving, until

import logitscope as ls
from logitscope.engines.base import Engine
from logitscope.engines.fake import FakeEngine
from logitscope.logits.collect import Collector
from logitscope.rows import End, Request, Sampling
from logitscope.testing import tiny_model


@dataclasses.dataclass
class Script:
    """Joins requests after so many steps of the first one; forgets some."""

    later: dict[int, list[Request]]
    steps: int = 0
    unwanted: frozenset[int] = frozenset()
    leave_after: int = 0

    def arrivals(self, room: int) -> Sequence[Request]:
        self.steps += 1
        found = self.later.pop(self.steps, [])
        assert len(found) <= room
        return found

    def wanted(self, index: int) -> bool:
        return index not in self.unwanted or self.steps < self.leave_after


def run(engine: Engine, first: list[Request], script: Script) -> list[Any]:
    every = [*first, *(one for _, ones in sorted(script.later.items()) for one in ones)]
    collector = Collector(every, identity=engine.identity, head=engine.head)
    for item in engine.stream(first, joining=script):
        if isinstance(item, End):
            collector.finish(item)
        else:
            collector.add(item)
    return collector.results()


def requests(engine: Engine, prompts: Any, new: int, **options: Any) -> list[Request]:
    return engine.requests(prompts, max_new_tokens=new, summary=True, **options)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "qwen3"])
@pytest.mark.parametrize("drawn", [False, True])
def test_who_joins_gets_what_it_gets_alone(family: str, drawn: bool) -> None:
    engine = ls.open(tiny_model(family))
    assert engine.joins
    sampling = Sampling(temperature=0.9, seed=4, ignore_eos=True) if drawn else Sampling(ignore_eos=True)
    first = requests(engine, [[5, 6, 7], list(range(4, 40))], 12, sampling=sampling, processed=drawn)
    two = requests(engine, [list(range(50, 90)), [9]], 9, sampling=sampling, n=2)
    late = requests(engine, [[8] * 5], 7, sampling=sampling, hidden_states=(1,))
    script = Script({1: two[:1], 4: two[1:], 10: late})
    found = run(engine, first, script)
    for one, request in zip(found, [*first, *two, *late], strict=True):
        collector = Collector([request], identity=engine.identity, head=engine.head)
        for item in engine.stream([request]):
            if isinstance(item, End):
                collector.finish(item)
            else:
                collector.add(item)
        (alone,) = collector.results()
        assert one.end.generated_ids.tolist() == alone.end.generated_ids.tolist()
        assert np.allclose(one.logits.to_numpy(), alone.logits.to_numpy(), atol=1e-4)
        assert one.logits.positions.tolist() == alone.logits.positions.tolist()
        for layer, states in alone.logits.hidden_states.items():
            assert np.allclose(one.logits.hidden_states[layer], states, atol=1e-4)


def test_who_is_not_wanted_costs_no_more_steps() -> None:
    engine = ls.open(tiny_model("llama"))
    first = requests(engine, [[5, 6], [7, 8, 9]], 40, sampling=Sampling(ignore_eos=True))
    script = Script({}, unwanted=frozenset({0, 1}), leave_after=5)
    items = list(engine.stream(first, joining=script))
    assert not any(isinstance(item, End) for item in items)
    assert script.steps == 5
    script = Script({}, unwanted=frozenset({1}), leave_after=5)
    items = list(engine.stream(first, joining=script))
    assert [item.index for item in items if isinstance(item, End)] == [0]
    assert sum(len(item.token_ids) for item in items if item.index == 1 and not isinstance(item, End)) == 5


def test_an_engine_that_cannot_is_not_asked() -> None:
    engine = FakeEngine.open("fake", vocab_size=50)
    script = Script({1: requests(engine, [[1]], 3)})
    ends = [i for i in engine.stream(requests(engine, [[2, 3]], 5), joining=script) if isinstance(i, End)]
    assert (len(ends), script.steps) == (1, 0)


def counted(engine: Any) -> list[int]:
    """Sequences of each forward of one token."""
    seen: list[int] = []
    original: Callable[..., Any] = engine._model.run

    def run(ids: Any, **options: Any) -> Any:
        if ids.shape[1] == 1:
            seen.append(len(ids))
        time.sleep(0.003)
        return original(ids, **options)

    engine._model.run = run
    return seen


def test_generations_of_many_clients_share_forwards() -> None:
    engine = ls.open(tiny_model("llama"))
    options = {"max_new_tokens": 60, "ignore_eos": True, "return_logits": True}
    prompts = [[5 + i, 6, 7][: 1 + i % 3] for i in range(6)]
    alone = [engine.generate(prompt, **options) for prompt in prompts]
    seen = counted(engine)
    with serving(engine) as address, contextlib.closing(ls.open(address)) as client:
        found: dict[int, Any] = {}

        def ask(i: int) -> None:
            time.sleep(0.03 * i)
            found[i] = client.generate(prompts[i], **options)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert health(address)["served_sequences"] == 6
    for i, one in enumerate(alone):
        assert found[i].token_ids.tolist() == one.token_ids.tolist()
        assert np.allclose(found[i].logits.to_numpy(), one.logits.to_numpy(), atol=1e-4)
    assert max(seen) >= 4
    assert len(seen) < 4 * 60


def test_a_client_that_leaves_ends_its_generation_and_no_other() -> None:
    engine = ls.open(tiny_model("llama"))
    seen = counted(engine)
    with (
        serving(engine) as address,
        contextlib.closing(ls.open(address)) as client,
        contextlib.closing(ls.open(address)) as other,
    ):
        stays: list[Any] = []
        thread = threading.Thread(
            target=lambda: stays.append(client.generate([4, 5], max_new_tokens=150, ignore_eos=True))
        )
        thread.start()
        until(lambda: len(seen) > 3)
        stream = other.stream(other.requests([6, 7], max_new_tokens=155, sampling=Sampling(ignore_eos=True)))
        for _ in range(5):
            next(stream)
        assert 2 in seen
        stream.close()  # type: ignore[attr-defined]
        until(lambda: seen[-3:] == [1, 1, 1] or not thread.is_alive())
        thread.join()
        assert len(stays[0].token_ids) == 150
        until(lambda: health(address)["buffered_bytes"] == 0)
        assert seen.count(2) < 60
