"""Hidden rows in files that every machine rebuilds to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import logitscope as ls
from logitscope.encodings import ExactRows, exact
from logitscope.errors import FileFormatError
from logitscope.head import Head
from logitscope.logits import Logits, LogitsBatch, load
from logitscope.testing import tiny_model
from logitscope.testing.asserts import assert_same_bits

IDS = list(range(4, 45))


class Elsewhere:
    """Another library: its products are summed in another order."""

    def __init__(self, head: Any) -> None:
        self.head = head

    def __getattr__(self, name: str) -> Any:
        return getattr(self.head, name)

    def rows(self, hidden: Any, ids: Any = None) -> Any:
        order = np.random.default_rng(0).permutation(hidden.shape[1])
        found = (
            hidden[:, order].astype(np.float32) @ self.head.arrays()["weight"].astype(np.float32)[:, order].T
        )
        return found.astype(self.head.rows_dtype)

    def wide_rows(self, hidden: Any, shift: int = 0) -> Any:
        """In float64, too, the last bits differ elsewhere."""
        wide = self.head.wide_rows(hidden, shift)
        return wide * (1 + np.random.default_rng(1).choice([-1, 1], wide.shape) * 2.0**-52)


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("encode", ["hidden", "hidden-float16"])
def test_another_machine_rebuilds_the_same_bits(family: str, dtype: str, encode: str, tmp_path: Path) -> None:
    engine = ls.open(tiny_model(family, dtype=dtype))
    rows = engine.logits(IDS, encode=encode)
    whole = rows.to_numpy()
    rows.save(tmp_path / "rows.safetensors", exact=True)
    found = load(tmp_path / "rows.safetensors")
    assert isinstance(found, Logits)
    assert isinstance(found.values, ExactRows)
    found.values.head = Elsewhere(found.values.head)
    assert_same_bits(found.to_numpy(), whole)
    part = found[[40, 3, 3, 17]]
    assert_same_bits(part.to_numpy(), whole[[40, 3, 3, 17]])
    assert_same_bits(part[1:3].values.decode(np.array([7, 900])), whole[[3, 3]][:, [7, 900]])
    assert found.values.nbytes < whole.nbytes
    assert "residual" in repr(found.values)
    if dtype == "float32" and family == "llama":
        other = Elsewhere(engine.head).rows(rows.values.hidden)
        assert not np.array_equal(other, rows.to_numpy()), "the other machine does differ"


def test_batches_and_archives(tmp_path: Path) -> None:
    engine = ls.open(tiny_model("llama"))
    batch = engine.logits([IDS, IDS[:3]], encode="hidden")
    batch.save(tmp_path / "batch.npz", exact=True)
    found = load(tmp_path / "batch.npz")
    assert isinstance(found, LogitsBatch)
    for one, other in zip(found, batch, strict=True):
        assert_same_bits(one.to_numpy(), other.to_numpy())
    engine.logits(IDS).save(tmp_path / "plain.npz", exact=True)
    assert_same_bits(load(tmp_path / "plain.npz").to_numpy(), engine.logits(IDS).to_numpy())
    again = load(tmp_path / "batch.npz")[0]
    again.save(tmp_path / "again.safetensors", exact=True)
    assert_same_bits(load(tmp_path / "again.safetensors").to_numpy(), batch[0].to_numpy())


def test_values_near_a_border_are_kept_as_they_are() -> None:
    linear = torch.nn.Linear(1, 4, bias=False)
    with torch.no_grad():
        linear.weight[:] = torch.tensor([[1.0], [1 + 2.0**-23], [3.0], [0.0]])
    head = Head(linear, transforms=(), vocab_size=4, dtype=torch.float32)
    hidden = np.array([[1 + 2.0**-23], [1.0]], np.float32)  # (1 + u)² lies between two floats
    rows = ls.encodings.HiddenRows(hidden, head)
    residual = exact.Residual.of(rows)
    for push in (-1e-16, 0.0, 1e-16):
        wide = head.wide_rows(hidden) * (1 + push)
        assert_same_bits(residual.apply(0, wide, np.dtype(np.float32)), rows.decode())


@given(
    hnp.arrays(np.float32, (3, 50), elements=st.floats(width=32, allow_nan=False)),
    st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]),
)
@settings(max_examples=100, deadline=None)
def test_any_rows_come_back_whatever_the_product(values: Any, dtype: Any) -> None:
    with np.errstate(over="ignore"):
        rows = values.astype(dtype)
        wide = values.astype(np.float64) * 1.3 + 1e-3
    data = exact._compressed(rows, wide, wide, wide)
    assert_same_bits(exact._restored(data, wide, np.dtype(dtype)), rows)


@given(hnp.arrays(np.float32, 40, elements=st.floats(width=32, allow_nan=False)))
def test_order_ascends_and_turns_back(values: Any) -> None:
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        with np.errstate(over="ignore"):
            floats = values.astype(dtype)
        floats = floats[np.lexsort((~np.signbit(floats), floats.astype(np.float64)))]
        order = exact._order(floats)
        assert (np.diff(order) >= 0).all()
        assert_same_bits(exact._unordered(order, np.dtype(dtype)), floats)


def test_a_damaged_residual_is_an_error(tmp_path: Path) -> None:
    engine = ls.open(tiny_model("llama"))
    rows = engine.logits(IDS, encode="hidden")
    residual = exact.Residual.of(rows.values)
    wide = engine.head.wide_rows(rows.values.hidden[:16])
    broken = np.array(residual.data)
    broken[20:40] ^= 255
    for wrong in (
        exact.Residual(broken, residual.ends),
        exact.Residual(residual.data[:5], residual.ends),
    ):
        with pytest.raises(FileFormatError, match="residual"):
            wrong.apply(0, wide, np.dtype(np.float32))
    with pytest.raises(FileFormatError, match="residual"):
        residual.apply(0, wide[:3], np.dtype(np.float32))
