"""Complete logits of a real SGLang engine, row for row against Transformers."""

from __future__ import annotations

import gc
import pathlib
import pickle
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from logitscope import Select
from logitscope.errors import OptionError, SelectError
from logitscope.logits import Logits

FRANCE = "The capital of France is"
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


def prompts(*lengths: int) -> list[list[int]]:
    random = np.random.default_rng(len(lengths))
    return [random.integers(1000, 40_000, n).tolist() for n in lengths]


def logits_of(answer: Any) -> Logits:
    found = answer["meta_info"]["logits"]
    assert isinstance(found, Logits)
    return found


def test_prompt_and_generated_rows_are_those_of_transformers(engine: Any, oracle: Any, close: Any) -> None:
    answer = engine.generate(FRANCE, GREEDY, return_logits=True)
    found = logits_of(answer)
    assert found.token_ids[found.prompt_length :].tolist() == answer["output_ids"]
    assert len(found.generated) == 12
    assert found.positions.tolist() == list(range(5 + 12 - 1))
    close("greedy", found, oracle(found.token_ids)[:-1])
    assert np.asarray(found.generated).argmax(-1).tolist() == answer["output_ids"]
    assert found.identity.engine == "sglang"
    assert " → '" in repr(found), "results know the texts of tokens"


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 334])
def test_scoring_gives_every_row_whatever_the_chunks_of_the_prefill(
    engine: Any, oracle: Any, close: Any, length: int
) -> None:
    ids = prompts(length)[0]
    found = engine.logits(input_ids=ids)
    assert found.token_ids.tolist() == ids
    assert found.positions.tolist() == list(range(length))
    close("scoring", found, oracle(ids))


def test_a_batch_of_mixed_lengths_keeps_its_order(engine: Any, oracle: Any, close: Any) -> None:
    ids = prompts(5, 334, 11, 64)
    for own, given in zip(engine.logits(input_ids=ids), ids, strict=True):
        assert own.token_ids.tolist() == given
        close("scoring, batch", own, oracle(given))
    for answer, given in zip(
        engine.generate(input_ids=ids, sampling_params=GREEDY, return_logits=True), ids, strict=True
    ):
        found = logits_of(answer)
        assert found.token_ids.tolist() == given + answer["output_ids"]
        close("generation, batch", found, oracle(found.token_ids)[:-1])


def test_only_those_who_ask_get_rows(engine: Any, oracle: Any, close: Any) -> None:
    ids = prompts(*range(3, 35))
    asked = [bool(i % 2) for i in range(32)]
    for answer, wanted in zip(
        engine.generate(input_ids=ids, sampling_params=GREEDY, return_logits=asked), asked, strict=True
    ):
        assert ("logits" in answer["meta_info"]) == wanted
        assert "logitscope" not in answer["meta_info"]
        if wanted:
            found = logits_of(answer)
            close("32 at once", found, oracle(found.token_ids)[:-1])


def test_a_cached_prefix_loses_no_rows(engine: Any, oracle: Any, close: Any) -> None:
    engine.flush_cache()
    shared, one, other = prompts(150, 20, 30)
    cold = engine.generate(input_ids=shared + one, sampling_params=GREEDY)
    warm = engine.generate(input_ids=shared + one, sampling_params=GREEDY)
    assert cold["meta_info"]["cached_tokens"] == 0
    assert warm["meta_info"]["cached_tokens"] > 100, "the cache is at work"
    for tail in (one, other):
        found = logits_of(
            engine.generate(input_ids=shared + tail, sampling_params=GREEDY, return_logits=True)
        )
        close("behind a cached prefix", found, oracle(found.token_ids)[:-1])
    again = engine.generate(input_ids=shared + other, sampling_params=GREEDY)
    assert again["meta_info"]["cached_tokens"] > 150, "and stays usable for others"


def test_generated_rows_alone_use_the_cache(engine: Any, oracle: Any, close: Any) -> None:
    ids = prompts(200)[0]
    engine.generate(input_ids=ids, sampling_params=GREEDY)
    answer = engine.generate(input_ids=ids, sampling_params=GREEDY, return_logits={"select": "generated"})
    assert answer["meta_info"]["cached_tokens"] > 100
    found = logits_of(answer)
    assert found.positions.tolist() == list(range(199, 199 + 12))
    close("generated rows only", found, oracle(found.token_ids)[199:-1])


def test_raw_rows_stay_raw_under_penalties_temperature_and_grammar(
    engine: Any, oracle: Any, close: Any
) -> None:
    settings: list[dict[str, Any]] = [
        {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "frequency_penalty": 0.8, "presence_penalty": 0.5},
        {"temperature": 1.3, "min_p": 0.05, "repetition_penalty": 1.3},
        {"temperature": 0, "regex": "(yes|no), [a-z ]{3,20}"},
        {"temperature": 0, "logit_bias": {"338": 50.0}},
    ]
    for params in settings:
        answer = engine.generate(FRANCE, {"max_new_tokens": 10, **params}, return_logits={"summary": True})
        found = logits_of(answer)
        assert len(found.generated) == len(answer["output_ids"])
        truth = oracle(found.token_ids)[:-1]
        close("with processors", found, truth)
        chosen = truth[np.arange(len(truth)), found.token_ids[1:]]
        assert np.abs(found.summary["target_logit"] - chosen).max() < 2e-4


def test_rows_equal_tokens_for_every_finish_reason(engine: Any, oracle: Any, close: Any) -> None:
    tokenizer = engine.tokenizer_manager.tokenizer
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Say hi."}], tokenize=False, add_generation_prompt=True
    )
    for prompt, params, reason in [
        (FRANCE, {"stop": ["Paris"]}, "stop"),
        (FRANCE, {"stop_token_ids": [tokenizer.encode(" Paris")[0]]}, "stop"),
        (chat, {}, "stop"),
        (FRANCE, {"max_new_tokens": 1}, "length"),
    ]:
        answer = engine.generate(
            prompt, {"temperature": 0, "max_new_tokens": 40, **params}, return_logits=True
        )
        assert answer["meta_info"]["finish_reason"]["type"] == reason
        found = logits_of(answer)
        assert len(found.generated) == answer["meta_info"]["completion_tokens"]
        close("finish reasons", found, oracle(found.token_ids)[:-1])


def test_samples_of_one_prompt_have_rows_of_their_own(engine: Any, oracle: Any, close: Any) -> None:
    params = {"temperature": 1.0, "max_new_tokens": 6, "n": 3, "ignore_eos": True}
    answers = engine.generate(FRANCE, params, return_logits=True)
    assert len(answers) == 3
    for answer in answers:
        found = logits_of(answer)
        assert found.token_ids[found.prompt_length :].tolist() == answer["output_ids"]
        close("n = 3", found, oracle(found.token_ids)[:-1])


@pytest.mark.parametrize("pause_s", [0, 0.5])
def test_a_stream_brings_the_new_rows_of_each_chunk(
    engine: Any, oracle: Any, close: Any, pause_s: float
) -> None:
    parts = []
    for chunk in engine.generate(FRANCE, GREEDY, stream=True, return_logits=True):
        parts.append(logits_of(chunk))
        time.sleep(pause_s)  # meanwhile SGLang goes on, and drops the chunks that were not taken
    positions = np.concatenate([part.positions for part in parts])
    assert len(parts) > 1
    assert positions.tolist() == list(range(5 + 12 - 1))
    close("streaming", np.concatenate([np.asarray(p) for p in parts]), oracle(parts[-1].token_ids)[:-1])


@pytest.mark.parametrize("encode", ["float16", "bfloat16"])
def test_encodings_are_applied_before_the_hand_over(engine: Any, encode: str) -> None:
    exact = np.asarray(engine.logits(FRANCE))
    found = engine.logits(FRANCE, encode=encode)
    values = np.asarray(found)
    assert str(values.dtype) == encode
    assert np.array_equal(values.view(np.uint16), exact.astype(values.dtype).view(np.uint16))


CUTS: list[dict[str, Any]] = [
    {"vocab": [504, 3, 40_000]},
    {"vocab": [504, 3], "logsumexp": False},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"threshold": 12.0},
    {"sample": 7, "seed": 2},
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_some_columns_are_kept_in_the_scheduler(engine: Any, oracle: Any, close: Any, cut: Any) -> None:
    ids = prompts(90)[0]
    answers = engine.generate(
        input_ids=[ids, ids[:9], ids],
        sampling_params=GREEDY,
        return_logits=[{"select": Select(**cut)}, True, {"select": cut | {"positions": "generated"}}],
    )
    assert logits_of(answers[1]).shape[1] == 49152
    for answer, positions in ((answers[0], np.arange(101)), (answers[2], np.arange(89, 101))):
        found = logits_of(answer)
        assert found.positions.tolist() == positions.tolist()
        check_cut(found, oracle(found.token_ids)[positions], cut)
    check_cut(engine.logits(input_ids=ids, select=Select(**cut)), oracle(ids), cut)


@pytest.mark.parametrize("cut", [CUTS[0], CUTS[3]], ids=str)
def test_a_stream_of_some_columns(engine: Any, oracle: Any, close: Any, cut: Any) -> None:
    chunks = [
        logits_of(chunk)
        for chunk in engine.generate(FRANCE, GREEDY, return_logits={"select": cut}, stream=True)
    ]
    truth = oracle(chunks[-1].token_ids)
    assert np.concatenate([chunk.positions for chunk in chunks]).tolist() == list(range(16))
    for chunk in chunks:
        check_cut(chunk, truth[chunk.positions], cut)


def check_cut(found: Logits, truth: Any, cut: dict[str, Any]) -> None:
    truth = truth.astype(np.float64)
    entries = found.values.entries()
    rows = np.repeat(np.arange(len(found)), entries.lengths)
    assert np.abs(entries.values - truth[rows, entries.ids]).max() < 5e-4
    if "top_k" in cut:
        assert np.array_equal(entries.ids.reshape(-1, 5)[:, 0], truth.argmax(1))
    if "vocab" in cut:
        assert entries.ids.tolist() == cut["vocab"] * len(found)
    if "sample" in cut:
        assert (found.values.sums(entries.counts) == cut["sample"]).all()
    if cut.get("logsumexp", True):
        mass = np.exp(truth - np.logaddexp.reduce(truth, axis=1)[:, None])[rows, entries.ids]
        assert np.abs(1 - found.dropped_mass() - found.values.sums(mass)).max() < 1e-3


def test_summaries_without_rows(engine: Any, oracle: Any) -> None:
    found = engine.logits(FRANCE, select=Select(vocab=None), summary=True)
    truth = oracle(found.token_ids).astype(np.float64)
    logprobs = (
        truth
        - np.log(np.exp(truth - truth.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - truth.max(-1, keepdims=True)
    )
    entropy = -(np.exp(logprobs) * logprobs).sum(-1)
    assert np.abs(found.entropy() - entropy).max() < 1e-4
    scored = logprobs[np.arange(4), found.token_ids[1:]]
    assert np.abs(found.target_logprob()[:-1] - scored).max() < 1e-4
    assert np.isnan(found.target_logprob()[-1])


@pytest.mark.parametrize(
    ("select", "positions"),
    [("last", [15]), ("prompt", [0, 1, 2, 3]), ([2, 7, 3], [2, 3, 7]), (slice(-3, None), [13, 14, 15])],
)
def test_positions_are_selected(
    engine: Any, oracle: Any, close: Any, select: Any, positions: list[int]
) -> None:
    found = logits_of(engine.generate(FRANCE, GREEDY, return_logits={"select": select}))
    assert found.positions.tolist() == positions
    close("selections", found, oracle(found.token_ids)[positions])


def test_results_are_held_across_later_requests(engine: Any) -> None:
    held = logits_of(engine.generate(FRANCE, GREEDY, return_logits=True))
    before = np.asarray(held).copy()
    for ids in prompts(*range(5, 25)):
        engine.generate(input_ids=ids, sampling_params=GREEDY, return_logits=True)
    assert np.array_equal(np.asarray(held), before)


def test_a_held_result_has_as_many_objects_whatever_the_vocabulary(engine: Any) -> None:
    ids = prompts(40)[0]

    def objects(vocab: Any, held: Callable[[Any], Any] = lambda rows: rows) -> int:
        asked = {"select": Select(vocab=vocab), "summary": ["entropy"]}
        for _ in range(2):  # what is made once is there before the second time
            gc.collect()
            before = sys.getallocatedblocks()
            answer = engine.generate(input_ids=ids, sampling_params=GREEDY, return_logits=asked)
            rows = held(logits_of(answer))
            gc.collect()
            found = sys.getallocatedblocks() - before
            assert len(rows) == 40 + 12 - 1
            del answer, rows
        return found

    few, many = objects(None), objects("all")  # no columns, and 49,152
    assert abs(many - few) < 500
    assert objects("all", lambda rows: np.asarray(rows)[:, :1000].tolist()) > few + 51 * 900, "it is counted"


def test_shared_memory_is_used_again(engine: Any, segments: Callable[[], list[pathlib.Path]]) -> None:
    engine.generate(FRANCE, GREEDY, return_logits=True)
    gc.collect()
    before = len(segments())
    for _ in range(10):
        engine.generate(FRANCE, GREEDY, return_logits=True)
        gc.collect()
    assert len(segments()) == before


def test_an_aborted_request_leaves_nothing_and_the_next_is_right(
    engine: Any, oracle: Any, close: Any, segments: Callable[[], list[pathlib.Path]]
) -> None:
    long = {"temperature": 0, "max_new_tokens": 2000, "ignore_eos": True}
    counts = []
    for _ in range(4):
        stream = engine.generate(FRANCE, long, stream=True, return_logits=True)
        next(stream)
        stream.close()
        engine.tokenizer_manager.abort_request(abort_all=True)
        found = logits_of(engine.generate(FRANCE, GREEDY, return_logits=True))
        close("after aborts", found, oracle(found.token_ids)[:-1])
        del found
        gc.collect()
        counts.append(len(segments()))
    assert counts[-1] <= counts[1], "segments are used again"


@pytest.mark.parametrize(
    ("asked", "error", "match"),
    [
        ({"selekt": "all"}, OptionError, "selekt"),
        ({"encode": "int3"}, OptionError, "int3"),
        ({"select": "every"}, SelectError, "every"),
        ({"summary": ["mood"]}, OptionError, "mood"),
        ({"select": {"vocab": None}}, SelectError, "nothing is kept"),
        ([True, False], OptionError, "one entry a prompt"),
        (3, OptionError, "neither"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_it_runs(
    engine: Any, asked: Any, error: Any, match: str
) -> None:
    with pytest.raises(error, match=match):
        engine.generate(FRANCE, GREEDY, return_logits=asked)
    assert "meta_info" in engine.generate(FRANCE, GREEDY)


def test_what_the_scheduler_refuses_is_one_requests_error(engine: Any) -> None:
    from logitscope.plugins.common.options import KEY

    with pytest.raises(ValueError, match=r"return_logits.*no JSON"):
        engine.generate(FRANCE, {**GREEDY, "custom_params": {KEY: "{"}})
    assert "Paris" in engine.generate(FRANCE, GREEDY)["text"]


def test_beam_search_is_refused_by_name(engine: Any) -> None:
    with pytest.raises(ValueError, match="no complete logits with beam search"):
        engine.generate(FRANCE, {"max_new_tokens": 4, "beam_width": 2}, return_logits=True)


def test_log_probabilities_that_the_user_asks_for_stay(engine: Any) -> None:
    plain = engine.generate(FRANCE, GREEDY, return_logprob=True, logprob_start_len=2, top_logprobs_num=2)
    both = engine.generate(
        FRANCE, GREEDY, return_logprob=True, logprob_start_len=2, top_logprobs_num=2, return_logits=True
    )
    ours = [p for p, *_ in both["meta_info"]["output_token_logprobs"]]
    theirs = [p for p, *_ in plain["meta_info"]["output_token_logprobs"]]
    assert np.allclose(ours, theirs, atol=1e-4)
    assert "output_token_logprobs" not in engine.generate(FRANCE, GREEDY, return_logits=True)["meta_info"]


def test_few_bytes_cross_the_border_between_processes(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    from logitscope.plugins.common import options

    seen: list[int] = []
    inner = TokenizerManager.update_request_meta_info

    def measured(self: Any, meta: Any, state: Any, info: Any, index: int, *args: Any) -> Any:
        if info.get(options.KEY):
            seen.append(len(pickle.dumps(info[options.KEY][index])))
        return inner(self, meta, state, info, index, *args)

    monkeypatch.setattr(TokenizerManager, "update_request_meta_info", measured)
    engine.generate(input_ids=prompts(1024)[0], sampling_params=GREEDY, return_logits={"summary": True})
    assert seen
    assert sum(seen) < 10_000


def test_a_user_can_await_rows(engine: Any, oracle: Any, close: Any) -> None:
    async def ask() -> Any:
        return await engine.async_generate(FRANCE, GREEDY, return_logits=True)

    found = logits_of(engine.loop.run_until_complete(ask()))
    close("async", found, oracle(found.token_ids)[:-1])


def test_a_user_can_await_a_stream(engine: Any, oracle: Any, close: Any) -> None:
    async def ask() -> list[Any]:
        chunks = await engine.async_generate(FRANCE, GREEDY, stream=True, return_logits=True)
        return [logits_of(chunk) async for chunk in chunks]

    parts = engine.loop.run_until_complete(ask())
    assert np.concatenate([part.positions for part in parts]).tolist() == list(range(5 + 12 - 1))
    close("async stream", np.concatenate([np.asarray(p) for p in parts]), oracle(parts[-1].token_ids)[:-1])


@pytest.mark.parametrize("encode", ["hidden", "hidden-float16"])
def test_hidden_rows_are_rebuilt(engine: Any, oracle: Any, close: Any, encode: str) -> None:
    batch = engine.logits(input_ids=prompts(5, 150, 64), encode=encode)
    for found in batch:
        assert found.values.nbytes * (85 if encode == "hidden" else 170) <= len(found) * 49152 * 4
        assert found.verification.rows == len(found)
        assert found.verification.max_abs_difference <= found.verification.bound
        tolerance = 2e-4 if encode == "hidden" else found.verification.bound
        truth = oracle(found.token_ids)
        worst = float(np.abs(np.asarray(found) - truth).max())
        assert worst <= tolerance, worst
        if encode == "hidden":
            close("hidden rows, scoring", found, truth)


def test_hidden_rows_of_generations_beside_plain_ones(engine: Any, oracle: Any, close: Any) -> None:
    asked: list[Any] = [
        {"encode": "hidden"},
        True,
        False,
        {"encode": "hidden", "select": "generated", "summary": ["entropy"]},
        {"encode": "hidden", "select": slice(-2, None)},
        {"encode": "float16", "select": "last"},
    ]
    params = [{**GREEDY, "temperature": 0.8 * (i % 2)} for i in range(len(asked))]
    answers = engine.generate(
        input_ids=prompts(9, 70, 8, 33, 7, 5), sampling_params=params, return_logits=asked
    )
    for answer, wanted in zip(answers, asked, strict=True):
        found = answer["meta_info"].get("logits")
        if not wanted:
            assert found is None
            continue
        hidden = isinstance(wanted, dict) and wanted["encode"] == "hidden"
        assert (found.verification is not None) == hidden
        if hidden or wanted is True:
            truth = oracle(found.token_ids)[found.positions]
            close("hidden rows, mixed generation", found, truth)


def test_a_stream_of_hidden_rows(engine: Any, oracle: Any, close: Any) -> None:
    asked = {"encode": "hidden"}
    parts = [logits_of(c) for c in engine.generate(FRANCE, GREEDY, stream=True, return_logits=asked)]
    assert np.concatenate([part.positions for part in parts]).tolist() == list(range(5 + 12 - 1))
    rows = np.concatenate([np.asarray(part) for part in parts])
    close("hidden rows, streaming", rows, oracle(parts[-1].token_ids)[:-1])
