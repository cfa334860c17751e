"""Quantized encodings: every decoded value is within the stated bound, on rows made to break it."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from samples import identity, make_logits

from logitscope.encodings import ENCODINGS, Quantized, QuantizedRows
from logitscope.errors import EncodingError
from logitscope.extract import Extractor, tensor_over
from logitscope.logits import Logits, LogitsBatch, load
from logitscope.rows import Request, Select
from logitscope.testing import assert_same_bits
from logitscope.wire.results import logits_from_json, logits_to_json

QUANTIZED: dict[str, Quantized] = {n: e for n, e in ENCODINGS.items() if isinstance(e, Quantized)}
WIDTHS = [1, 2, 63, 64, 65, 1001, 16384]


def encoded(name: str, rows: NDArray[Any]) -> tuple[NDArray[Any], bool]:
    """Stored rows, and whether something did not fit."""
    kind = QUANTIZED[name]
    row = kind.row_format(identity(vocab_size=rows.shape[1]))
    stored = np.empty((len(rows), row.width), row.dtype)
    misfit = kind.encode(tensor_over(np.ascontiguousarray(rows)), tensor_over(stored))
    return stored, bool(misfit)


def check(name: str, rows: NDArray[Any]) -> NDArray[np.float32]:
    """Encode and decode; every value is within the bound, -inf is -inf, and the maximum is exact."""
    kind = QUANTIZED[name]
    stored, misfit = encoded(name, rows)
    assert not misfit
    found, truth = kind.decode(stored), np.asarray(rows, np.float64)
    assert found.dtype == np.float32
    masked = np.isneginf(truth)
    assert np.array_equal(np.isneginf(found), masked)
    with np.errstate(invalid="ignore"):
        errors = np.where(masked, 0.0, np.abs(found.astype(np.float64) - truth))
    bound = kind.error_bound(stored)
    assert (errors.max(axis=1) <= bound).all(), (errors.max(axis=1) / bound).max()
    assert np.array_equal(found.max(axis=1), np.asarray(rows, np.float32).max(axis=1))
    return found


ADVERSARIAL: dict[str, Callable[[int], NDArray[Any]]] = {
    "normal": lambda v: np.random.default_rng(0).normal(scale=4, size=(5, v)),
    "all equal": lambda v: np.full((2, v), 3.25),
    "all zero": lambda v: np.zeros((1, v)),
    "one outlier above": lambda v: _with(np.random.default_rng(1).normal(size=(3, v)), v // 2, 1e4),
    "one outlier below": lambda v: _with(np.random.default_rng(1).normal(size=(3, v)), v // 2, -1e6),
    "subnormal": lambda v: np.random.default_rng(2).normal(size=(3, v)) * 1e-41,
    "huge": lambda v: np.random.default_rng(3).uniform(-1e38, 1e38, (3, v)),
    "far from zero": lambda v: 1e6 + np.random.default_rng(4).normal(size=(3, v)),
    "masked": lambda v: _masked(v, 0.5),
    "nearly all masked": lambda v: _masked(v, 0.999),
    "ties at the top": lambda v: np.minimum(np.random.default_rng(5).normal(size=(4, v)), 0.0),
    "two levels": lambda v: np.where(np.arange(v) % 2, -5.0, 5.0)[None].repeat(2, 0),
}


def _with(rows: NDArray[Any], column: int, value: float) -> NDArray[Any]:
    rows[:, column] = value
    return rows


def _masked(vocab: int, share: float) -> NDArray[Any]:
    random = np.random.default_rng(6)
    rows = random.normal(scale=3, size=(4, vocab))
    rows[random.random((4, vocab)) < share] = -np.inf
    rows[:, vocab // 3] = 1.5
    return rows


@pytest.mark.parametrize("vocab", WIDTHS)
@pytest.mark.parametrize("kind", ADVERSARIAL)
@pytest.mark.parametrize("name", QUANTIZED)
def test_values_are_within_the_bound(name: str, kind: str, vocab: int) -> None:
    with np.errstate(over="ignore"):
        check(name, ADVERSARIAL[kind](vocab).astype(np.float32))


@pytest.mark.parametrize("name", QUANTIZED)
@settings(max_examples=60)
@given(data=st.data())
def test_any_rows(name: str, data: st.DataObject) -> None:
    vocab = data.draw(st.integers(1, 200))
    floats = st.floats(-(2.0**100), 2.0**100, width=32) | st.floats(-50, 50, width=32) | st.just(-np.inf)
    rows = np.array(
        data.draw(st.lists(st.lists(floats, min_size=vocab, max_size=vocab), min_size=1, max_size=3)),
        np.float32,
    )
    rows[:, data.draw(st.integers(0, vocab - 1))] = data.draw(st.floats(-50, 50, width=32))
    check(name, rows)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("name", QUANTIZED)
def test_rows_of_narrower_models(name: str, dtype: Any) -> None:
    check(name, np.random.default_rng(0).normal(scale=5, size=(9, 1001)).astype(dtype))


@pytest.mark.parametrize("vocab", [65, 1001, 16384])
def test_the_best_tokens_of_q8_are_exact_and_in_order(vocab: int) -> None:
    rows = np.random.default_rng(7).normal(scale=4, size=(6, vocab)).astype(np.float32)
    rows[1] = 2.0
    rows[2, : vocab // 2] = rows[2].max()
    found = check("q8", rows)
    exact = min(64, max(1, vocab // 256))
    assert np.array_equal(found.argmax(1), rows.argmax(1)), "the chosen token never changes"
    for row in (0, 3, 4, 5):
        best = np.argsort(-rows[row], kind="stable")[:exact]
        assert np.array_equal(np.argsort(-found[row], kind="stable")[:exact], best)
        assert np.array_equal(found[row, best], rows[row, best])


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("bad", [np.nan, np.inf, "all -inf", "range"])
def test_what_does_not_fit_is_a_named_error(name: str, bad: Any) -> None:
    rows = np.random.default_rng(0).normal(size=(4, 70)).astype(np.float32)
    if bad == "all -inf":
        rows[2] = -np.inf
    elif bad == "range":
        rows[2, 3], rows[2, 5] = 3e38, -3e38
    else:
        rows[2, 3] = bad
    assert encoded(name, rows)[1]
    request = Request(np.arange(1, 5, dtype=np.int32), encode=name)

    class Chunk:
        positions, targets = np.arange(4), np.arange(4, dtype=np.int32)
        device = torch.device("cpu")

        def logits(self, out: Any = None) -> Any:
            return tensor_over(rows)

        def non_finite(self) -> Any:
            return None

    extractor = Extractor(request, 0, identity=identity(vocab_size=70))
    with pytest.raises(EncodingError, match=f"rows 0 … 3: values do not fit {name}"):
        extractor.extract(Chunk()).wait()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", QUANTIZED)
def test_columns_are_those_of_the_whole(name: str) -> None:
    rows = np.random.default_rng(8).normal(scale=3, size=(5, 1001)).astype(np.float32)
    stored, _ = encoded(name, rows)
    kind = QUANTIZED[name]
    ids = np.concatenate([rows.argmax(1)[:2], [0, 1000, 64, 63, 64]])
    assert_same_bits(kind.decode(stored, ids), kind.decode(stored)[:, ids])


@pytest.mark.parametrize("name", QUANTIZED)
def test_tiles_do_not_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = _masked(300, 0.1).astype(np.float32)
    whole, _ = encoded(name, rows)
    monkeypatch.setattr("logitscope.encodings.base._TILE_VALUES", 1)
    assert_same_bits(encoded(name, rows)[0], whole)


def held(name: str, prompt: int = 5, new: int = 3, *, seed: int = 0) -> tuple[Logits, Logits]:
    """The same rows as decoded values and as codes."""
    plain = make_logits(prompt, new, vocab=300, seed=seed)
    stored, _ = encoded(name, np.asarray(plain))
    kind = QUANTIZED[name]
    values = kind.held(stored, plain.identity, None)
    kept = make_logits(prompt, new, vocab=300, seed=seed, values=values, encoding=name)
    return make_logits(prompt, new, vocab=300, seed=seed, values=kind.decode(stored)), kept


@pytest.mark.parametrize("name", QUANTIZED)
def test_results_files_and_json_over_codes(name: str, tmp_path: pathlib.Path) -> None:
    plain, kept = held(name)
    assert kept.nbytes == kept.values.stored.nbytes
    assert f"float32 from {name}" in repr(kept)
    assert f"in {name}" in repr(kept.values)
    others = [logits_from_json(logits_to_json(kept))]
    for suffix in (".npz", ".safetensors"):
        kept.save(tmp_path / f"x{suffix}")
        others.append(load(tmp_path / f"x{suffix}"))  # type: ignore[arg-type]
        LogitsBatch([kept, held(name, 3, 2, seed=1)[1]]).save(tmp_path / f"b{suffix}")
        others.append(load(tmp_path / f"b{suffix}")[0])  # type: ignore[arg-type]
    for found in [kept, *others]:
        assert isinstance(found.values, QuantizedRows)
        assert_same_bits(np.asarray(found), np.asarray(plain))
        assert_same_bits(found[2:4].entropy(), plain[2:4].entropy())
        assert_same_bits(found.top_k(3).logits, plain.top_k(3).logits)
        assert_same_bits(found.values.error_bound(), kept.values.error_bound())


@pytest.mark.parametrize("name", QUANTIZED)
def test_sizes_are_exact(name: str) -> None:
    row = QUANTIZED[name].row_format(identity(vocab_size=49152))
    assert row.nbytes == {"q16": 98312, "q8": 52744, "float8": 49160}[name]
    assert Select().rows(prompt_length=2, new_tokens=0).size == 2
