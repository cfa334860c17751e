"""Several engines as one: worker processes, or several servers."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from transformers import AutoModelForCausalLM

import logitscope as ls
from logitscope.engines.parallel import ParallelEngine, _shared_out
from logitscope.errors import (
    ConnectionFailedError,
    IdentityMismatchError,
    LogitscopeError,
    ModelNotFoundError,
    OptionError,
    SelectError,
)
from logitscope.rows import End, Request, Select
from logitscope.testing import EngineCase, EngineSuite, Oracle, save_tiny, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Any]:
    with contextlib.closing(ls.open(str(folder), workers=2)) as found:
        yield found


class TestParallel(EngineSuite):
    @pytest.fixture(scope="class")
    @classmethod
    def case(cls, engine: Any, folder: Path) -> EngineCase:
        model = AutoModelForCausalLM.from_pretrained(folder)
        return EngineCase(engine, Oracle(model), "two workers, llama float32", eos_token_id=2)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(4, 900, n).tolist() for n in random.integers(1, 60, count)]


def test_results_are_those_of_one_engine_in_order(engine: Any, folder: Path) -> None:
    plain = ls.open(str(folder))
    ids = prompts(70)
    for ours, theirs, own in zip(engine.logits(ids), plain.logits(ids), ids, strict=True):
        assert ours.token_ids.tolist() == own
        assert np.allclose(ours.to_numpy(), theirs.to_numpy(), atol=1e-5)
    made = engine.generate(ids[:9], max_new_tokens=5, n=2, temperature=1.0, seed=4, return_logits=True)
    wanted = plain.generate(ids[:9], max_new_tokens=5, n=2, temperature=1.0, seed=4)
    assert [one.token_ids.tolist() for one in made] == [one.token_ids.tolist() for one in wanted]
    assert engine.identity.weights_hash == plain.identity.weights_hash
    hidden = engine.logits(ids[:5], encode="hidden")
    assert np.allclose(hidden[3].to_numpy(), plain.logits(ids[3]).to_numpy(), atol=1e-5)
    cut = engine.logits(ids[:5], select=Select(top_k=3), summary=True)
    assert np.array_equal(cut[2].values.ids, plain.logits(ids[2], select=Select(top_k=3)).values.ids)


def test_both_work_and_each_has_its_cores(engine: Any) -> None:
    processes = [psutil.Process(worker._process.pid) for worker in engine._workers]
    before = [sum(process.cpu_times()[:2]) for process in processes]
    engine.logits(prompts(300, 1), select=Select(vocab=None), summary=True)
    after = [sum(process.cpu_times()[:2]) for process in processes]
    assert all(b > a for a, b in zip(before, after, strict=True))
    if hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1:
        one, other = (set(process.cpu_affinity()) for process in processes)
        assert not one & other


def test_a_stream_that_is_left_and_one_that_is_read_slowly(engine: Any) -> None:
    requests = engine.requests(prompts(60, 2))
    stream = engine.stream(requests)
    next(stream)
    stream.close()
    ends = 0
    for item in engine.stream(requests):
        ends += isinstance(item, End)
        time.sleep(0.001)
    assert ends == 60


def test_errors_of_workers_are_raised_here(engine: Any, folder: Path) -> None:
    with pytest.raises(SelectError, match="outside"):
        engine.logits([4, 5], select=Select([9]))
    with pytest.raises(ModelNotFoundError):
        ls.open(str(folder / "nothing"), workers=2)
    assert engine.logits([4, 5]).shape == (2, 1001)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("x", {"workers": 0}),
        ("x", {"workers": 1.5}),
        ("x", {"workers": 2, "devices": ["cpu"]}),
        ("x", {"devices": []}),
        ("x", {"devices": "cpu"}),
        (tiny_model("llama"), {"workers": 2}),
        ([], {}),
        (["http://a"], {"workers": 2}),
    ],
    ids=str,
)
def test_what_cannot_be_opened_together(model: Any, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        ls.open(model, **options)


def test_a_killed_worker_is_a_named_error_and_nothing_stays(folder: Path) -> None:
    engine = ls.open(str(folder), devices=["cpu", "cpu"])
    assert isinstance(engine, ParallelEngine)
    processes = [worker._process for worker in engine._workers]
    os.kill(processes[0].pid, signal.SIGKILL)
    processes[0].wait(10)
    with pytest.raises(ConnectionFailedError):
        engine.logits(prompts(40))
    engine.close()
    assert all(process.wait(15) is not None for process in processes)
    with pytest.raises(LogitscopeError):
        engine.logits([4])


def test_workers_end_with_their_owner(folder: Path) -> None:
    import subprocess
    import sys

    code = (
        "import logitscope as ls, os, sys\n"
        f"engine = ls.open({str(folder)!r}, workers=2)\n"
        "print(*[worker._process.pid for worker in engine._workers], flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    late = time.monotonic() + 20
    pids = [int(pid) for pid in found.stdout.split()]
    assert len(pids) == 2
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < late, "a worker outlives its owner"
        time.sleep(0.05)


def test_several_servers_share_the_work(folder: Path, engine: Any) -> None:
    addresses = [one.address for one in engine.engines]
    keys = [worker._key for worker in engine._workers]
    with pytest.raises(LogitscopeError, match="key"):
        ls.open(addresses)
    with contextlib.closing(ls.open(addresses[:1], api_key=keys[0])) as one:
        assert one.logits([[4, 5], [6]]).lengths.tolist() == [2, 1]


def test_engines_of_different_models_do_not_share() -> None:
    engines = [ls.open("fake", engine="fake", vocab_size=size) for size in (50, 60)]
    with pytest.raises(IdentityMismatchError, match="vocab_size"):
        ParallelEngine(engines)


def test_shares_cover_everything_once_and_begin_with_the_longest() -> None:
    random = np.random.default_rng(0)
    requests = [Request(np.zeros(n, np.int32)) for n in random.integers(1, 3000, 97)]
    for engines in (1, 2, 5):
        shares = _shared_out(requests, engines)
        assert sorted(i for share in shares for i in share) == list(range(97))
        lengths = [requests[i].prompt_length for share in shares for i in share]
        assert lengths == sorted(lengths, reverse=True)
        assert len(shares) >= 2 * engines
