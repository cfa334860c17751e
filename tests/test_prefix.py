"""Prompts that begin as earlier ones did: their rows are those of a cold run, and cost no forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import logitscope as ls
from logitscope.engines.transformers.prefix import SHORTEST, PrefixCache, common
from logitscope.errors import OptionError
from logitscope.rows import Select
from logitscope.testing import FAMILIES, forward_logits, tiny_model, tiny_tokenizer
from logitscope.testing.asserts import assert_rows_close

LIMIT = 100 * 2**20
RANDOM = np.random.default_rng(7)
CONTEXT = RANDOM.integers(4, 900, 90).tolist()


def opened(model: Any = None, **options: Any) -> Any:
    return ls.open(model or tiny_model("llama"), **{"prefix_cache_bytes": LIMIT, **options})


class Counting:
    """Counts the tokens that a model reads."""

    def __init__(self, engine: Any) -> None:
        self.tokens, run = 0, engine._model.run

        def counted(token_ids: Any, **options: Any) -> Any:
            self.tokens += token_ids.numel()
            return run(token_ids, **options)

        engine._model.run = counted

    def taken(self) -> int:
        found, self.tokens = self.tokens, 0
        return found


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_behind_a_cached_prefix_are_those_of_a_plain_forward(family: str) -> None:
    model = tiny_model(family)
    engine = opened(model)
    count = Counting(engine)
    vocab = engine.vocab_size
    longer = [*CONTEXT, *range(10, 40)]
    other = [*CONTEXT[:70], *range(50, 60)]
    for ids in (CONTEXT, longer, other, CONTEXT[:80], longer, CONTEXT):
        rows = engine.logits(ids)
        assert rows.shape == (len(ids), vocab)
        assert_rows_close(rows.values, forward_logits(model, ids), dtype="float32")
    read = count.taken()
    if engine.prefixes is not None:
        assert read < 90 + 30 + 10 + 5, "only what was new"
        assert len(engine.prefixes) <= 2


def test_the_same_prompt_costs_no_forward_and_has_the_same_bits() -> None:
    engine = opened()
    count = Counting(engine)
    first = engine.logits(CONTEXT)
    assert count.taken() == 90
    again = engine.logits(CONTEXT, summary=True, select=Select(slice(3, None, 2)))
    hidden = engine.logits(CONTEXT, encode="hidden")
    assert count.taken() == 0
    assert np.array_equal(again.to_numpy(), first.to_numpy()[3::2])
    assert np.array_equal(hidden.to_numpy(), first.to_numpy())


def test_continuations_of_one_context_read_it_once() -> None:
    model = tiny_model("llama")
    engine = opened(model)
    count = Counting(engine)
    prompts = [[*CONTEXT, *RANDOM.integers(4, 900, n).tolist()] for n in (5, 9, 2, 7)]
    for found, ids in zip(engine.logits(prompts), prompts, strict=True):
        assert found.token_ids.tolist() == ids
        assert_rows_close(found.values, forward_logits(model, ids), dtype="float32")
    assert count.taken() <= 90 + 9 + 9 + 9 + 9


def test_prompts_that_share_little_run_together_as_ever() -> None:
    engine = opened()
    prompts = [RANDOM.integers(4, 900, 100).tolist() for _ in range(4)]
    engine.logits(prompts)
    assert len(engine.prefixes) == 0


@pytest.mark.parametrize("n", [1, 3])
def test_generation_behind_a_cached_prefix(n: int) -> None:
    model = tiny_model("llama")
    cold, warm = ls.open(model), opened(model)
    warm.logits(CONTEXT)
    count = Counting(warm)
    options: dict[str, Any] = {"max_new_tokens": 6, "return_logits": True, "ignore_eos": True, "n": n}
    for ids in (CONTEXT, [*CONTEXT, 5, 6, 7], CONTEXT[:75]):
        ours, theirs = warm.generate(ids, **options), cold.generate(ids, **options)
        for a, b in zip(ours if n > 1 else [ours], theirs if n > 1 else [theirs], strict=True):
            assert np.array_equal(a.token_ids, b.token_ids)
            assert np.array_equal(a.logits.positions, b.logits.positions)
            assert_rows_close(a.logits.values, b.logits.values, dtype="float32")
    assert count.taken() <= 3 * (4 + 5 * n)
    after = warm.logits(CONTEXT)
    assert_rows_close(after.values, forward_logits(model, CONTEXT), dtype="float32")


def test_decoding_does_not_change_what_is_kept() -> None:
    model = tiny_model("llama")
    engine = opened(model)
    made = engine.generate(CONTEXT, max_new_tokens=9, ignore_eos=True, return_logits=True)
    for tail in ([], [8, 9, 10], made.token_ids[:4].tolist()):
        ids = [*CONTEXT, *tail]
        assert_rows_close(engine.logits(ids).values, forward_logits(model, ids), dtype="float32")


def test_what_is_kept_stays_within_its_bytes() -> None:
    engine = opened(prefix_cache_bytes=400_000)
    model = engine.model
    for seed in range(12):
        ids = np.random.default_rng(seed).integers(4, 900, 70 + seed).tolist()
        assert_rows_close(engine.logits(ids).values, forward_logits(model, ids), dtype="float32")
        assert engine.prefixes.nbytes <= 400_000
    assert 0 < len(engine.prefixes) < 12
    tiny = opened(prefix_cache_bytes=1000)
    tiny.logits(CONTEXT)
    assert len(tiny.prefixes) == 0


def test_changed_weights_forget_what_was_read() -> None:
    model: Any = tiny_model("llama")
    engine = opened(model)
    before = engine.logits(CONTEXT).to_numpy()
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    after = engine.logits(CONTEXT)
    assert np.abs(after.to_numpy() - before).max() > 1e-3
    assert_rows_close(after.values, forward_logits(model, CONTEXT), dtype="float32")


def test_a_model_object_keeps_nothing_unless_asked(tmp_path: Any) -> None:
    model: Any = tiny_model("llama")
    assert ls.open(model).prefixes is None
    model.save_pretrained(tmp_path)
    engine = ls.open(str(tmp_path))
    assert engine.prefixes is not None
    engine.logits(CONTEXT)
    assert engine.prefixes.nbytes > 0
    assert ls.open(str(tmp_path), prefix_cache_bytes=0).prefixes is None
    with pytest.raises(OptionError, match="prefix_cache_bytes"):
        ls.open(str(tmp_path), prefix_cache_bytes=-1)


def test_extras_are_read_anew_and_right() -> None:
    engine = opened(tiny_model("llama"), tokenizer=tiny_tokenizer())
    engine.logits(CONTEXT)
    rows = engine.logits(CONTEXT, hidden_states=[0, 1], attentions=[0])
    plain = ls.open(engine.model).logits(CONTEXT, hidden_states=[0, 1], attentions=[0])
    assert np.allclose(rows.hidden_states[1], plain.hidden_states[1], atol=1e-5)
    assert np.allclose(rows.attentions[0], plain.attentions[0], atol=1e-5)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=200), min_size=1, max_size=8), st.data())
@settings(max_examples=60, deadline=None)
def test_what_is_found_is_a_beginning_that_was_kept(prompts: list[list[int]], data: Any) -> None:
    cache = PrefixCache(data.draw(st.sampled_from([20_000, 10**9])))
    model: Any = tiny_model("llama")
    from logitscope.engines.transformers.cache import new_cache

    for prompt in prompts:
        ids = np.array(prompt * (1 + 2 * SHORTEST // len(prompt)), np.int32)
        slabs = new_cache(model.config, len(ids))
        marks = torch.from_numpy(ids.astype(np.float32)).reshape(1, 1, -1, 1)
        for layer in slabs.layers:
            layer.update(marks.clone(), -marks)
        cache.keep(ids, slabs, marks.reshape(-1, 1))
        assert cache.nbytes <= cache.limit_bytes
    for prompt in prompts:
        ids = np.array(prompt * (1 + 2 * SHORTEST // len(prompt)), np.int32)
        found = cache.find(ids)
        if cache.limit_bytes > 10**6:
            assert found is not None
            assert found.tokens >= len(ids) * 3 // 4
        if found is not None:
            assert found.tokens >= SHORTEST
            assert found.hidden[:, 0].tolist() == ids[: found.tokens].tolist()
            filled = new_cache(model.config, len(ids))
            found.fill(filled)
            for layer in filled.layers:
                assert layer.get_seq_length() == found.tokens
                assert layer.keys[0, 0, :, 0].tolist() == ids[: found.tokens].tolist()
                assert layer.values[0, 0, :, 0].tolist() == (-ids[: found.tokens]).tolist()


def test_common_beginnings() -> None:
    one = np.array([1, 2, 3], np.int32)
    for other, tokens in (([1, 2, 3, 4], 3), ([1, 2], 2), ([5], 0), ([1, 9, 3], 1)):
        assert common(one, np.array(other, np.int32)) == tokens
