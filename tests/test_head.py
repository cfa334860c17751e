"""The canonical head product: a row's bits do not depend on the block it is multiplied in."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from logitscope.encodings import HiddenRows
from logitscope.errors import EncodingError
from logitscope.head import Head, compare_head, final_transforms, host_array
from logitscope.testing import assert_same_bits

VOCAB, WIDTH = 1001, 48


def make_head(
    *, bias: bool = False, dtype: torch.dtype = torch.float32, rows: int = VOCAB, packed: bool = False
) -> Head:
    torch.manual_seed(1)
    module = nn.Linear(WIDTH, rows, bias=bias).to(dtype).requires_grad_(False)
    head = Head(module, transforms=(), vocab_size=VOCAB, dtype=dtype)
    if packed:
        head.pack()
    return head


def project(head: Head, hidden: torch.Tensor) -> torch.Tensor:
    return head.project(hidden, head.empty(len(hidden)))


def hidden_rows(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(2)).to(dtype)


HEADS = {
    (bias, name, packed): make_head(bias=bias, dtype=getattr(torch, name), packed=packed)
    for bias in (False, True)
    for name in ("float32", "bfloat16")
    for packed in (False, True)
}


@pytest.mark.parametrize("key", HEADS, ids=str)
@given(cuts=st.lists(st.integers(1, 419), max_size=8))
def test_any_cut_into_blocks_gives_the_same_bits(key: tuple[bool, str, bool], cuts: list[int]) -> None:
    head = HEADS[key]
    hidden = hidden_rows(420, head.dtype)
    whole = project(head, hidden)
    borders = sorted({0, 420, *cuts})
    parts = [project(head, hidden[a:b]) for a, b in itertools.pairwise(borders)]
    assert torch.equal(torch.cat(parts), whole)


@given(order=st.permutations(range(40)))
def test_the_order_of_rows_does_not_matter(order: list[int]) -> None:
    head, hidden = HEADS[False, "float32", False], hidden_rows(40)
    assert torch.equal(project(head, hidden[order]), project(head, hidden)[order])


def test_the_number_of_threads_does_not_matter() -> None:
    head, hidden = HEADS[False, "float32", True], hidden_rows(77)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(project(head, hidden))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 16, 50])
def test_rows_are_the_float64_product(bias: bool, rows: int) -> None:
    head, hidden = HEADS[bias, "float32", False], hidden_rows(rows)
    truth = hidden.double() @ head.weight.double().T
    if head.bias is not None:
        truth += head.bias.double()
    assert float((project(head, hidden).double() - truth).abs().max()) < 1e-5


def test_rows_are_written_where_they_are_wanted() -> None:
    head, hidden = HEADS[True, "float32", False], hidden_rows(21)
    out = torch.full((21, VOCAB), torch.nan)
    assert head.project(hidden, out) is out
    assert torch.equal(out, project(head, hidden))


def test_padded_rows_of_the_head_are_cut_off() -> None:
    padded, exact = make_head(rows=VOCAB + 23), make_head()
    exact.module.load_state_dict({"weight": padded.weight})
    assert torch.equal(project(padded, hidden_rows(9)), project(exact, hidden_rows(9)))


def test_transforms_are_the_configs() -> None:
    class Config:
        logit_scale = 0.25
        final_logit_softcapping = 30.0

    assert final_transforms(Config()) == (("multiply", 0.25), ("softcap", 30.0))


def test_a_head_that_does_not_reproduce_the_model_is_not_used() -> None:
    rows = torch.randn(8, VOCAB)
    assert compare_head(rows, rows).identical
    close = compare_head(rows, rows + 1e-6)
    assert (close.used, close.identical) == (True, False)
    assert not compare_head(rows, rows + 0.1).used
    assert not compare_head(rows, torch.full_like(rows, torch.nan)).used
    assert not compare_head(rows, torch.randn(8, VOCAB + 1)).used


# -- a head by itself ------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", HEADS, ids=str)
@pytest.mark.parametrize("transforms", [(), (("multiply", 0.25), ("softcap", 3.0))], ids=str)
def test_a_head_that_travelled_gives_the_same_bits(key: tuple[bool, str, bool], transforms: Any) -> None:
    given = HEADS[key]
    head = Head(given.module, transforms=transforms, vocab_size=VOCAB, dtype=given.dtype)
    again = Head.from_arrays(head.arrays(), json.loads(json.dumps(head.facts())))
    hidden = hidden_rows(37, head.dtype)
    array = host_array(hidden)
    assert again.hash == head.hash
    assert_same_bits(again.rows(array), host_array(project(head, hidden)))
    assert_same_bits(again.rows(array[5:6]), again.rows(array)[5:6])
    assert again.rows(array[:0]).shape == (0, VOCAB)


def test_rows_may_be_wider_than_the_product() -> None:
    head = make_head(dtype=torch.bfloat16)
    wide = Head(
        head.module,
        transforms=(("softcap", 3.0),),
        vocab_size=VOCAB,
        dtype=head.dtype,
        rows_dtype=torch.float32,
    )
    hidden = hidden_rows(5, torch.bfloat16)
    expected = 3 * torch.tanh(project(head, hidden).float() / 3)
    found = wide.rows(host_array(hidden))
    assert found.dtype == np.float32
    assert np.abs(found - expected.numpy()).max() < 1e-6


def test_other_weights_have_another_hash_and_state() -> None:
    head = make_head()
    other = Head(head.module, transforms=(("multiply", 2.0),), vocab_size=VOCAB, dtype=head.dtype)
    assert other.hash != head.hash
    before = head.state, head.hash
    with torch.no_grad():
        head.module.weight[0, 0] += 1
    changed = Head(head.module, transforms=(), vocab_size=VOCAB, dtype=head.dtype)
    assert changed.state != before[0]
    assert changed.hash != before[1]


def test_rows_captured_before_the_head_was_trained_on_are_an_error() -> None:
    head = make_head()
    kept = HiddenRows(host_array(hidden_rows(3)), head)
    part = kept[1:]
    with torch.no_grad():
        head.module.weight.add_(1.0)
    for rows in (kept, part, part[:1]):
        with pytest.raises(EncodingError, match="changed after"):
            rows.decode()
        with pytest.raises(EncodingError, match="changed after"):
            rows.own_head()


def test_the_bound_of_rounding_holds() -> None:
    head = make_head()
    hidden = hidden_rows(64) * torch.logspace(-3, 3, 64)[:, None]
    for row in hidden.split(1):
        difference = (project(head, row.half().float()) - project(head, row)).abs().max()
        assert 0 < float(difference) <= head.rounding_bound(row, torch.float16)
