"""The test kit finds what it is there to find."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest

from logitscope.engines.fake import FAULTS, FakeEngine, fake_rows
from logitscope.errors import IncompleteError, OptionError
from logitscope.logits import Logits
from logitscope.numerics import reference
from logitscope.rows import End, RowBlock, Select
from logitscope.testing import (
    FAMILIES,
    Oracle,
    assert_aligned,
    assert_complete,
    assert_rows_close,
    assert_same_bits,
    forward_logits,
    save_tiny,
    teacher_forced,
    tiny_model,
    tiny_tokenizer,
)
from logitscope.testing.case import read_stream

pytest_plugins = ["pytester"]

# Which checks must find which fault; each also fails elsewhere, which is as well.
FOUND_BY = {
    "drop_block": "trap_03",
    "repeat_block": "trap_03",
    "swap_blocks": "a_stream_gives_each_row_once",
    "hang_up": "a_stream_gives_each_row_once",
    "extra_row": "trap_05",
    "lose_last_row": "trap_05",
    "reuse_buffer": "trap_17",
    "stale_after_close": "trap_21",
    "nan": "trap_19",
    "shift": "trap_04",
    "border": "trap_03",
    "raw_processed": "trap_08",
    "batch_dependent": "trap_13",
    "padded_columns": "trap_12",
    "narrowed": "trap_19",
    "mixed_samples": "trap_20",
    "python_objects": "trap_15",
}

SUITE = """
    import pytest
    from logitscope.engines.fake import FakeEngine, fake_rows
    from logitscope.testing import EngineCase, EngineSuite, tiny_tokenizer

    TOKENIZER = tiny_tokenizer(300)

    def opened(forward_tokens):
        return FakeEngine.open(
            vocab_size=301,
            tokenizer=TOKENIZER,
            eos_token_id=2,
            block_rows=forward_tokens or 4,
            fault={fault!r},
        )

    class TestIt(EngineSuite):
        @pytest.fixture
        def case(self):
            {setup}
            return EngineCase(
                opened(None),
                oracle=lambda ids: fake_rows(ids, 301),
                name="broken",
                eos_token_id=2,
                reopen=opened,
            )
"""


def run_suite(pytester: pytest.Pytester, *arguments: str, fault: str | None, setup: str = "") -> Any:
    pytester.makepyfile(textwrap.dedent(SUITE).format(fault=fault, setup=setup))
    return pytester.runpytest_inprocess("-q", "-p", "logitscope.testing.plugin", *arguments)


def test_every_fault_is_tested() -> None:
    assert set(FOUND_BY) == set(FAULTS)


@pytest.mark.parametrize(("fault", "trap"), FOUND_BY.items(), ids=list(FOUND_BY))
def test_the_suite_finds_a_fault(pytester: pytest.Pytester, fault: str, trap: str) -> None:
    result = run_suite(pytester, "-k", trap, fault=fault)
    assert result.parseoutcomes().get("failed", 0) >= 1, f"{fault} was not found by {trap}"


def test_the_suite_finds_nothing_in_a_sound_engine(pytester: pytest.Pytester) -> None:
    checks = " or ".join(sorted(set(FOUND_BY.values())))
    outcomes = run_suite(pytester, "-k", checks, fault=None).parseoutcomes()
    assert outcomes["passed"] > 40
    assert "failed" not in outcomes


BROKEN_STREAMS = ["drop_block", "repeat_block", "swap_blocks", "hang_up", "lose_last_row"]


@pytest.mark.parametrize("fault", BROKEN_STREAMS)
def test_scoring_is_complete_or_an_error(fault: str) -> None:
    engine = FakeEngine.open(vocab_size=11, block_rows=2, fault=fault)
    with pytest.raises(IncompleteError):
        engine.logits([[1, 2, 3, 4, 5], [6, 7, 8, 9]])


@pytest.mark.parametrize("fault", [*BROKEN_STREAMS, "extra_row"])
def test_a_generation_is_complete_or_an_error(fault: str) -> None:
    engine = FakeEngine.open(vocab_size=11, block_rows=2, fault=fault)
    with pytest.raises(IncompleteError):
        engine.generate([[1, 2, 3, 4, 5]], max_new_tokens=3, return_logits=True)


# -- the report --------------------------------------------------------------------------------------------


def test_the_report_counts_checks_measures_and_skips(pytester: pytest.Pytester) -> None:
    result = run_suite(pytester, "-k", "trap_19 or stay_on_the_device or seed_does", fault=None)
    result.stdout.fnmatch_lines(
        [
            "EngineSuite: 4 checks on broken, 1 skipped",
            "*skipped 1: the engine does not give keep_on_device",
            "*worst difference from the oracle: 0",
        ]
    )
    assert result.ret == 0


def test_the_report_names_failures(pytester: pytest.Pytester) -> None:
    result = run_suite(pytester, "-k", "trap_19", fault="nan")
    result.stdout.fnmatch_lines(["EngineSuite: 3 checks on broken, * failed"])
    assert result.ret == 1


def test_an_engine_of_which_no_check_ran_fails_the_run(pytester: pytest.Pytester) -> None:
    result = run_suite(pytester, "-k", "trap_19", fault=None, setup="pytest.skip('no such engine here')")
    result.stdout.fnmatch_lines(["*TestIt was selected, and none of its checks ran*"])
    assert result.ret == 1


# -- traps without an engine -------------------------------------------------------------------------------


def test_trap_07_positions_beyond_2_to_the_31_values(tmp_path: pathlib.Path) -> None:
    """Row 2,199,023 begins beyond 2**31 values, and 2**32 bytes, of a file without blocks on disk."""
    vocab, rows = 1024, 2_200_000
    values = np.lib.format.open_memmap(
        tmp_path / "rows.npy", mode="w+", dtype=np.float16, shape=(rows, vocab)
    )
    assert values.size > 2**31
    row = np.linspace(-3, 3, vocab).astype(np.float16)
    values[-1] = values[2**21] = row
    identity = FakeEngine.open(vocab_size=vocab).identity
    logits = Logits(
        values=values,
        positions=np.arange(rows),
        token_ids=np.full(rows, 5, np.int32),
        prompt_length=rows,
        identity=identity,
    )
    assert logits.nbytes == 2 * rows * vocab
    for part in (logits.last, logits[rows - 1 :], logits[[-1]], logits[np.array([2**21, rows - 1])]):
        assert_same_bits(np.asarray(part)[-1], row)
    assert_same_bits(logits.at(2**21), row)
    wanted = reference.summaries(row[None], np.array([5]), ("entropy", "target_rank"))
    found = logits[[2**21]]
    assert found.entropy()[0] == pytest.approx(wanted["entropy"][0], rel=1e-5)
    assert found.target_rank()[0] == wanted["target_rank"][0]


def test_trap_07_a_buffer_beyond_2_to_the_31_values() -> None:
    """The collector's room: its untouched pages cost nothing."""
    from logitscope.logits.collect import Collector
    from logitscope.rows import Request

    vocab, length = 65_536, 33_000
    request = Request(token_ids=np.zeros(length, np.int32), encode="float16")
    identity = FakeEngine.open(vocab_size=vocab).identity
    collector = Collector([request], identity=identity)
    assert length * vocab > 2**31
    place = collector.buffer(0, "raw", length - 2, 2)
    place[:] = 7
    assert place.shape == (2, vocab)
    assert (collector.buffer(0, "raw", length - 1, 1) == 7).all()
    with pytest.raises(IncompleteError):
        collector.buffer(0, "raw", length - 1, 2)


@pytest.mark.parametrize("kind", ["fake", "transformers"])
def test_trap_15_objects_do_not_grow_with_the_vocabulary(kind: str) -> None:
    import gc

    def cost(vocab_size: int) -> int:
        if kind == "fake":
            engine: Any = FakeEngine.open(vocab_size=vocab_size)
        else:
            from logitscope.engines.transformers.engine import TransformersEngine

            engine = TransformersEngine.open(tiny_model("llama", vocab_size=vocab_size))
        requests = engine.requests([[5, 6, 7]] * 2, max_new_tokens=4, summary=True)
        list(engine.stream(requests))
        gc.collect()
        before = sys.getallocatedblocks()
        held = list(engine.stream(requests))
        after = sys.getallocatedblocks()
        assert held
        return after - before

    cost(301)
    assert abs(cost(5003) - cost(301)) < 60


_PEAK = """
import sys
import numpy as np
import resource
import torch
from logitscope.engines.transformers.engine import TransformersEngine
from logitscope.rows import Select
from logitscope.testing import tiny_model

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

torch.set_num_threads(1)
engine = TransformersEngine.open(tiny_model("llama", vocab_size=60_001, context=2048), pack=False)
ids = np.random.default_rng(0).integers(0, 60_001, 1500).tolist()
engine.logits(ids[:600], select=Select("last"))
requests = engine.requests(ids, select=Select(vocab=None), summary=True)
planned = engine.estimate(requests).total_bytes
before = peak()
for block in engine.stream(requests):
    pass
print(peak() - before, planned, 1500 * 60_001 * 4)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has another unit elsewhere")
def test_trap_06_the_peak_is_within_the_plan() -> None:
    """Summaries alone over rows of 360 MB: the peak stays within the estimate, far below the rows."""
    done = subprocess.run(
        [sys.executable, "-c", _PEAK], capture_output=True, text=True, check=True, timeout=120
    )
    grown, planned, whole = map(int, done.stdout.split())
    assert grown <= planned * 1.1 + 2**24, f"the peak grew by {grown:,} bytes, planned {planned:,}"
    assert planned < whole / 2


# -- the fake engine and the kit's own parts ---------------------------------------------------------------


def test_fake_rows_depend_on_what_was_read_and_nothing_else() -> None:
    ids = [3, 1, 4, 1, 5]
    rows = fake_rows(ids, 101)
    assert rows.dtype == np.float32
    assert_same_bits(fake_rows(ids[:3], 101), rows[:3])
    assert_same_bits(fake_rows(ids, 57), rows[:, :57])
    for place in range(5):
        other = [*ids[:place], 9, *ids[place + 1 :]]
        changed = (fake_rows(other, 101) != rows).any(axis=1)
        assert changed.tolist() == [p >= place for p in range(5)]
    assert (fake_rows(ids, 101, seed=1) != rows).any(axis=1).all()
    assert (rows[1] != rows[3]).any(), "the same token after another prefix"
    assert 2.5 < rows.std() < 3.3


def test_fake_blocks_of_several_requests_come_in_turn() -> None:
    engine = FakeEngine.open(vocab_size=11, block_rows=1)
    items = list(engine.stream(engine.requests([[1, 2, 3], [4, 5, 6]])))
    assert [item.index for item in items] == [0, 1] * 4
    assert [isinstance(item, End) for item in items] == [False] * 6 + [True] * 2


@pytest.mark.parametrize(
    ("option", "value"), [("vocab_size", 0), ("block_rows", 0), ("dtype", "int8"), ("fault", "rain")]
)
def test_the_fake_engine_refuses_what_it_cannot_do(option: str, value: Any) -> None:
    with pytest.raises(OptionError, match=option):
        FakeEngine.open(**{option: value})


def test_the_fake_engine_needs_no_torch() -> None:
    code = (
        "import sys, logitscope as ls; engine = ls.open('fake', engine='fake', vocab_size=7)\n"
        "engine.generate([1, 2], max_new_tokens=3, temperature=1.0, return_logits=True, summary=True)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tie", [None, True, False])
def test_tiny_models_are_what_they_say(family: str, tie: bool | None) -> None:
    model: Any = tiny_model(family, tie=tie, vocab_size=503)
    again = tiny_model(family, tie=tie, vocab_size=503)
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert head.shape == (503, 64)
    if tie is not None:
        assert (head.data_ptr() == embedding.data_ptr()) == tie
    ids = list(range(4, 40))
    rows = forward_logits(model, ids)
    assert rows.shape == (36, 503)
    assert rows.std() > 1
    assert_same_bits(forward_logits(again, ids), rows)
    assert np.abs(forward_logits(tiny_model(family, tie=tie, vocab_size=503, seed=1), ids) - rows).max() > 1
    swapped = [ids[20], *ids[1:20], ids[0], *ids[21:]]
    assert np.abs(forward_logits(model, swapped) - rows)[-1].max() > 0.2, "the row does not know the order"


def test_tiny_gemma_has_soft_caps_that_bite_and_a_window_that_closes() -> None:
    model: Any = tiny_model("gemma2")
    ids = list(range(4, 34))
    rows = forward_logits(model, ids)
    assert 2.9 < np.abs(rows).max() <= 3.0
    model.config.final_logit_softcapping = None
    assert np.abs(forward_logits(model, ids) - rows).max() > 2
    model = tiny_model("gemma2")
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    model.config.sliding_window = 1000
    assert np.abs(forward_logits(model, ids) - rows)[-1].max() > 0.1


@pytest.mark.parametrize(
    ("family", "name"),
    [("cohere", "logit_scale"), ("granite", "logits_scaling")],
)
def test_tiny_models_with_a_logit_scale_use_it(family: str, name: str) -> None:
    model: Any = tiny_model(family)
    assert getattr(model.config, name) != 1.0


def test_tiny_phi_has_a_biased_head() -> None:
    model: Any = tiny_model("phi")
    head = model.get_output_embeddings()
    assert head.bias.abs().max() > 0.3


def test_tiny_model_names_what_it_does_not_know() -> None:
    with pytest.raises(OptionError, match="lama"):
        tiny_model("lama")
    with pytest.raises(OptionError, match="int8"):
        tiny_model("llama", dtype="int8")
    with pytest.raises(OptionError, match="100000"):
        tiny_tokenizer(100_000)


@pytest.mark.parametrize(
    "text", ["The capital of France is", "naïve 日本語 🙂", " two  spaces\n\t", "", "\x00\x7f"]
)
def test_the_tiny_tokenizer_encodes_every_text(text: str) -> None:
    tokenizer = tiny_tokenizer(300)
    ids = tokenizer(text).input_ids
    assert all(4 <= i < 300 for i in ids)
    assert tokenizer.decode(ids) == text
    assert tiny_tokenizer(300, bos=True)(text).input_ids == [1, *ids]


def test_the_tiny_tokenizer_has_a_chat_template_that_marks_the_assistant() -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    encoded: Any = tiny_tokenizer().apply_chat_template(
        chat, return_dict=True, return_assistant_tokens_mask=True
    )
    marked = [i for i, mine in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mine]
    assert tiny_tokenizer().decode(marked) == "Yes<|im_end|>"


def test_a_saved_tiny_model_comes_back(tmp_path: pathlib.Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = save_tiny(tmp_path / "model", "phi", seed=3)
    ids = list(range(4, 20))
    assert_same_bits(
        forward_logits(AutoModelForCausalLM.from_pretrained(folder), ids),
        forward_logits(tiny_model("phi", seed=3), ids),
    )
    assert len(AutoTokenizer.from_pretrained(folder)) == 750


def test_the_oracle_is_the_models_forward_and_leaves_it_alone() -> None:
    import torch

    model: Any = tiny_model("llama", dtype="bfloat16")
    ids = list(range(4, 20))
    rows = Oracle(model)(ids)
    assert rows.dtype == np.float64
    assert model.dtype == torch.bfloat16
    assert_rows_close(Oracle(model, dtype="float32")(ids), rows, dtype="bfloat16")
    forced = teacher_forced(model, ids[:10], ids[10:])
    assert forced.shape == (15, 1001)
    np.testing.assert_allclose(forced, rows[:15], rtol=0, atol=1e-9)  # another shape, other last bits


# -- assertions that must fail -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_close_finds_faults_and_allows_rounding(dtype: str) -> None:
    truth = fake_rows([1, 2, 3], 301).astype(np.float64)
    eps = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}[dtype]
    assert assert_rows_close(truth * (1 + eps), truth, dtype=dtype) == pytest.approx(
        np.abs(truth).max() * eps
    )
    faults = {
        "shape": truth[:2],
        "row 1": truth[[0, 0, 2]],
        "not finite": np.where(np.arange(301) == 7, np.nan, truth),
        "rms": truth + 4.5 * eps * np.abs(truth).max() * (4 if dtype == "float32" else 1),
        "largest": truth + 70 * eps * np.abs(truth).max() * (np.arange(301) == 5),
    }
    for what, wrong in faults.items():
        with pytest.raises(AssertionError, match=what):
            assert_rows_close(wrong, truth, dtype=dtype)


def test_aligned_and_complete_find_faults() -> None:
    import dataclasses

    engine = FakeEngine.open(vocab_size=11)
    made: Any = engine.generate([1, 2, 3], max_new_tokens=4, return_logits=True)
    assert_complete(made)
    ids = np.concatenate([made.prompt_token_ids, made.token_ids])
    assert_aligned(made.logits, ids, prompt_length=3)
    with pytest.raises(AssertionError, match="positions"):
        assert_aligned(made.logits, ids, prompt_length=3, select=Select("last"))
    with pytest.raises(AssertionError, match="targets"):
        assert_aligned(made.logits, ids[::-1], prompt_length=3)
    for change, what in (
        ({"logits": made.logits[:-1]}, "generated rows"),
        ({"logits": None}, "no logits"),
        ({"token_ids": made.token_ids[:-1]}, "generated rows"),
        ({"finish_reason": None}, "finish_reason"),
    ):
        with pytest.raises(AssertionError, match=what):
            assert_complete(dataclasses.replace(made, **change))


def test_read_stream_finds_faults() -> None:
    def block(*positions: int, index: int = 0) -> RowBlock:
        return RowBlock(index, np.array(positions, np.int64), values=np.zeros((len(positions), 3)))

    def end(rows: int, index: int = 0) -> End:
        return End(index, np.empty(0, np.int32), rows=rows)

    assert read_stream([block(0, 1), block(2), end(3)], 1)[0].positions.tolist() == [0, 1, 2]
    broken: list[tuple[list[RowBlock | End], str]] = [
        ([block(0), block(0), end(2)], "ascend"),
        ([block(1), block(0), end(2)], "ascend"),
        ([block(0), end(2)], "states 2"),
        ([block(0)], "ends of"),
        ([end(0), block(0)], "after its end"),
        ([block(0, index=1), end(1, index=1)], "request 1 of 1"),
    ]
    for items, what in broken:
        with pytest.raises(AssertionError, match=what):
            read_stream(items, 1)


def test_same_bits_tells_zeros_and_nans_apart() -> None:
    assert_same_bits(np.array([np.nan, -0.0]), np.array([np.nan, -0.0]))
    for wrong in (np.array([np.nan, 0.0]), np.array([np.nan]), np.array([np.nan, -0.0], np.float32)):
        with pytest.raises(AssertionError):
            assert_same_bits(wrong, np.array([np.nan, -0.0]))
