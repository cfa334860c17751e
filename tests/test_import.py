"""``import logitscope`` is light, and stays light."""

from __future__ import annotations

import json
import subprocess
import sys
import time

HEAVY = (
    "fastapi",
    "jax",
    "pandas",
    "pyarrow",
    "rich",
    "tensorflow",
    "torch",
    "transformers",
    "typer",
)
CORE = (
    "logitscope",
    "logitscope.encodings",
    "logitscope.engines",
    "logitscope.engines.fake",
    "logitscope.engines.registry",
    "logitscope.errors",
    "logitscope.logits",
    "logitscope.numerics",
    "logitscope.rows",
    "logitscope.tensors",
    "logitscope.testing",
)


def loaded_after(statement: str) -> set[str]:
    """Top-level modules that a fresh Python holds after the statement."""
    report = "import json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    code = f"{statement}\n{report}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def seconds(statement: str) -> float:
    """Seconds of a fresh Python that runs the statement."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - started


def test_import_loads_no_heavy_library() -> None:
    assert not loaded_after("import logitscope").intersection(HEAVY)


def test_core_layers_load_no_heavy_library() -> None:
    assert not loaded_after(f"import {', '.join(CORE)}").intersection(HEAVY)


def test_command_line_starts_without_torch() -> None:
    assert not loaded_after("import logitscope.cli").intersection(
        {"jax", "tensorflow", "torch", "transformers"}
    )


def test_import_takes_under_300_ms() -> None:
    pairs = [(seconds("import logitscope"), seconds("pass")) for _ in range(7)]
    assert min(full for full, _ in pairs) - min(bare for _, bare in pairs) < 0.3
