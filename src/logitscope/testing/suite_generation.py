"""Conformance checks of generation: finish reasons, stages, samples and seeds (traps 5, 8, 9, 14, 20)."""

# ruff: noqa: D102 - a check's name is its statement

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from logitscope.engines.results import Generation
from logitscope.errors import InputError, OptionError, TokenIdError
from logitscope.numerics import reference
from logitscope.rows import Ids, Sampling
from logitscope.testing.asserts import BUDGETS, assert_complete, assert_rows_close, assert_same_bits
from logitscope.testing.case import EngineCase, read_stream

_STEPS = 10
_WORDS = 48
_WORD_BIAS = 1000.0

PROCESSORS: dict[str, Any] = {
    "temperature": 0.7,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.01,
    "repetition_penalty": 1.4,
    "seed": 11,
}


class FinishSuite:
    """Trap 5: there are as many generated rows as generated tokens, whatever ends a sequence."""

    def test_trap_05_length(self, case: EngineCase) -> None:
        made = _finished(case, case.prompt(6), tokens=5, max_new_tokens=5, ignore_eos=True)
        assert (made.finish_reason, made.stop) == ("length", None)

    def test_trap_05_one_new_token(self, case: EngineCase) -> None:
        made = _finished(case, case.prompt(6), tokens=1, max_new_tokens=1, ignore_eos=True)
        assert made.finish_reason == "length"

    @pytest.mark.parametrize("step", [0, 3])
    def test_trap_05_end_of_sequence(self, case: EngineCase, step: int) -> None:
        prompt, bias = _eos_at(case, step)
        made = _finished(case, prompt, tokens=step + 1, max_new_tokens=_STEPS, logit_bias=bias)
        assert made.finish_reason == "stop"
        assert made.token_ids[-1] == case.eos_token_id
        assert made.stop == case.eos_token_id

    def test_trap_05_end_of_sequence_as_the_last_token_allowed(self, case: EngineCase) -> None:
        prompt, bias = _eos_at(case, 3)
        made = _finished(case, prompt, tokens=4, max_new_tokens=4, logit_bias=bias)
        assert made.finish_reason == "stop"

    def test_trap_05_going_on_after_the_end_of_sequence(self, case: EngineCase) -> None:
        prompt, bias = _eos_at(case, 3)
        made = _finished(case, prompt, tokens=_STEPS, max_new_tokens=_STEPS, logit_bias=bias, ignore_eos=True)
        assert made.finish_reason == "length"
        assert made.token_ids[3] == case.eos_token_id

    @pytest.mark.parametrize("step", [0, 4])
    def test_trap_05_stop_id(self, case: EngineCase, step: int) -> None:
        prompt = case.prompt(6)
        ids = _greedy(case, prompt)
        stop = int(ids[step])
        tokens = ids.tolist().index(stop) + 1
        made = _finished(
            case, prompt, tokens=tokens, max_new_tokens=_STEPS, stop_token_ids=[stop], ignore_eos=True
        )
        assert (made.finish_reason, made.stop) == ("stop", stop)
        assert np.array_equal(made.token_ids, ids[:tokens])

    @pytest.mark.parametrize("place", ["first token", "middle of a token", "across tokens"])
    def test_trap_05_stop_string(self, case: EngineCase, place: str) -> None:
        prompt, bias = case.prompt(6), _words(case)
        ids = case.generate(prompt, max_new_tokens=_STEPS, logit_bias=bias, repetition_penalty=1e3).token_ids
        pieces = case.tokenizer.pieces(ids)
        stop = {
            "first token": pieces[0],
            "middle of a token": pieces[4][1:-1],
            "across tokens": pieces[3][-1:] + pieces[4][:1],
        }[place]
        texts = [case.tokenizer.decode(ids[: k + 1]) for k in range(_STEPS)]
        tokens = [stop in text for text in texts].index(True) + 1
        made = _finished(
            case,
            prompt,
            tokens=tokens,
            max_new_tokens=_STEPS,
            stop=["never to be seen", stop],
            logit_bias=bias,
            repetition_penalty=1e3,
        )
        assert (made.finish_reason, made.stop) == ("stop", stop)
        assert made.text == texts[tokens - 1].split(stop)[0]
        assert np.array_equal(made.token_ids, ids[:tokens]), "token ids are not trimmed"

    def test_trap_05_a_batch_that_ends_at_different_steps(self, case: EngineCase) -> None:
        prompts = [case.prompt(length, seed=3) for length in (3, 8, 5, 8)]
        alone = [_greedy(case, prompt) for prompt in prompts]
        stop = [int(alone[0][1]), int(alone[1][5]), int(alone[3][3])]
        made = case.generate_batch(prompts, max_new_tokens=_STEPS, stop_token_ids=stop, ignore_eos=True)
        for one in made:
            assert_complete(one)
            assert one.logits is not None
            case.assert_true(one.logits)
            ended = [i for i, token_id in enumerate(one.token_ids) if token_id in stop]
            assert ended in ([], [len(one.token_ids) - 1]), "a sequence went on after its stop id"
            assert bool(ended) == (one.finish_reason == "stop")
        assert len({len(one.token_ids) for one in made}) > 1, "all ended together: nothing was checked"

    def test_text_is_the_decoded_tokens(self, case: EngineCase) -> None:
        made = case.generate(case.prompt(6), max_new_tokens=6, logit_bias=_words(case))
        assert made.text == case.tokenizer.decode(made.token_ids)

    def test_tokens_alone_are_the_same(self, case: EngineCase) -> None:
        prompts = [case.prompt(6), case.prompt(11)]
        alone = case.engine.generate(prompts, max_new_tokens=5, ignore_eos=True)
        assert isinstance(alone, list)
        for one, beside in zip(
            alone, case.generate_batch(prompts, max_new_tokens=5, ignore_eos=True), strict=True
        ):
            assert one.logits is None
            assert np.array_equal(one.token_ids, beside.token_ids)


class StageSuite:
    """Traps 8, 9 and 14: raw rows are the model's own, processed ones are what the token was drawn from."""

    def test_trap_08_processors_do_not_change_raw_rows(self, case: EngineCase) -> None:
        bias = {case.prompt(1, seed=5)[0]: 30.0}
        made = case.generate(case.prompt(9), max_new_tokens=8, ignore_eos=True, logit_bias=bias, **PROCESSORS)
        assert_complete(made)
        assert made.logits is not None
        case.assert_true(made.logits)

    def test_trap_08_processors_do_not_change_raw_rows_of_a_batch(self, case: EngineCase) -> None:
        prompts = [case.prompt(length) for length in (4, 9, 9, 2)]
        processed = case.engine.capabilities.processed
        for made in case.generate_batch(
            prompts, max_new_tokens=6, ignore_eos=True, processed=processed, **PROCESSORS
        ):
            assert made.logits is not None
            case.assert_true(made.logits)

    def test_trap_09_raw_means_the_same_for_prompt_and_generated_rows(self, case: EngineCase) -> None:
        made = case.generate(case.prompt(9), max_new_tokens=8, ignore_eos=True, **PROCESSORS)
        every = [*case.prompt(9), *made.token_ids[:-1].tolist()]
        scored = case.score(every)
        assert made.logits is not None
        assert made.logits.stage == scored.stage == "raw"
        worst = assert_rows_close(made.logits.values, scored.values, dtype=case.dtype)
        case.publish("worst difference between generated and scored", worst)

    def test_trap_09_processed_rows_are_generated_ones(self, case: EngineCase) -> None:
        case.require("processed")
        made = case.generate(
            case.prompt(9), max_new_tokens=5, ignore_eos=True, processed=True, summary=True, **PROCESSORS
        )
        assert made.processed is not None
        assert made.processed.stage == "processed"
        assert made.processed.positions.tolist() == list(range(8, 13))
        assert np.array_equal(made.processed.targets, made.token_ids)
        chosen = made.processed.target_logit()
        assert np.isfinite(chosen).all(), "a token was drawn that the processors had ruled out"
        wanted = reference.summaries(np.asarray(made.processed), made.processed.targets, ("logsumexp",))
        assert np.abs(made.processed.summary["logsumexp"] - wanted["logsumexp"]).max() < 1e-5

    @pytest.mark.parametrize(
        "options",
        [
            {"temperature": 0.5},
            {"temperature": 2.0, "top_k": 7},
            {"temperature": 1.0, "top_p": 0.6},
            {"temperature": 1.0, "min_p": 0.1},
            {"repetition_penalty": 1.7},
            {"temperature": 0.8, "top_k": 30, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.2},
        ],
        ids=lambda options: " ".join(options),
    )
    def test_trap_09_processed_rows_are_the_stated_function_of_raw_ones(
        self, case: EngineCase, options: dict[str, Any]
    ) -> None:
        case.require("processed")
        prompt = case.prompt(9)
        bias = {prompt[0]: 4.0, prompt[1]: -4.0}
        made = case.generate(
            prompt, max_new_tokens=6, ignore_eos=True, processed=True, logit_bias=bias, seed=3, **options
        )
        assert made.logits is not None
        assert made.processed is not None
        raw = np.asarray(made.logits.generated).astype(np.float64)
        sampling = Sampling(logit_bias=bias, **options)
        for step, found in enumerate(np.asarray(made.processed).astype(np.float64)):
            history = [*prompt, *made.token_ids[:step].tolist()]
            _assert_processed(found, raw[step], history, sampling)

    def test_trap_09_scoring_has_no_processed_rows(self, case: EngineCase) -> None:
        with pytest.raises(InputError, match="processed"):
            case.engine.requests(case.prompt(4), processed=True)

    def test_trap_14_every_row_belongs_to_a_token_that_stayed(self, case: EngineCase) -> None:
        long = case.generate(case.prompt(8), max_new_tokens=9, ignore_eos=True)
        assert long.logits is not None
        for n in range(1, 9):
            short = case.generate(case.prompt(8), max_new_tokens=n, ignore_eos=True)
            assert short.logits is not None
            assert np.array_equal(short.token_ids, long.token_ids[:n])
            assert_rows_close(short.logits.values, long.logits.values[: 7 + n], dtype=case.dtype)

    def test_logit_bias_decides(self, case: EngineCase) -> None:
        wanted = case.prompt(1, seed=9)[0]
        made = case.generate(
            case.prompt(5), max_new_tokens=3, ignore_eos=True, logit_bias={wanted: _WORD_BIAS}
        )
        assert made.token_ids.tolist() == [wanted] * 3

    def test_one_best_token_is_greedy(self, case: EngineCase) -> None:
        greedy = case.generate(case.prompt(5), max_new_tokens=5, ignore_eos=True)
        drawn = case.generate(
            case.prompt(5), max_new_tokens=5, ignore_eos=True, temperature=1.5, top_k=1, seed=2
        )
        assert np.array_equal(greedy.token_ids, drawn.token_ids)
        assert greedy.seed is None


class SampleSuite:
    """Trap 20: several samples, and seeds."""

    def test_trap_20_samples_are_sequences_of_their_own(self, case: EngineCase) -> None:
        prompts = [case.prompt(7), case.prompt(4)]
        made = case.generate_batch(prompts, max_new_tokens=6, ignore_eos=True, n=3, temperature=1.5, seed=5)
        assert [(one.prompt_index, one.sample_index) for one in made] == [
            (i, j) for i in range(2) for j in range(3)
        ]
        for one in made:
            assert np.array_equal(one.prompt_token_ids, prompts[one.prompt_index])
            assert_complete(one)
            assert one.logits is not None
            case.assert_true(one.logits, what=f"sample {one.sample_index} of prompt {one.prompt_index}")
        for i in (0, 1):
            assert len({tuple(one.token_ids) for one in made if one.prompt_index == i}) > 1, (
                "all samples equal"
            )

    def test_trap_20_samples_of_one_prompt_are_a_list(self, case: EngineCase) -> None:
        made = case.generate_batch(case.prompt(7), max_new_tokens=2, ignore_eos=True, n=2)
        assert [one.sample_index for one in made] == [0, 1]
        assert np.array_equal(made[0].token_ids, made[1].token_ids), "greedy samples do not differ"

    def test_trap_20_samples_do_not_share_memory(self, case: EngineCase) -> None:
        first, second = case.generate_batch(case.prompt(7), max_new_tokens=3, ignore_eos=True, n=2)
        assert first.logits is not None
        assert second.logits is not None
        before = np.array(second.logits.values)
        first.logits.values[...] = 0
        assert_same_bits(second.logits.values, before)

    def test_a_seed_gives_the_same_tokens_again(self, case: EngineCase) -> None:
        def drawn(seed: int) -> list[int]:
            made = case.generate(
                case.prompt(7), max_new_tokens=8, ignore_eos=True, temperature=1.5, seed=seed
            )
            assert made.seed == seed
            return [int(i) for i in made.token_ids]

        assert drawn(1) == drawn(1)
        assert len({tuple(drawn(seed)) for seed in range(4)}) > 1

    def test_a_seed_does_not_depend_on_the_batch(self, case: EngineCase) -> None:
        prompts = [case.prompt(7), case.prompt(3), case.prompt(7, seed=1)]
        options: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True, "temperature": 1.2, "seed": 8}
        together = case.generate_batch(prompts, **options)
        for prompt, made in zip(prompts, together, strict=True):
            assert np.array_equal(case.generate(prompt, **options).token_ids, made.token_ids)

    def test_samples_do_not_depend_on_how_many_there_are(self, case: EngineCase) -> None:
        options: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True, "temperature": 1.2, "seed": 8}
        many = case.generate_batch(case.prompt(7), n=3, **options)
        few = case.generate_batch(case.prompt(7), n=2, **options)
        for one, other in zip(few, many[:2], strict=True):
            assert np.array_equal(one.token_ids, other.token_ids)

    def test_a_seed_from_the_system_is_reported(self, case: EngineCase) -> None:
        options: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True, "temperature": 1.2}
        made = case.generate(case.prompt(7), **options)
        assert made.seed is not None
        again = case.generate(case.prompt(7), seed=made.seed, **options)
        assert np.array_equal(again.token_ids, made.token_ids)

    def test_draws_follow_the_distribution(self, case: EngineCase) -> None:
        drawn = case.generate_batch(
            case.prompt(6), max_new_tokens=1, ignore_eos=True, n=300, temperature=1.0, seed=4, top_k=20
        )
        first = drawn[0].logits
        assert first is not None
        row = np.asarray(first.generated)[0].astype(np.float64)
        kept = np.flatnonzero(row >= np.sort(row)[-20])  # what equals the 20th stays as well
        shares = np.exp(reference.row_log_softmax(row[kept]))
        counts = np.array([sum(int(one.token_ids[0]) == i for one in drawn) for i in kept])
        assert counts.sum() == 300, "a token outside the 20 best was drawn"
        chi_square = float(((counts - 300 * shares) ** 2 / (300 * shares)).sum())
        freedom = len(kept) - 1  # the distribution's mean; twice that is its variance
        assert chi_square < freedom + 5 * math.sqrt(2 * freedom), (
            f"chi-square {chi_square:.1f}, {freedom} free"
        )

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("temperature", -0.1),
            ("temperature", math.nan),
            ("temperature", math.inf),
            ("top_k", -1),
            ("top_p", 0.0),
            ("top_p", 1.5),
            ("min_p", 1.0),
            ("repetition_penalty", 0.0),
            ("seed", -1),
            ("stop", ""),
            ("max_new_tokens", -1),
            ("max_new_tokens", 0),
            ("n", 0),
        ],
    )
    def test_a_value_outside_its_range_is_an_error(self, case: EngineCase, option: str, value: Any) -> None:
        with pytest.raises(OptionError, match=rf"\b{option}\b"):
            case.engine.generate(case.prompt(4), **{option: value})
        assert_complete(case.generate(case.prompt(4), max_new_tokens=2))

    @pytest.mark.parametrize("beyond", [-1, 0], ids=["-1", "vocab_size"])
    def test_ids_of_options_outside_the_vocabulary_are_errors(self, case: EngineCase, beyond: int) -> None:
        token_id = beyond if beyond else case.vocab_size
        with pytest.raises(TokenIdError, match=str(token_id)):
            case.engine.generate(case.prompt(4), stop_token_ids=[token_id])
        with pytest.raises(TokenIdError, match=str(token_id)):
            case.engine.generate(case.prompt(4), logit_bias={token_id: 1.0})

    @pytest.mark.parametrize("option", ["encode", "summary", "select", "processed"])
    def test_what_is_kept_of_no_rows_is_an_error(self, case: EngineCase, option: str) -> None:
        from logitscope.rows import Select

        value = {"encode": "float16", "summary": True, "select": Select("last"), "processed": True}[option]
        with pytest.raises(OptionError, match="return_logits"):
            case.engine.generate(case.prompt(4), **{option: value})  # type: ignore[arg-type]


def _finished(case: EngineCase, prompt: list[int], *, tokens: int, **options: Any) -> Generation:
    """A generation of so many tokens, checked; and the same by streaming."""
    made = case.generate(prompt, **options)
    assert len(made.token_ids) == tokens
    assert_complete(made)
    assert made.logits is not None
    case.assert_true(made.logits)
    names = ("logit_bias", "repetition_penalty", "stop", "stop_token_ids", "ignore_eos")
    sampling = Sampling(**{name: options[name] for name in names if name in options})
    requests = case.engine.requests(prompt, max_new_tokens=options["max_new_tokens"], sampling=sampling)
    (streamed,) = read_stream(case.engine.stream(requests), 1)
    assert np.array_equal(streamed.token_ids, made.token_ids), "streaming gave other tokens"
    assert np.array_equal(streamed.positions, made.logits.positions), "streaming gave other rows"
    assert (streamed.end.finish_reason, streamed.end.stop) == (made.finish_reason, made.stop)
    assert streamed.end.text == made.text
    assert_rows_close(streamed.values, made.logits.values, dtype=case.dtype)
    return made


def _greedy(case: EngineCase, prompt: list[int]) -> Ids:
    return case.generate(prompt, max_new_tokens=_STEPS, ignore_eos=True).token_ids


def _eos_at(case: EngineCase, step: int) -> tuple[list[int], dict[int, float]]:
    """A prompt, and a bias of the end-of-sequence id that makes it the best token first at ``step``."""
    if case.eos_token_id is None:
        pytest.skip("the model has no end-of-sequence id")
    for seed in range(50):
        prompt = case.prompt(6, seed)
        made = case.generate(prompt, max_new_tokens=step + 1, ignore_eos=True)
        assert made.logits is not None
        found = np.asarray(made.logits.generated).astype(np.float64)
        gaps = found.max(axis=1) - found[:, case.eos_token_id]
        # Between the gap at this step and the smallest one before it, with room for rounding.
        room = 2 * BUDGETS[case.dtype].worst * BUDGETS[case.dtype].eps * np.abs(found).max()
        if step == 0:
            return prompt, {case.eos_token_id: float(gaps[0] + 1)}
        if case.eos_token_id not in made.token_ids and gaps[step] + 2 * min(room, 0.05) < gaps[:step].min():
            return prompt, {case.eos_token_id: float((gaps[step] + gaps[:step].min()) / 2)}
    pytest.fail("no prompt lets the end of sequence come at that step")


def _words(case: EngineCase) -> dict[int, float]:
    """A bias that leaves only tokens of three and more plain letters."""
    ids = [i for i in range(len(case.tokenizer)) if i not in case.special_token_ids]
    words = [i for i, piece in zip(ids, case.tokenizer.pieces(ids), strict=True) if _is_word(piece)]
    return dict.fromkeys(words[:_WORDS], _WORD_BIAS)


def _is_word(piece: str) -> bool:
    return len(piece) >= 3 and piece.isascii() and piece.isalpha()


def _assert_processed(found: Any, raw: Any, history: list[int], sampling: Sampling) -> None:
    """Check one processed row ``[vocab]`` against the options, in float64, without knowing ties apart."""
    wanted = raw.copy()
    seen = np.unique(history)
    penalty = sampling.repetition_penalty
    wanted[seen] = np.where(wanted[seen] > 0, wanted[seen] / penalty, wanted[seen] * penalty)
    for token_id, bias in sampling.logit_bias.items():
        wanted[token_id] += bias
    if not sampling.greedy:
        wanted /= sampling.temperature
    kept = np.ones(len(raw), dtype=bool)
    order = reference.order(wanted)
    if sampling.top_k:
        kept[wanted < wanted[order[sampling.top_k - 1]]] = False
    shares = np.exp(reference.row_log_softmax(np.where(kept, wanted, -np.inf)))
    before = np.cumsum(shares[order]) - shares[order]
    kept[order] &= before < sampling.top_p
    kept &= shares >= sampling.min_p * shares.max()
    unclear = np.abs(before - sampling.top_p) < 1e-5
    differing = np.isfinite(found) != kept
    differing[order[unclear]] = False
    assert not differing.any(), f"other tokens stayed than the options say: ids {np.flatnonzero(differing)}"
    both = kept & np.isfinite(found)
    assert both.any()
    assert np.abs(found[both] - wanted[both]).max() <= 1e-5 * max(np.abs(wanted[both]).max(), 1)
