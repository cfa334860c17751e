"""A real SGLang on the CPU: one engine for the suite, and a plain Transformers forward as the truth."""

from __future__ import annotations

import contextlib
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from cpu import bundled_model, open_sglang

from logitscope.wire import shared

collect_ignore = ["stubs"]
pytest_plugins = ["logitscope.testing.plugin"]
Oracle = Callable[[Any], Any]
DIFFERENCES: dict[str, float] = {}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the worst difference from Transformers in each group of checks."""
    terminalreporter.section("worst differences from Transformers")
    for name, value in DIFFERENCES.items():
        terminalreporter.write_line(f"{value:.1e}  {name}")


def plain_forward(model: str) -> Oracle:
    """``model(ids).logits`` of Transformers in float32: ``[L, vocab]``."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def rows(token_ids: Any) -> Any:
        with torch.no_grad():
            return loaded(torch.tensor([[int(i) for i in token_ids]]), use_cache=False).logits[0].numpy()

    return rows


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The folder of the bundled model."""
    return bundled_model()


@pytest.fixture(scope="session")
def oracle(smollm2: str) -> Oracle:
    return plain_forward(smollm2)


@pytest.fixture(scope="session")
def engine(smollm2: str) -> Iterator[Any]:
    """SmolLM2, overlap scheduling on, prefill in chunks of 64, grammars."""
    opened = open_sglang(smollm2, chunked_prefill_size=64, grammar_backend="xgrammar")
    yield opened
    opened.shutdown()


@pytest.fixture
def close() -> Callable[..., None]:
    """Compares rows with the truth, and remembers the worst difference under a name."""

    def check(name: str, rows: Any, truth: Any, tolerance: float = 2e-4) -> None:
        rows, truth = np.asarray(rows, np.float32), np.asarray(truth, np.float32)
        assert rows.shape == truth.shape
        worst = float(np.abs(rows - truth).max())
        DIFFERENCES[name] = max(worst, DIFFERENCES.get(name, 0.0))
        assert worst <= tolerance, f"{name}: {worst}"
        assert (rows.argmax(-1) == truth.argmax(-1)).all()

    return check


@pytest.fixture
def segments() -> Callable[[], list[pathlib.Path]]:
    """Segments that lie in shared memory now: of the tests' processes, and of those that are gone."""

    def others(path: pathlib.Path) -> bool:
        try:
            return os.getpid() not in [p.pid for p in psutil.Process(int(path.name.split("-")[1])).parents()]
        except psutil.NoSuchProcess:
            return False

    return lambda: [p for p in sorted(pathlib.Path("/dev/shm").glob("logitscope-*.segment")) if not others(p)]


@pytest.fixture
def used(segments: Callable[[], list[pathlib.Path]]) -> Callable[[], list[str]]:
    """Segments that are not free, with their state."""
    names = {shared._HELD: "held", shared._LENT: "lent", shared._READ: "read"}

    def find() -> list[str]:
        states = {}
        for path in segments():
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                _, _, state = shared._STATE.unpack(file.read(shared._STATE.size))
                if state == shared._READ and shared._lock(file.fileno()):
                    continue  # nobody reads any more
                states[path.name] = names.get(state)
        return [f"{name}: {state}" for name, state in states.items() if state]

    return find


@pytest.fixture
def until() -> Callable[..., Any]:
    """Looks until what it finds is right, for half a minute at most; returns the last find."""

    def wait(look: Callable[[], Any], right: Callable[[Any], bool]) -> Any:
        late = time.monotonic() + 30
        while not right(found := look()) and time.monotonic() < late:
            time.sleep(0.1)
        return found

    return wait
