"""`Logits` and `LogitsBatch`: alignment, parts, summaries, padding, hand-over and what they refuse."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from samples import DTYPES, VOCAB, identity, make_logits, random_values, reference, token_ids

from logitscope import tensors
from logitscope.errors import (
    EmptyInputError,
    IdentityMismatchError,
    InputError,
    OptionError,
    SelectError,
    UnavailableError,
)
from logitscope.logits import Logits, LogitsBatch, check_same_vocabulary
from logitscope.numerics import host
from logitscope.rows import SUMMARIES, SUMMARY_DTYPES, Select, row_count

SEQUENCES = st.tuples(st.integers(1, 9), st.integers(0, 6))


def summaries_only(logits: Logits, names: tuple[str, ...] = SUMMARIES) -> Logits:
    return dataclasses.replace(logits, values=None, summary=logits.summaries(names))


def on_device(logits: Logits) -> Logits:
    pytest.importorskip("torch")
    return dataclasses.replace(logits, values=tensors.to_torch(logits.values).clone())


def even_batch(count: int = 3, prompt_length: int = 4, dtype: Any = np.float32) -> LogitsBatch:
    block = tensors.empty((count, prompt_length, VOCAB), dtype)
    block[...] = random_values(count * prompt_length, dtype).reshape(block.shape)
    return LogitsBatch([make_logits(prompt_length, 0, values=block[i], seed=i) for i in range(count)])


def ragged_batch(dtype: Any = np.float32) -> LogitsBatch:
    return LogitsBatch([make_logits(n, m, dtype, seed=n) for n, m in ((4, 2), (1, 0), (3, 5))])


# -- alignment and parts -----------------------------------------------------------------------------------


@given(SEQUENCES, st.data())
def test_every_row_scores_the_token_after_it(sequence: tuple[int, int], data: st.DataObject) -> None:
    prompt_length, new = sequence
    count = row_count(prompt_length, new)
    chosen = sorted(data.draw(st.sets(st.integers(0, count - 1))))
    logits = make_logits(prompt_length, new, positions=chosen)
    t = token_ids(prompt_length + new)
    assert logits.targets.tolist() == [t[p + 1] if p + 1 < len(t) else -1 for p in chosen]
    assert logits.targets.dtype == np.int32
    for p, kind in zip(chosen, logits.kinds, strict=True):
        assert kind == ("prompt" if p < prompt_length - 1 else "generated" if new else "next")
        np.testing.assert_array_equal(logits.at(p), random_values(count)[p])
    for name in ("prompt", "generated", "next"):
        part = getattr(logits, name)
        assert part.positions.tolist() == [p for p, k in zip(chosen, logits.kinds, strict=True) if k == name]
        np.testing.assert_array_equal(part.values, random_values(count)[part.positions])
    assert logits.last.positions.tolist() == [p for p in chosen if p == count - 1]


@given(SEQUENCES)
def test_parts_of_a_complete_sequence(sequence: tuple[int, int]) -> None:
    prompt_length, new = sequence
    logits = make_logits(prompt_length, new)
    assert len(logits.prompt) == prompt_length - 1
    assert len(logits.generated) == new
    assert len(logits.next) == (new == 0)
    assert len(logits.last) == 1
    for name in ("all", "prompt", "generated", "last"):
        part = logits if name == "all" else getattr(logits, name)
        wanted = Select(name).rows(prompt_length=prompt_length, new_tokens=new)
        np.testing.assert_array_equal(part.positions, wanted)
        np.testing.assert_array_equal(part.targets, logits.targets[wanted])


def test_parts_and_slices_are_views() -> None:
    logits = make_logits(6, 4)
    for part in (logits.prompt, logits.generated, logits.last, logits[2:5], logits[::-2]):
        assert np.shares_memory(part.values, logits.values)
        assert np.shares_memory(part.positions, logits.positions)


@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize(
    "index",
    [slice(2, 5), slice(None, None, 2), slice(None, None, -1), [0, 3, 1], np.array([-1, 0]), [], "mask"],
    ids=str,
)
def test_rows_are_chosen_as_in_numpy(index: Any, place: str) -> None:
    logits = make_logits(5, 3)
    expected = logits.values
    logits = on_device(logits) if place == "device" else logits
    logits = dataclasses.replace(
        logits,
        summary=logits.summaries(["entropy"]),
        hidden_states={2: random_values(7, vocab=4)},
        attentions={0: random_values(7, vocab=6).reshape(7, 2, 3)},
    )
    chosen = logits.positions % 3 == 0 if isinstance(index, str) else index
    numpy_index = np.empty(0, np.int64) if isinstance(chosen, list) and not chosen else chosen
    part = logits[chosen]
    np.testing.assert_array_equal(part.to_numpy(), expected[numpy_index])
    np.testing.assert_array_equal(part.positions, logits.positions[numpy_index])
    np.testing.assert_array_equal(part.entropy(), logits.entropy()[numpy_index])
    np.testing.assert_array_equal(part.hidden_states[2], logits.hidden_states[2][numpy_index])
    np.testing.assert_array_equal(part.attentions[0], logits.attentions[0][numpy_index])


def test_one_row_gives_its_values() -> None:
    logits = make_logits(5, 3)
    np.testing.assert_array_equal(logits[-1], logits.values[-1])
    assert np.shares_memory(logits[np.int64(2)], logits.values)
    assert [row.shape for row in logits] == [(VOCAB,)] * 7
    with pytest.raises(IndexError):
        logits[7]
    with pytest.raises(IndexError):
        logits[[0, -8]]


@pytest.mark.parametrize("index", [[True, False], [[0, 1]], [0.5], "two"], ids=str)
def test_no_index_of_rows(index: Any) -> None:
    with pytest.raises(SelectError, match="no index of rows"):
        make_logits(5, 3)[index]


def test_a_position_that_was_not_kept() -> None:
    logits = make_logits(9, 0, positions=[0, 1, 2, 5, 7])
    np.testing.assert_array_equal(logits.at(5), logits.values[3])
    with pytest.raises(SelectError, match=r"expected 0 … 2, 5, 7; got 3"):
        logits.at(3)


# -- summaries ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("new", [0, 3])
def test_summaries_from_values(dtype: Any, place: str, new: int) -> None:
    logits = make_logits(6, new, dtype)
    expected = reference(logits)
    logits = on_device(logits) if place == "device" else logits
    for name in SUMMARIES:
        found = getattr(logits, name)()
        assert isinstance(found, np.ndarray)
        assert found.dtype == SUMMARY_DTYPES[name]
        np.testing.assert_allclose(found, expected[name], rtol=1e-5, atol=1e-5, err_msg=name)
    assert np.isnan(logits.target_logprob()[-1]) == (new == 0)
    assert (logits.target_rank()[-1] == -1) == (new == 0)


@pytest.mark.parametrize("name", SUMMARIES)
def test_kept_summaries_come_first(name: str) -> None:
    kept = np.arange(7).astype(SUMMARY_DTYPES[name])
    logits = make_logits(5, 3, summary={name: kept})
    assert getattr(logits, name)() is kept
    other = "max" if name != "max" else "entropy"
    np.testing.assert_allclose(logits.summaries([name, other])[other], reference(logits)[other], rtol=1e-5)


def test_summaries_without_values() -> None:
    full = make_logits(5, 3)
    logits = summaries_only(full, ("entropy", "argmax"))
    assert logits.shape == (7, VOCAB)
    assert logits.dtype is None
    assert logits.nbytes == 7 * 8
    np.testing.assert_array_equal(logits.generated.entropy(), full.entropy()[4:])
    for what in (logits.max, logits.logprobs, logits.to_numpy, logits.to_torch, logits.__dlpack__):
        with pytest.raises(UnavailableError, match=r"not|neither"):
            what()
    for ask in (lambda: logits[0], lambda: logits.at(2), lambda: logits.top_k(2), lambda: np.asarray(logits)):
        with pytest.raises(UnavailableError, match=r"Ask the engine for Select\(vocab='all'\)"):
            ask()


@pytest.mark.parametrize("place", ["host", "device"])
def test_no_rows_at_all(place: str) -> None:
    """As the prompt rows of a prompt of one token."""
    logits = make_logits(1, 0).prompt
    logits = on_device(logits) if place == "device" else logits
    assert {name: values.shape for name, values in logits.summaries().items()} == dict.fromkeys(
        SUMMARIES, (0,)
    )
    assert logits.logprobs().shape == (0, VOCAB)
    assert logits.top_k(3).token_ids.shape == (0, 3)
    assert logits.tokens == logits.target_tokens == []
    assert logits.to_arrow().num_rows == 0
    assert "no rows" in repr(logits)


def test_unknown_summary() -> None:
    with pytest.raises(OptionError, match="expected of logsumexp"):
        make_logits().summaries(["perplexity"])


@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logprobs_are_float32_over_the_full_vocabulary(dtype: Any, place: str) -> None:
    logits = make_logits(5, 3, dtype)
    expected = logits.values.astype(np.float64)
    expected = expected - reference(logits)["logsumexp"][:, None]
    found = (on_device(logits) if place == "device" else logits).logprobs()
    assert tensors.is_torch(found) == (place == "device")
    found = tensors.to_numpy(found)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_top_k_is_ordered_by_logit_then_id(dtype: Any, place: str) -> None:
    values = random_values(7, dtype)
    values[:, 5] = values[:, 9] = values.max()
    logits = make_logits(5, 3, values=values)
    expected = np.argsort(-values.astype(np.float64), axis=1, kind="stable")[:, :4]
    top = (on_device(logits) if place == "device" else logits).top_k(4)
    np.testing.assert_array_equal(top.token_ids, expected)
    np.testing.assert_array_equal(top.logits, np.take_along_axis(values, expected, 1))
    assert top.logits.dtype == dtype
    assert top.logprobs.dtype == np.float32
    np.testing.assert_allclose(
        top.logprobs, np.take_along_axis(tensors.to_numpy(logits.logprobs()), expected, 1), atol=1e-5
    )
    for k in (0, VOCAB + 1):
        with pytest.raises(OptionError, match="k: value outside its range"):
            logits.top_k(k)


def test_texts_of_tokens() -> None:
    logits = make_logits(3, 0)
    a, b, c = token_ids(3)
    assert logits.tokens == [f" w{a}", f" w{b}", f" w{c}"]
    assert logits.target_tokens == [f" w{b}", f" w{c}", ""]
    with pytest.raises(UnavailableError, match="texts of tokens are not known"):
        _ = make_logits(vocabulary=None).tokens


# -- what is refused when it is made -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"values": random_values(6)}, "values"),
        ({"values": random_values(7, vocab=VOCAB + 1)}, "values"),
        ({"summary": {"entropy": np.zeros(6, np.float32)}}, r"summary\['entropy'\]"),
        ({"hidden_states": {3: np.zeros((8, 2))}}, r"hidden_states\[3\]"),
        ({"prompt_length": 0}, "prompt_length"),
        ({"prompt_length": 9}, "prompt_length"),
        ({"positions": np.arange(1, 8)}, "positions"),
        ({"positions": np.arange(-1, 6)}, "positions"),
    ],
    ids=str,
)
def test_parts_that_do_not_fit(change: dict[str, Any], where: str) -> None:
    with pytest.raises(InputError, match=where):
        dataclasses.replace(make_logits(5, 3), **change)


@pytest.mark.parametrize(
    ("change", "name"), [({"vocab_size": 11}, "vocab_size"), ({"tokenizer_hash": "t2"}, "tokenizer_hash")]
)
def test_other_vocabularies_do_not_combine(change: dict[str, Any], name: str) -> None:
    a = make_logits()
    vocab = change.get("vocab_size", VOCAB)
    b = make_logits(values=None, vocab=vocab, identity=identity(**change))
    check_same_vocabulary(a, make_logits(2, 0, identity=identity(model="another", dtype="float16")))
    with pytest.raises(IdentityMismatchError, match=name):
        check_same_vocabulary(a, b)
    with pytest.raises(IdentityMismatchError, match=name):
        LogitsBatch([a, b])


# -- hand-over of one sequence -----------------------------------------------------------------------------


def test_the_array_protocol() -> None:
    logits = make_logits(5, 3)
    assert np.shares_memory(np.asarray(logits), logits.values)
    assert np.shares_memory(np.asarray(logits, copy=False), logits.values)
    assert not np.shares_memory(np.array(logits), logits.values)
    assert np.asarray(logits, dtype=np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="copy"):
        np.asarray(logits, dtype=np.float64, copy=False)
    assert np.asarray(make_logits(dtype=ml_dtypes.bfloat16)).dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_takes_logits_by_dlpack(dtype: Any) -> None:
    torch = pytest.importorskip("torch")
    logits = make_logits(5, 3, dtype)
    tensor = torch.from_dlpack(logits)
    assert tensor.data_ptr() == logits.values.ctypes.data
    assert tensor.dtype == getattr(torch, dtype.name)
    assert torch.equal(tensor, logits.to_torch())
    assert logits.__dlpack_device__() == (1, 0)


def test_numpy_takes_logits_by_dlpack() -> None:
    logits = make_logits(5, 3)
    assert np.shares_memory(np.from_dlpack(logits), logits.values)


@pytest.mark.parametrize("library", ["jax", "tensorflow"])
def test_other_libraries(library: str) -> None:
    pytest.importorskip(library)
    for result in (make_logits(5, 3), ragged_batch()):
        np.testing.assert_array_equal(np.asarray(getattr(result, f"to_{library}")()), result.to_numpy())


def test_rows_on_the_device_stay_there() -> None:
    logits = on_device(make_logits(5, 3))
    assert logits.to_torch() is logits.values
    assert logits[2:4].values.data_ptr() == logits.values[2:].data_ptr()
    assert str(logits.dtype) == "torch.float32"
    assert logits.nbytes == 7 * VOCAB * 4


@pytest.mark.parametrize("kept", ["values", "summaries"])
def test_pandas_has_one_line_a_row(kept: str) -> None:
    pytest.importorskip("pandas")
    full = make_logits(5, 0)
    logits = summaries_only(full, ("entropy", "target_rank")) if kept == "summaries" else full
    frame = logits.to_pandas()
    names = SUMMARIES if kept == "values" else ("entropy", "target_rank")
    assert list(frame) == ["position", "kind", "token_id", "token", "target_id", "target", *names]
    assert frame["position"].tolist() == [0, 1, 2, 3, 4]
    assert frame["kind"].tolist() == ["prompt"] * 4 + ["next"]
    assert frame["token_id"].tolist() == token_ids(5).tolist()
    assert frame["target_id"].tolist() == [*token_ids(5)[1:], -1]
    assert frame["target"].isna().tolist() == [False] * 4 + [True]
    assert frame["target_rank"].iloc[-1] == -1
    np.testing.assert_array_equal(frame["entropy"], full.entropy())
    if kept == "values":
        assert np.isnan(frame["target_logprob"].iloc[-1])


def test_tables_without_a_vocabulary_have_no_texts() -> None:
    pytest.importorskip("pandas")
    logits = make_logits(vocabulary=None)
    assert logits.to_pandas()["token"].isna().all()
    assert logits.to_arrow()["target"].null_count == len(logits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrow_shares_the_values_and_says_what_they_are(dtype: Any) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    logits = make_logits(5, 0, dtype, encoding=dtype.name)
    table = logits.to_arrow()
    lists = table["logits"].chunk(0)
    assert lists.flatten().buffers()[1].address == logits.values.ctypes.data
    assert table.schema.field("logits").metadata[b"dtype"] == dtype.name.encode()
    assert json.loads(table.schema.metadata[b"identity"]) == dataclasses.asdict(logits.identity)
    assert table.schema.metadata[b"stage"] == b"raw"
    assert table.schema.metadata[b"encoding"] == dtype.name.encode()
    for name in ("target_id", "target", "target_logit", "target_logprob", "target_rank"):
        assert table[name].is_null().to_pylist() == [False] * 4 + [True], name
    assert table["entropy"].null_count == 0
    assert pyarrow.table(logits).equals(table)


# -- a batch -----------------------------------------------------------------------------------------------


@given(st.lists(SEQUENCES, min_size=1, max_size=4), st.sampled_from([0.0, -np.inf]))
def test_a_ragged_batch_and_its_dense_view(sequences: list[tuple[int, int]], pad: float) -> None:
    batch = LogitsBatch([make_logits(*one, seed=i) for i, one in enumerate(sequences)])
    lengths = [row_count(*one) for one in sequences]
    assert batch.lengths.tolist() == lengths
    assert batch.shape == (len(sequences), max(lengths), VOCAB)
    dense, mask, positions = batch.to_numpy(pad), batch.mask(), batch.positions
    assert dense.shape == batch.shape
    for i, (member, length) in enumerate(zip(batch, lengths, strict=True)):
        np.testing.assert_array_equal(dense[i, :length], member.values)
        assert (dense[i, length:] == pad).all()
        assert mask[i].tolist() == [True] * length + [False] * (max(lengths) - length)
        assert positions[i].tolist() == [*range(length), *[-1] * (max(lengths) - length)]
    for name in SUMMARIES:
        found = getattr(batch, name)()
        assert found.dtype == SUMMARY_DTYPES[name]
        for i, member in enumerate(batch):
            np.testing.assert_array_equal(found[i, : len(member)], getattr(member, name)())
            padding = found[i, len(member) :]
            assert (np.isnan(padding) if found.dtype == np.float32 else padding == -1).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_even_batch_is_dense_without_a_copy(dtype: Any) -> None:
    batch = even_batch(dtype=dtype)
    dense = batch.to_numpy()
    assert dense.ctypes.data == batch[0].values.ctypes.data
    assert dense.dtype == dtype
    for i, member in enumerate(batch):
        assert dense[i].tobytes() == member.values.tobytes()
    assert np.shares_memory(batch[1:].to_numpy(), dense)
    assert np.shares_memory(batch[::2].to_numpy(), dense)
    assert np.shares_memory(batch.prompt.to_numpy(), dense)
    assert batch.prompt.to_numpy().tobytes() == np.ascontiguousarray(dense[:, :-1]).tobytes()
    assert np.shares_memory(np.asarray(batch), dense)
    torch = pytest.importorskip("torch")
    assert batch.to_torch().data_ptr() == torch.from_dlpack(batch).data_ptr() == dense.ctypes.data


def test_a_dense_view_keeps_the_block_alive_and_read_only() -> None:
    batch = even_batch()
    for member in batch:
        member.values.flags.writeable = False
    dense = batch.to_numpy()
    before = dense.copy()
    del batch, member
    poison = [np.full(before.shape, 7, np.float32) for _ in range(8)]
    np.testing.assert_array_equal(dense, before)
    assert not dense.flags.writeable
    del poison


@pytest.mark.parametrize("order", [(0, 0), (1, 0), (0, 1, 3)], ids=str)
def test_members_that_do_not_lie_evenly_are_copied(order: tuple[int, ...]) -> None:
    whole = even_batch(4)
    batch = LogitsBatch([whole[i] for i in order])
    dense = batch.to_numpy()
    assert not np.shares_memory(dense, whole[0].values)
    np.testing.assert_array_equal(dense, np.stack([whole[i].values for i in order]))


def test_members_of_separate_arrays_are_copied() -> None:
    batch = LogitsBatch([make_logits(4, 0, seed=i) for i in range(2)])
    np.testing.assert_array_equal(batch.to_numpy(), np.stack([m.values for m in batch]))


def test_a_batch_on_the_device_is_padded_there() -> None:
    torch = pytest.importorskip("torch")
    expected = ragged_batch(ml_dtypes.bfloat16)
    batch = LogitsBatch([on_device(member) for member in expected])
    dense = batch.to_torch(-1.0)
    assert dense.dtype == torch.bfloat16
    assert tensors.to_numpy(dense).tobytes() == expected.to_numpy(-1.0).tobytes()
    np.testing.assert_allclose(batch.entropy(), expected.entropy(), rtol=1e-5)


def test_parts_of_a_batch() -> None:
    batch = ragged_batch()
    assert batch.prompt.lengths.tolist() == [3, 0, 2]
    assert batch.generated.lengths.tolist() == [2, 0, 5]
    assert batch.last.lengths.tolist() == [1, 1, 1]
    assert isinstance(batch[1:], LogitsBatch)
    assert batch[-1] is list(batch)[2]
    assert batch.nbytes == sum(m.values.nbytes for m in batch)
    with pytest.raises(IndexError):
        batch[3]


def test_tables_of_a_batch() -> None:
    pytest.importorskip("pandas")
    batch = ragged_batch()
    samples = np.repeat([0, 1, 2], batch.lengths)
    frame, table = batch.to_pandas(), batch.to_arrow()
    assert list(frame)[:2] == ["sample", "position"]
    assert frame["sample"].tolist() == table["sample"].to_pylist() == samples.tolist()
    np.testing.assert_array_equal(frame["entropy"], np.concatenate([m.entropy() for m in batch]))
    shared = [chunk.flatten().buffers()[1].address for chunk in table["logits"].chunks]
    assert shared == [m.values.ctypes.data for m in batch]
    pyarrow = pytest.importorskip("pyarrow")
    assert pyarrow.table(batch).equals(table)


def test_a_batch_needs_a_member() -> None:
    with pytest.raises(EmptyInputError):
        LogitsBatch([])
    with pytest.raises(EmptyInputError):
        ragged_batch()[3:]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            {"identity": identity(weights_hash="w2")},
            IdentityMismatchError,
        ),
        ({"stage": "processed"}, InputError),
        ({"encoding": "float32"}, InputError),
        ({"values": random_values(7, np.float16)}, InputError),
        ({"values": None}, InputError),
    ],
    ids=["identity", "stage", "encoding", "dtype", "values"],
)
def test_members_are_of_one_kind(change: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=r"members\[1\]"):
        LogitsBatch([make_logits(), make_logits(**change)])


# -- views and size ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", ["words", "none"])
def test_repr_shows_the_first_and_last_rows(vocabulary: str, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []

    def counting(z: NDArray[Any], targets: Any, names: Any) -> dict[str, NDArray[Any]]:
        computed.append(len(z))
        return original(z, targets, names)

    original = host.summaries
    logits = make_logits(40, 0)
    if vocabulary == "none":
        logits = dataclasses.replace(logits, vocabulary=None)
    monkeypatch.setattr(host, "summaries", counting)
    shown = repr(logits).splitlines()
    assert sum(computed) <= 8
    assert shown[0] == "Logits [40, 13] float32, raw, tiny, positions 0 … 39 (39 prompt, 1 next)"
    assert [line.split()[0] for line in shown[2:]] == ["0", "1", "2", "…", "37", "38", "39"]
    assert "(next)" in shown[-1]
    first, second = token_ids(40)[:2]
    expected = f"' w{first}' → ' w{second}'" if vocabulary == "words" else f"{first} → {second}"
    assert expected in shown[2]


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 6, 7])
def test_repr_repeats_no_row(rows: int) -> None:
    shown = repr(make_logits(8, 0, positions=range(rows))).splitlines()
    listed = [line.split()[0] for line in shown[2:] if "…" not in line]
    expected = list(range(rows)) if rows < 7 else [0, 1, 2, 4, 5, 6]
    assert listed == [str(p) for p in expected]


def test_repr_of_summaries_and_of_batches() -> None:
    assert "summaries only" in repr(summaries_only(make_logits(), ("entropy",)))
    assert "float32 on cpu" in repr(on_device(make_logits()))
    shown = repr(LogitsBatch([make_logits(n + 1, 0) for n in range(9)])).splitlines()
    assert shown[0] == "LogitsBatch [9, 9, 13], 9 sequences, lengths 1, 2, 3, 4, 5, 6, 7, 8, …"
    assert shown[-1] == "  … 5 more"


def test_views_for_people(tmp_path: pathlib.Path) -> None:
    logits = make_logits()
    assert logits.table(top=2).row_count == len(logits)
    page = logits.to_html(tmp_path / "page.html")
    assert page == (tmp_path / "page.html").read_text(encoding="utf-8") == logits.to_html()
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
    assert "<html" in page
    assert "tiny" in logits._repr_html_()
    batch = LogitsBatch([make_logits(2, 0, seed=i) for i in range(6)])
    assert "2 more sequences" in batch._repr_html_()
    assert "Sequence 6 of 6" in batch.to_html(tmp_path / "batch.html")
    assert (tmp_path / "batch.html").exists()


def test_more_values_than_32_bits_can_count() -> None:
    """2,147,516,416 values: the last row is found in every library's view of them."""
    torch = pytest.importorskip("torch")
    vocab, rows = 65_536, 32_769
    values = np.zeros((rows, vocab), np.float16)
    values[-1, -1] = 3.0
    logits = make_logits(
        rows, 0, vocab=vocab, values=values, token_ids=np.zeros(rows, np.int32), vocabulary=None
    )
    assert logits.values.size > 2**31
    assert logits.at(rows - 1)[-1] == 3.0
    assert logits.last.argmax().tolist() == [vocab - 1]
    assert torch.from_dlpack(logits)[-1, -1] == 3.0
    flat = tensors.to_arrow(values, "logits")[1].flatten()
    assert flat[len(flat) - 1].as_py() == 3.0


@pytest.mark.parametrize("what", ["to_arrow", "to_pandas", "summaries", "__repr__"])
def test_python_objects_do_not_grow_with_the_vocabulary(what: str) -> None:
    pytest.importorskip("pandas")
    blocks = []
    for vocab in (16, 16, 20_000):
        logits = make_logits(5, 3, vocab=vocab)
        before = sys.getallocatedblocks()
        result = getattr(logits, what)()
        blocks.append(sys.getallocatedblocks() - before)
        del result
    assert abs(blocks[2] - blocks[1]) < 500


def test_log_probabilities_of_the_best_are_exact_at_large_logits() -> None:
    values = (np.float32(1e4) + np.array([[0.0, -1.0, -2.0] + [-9.0] * 10])).astype(np.float32)
    found = make_logits(1, 0, values=values).top_k(3).logprobs
    truth = values[0].astype(np.float64) - 1e4
    truth -= np.log(np.exp(truth).sum())
    np.testing.assert_allclose(found[0], truth[:3], atol=1e-6)
