"""The conformance suite of every engine, on SGLang; and that both engines draw the same tokens."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cpu import OPTIONS

import logitscope as ls
from logitscope.engines.sglang import SGLangEngine
from logitscope.errors import ModelLoadError, OptionError
from logitscope.testing import EngineCase, EngineSuite, Oracle, save_tiny, tiny_model

VOCAB = 1001


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("suite") / "llama", "llama"))


@pytest.fixture(scope="module")
def opened(folder: str) -> Iterator[Any]:
    """A tiny Llama in SGLang, prefill in chunks of 16."""
    options = {**OPTIONS, "grammar_backend": "none", "chunked_prefill_size": 16, "max_total_tokens": 4096}
    engine = ls.open(folder, engine="sglang", **options)
    yield engine
    engine.close()


class TestSGLang(EngineSuite):
    @pytest.fixture(scope="class")
    @classmethod
    def case(cls, opened: SGLangEngine) -> EngineCase:
        def again(forward_tokens: int | None) -> Any:
            if forward_tokens is not None:
                pytest.skip("SGLang's chunks are fixed when it starts")
            return ls.open(opened.wrapped, engine="sglang")

        return EngineCase(
            opened,
            oracle=Oracle(tiny_model("llama")),
            name="sglang, llama float32 in chunks of 16",
            eos_token_id=2,
            reopen=again,
            repeatable=False,
        )


def test_both_engines_draw_the_same_tokens(opened: SGLangEngine, folder: str) -> None:
    embedded = ls.open(folder)
    options: dict[str, Any] = {
        "max_new_tokens": 12,
        "ignore_eos": True,
        "temperature": 0.9,
        "top_p": 0.95,
        "repetition_penalty": 1.2,
        "seed": 7,
        "n": 3,
        "return_logits": True,
        "processed": True,
    }
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3]]
    found: Any = opened.generate(prompts, **options)
    expected: Any = embedded.generate(prompts, **options)
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        ours, theirs = np.asarray(one.processed), np.asarray(other.processed)
        both = np.isfinite(ours) & np.isfinite(theirs)
        assert np.abs(ours[both] - theirs[both]).max() < 1e-4
        assert (np.isfinite(ours) == np.isfinite(theirs)).mean() > 0.999


def test_options_are_sglangs_own(folder: str) -> None:
    with pytest.raises(OptionError, match=r"Did you mean tp_size\?"):
        ls.open(folder, engine="sglang", tpsize=2)
    with pytest.raises(OptionError, match="requests_in_flight"):
        ls.open(folder, engine="sglang", requests_in_flight=0)


def test_a_running_engine_takes_no_options_of_its_start(opened: SGLangEngine) -> None:
    with pytest.raises(OptionError, match="runs already"):
        ls.open(opened.wrapped, engine="sglang", tp_size=1)


def test_what_is_no_model_is_an_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelLoadError, match="SGLang did not start"):
        ls.open(tmp_path / "nothing", engine="sglang", **OPTIONS)


def test_more_requests_than_are_in_flight(opened: SGLangEngine) -> None:
    few = ls.open(opened.wrapped, engine="sglang", requests_in_flight=3)
    prompts = [[4 + i] * (1 + i % 7) for i in range(20)]
    batch: Any = few.logits(prompts)
    truth: Any = opened.logits(prompts)
    for one, other in zip(batch, truth, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert np.abs(np.asarray(one) - np.asarray(other)).max() < 1e-4
    few.close()
    assert opened.logits([1, 2]).shape == (2, VOCAB), "closing a view leaves the engine running"
