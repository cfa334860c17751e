"""Other models, schedules and shapes of SGLang, and what is left when an engine ends."""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import plain_forward
from cpu import open_sglang

import logitscope as ls
from logitscope.testing import save_tiny

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama untied, no overlap, chunks of 7": (
        "llama",
        {"tie": False},
        {"disable_overlap_schedule": True, "chunked_prefill_size": 7},
    ),
    "gemma2 soft-caps, no overlap": ("gemma2", {}, {"disable_overlap_schedule": True}),
    "qwen3 tied, overlap, mixed chunks": (
        "qwen3",
        {"tie": True},
        {"chunked_prefill_size": 16, "enable_mixed_chunk": True},
    ),
    "llama on two ranks": ("llama", {"tie": False}, {"tp_size": 2}),
}
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 9, "ignore_eos": True}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    family, tiny, options = CASES[request.param]
    folder = str(save_tiny(tmp_path_factory.mktemp("tiny") / family, family, **tiny))
    config = pathlib.Path(folder, "config.json")
    facts = json.loads(config.read_text())
    # SGLang's Gemma-2 reads the activation's older name, which this Transformers does not write.
    config.write_text(json.dumps({"hidden_act": facts.get("hidden_activation"), **facts}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_TEST_RETRACT", "true")  # preempt somebody at every 20th step
        patch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "20")
        if options.get("tp_size", 1) > 1:  # ranks of a CPU are pinned to cores, and have no NCCL
            patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
            patch.setenv("SGLANG_NCCL_SO_PATH", "/nonexistent.so")
            patch.setenv("TORCH_COMPILE_DISABLE", "1")
        engine = open_sglang(folder, skip_tokenizer_init=True, max_total_tokens=2048, **options)
    yield request.param, engine, plain_forward(folder)
    engine.shutdown()


def test_every_row_is_that_of_transformers(case: Any, close: Callable[..., None]) -> None:
    name, engine, oracle = case
    random = np.random.default_rng(0)
    ids = [random.integers(4, 1001, n).tolist() for n in (1, 5, 6, 7, 8, 15, 16, 17, 60, 5)]
    for own, given in zip(engine.logits(input_ids=ids), ids, strict=True):
        assert own.shape == (len(given), 1001)
        close(name, own, oracle(given))
    asked: list[Any] = [True, {"summary": True}, False, {"select": "generated"}] * 2 + [True, True]
    params = [{**GREEDY, "temperature": 0.9 * (i % 2), "frequency_penalty": 0.3} for i in range(len(ids))]
    answers = engine.generate(input_ids=ids, sampling_params=params, return_logits=asked)
    for answer, wanted, given in zip(answers, asked, ids, strict=True):
        found = answer["meta_info"].get("logits")
        assert (found is not None) == bool(wanted)
        if found is not None:
            assert found.token_ids.tolist() == given + answer["output_ids"]
            close(f"{name}, generation", found, oracle(found.token_ids)[found.positions])


def test_hidden_rows_are_rebuilt_by_the_gathered_head(case: Any, close: Callable[..., None]) -> None:
    name, engine, oracle = case
    random = np.random.default_rng(2)
    ids = [random.integers(4, 1001, n).tolist() for n in (1, 6, 17, 60)]
    asked = {"encode": "hidden"}
    for found, given in zip(engine.logits(input_ids=ids, **asked), ids, strict=True):
        assert found.values.hidden.shape[0] == len(given)
        assert found.verification.rows == len(given)
        close(f"{name}, hidden rows", found, oracle(given))
    for answer in engine.generate(input_ids=ids, sampling_params=GREEDY, return_logits=asked):
        found = answer["meta_info"]["logits"]
        close(f"{name}, hidden rows", found, oracle(found.token_ids)[found.positions])


def test_tokens_are_drawn_as_in_the_embedded_engine(case: Any, close: Callable[..., None]) -> None:
    name, engine, oracle = case
    ours = ls.open(engine, engine="sglang")
    embedded = ls.open(engine.server_args.model_path)
    random = np.random.default_rng(3)
    prompts = [random.integers(4, 1001, n).tolist() for n in (60, 60, 5, 33, 60, 60, 17, 60, 60, 60)]
    options: dict[str, Any] = {"temperature": 0.9, "top_k": 50, "repetition_penalty": 1.3, "seed": 5}
    options |= {"max_new_tokens": 40, "ignore_eos": True, "return_logits": True, "processed": True}
    found: Any = ours.generate(prompts, **options)
    expected: Any = embedded.generate(prompts, **options)
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        close(f"{name}, draws", one.logits, oracle(one.logits.token_ids)[:-1])
        chosen = one.processed.target_logit()
        assert np.isfinite(chosen).all()
        assert np.abs(chosen - other.processed.target_logit()).max() < 1e-3
    ours.close()


def test_a_preempted_request_has_every_row(case: Any, close: Callable[..., None]) -> None:
    name, engine, oracle = case
    random = np.random.default_rng(1)
    ids = [random.integers(4, 1001, 60).tolist() for _ in range(12)]
    params = {**GREEDY, "max_new_tokens": 60}
    answers = engine.generate(input_ids=ids, sampling_params=params, return_logits=True)
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0, "some were preempted"
    for answer in answers:
        found = answer["meta_info"]["logits"]
        assert len(found) == 60 + 60 - 1
        close(f"{name}, preemption", found, oracle(found.token_ids)[:-1])


def test_hidden_rows_of_a_model_in_bfloat16(tmp_path: pathlib.Path) -> None:
    folder = str(save_tiny(tmp_path / "tiny", "llama", dtype="bfloat16"))
    engine = open_sglang(folder, skip_tokenizer_init=True, max_total_tokens=2048, dtype="bfloat16")
    ids = np.random.default_rng(4).integers(4, 1001, 40).tolist()
    for asked in ({"max_new_tokens": 0}, GREEDY):
        plain, kept = (
            engine.generate(input_ids=ids, sampling_params=asked, return_logits=how)["meta_info"]["logits"]
            for how in (True, {"encode": "hidden"})
        )
        assert (plain.model_dtype, kept.values.hidden.dtype.name) == ("float32", "bfloat16")
        assert kept.nbytes * 30 < plain.nbytes * 2
        assert kept.verification.max_abs_difference <= kept.verification.bound
        assert np.abs(np.asarray(kept) - np.asarray(plain)).max() <= kept.verification.bound
        assert (np.asarray(kept).dtype, kept.token_ids.tolist()) == (np.float32, plain.token_ids.tolist())
    engine.shutdown()


PROGRAM = """
import os, sys
sys.path.insert(0, {here!r})
from cpu import open_sglang
if __name__ == "__main__":
    engine = open_sglang({folder!r}, skip_tokenizer_init=True, max_total_tokens=2048)
    params = dict(temperature=0, max_new_tokens=4)
    held = engine.generate(input_ids=[5, 6, 7], sampling_params=params, return_logits=True)
    before = held["meta_info"]["logits"].entropy()
    {end}
    assert (held["meta_info"]["logits"].entropy() == before).all()
    print("held")
"""


@pytest.mark.parametrize("end", ["engine.shutdown()", "os.kill(os.getpid(), 9)"])
def test_nothing_stays_in_shared_memory(
    end: str, tmp_path: pathlib.Path, segments: Callable[[], list[pathlib.Path]]
) -> None:
    from logitscope.wire import sweep

    sweep()
    before = segments()
    folder = str(save_tiny(tmp_path / "tiny", "llama"))
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(here=str(pathlib.Path(__file__).parent), folder=folder, end=end))
    done = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, check=False)
    if "kill" in end:
        assert done.returncode == -signal.SIGKILL
        _wait_until(lambda: bool(sweep()) or segments() == before)  # the next start sweeps
    else:
        assert done.stdout.endswith("held\n")
    assert segments() == before


def _wait_until(true: Callable[[], bool], *, seconds: float = 30) -> None:
    import time

    late = time.monotonic() + seconds
    while not true() and time.monotonic() < late:
        time.sleep(0.2)
