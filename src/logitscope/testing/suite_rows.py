"""Conformance checks of what rows hold: values, alignment, columns, selections, summaries, dtypes."""

# ruff: noqa: D102 - a check's name is its statement

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from logitscope import rows
from logitscope.encodings import ENCODINGS, Dense, HiddenRows, Quantized, QuantizedRows
from logitscope.errors import HiddenRowsWarning, MemoryLimitError, OptionError, SelectError, UnavailableError
from logitscope.logits import Logits
from logitscope.logits.cut import CutRows
from logitscope.numerics import reference
from logitscope.rows import HIDDEN_FORMS, SUMMARIES, SUMMARY_DTYPES, Select
from logitscope.testing.asserts import (
    BUDGETS,
    assert_aligned,
    assert_complete,
    assert_rows_close,
    assert_same_bits,
    rounded,
)
from logitscope.testing.case import EngineCase, read_stream

_SUMMARY_TOLERANCE = {
    "logsumexp": 1e-5,
    "max": 0.0,
    "entropy": 1e-4,
    "varentropy": 5e-4,
    "target_logit": 0.0,
    "target_logprob": 1e-5,
    "top1_margin": 1e-6,
}
"""Absolute, between float32 summaries and the float64 reference over the same values."""

LENGTHS = (1, 2, 9, 17, 24, 9, 23, 24)
QUANTIZED = [name for name, encoding in ENCODINGS.items() if isinstance(encoding, Quantized)]
_NAMED = ("all", "prompt", "generated", "last")
CUTS: tuple[dict[str, Any], ...] = (
    {"top_k": 1},
    {"top_k": 20},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"threshold": 1.5},
    {"sample": 8, "temperature": 0.7, "seed": 3},
    {"vocab": (7, 3, 90)},
    {"vocab": (7, 3, 90), "logsumexp": False},
)


class RowsSuite:
    """The oracle's part of the suite: traps 3, 4, 12, 13 and 19. A subclass gives a fixture ``case``."""

    def test_trap_19_scoring_rows_are_those_of_a_plain_forward(self, case: EngineCase) -> None:
        scored = case.score(case.prompt(33))
        assert scored.shape == (33, case.vocab_size)
        assert_aligned(scored, case.prompt(33), prompt_length=33)
        case.assert_true(scored)

    def test_trap_19_summaries_without_values_are_those_of_a_plain_forward(self, case: EngineCase) -> None:
        scored = case.score(case.prompt(33), select=Select(vocab=None), summary=True)
        truth = case.oracle(case.prompt(33))
        wanted = reference.summaries(truth, scored.targets, ("logsumexp", "max", "target_logit"))
        budget = BUDGETS[case.dtype]
        for name, true in wanted.items():
            allowed = budget.worst * budget.eps * np.abs(truth).max()
            found = scored.summary[name]
            assert np.allclose(found, true, rtol=0, atol=allowed, equal_nan=True), name

    def test_trap_19_a_prompt_of_one_token(self, case: EngineCase) -> None:
        scored = case.score(case.prompt(1))
        assert scored.shape == (1, case.vocab_size)
        assert len(scored.prompt) == 0
        assert len(scored.next) == 1
        case.assert_true(scored)

    def test_trap_04_generated_rows_are_those_of_teacher_forcing(self, case: EngineCase) -> None:
        made = case.generate(case.prompt(12), max_new_tokens=12, ignore_eos=True)
        assert len(made.token_ids) == 12
        assert_complete(made)
        assert made.logits is not None
        case.assert_true(made.logits)
        assert made.logits.kinds == ["prompt"] * 11 + ["generated"] * 12
        assert np.array_equal(made.logits.generated.argmax(), made.token_ids)

    def test_trap_04_generating_from_one_token(self, case: EngineCase) -> None:
        made = case.generate(case.prompt(1), max_new_tokens=4, ignore_eos=True)
        assert_complete(made)
        assert made.logits is not None
        case.assert_true(made.logits)

    def test_trap_04_a_row_scores_the_token_after_it(self, case: EngineCase) -> None:
        ids = case.prompt(24)
        truth = reference.log_softmax(case.oracle(ids))
        scored = case.score(ids)
        found = scored.target_logprob()
        budget = BUDGETS[case.dtype]
        allowed = 2 * budget.worst * budget.eps * np.abs(case.oracle(ids)).max() + 1e-5
        right = truth[np.arange(23), ids[1:]]
        shifted = truth[np.arange(1, 24), ids[1:]]
        assert np.abs(found[:-1] - right).max() <= allowed
        assert np.isnan(found[-1]), "the last row of a scored prompt has no target"
        assert np.abs(shifted - right).max() > allowed, "this model cannot tell a shift: take another"

    def test_trap_04_text_with_the_tokenizers_own_special_tokens(self, case: EngineCase) -> None:
        text = "The capital of France is"
        ids = case.tokenizer.encode(text)
        scored = case.score(text)
        assert np.array_equal(scored.token_ids, ids)
        case.assert_true(scored)
        made = case.generate(text, max_new_tokens=4, ignore_eos=True)
        assert np.array_equal(made.prompt_token_ids, ids)
        assert_complete(made)
        assert made.logits is not None
        case.assert_true(made.logits)

    def test_trap_12_the_columns_are_the_vocabulary(self, case: EngineCase) -> None:
        ids = [0, case.vocab_size - 1, *case.prompt(6), case.vocab_size - 1]
        truth = case.oracle(ids)
        scored = case.score(ids, summary=("logsumexp",))
        assert truth.shape[1] == case.vocab_size == case.engine.identity.vocab_size
        assert scored.values.shape == (9, case.vocab_size)
        case.assert_true(scored)
        whole = reference.summaries(np.asarray(scored), scored.targets, ("logsumexp",))["logsumexp"]
        assert np.abs(scored.summary["logsumexp"] - whole).max() <= _SUMMARY_TOLERANCE["logsumexp"]
        mass = np.exp(scored.logprobs().astype(np.float64)).sum(axis=1)
        assert np.abs(mass - 1).max() < 1e-5

    def test_trap_12_the_tokenizers_size_is_reported_beside_it(self, case: EngineCase) -> None:
        assert case.engine.identity.tokenizer_size == len(case.tokenizer)

    def test_trap_13_rows_do_not_depend_on_the_batch(self, case: EngineCase) -> None:
        prompts = [case.prompt(length, seed) for seed, length in enumerate(LENGTHS)]
        batch = case.score_batch(prompts)
        assert batch.lengths.tolist() == list(LENGTHS)
        assert batch.shape == (len(LENGTHS), max(LENGTHS), case.vocab_size)
        for i, prompt in enumerate(prompts):
            assert np.array_equal(batch[i].token_ids, prompt)
            case.assert_true(batch[i], what=f"input {i} of a batch")
            alone = case.score(prompt)
            worst = assert_rows_close(batch[i].values, alone.values, dtype=case.dtype)
            case.publish("worst difference between batch and alone", worst)

    def test_trap_13_rows_do_not_depend_on_the_order(self, case: EngineCase) -> None:
        prompts = [case.prompt(length, seed) for seed, length in enumerate(LENGTHS)]
        order = [3, 7, 0, 5, 2, 6, 4, 1]
        straight = case.score_batch(prompts)
        permuted = case.score_batch([prompts[i] for i in order])
        for place, i in enumerate(order):
            assert np.array_equal(permuted[place].token_ids, prompts[i])
            worst = assert_rows_close(permuted[place].values, straight[i].values, dtype=case.dtype)
            case.publish("worst difference between orders", worst)

    def test_trap_13_generation_does_not_depend_on_the_batch(self, case: EngineCase) -> None:
        prompts = [case.prompt(length, seed) for seed, length in enumerate(LENGTHS)]
        results = case.generate_batch(prompts, max_new_tokens=7, ignore_eos=True)
        for i, (prompt, made) in enumerate(zip(prompts, results, strict=True)):
            assert np.array_equal(made.prompt_token_ids, prompt)
            assert (made.prompt_index, made.sample_index) == (i, 0)
            assert_complete(made)
            assert made.logits is not None
            case.assert_true(made.logits, what=f"input {i} of a batch")

    def test_trap_03_the_longest_prompt(self, case: EngineCase) -> None:
        length = min(case.engine.context_length or 150, 150)
        scored = case.score(case.prompt(length))
        assert_aligned(scored, case.prompt(length), prompt_length=length)
        case.assert_true(scored)

    @pytest.mark.parametrize("forward_tokens", [1, 2, 23, 24, 25])
    def test_trap_03_a_forward_in_chunks(self, case: EngineCase, forward_tokens: int) -> None:
        engine = case.opened(forward_tokens)
        prompts = [case.prompt(24), case.prompt(5)]
        truth = [case.oracle(prompt) for prompt in prompts]
        requests = engine.requests(prompts)
        for i, part in enumerate(read_stream(engine.stream(requests), 2)):
            assert np.array_equal(part.positions, np.arange(len(prompts[i])))
            worst = assert_rows_close(part.values, truth[i], dtype=case.dtype, what=f"input {i} in chunks")
            case.publish("worst difference in chunks", worst)
        requests = engine.requests(prompts, max_new_tokens=5)
        for i, part in enumerate(read_stream(engine.stream(requests), 2)):
            ids = [*prompts[i], *part.token_ids.tolist()]
            assert np.array_equal(part.positions, np.arange(len(ids) - 1))
            worst = assert_rows_close(part.values, case.oracle(ids[:-1]), dtype=case.dtype)
            case.publish("worst difference in chunks", worst)


class SelectionSuite:
    """Which rows and columns are kept, summaries and dtypes: trap 11 and the contract."""

    @pytest.mark.parametrize(
        "positions",
        [
            *_NAMED,
            slice(2, 9),
            slice(None, None, 3),
            slice(-3, None),
            slice(4, 4),
            [0],
            [7, 2, 2],
            [-1, 0],
            [-4, 12],
        ],
        ids=repr,
    )
    def test_selected_rows_of_a_prompt(self, case: EngineCase, positions: rows.Positions) -> None:
        select, ids = Select(positions), case.prompt(13)
        scored = case.score(ids, select=select, summary=("logsumexp",))
        assert_aligned(scored, ids, prompt_length=13, select=select)
        case.assert_true(scored)
        assert len(scored.logsumexp()) == len(scored.positions)

    @pytest.mark.parametrize(
        "positions",
        [*_NAMED, slice(9, None), slice(-3, None), slice(1, -1, 2), [3, 12], [-1], [-2, 0], [14]],
        ids=repr,
    )
    def test_selected_rows_of_a_generation(self, case: EngineCase, positions: rows.Positions) -> None:
        select, ids = Select(positions), case.prompt(10)
        made = case.generate(ids, max_new_tokens=6, ignore_eos=True, select=select, summary=("argmax",))
        assert made.logits is not None
        every = np.concatenate([ids, made.token_ids])
        assert_aligned(made.logits, every, prompt_length=10, select=select)
        case.assert_true(made.logits)
        assert len(made.logits.argmax()) == len(made.logits)

    @pytest.mark.parametrize("positions", ["all", "generated", slice(8, 12), [12, 3]], ids=repr)
    def test_selected_rows_of_processed_ones(self, case: EngineCase, positions: rows.Positions) -> None:
        case.require("processed")
        select, ids = Select(positions), case.prompt(10)
        made = case.generate(ids, max_new_tokens=6, ignore_eos=True, select=select, processed=True)
        assert made.logits is not None
        assert made.processed is not None
        assert made.logits.positions.tolist() == select.rows(prompt_length=10, new_tokens=6).tolist()
        assert np.array_equal(made.processed.positions, made.logits.generated.positions)
        # Greedy, without penalty and bias: the processors change nothing.
        assert_rows_close(made.processed.values, made.logits.generated.values, dtype=case.dtype)
        assert made.processed.values.dtype == np.float32, "they are computed in float32 whatever the model"

    @pytest.mark.parametrize("positions", ["last", slice(-2, None), [-1]], ids=repr)
    def test_processed_rows_that_count_from_the_end_are_refused(
        self, case: EngineCase, positions: rows.Positions
    ) -> None:
        case.require("processed")
        with pytest.raises(SelectError, match="processed"):
            case.generate(case.prompt(10), max_new_tokens=6, select=Select(positions), processed=True)

    def test_a_selection_that_the_generation_does_not_reach(self, case: EngineCase) -> None:
        ids = case.prompt(6)
        second = int(case.generate(ids, max_new_tokens=2, ignore_eos=True).token_ids[1])
        made = case.generate(ids, max_new_tokens=9, stop_token_ids=[second], select=Select([2, 5, 11]))
        assert made.logits is not None
        assert made.logits.positions.tolist() == [2, 5]
        case.assert_true(made.logits)

    @pytest.mark.parametrize("position", [13, 400, -14])
    def test_a_position_outside_is_an_error(self, case: EngineCase, position: int) -> None:
        ids = case.prompt(13)
        with pytest.raises(SelectError, match=str(position)):
            case.score(ids, select=Select([0, position]))
        with pytest.raises(SelectError):
            case.generate(ids, max_new_tokens=1, select=Select([position]))
        case.assert_true(case.score(ids))

    def test_no_rows_are_a_result_too(self, case: EngineCase) -> None:
        scored = case.score(case.prompt(1), select=Select("prompt"), summary=True)
        assert scored.shape == (0, case.vocab_size)
        assert {name: len(scored.summaries([name])[name]) for name in SUMMARIES} == dict.fromkeys(
            SUMMARIES, 0
        )
        scored = case.score(case.prompt(1), select=Select("prompt", vocab=None), summary=True)
        assert len(scored.entropy()) == 0

    def test_summaries_are_those_of_the_whole_row(self, case: EngineCase) -> None:
        scored = case.score(case.prompt(21), summary=True)
        wanted = reference.summaries(np.asarray(scored), scored.targets, SUMMARIES)
        assert tuple(scored.summary) == SUMMARIES
        for name in SUMMARIES:
            _assert_summary(name, scored.summary[name], wanted[name])

    def test_summaries_alone_are_the_same(self, case: EngineCase) -> None:
        prompts = [case.prompt(21), case.prompt(8)]
        alone = case.score_batch(prompts, select=Select(vocab=None), summary=True)
        beside = case.score_batch(prompts, summary=True)
        for one, two in zip(alone, beside, strict=True):
            assert one.values is None
            assert one.shape == two.shape
            for name in SUMMARIES:
                _assert_summary(name, one.summary[name], two.summary[name], dtype=case.dtype)
            with pytest.raises(UnavailableError):
                np.asarray(one)

    def test_summaries_of_a_generation(self, case: EngineCase) -> None:
        made = case.generate(case.prompt(5), max_new_tokens=6, ignore_eos=True, summary=True)
        assert made.logits is not None
        wanted = reference.summaries(np.asarray(made.logits), made.logits.targets, SUMMARIES)
        for name in SUMMARIES:
            _assert_summary(name, made.logits.summary[name], wanted[name])
        assert (made.logits.generated.summary["target_rank"] == 1).all(), "greedy takes the best"

    def test_some_summaries_by_name(self, case: EngineCase) -> None:
        scored = case.score(case.prompt(5), summary=["entropy", "target_rank"])
        assert sorted(scored.summary) == ["entropy", "target_rank"]
        with pytest.raises(OptionError, match="perplexity"):
            case.score(case.prompt(5), summary=["perplexity"])

    def test_trap_11_the_dtype_travels(self, case: EngineCase) -> None:
        scored = case.score(case.prompt(9), summary=True)
        assert scored.identity.dtype == scored.model_dtype == case.dtype
        assert scored.values.dtype == rounded([], case.dtype).dtype
        for name in SUMMARIES:
            assert scored.summary[name].dtype == SUMMARY_DTYPES[name], name

    def test_trap_11_log_softmax_is_taken_in_float32(self, case: EngineCase) -> None:
        scored = case.score(case.prompt(9))
        found = scored.logprobs()
        assert found.dtype == np.float32
        wanted = reference.log_softmax(np.asarray(scored))
        assert np.abs(found - wanted).max() <= 2e-6 + 1e-6 * np.abs(wanted).max()

    @pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
    def test_trap_11_an_encoding_rounds_as_it_says(self, case: EngineCase, name: str) -> None:
        ids = case.prompt(19)
        scored = case.score(ids, encode=name, summary=("max",))
        plain = case.score(ids, summary=("max",))
        assert scored.encoding == name
        assert scored.values.dtype == np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
        exact, held = _float64(plain.values), _float64(scored.values)
        if case.repeatable:
            assert_same_bits(scored.values, rounded(plain.values, name))
            assert_same_bits(
                scored.summary["max"], plain.summary["max"], what="a summary is of unrounded rows"
            )
            stated = Dense(name).relative_error(case.dtype)
            normal = np.abs(exact) >= 2.0**-14
            assert (np.abs(held - exact)[normal] <= stated * np.abs(exact)[normal]).all(), (
                "beyond the stated bound"
            )
        coarser = max(case.dtype, name, key=lambda dtype: BUDGETS[dtype].eps)
        assert_rows_close(held, case.oracle(ids), dtype=coarser)

    def test_trap_11_an_encoded_generation(self, case: EngineCase) -> None:
        made = case.generate(case.prompt(7), max_new_tokens=5, ignore_eos=True, encode="float16")
        plain = case.generate(case.prompt(7), max_new_tokens=5, ignore_eos=True)
        assert made.logits is not None
        assert plain.logits is not None
        assert np.array_equal(made.token_ids, plain.token_ids), "tokens come from unrounded rows"
        assert made.logits.values.dtype == np.float16
        assert_rows_close(made.logits.values, rounded(plain.logits.values, "float16"), dtype=case.dtype)

    @pytest.mark.parametrize("name", QUANTIZED)
    def test_quantized_rows_are_within_their_bound(self, case: EngineCase, name: str) -> None:
        ids = case.prompt(19)
        kept, plain = case.score(ids, encode=name, summary=("max",)), case.score(ids, summary=("max",))
        assert isinstance(kept.values, QuantizedRows)
        assert (kept.encoding, kept.shape) == (name, plain.shape)
        assert kept.dtype == np.float32
        planned = case.engine.estimate(case.engine.requests(ids, encode=name)).result_bytes
        assert planned == kept.values.nbytes
        errors = np.abs(_float64(kept) - _float64(plain)).max(axis=1)
        noise = 0 if case.repeatable else BUDGETS[case.dtype].worst * BUDGETS[case.dtype].eps * 100
        assert (errors <= kept.values.error_bound() + noise).all()
        if case.repeatable:
            assert_same_bits(kept.argmax(), plain.argmax())
            assert_same_bits(kept.summary["max"], plain.summary["max"], what="a summary is of exact rows")
        made = case.generate(case.prompt(7), max_new_tokens=4, ignore_eos=True, encode=name)
        assert made.logits is not None
        truth = case.oracle([*case.prompt(7), *made.token_ids[:-1].tolist()])
        coarse = made.logits.values.error_bound()
        budget = BUDGETS[case.dtype].worst * BUDGETS[case.dtype].eps * np.abs(truth).max()
        assert (np.abs(_float64(made.logits) - truth).max(axis=1) <= coarse + budget).all()

    @pytest.mark.parametrize("encode", HIDDEN_FORMS)
    def test_hidden_rows_are_rebuilt(self, case: EngineCase, encode: str) -> None:
        case.require("hidden")
        ids = case.prompt(19)
        kept = case.score(ids, encode=encode, summary=("max",))
        plain = case.score(ids, summary=("max",))
        identity = case.engine.identity
        assert isinstance(kept.values, HiddenRows)
        assert kept.encoding == encode
        assert kept.shape == plain.shape
        assert kept.dtype == plain.dtype
        itemsize = 2 if encode.endswith("16") or identity.hidden_dtype != "float32" else 4
        assert kept.values.nbytes == 19 * (identity.hidden_size or 0) * itemsize
        assert case.engine.estimate(case.engine.requests(ids, encode=encode)).result_bytes == (
            kept.values.nbytes
        )
        rows, truth = _float64(kept), _float64(plain)
        assert kept.verification is not None
        assert kept.verification.rows > 0
        assert kept.verification.max_abs_difference <= kept.verification.bound
        assert np.abs(rows - truth).max() <= kept.verification.bound
        if case.repeatable and encode == "hidden":
            assert_same_bits(np.asarray(kept), np.asarray(plain), what="rebuilt rows")
            assert_same_bits(kept[3:9][2], plain.at(5), what="one rebuilt row")
            assert_same_bits(kept.entropy(), plain.entropy())
            assert_same_bits(kept.top_k(4).logits, plain.top_k(4).logits)
        assert_same_bits(kept.summary["max"], plain.summary["max"], what="a summary is of the engine's rows")

    def test_hidden_rows_of_a_ragged_batch_and_of_generations(self, case: EngineCase) -> None:
        case.require("hidden")
        prompts = [case.prompt(n) for n in (3, 11, 7)]
        batch = case.score_batch(prompts, encode="hidden")
        for one in batch:
            case.assert_true(one, what="rebuilt rows")
        dense = batch.to_numpy(pad=-5.0)
        assert dense.shape == batch.shape
        assert_same_bits(dense[0, :3], np.asarray(batch[0]))
        assert (_float64(dense[0, 3:]) == -5.0).all()
        for made in case.generate_batch(prompts, max_new_tokens=5, ignore_eos=True, encode="hidden"):
            assert made.logits is not None
            assert len(made.logits.generated) == len(made.token_ids)
            case.assert_true(made.logits, what="rebuilt rows")

    def test_an_engine_without_hidden_rows_says_so_and_gives_plain_ones(self, case: EngineCase) -> None:
        if case.engine.capabilities.hidden:
            pytest.skip("the engine gives hidden rows")
        with pytest.warns(HiddenRowsWarning, match="hidden rows"):
            found = case.score(case.prompt(5), encode="hidden")
        assert found.encoding is None
        case.assert_true(found)

    @pytest.mark.parametrize("cut", CUTS, ids=str)
    def test_some_columns_of_a_prompt(self, case: EngineCase, cut: dict[str, Any]) -> None:
        ids = case.prompt(19)
        rows = case.score(ids, select=Select(slice(3, None), **cut))
        assert rows.positions.tolist() == list(range(3, 19))
        _assert_cut(case, rows, Select(**cut), case.oracle(ids)[3:])

    @pytest.mark.parametrize("cut", CUTS, ids=str)
    def test_some_columns_of_a_generation(self, case: EngineCase, cut: dict[str, Any]) -> None:
        made = case.generate(case.prompt(7), max_new_tokens=5, ignore_eos=True, select=Select(**cut))
        assert made.logits is not None
        assert len(made.logits) == 11
        ids = [*case.prompt(7), *made.token_ids[:-1].tolist()]
        _assert_cut(case, made.logits, Select(**cut), case.oracle(ids))

    def test_columns_of_its_own_for_each_row(self, case: EngineCase) -> None:
        lists = [[5, 2], [], [9, 4, 1, 0]]
        ids = case.prompt(12)
        rows = case.score(ids, select=Select([2, 7, 11], vocab=lists), encode="float16")
        assert isinstance(rows.values, CutRows)
        assert rows.values.lengths.tolist() == [2, 0, 4]
        assert rows.values.ids.tolist() == [5, 2, 9, 4, 1, 0]
        assert rows.dtype == np.float16
        truth = case.oracle(ids)
        wanted = [*truth[2, [5, 2]], *truth[11, [9, 4, 1, 0]]]
        allowed = _allowed("bfloat16" if case.dtype == "bfloat16" else "float16", truth)
        assert np.abs(_float64(rows.values.values) - wanted).max() <= allowed

    def test_summaries_beside_some_columns_are_of_the_whole_row(self, case: EngineCase) -> None:
        ids = case.prompt(15)
        rows = case.score(ids, select=Select(top_k=3), summary=True)
        plain = case.score(ids, summary=True)
        for name in SUMMARIES:
            _assert_summary(name, rows.summary[name], plain.summary[name], dtype=case.dtype)

    @pytest.mark.parametrize(
        ("select", "options"),
        [
            (Select(vocab=[10**6]), {}),
            (Select(top_k=10**6), {}),
            (Select(vocab=[[1], [2]]), {}),
            (Select(top_k=2), {"encode": "hidden"}),
            (Select("assistant"), {}),
        ],
        ids=str,
    )
    def test_columns_that_there_are_not_are_an_error(
        self, case: EngineCase, select: Select, options: dict[str, Any]
    ) -> None:
        with pytest.raises(SelectError):
            case.score(case.prompt(5), select=select, **options)
        case.assert_true(case.score(case.prompt(5)))

    def test_an_unknown_encoding_is_an_error(self, case: EngineCase) -> None:
        with pytest.raises(OptionError, match="float8_e9"):
            case.score(case.prompt(3), encode="float8_e9")

    def test_trap_06_a_request_beyond_the_limit_is_refused_with_numbers(self, case: EngineCase) -> None:
        prompts = [case.prompt(20), case.prompt(31)]
        planned = case.engine.estimate(case.engine.requests(prompts))
        needed = planned.total_bytes
        before = case.engine.memory_limit_bytes
        try:
            case.engine.memory_limit_bytes = needed - 1
            with pytest.raises(MemoryLimitError, match="vocab=None") as refused:
                case.engine.logits(prompts)
            assert refused.value.needed_bytes == needed
            assert refused.value.limit_bytes == needed - 1
            case.engine.memory_limit_bytes = needed
            case.assert_true(case.score_batch(prompts)[1])
        finally:
            case.engine.memory_limit_bytes = before

    def test_trap_06_the_estimate_of_a_result_is_exact(self, case: EngineCase) -> None:
        prompts = [case.prompt(20), case.prompt(31)]
        for options in ({}, {"encode": "float16"}, {"summary": True}, {"select": Select("last")}):
            planned = case.engine.estimate(case.engine.requests(prompts, **options))
            batch = case.score_batch(prompts, **options)
            assert planned.result_bytes == batch.nbytes, options
        planned = case.engine.estimate(case.engine.requests(prompts, max_new_tokens=5))
        made = case.generate_batch(prompts, max_new_tokens=5, ignore_eos=True)
        assert planned.result_bytes == sum(one.logits.nbytes for one in made if one.logits is not None)


class ExtrasSuite:
    """Hidden states, attention weights, and rows that stay on the device, where the engine gives them."""

    def test_hidden_states_are_aligned_with_the_rows(self, case: EngineCase) -> None:
        case.require("hidden_states")
        ids = case.prompt(11)
        whole = case.score(ids, hidden_states=[0, 1])
        assert sorted(whole.hidden_states) == [0, 1]
        part = case.score(ids, hidden_states=[1], select=Select([3, 8]))
        assert_rows_close(part.hidden_states[1], whole.hidden_states[1][[3, 8]], dtype=case.dtype)
        made = case.generate(ids, max_new_tokens=4, ignore_eos=True, hidden_states=[1])
        assert made.logits is not None
        assert len(made.logits.hidden_states[1]) == 14
        forced = case.score([*ids, *made.token_ids[:-1].tolist()], hidden_states=[1])
        assert_rows_close(made.logits.hidden_states[1], forced.hidden_states[1], dtype=case.dtype)

    def test_attention_weights_are_aligned_with_the_rows(self, case: EngineCase) -> None:
        case.require("attentions")
        ids = case.prompt(11)
        made = case.generate(ids, max_new_tokens=4, ignore_eos=True, attentions=[0])
        forced = case.score([*ids, *made.token_ids[:-1].tolist()], attentions=[0])
        assert made.logits is not None
        for logits in (made.logits, forced):
            weights = _float64(logits.attentions[0])
            assert weights.shape[0] == 14
            assert weights.shape[2] == 14
            later = np.arange(14)[None, :] > np.arange(14)[:, None]
            assert not weights.transpose(0, 2, 1)[later].any(), "a row attends to a later token"
            assert np.abs(weights.sum(axis=2) - 1).max() < 14 * BUDGETS[case.dtype].eps
        assert_rows_close(
            made.logits.attentions[0].reshape(14, -1), forced.attentions[0].reshape(14, -1), dtype=case.dtype
        )
        case.assert_true(forced)

    def test_hidden_states_and_attention_weights_of_a_forward_in_chunks(self, case: EngineCase) -> None:
        case.require("hidden_states")
        case.require("attentions")
        ids = case.prompt(19)
        whole = case.score(ids, hidden_states=[1], attentions=[0])
        select = Select([0, 6, 7, 18])
        for positions in (Select(), select):
            part = case.opened(7).logits(ids, hidden_states=[1], attentions=[0], select=positions)
            assert isinstance(part, Logits)
            rows_kept = part.positions
            assert_rows_close(part.hidden_states[1], whole.hidden_states[1][rows_kept], dtype=case.dtype)
            wanted = whole.attentions[0][rows_kept].reshape(len(rows_kept), -1)
            assert_rows_close(part.attentions[0].reshape(len(rows_kept), -1), wanted, dtype=case.dtype)

    def test_hidden_states_alone(self, case: EngineCase) -> None:
        case.require("hidden_states")
        alone = case.score(case.prompt(6), hidden_states=[1], select=Select(vocab=None))
        beside = case.score(case.prompt(6), hidden_states=[1])
        assert alone.values is None
        assert_rows_close(alone.hidden_states[1], beside.hidden_states[1], dtype=case.dtype)

    def test_rows_can_stay_on_the_device(self, case: EngineCase) -> None:
        case.require("keep_on_device")
        kept = case.score_batch([case.prompt(11), case.prompt(4)], device="keep", summary=("max",))
        held = [logits.values.clone() for logits in kept]
        for i, logits in enumerate(kept):
            assert hasattr(logits.values, "detach"), "no tensor"
            case.assert_true(logits, what=f"input {i} on the device")
        case.score(case.prompt(30), device="keep")
        for before, logits in zip(held, kept, strict=True):
            assert bool((before == logits.values).all()), "a later request changed rows on the device"
        made = case.generate(case.prompt(5), max_new_tokens=5, ignore_eos=True, device="keep")
        assert made.logits is not None
        case.assert_true(made.logits)

    def test_what_the_engine_cannot_give_is_refused_by_name(self, case: EngineCase) -> None:
        from logitscope.errors import UnsupportedError

        asked = {"hidden_states": {"hidden_states": [0]}, "attentions": {"attentions": [0]}}
        asked["keep_on_device"] = {"device": "keep"}  # type: ignore[dict-item]
        missing = [name for name in asked if not getattr(case.engine.capabilities, name)]
        if not missing:
            pytest.skip("the engine gives all of them")
        for name in missing:
            with pytest.raises(UnsupportedError):
                case.engine.logits(case.prompt(4), **asked[name])  # type: ignore[arg-type]


def _allowed(dtype: str, truth: NDArray[np.float64]) -> float:
    """How far a value may lie from the truth."""
    budget = BUDGETS[dtype]
    return float(budget.worst * budget.eps * np.abs(truth).max())


def _assert_cut(case: EngineCase, rows: Logits, select: Select, truth: NDArray[np.float64]) -> None:
    """Check kept columns: their values, that they are those that should be kept, and the dropped mass.

    At the border of a set a rounding decides, so there it is allowed for.
    """
    values = rows.values
    assert isinstance(values, CutRows)
    assert values.dtype == rounded([], case.dtype).dtype
    allowed = _allowed(case.dtype, truth)
    entries = values.entries()
    row = np.repeat(np.arange(len(rows)), entries.lengths)
    kept = _float64(entries.values)
    assert np.abs(kept - truth[row, entries.ids]).max(initial=0.0) <= allowed
    case.publish(
        "worst difference from the oracle", float(np.abs(kept - truth[row, entries.ids]).max(initial=0))
    )
    mask = np.zeros(truth.shape, bool)
    mask[row, entries.ids] = True
    assert mask.sum() == len(entries.ids), "an id twice in one row"
    lowest = np.where(mask, truth, np.inf).min(axis=1)
    highest = np.where(mask, -np.inf, truth).max(axis=1)
    if select.best:
        assert (highest <= lowest + 2 * allowed).all(), "a better token was dropped"
        order = np.diff(kept)[np.diff(row) == 0]
        assert (order <= 0).all(), "not best first"
        assert "argmax" not in rows.available or np.array_equal(
            rows.argmax(), [ids[0] for ids in np.split(entries.ids, np.cumsum(values.lengths))[:-1]]
        )
    if select.top_k is not None:
        assert (values.lengths == select.top_k).all()
    if select.min_p is not None or select.threshold is not None:
        bound = (
            truth.max(axis=1) + np.log(select.min_p) if select.min_p else np.full(len(rows), select.threshold)
        )
        assert (lowest >= bound - 2 * allowed).all()
        assert (highest <= bound + 2 * allowed).all()
    if isinstance(select.vocab, tuple):
        assert entries.ids.tolist() == list(select.vocab) * len(rows)
    if select.sample is not None:
        assert entries.counts is not None
        assert np.array_equal(values.sums(entries.counts), np.full(len(rows), select.sample))
    if not select.logsumexp:
        assert not rows.summary
        with pytest.raises(UnavailableError):
            rows.logprobs()
        return
    mass = np.where(mask, np.exp(reference.log_softmax(truth)), 0.0).sum(axis=1)
    assert np.abs(1 - rows.dropped_mass() - mass).max() <= 4 * allowed + 1e-5
    if select.top_p is not None:
        assert (mass >= select.top_p - 4 * allowed - 1e-5).all()
        last = np.exp(lowest - reference.summaries(truth, rows.targets, ("logsumexp",))["logsumexp"])
        assert (mass - last <= select.top_p + 4 * allowed + 1e-5).all()


def _float64(values: object) -> NDArray[np.float64]:
    return np.asarray(values).astype(np.float64)


def _assert_summary(
    name: str, found: NDArray[np.generic], wanted: NDArray[np.generic], *, dtype: str | None = None
) -> None:
    """Check one summary; with ``dtype`` the rows themselves may differ by that dtype's budget."""
    assert found.shape == wanted.shape, f"{name}: shape {found.shape}"
    if name not in _SUMMARY_TOLERANCE:
        assert np.array_equal(found, wanted), f"{name}: {found}, expected {wanted}"
        return
    allowed = _SUMMARY_TOLERANCE[name]
    if dtype is not None:
        allowed += BUDGETS[dtype].eps * 64
    close = np.allclose(_float64(found), _float64(wanted), rtol=2e-7, atol=allowed, equal_nan=True)
    assert close, f"{name}: {found}, expected {wanted}"
