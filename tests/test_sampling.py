"""Processors and warpers against Transformers' own, and the draw against exact probabilities."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from transformers.generation import logits_process as theirs

from logitscope.errors import OptionError, TokenIdError
from logitscope.rows import Sampling
from logitscope.sampling import choose, process, uniform_stream

VOCAB = 257
LARGEST = 1 - 2.0**-53


def rows(seed: int, *, ties: bool = False, batch: int = 3, vocab: int = VOCAB) -> torch.Tensor:
    z = torch.randn(batch, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    return z.round() if ties else z


def past(batch: int = 3, vocab: int = VOCAB) -> list[torch.Tensor]:
    """Ids with repeats, equally many a row, so that Transformers' processors take them too."""
    generator = torch.Generator().manual_seed(9)
    return list(torch.randint(0, vocab, (batch, 40), generator=generator))


def drawn(**options: Any) -> Sampling:
    return Sampling(**{"temperature": 1.0, **options})


CASES: list[tuple[dict[str, Any], list[theirs.LogitsProcessor]]] = [
    ({"repetition_penalty": 1.3}, [theirs.RepetitionPenaltyLogitsProcessor(1.3)]),
    ({"repetition_penalty": 0.7}, [theirs.RepetitionPenaltyLogitsProcessor(0.7)]),
    (
        {"logit_bias": {3: 2.5, 256: -4.0, 0: float("-inf")}},
        [theirs.SequenceBiasLogitsProcessor([[[3], 2.5], [[256], -4.0], [[0], float("-inf")]])],
    ),
    ({"temperature": 0.6}, [theirs.TemperatureLogitsWarper(0.6)]),
    ({"top_k": 1}, [theirs.TopKLogitsWarper(1)]),
    ({"top_k": 17}, [theirs.TopKLogitsWarper(17)]),
    ({"top_k": 5000}, [theirs.TopKLogitsWarper(5000)]),
    ({"min_p": 0.02}, [theirs.MinPLogitsWarper(0.02)]),
    ({"min_p": 0.999}, [theirs.MinPLogitsWarper(0.999)]),
]
TOP_P = [0.05, 0.3, 0.9, 0.9999]
EVERYTHING: tuple[dict[str, Any], list[theirs.LogitsProcessor]] = (
    {
        "repetition_penalty": 1.2,
        "logit_bias": {7: 3.0},
        "temperature": 1.7,
        "top_k": 40,
        "top_p": 0.8,
        "min_p": 0.05,
    },
    [
        theirs.RepetitionPenaltyLogitsProcessor(1.2),
        theirs.SequenceBiasLogitsProcessor([[[7], 3.0]]),
        theirs.TemperatureLogitsWarper(1.7),
        theirs.TopKLogitsWarper(40),
        theirs.TopPLogitsWarper(0.8),
        theirs.MinPLogitsWarper(0.05),
    ],
)


def as_transformers(z: torch.Tensor, processors: list[theirs.LogitsProcessor]) -> torch.Tensor:
    scores = z.float().clone()
    for processor in processors:
        scores = processor(torch.stack(past()), scores)
    return scores


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("seed", range(4))
def test_each_processor_is_transformers(seed: int, ties: bool) -> None:
    z = rows(seed, ties=ties)
    for options, processors in CASES:
        assert torch.equal(process(z, drawn(**options), past()), as_transformers(z, processors)), options


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("p", TOP_P)
def test_top_p_is_transformers(seed: int, p: float) -> None:
    z = rows(seed)
    got = process(z, drawn(top_p=p), past())
    assert torch.equal(got, as_transformers(z, [theirs.TopPLogitsWarper(p)]))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("p", TOP_P)
def test_top_p_with_ties_keeps_as_many_and_the_lower_ids(seed: int, p: float) -> None:
    """Which of equal tokens stay is open in Transformers; how many is not."""
    z = rows(seed, ties=True)
    kept = process(z, drawn(top_p=p), past()).isfinite()
    assert torch.equal(kept.sum(1), as_transformers(z, [theirs.TopPLogitsWarper(p)]).isfinite().sum(1))
    for row, keep in zip(z, kept, strict=True):
        for value in row.unique():
            flags = keep[row == value]
            assert flags.tolist() == sorted(flags.tolist(), reverse=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_all_in_order(dtype: torch.dtype) -> None:
    options, processors = EVERYTHING
    z = rows(2).to(dtype)
    got = process(z, drawn(**options), past())
    assert got.dtype == torch.float32
    assert torch.equal(got, as_transformers(z, processors))
    assert 1 < got.isfinite().sum() < 120


def test_greedy_has_processors_and_no_warpers() -> None:
    options = {**EVERYTHING[0], "temperature": 0.0}
    got = process(rows(1), Sampling(**options), past())
    assert torch.equal(got, as_transformers(rows(1), EVERYTHING[1][:2]))
    assert torch.equal(choose(got, Sampling(**options), None), got.argmax(1))


def test_a_bias_changes_the_greedy_choice() -> None:
    z = rows(0)
    wanted = Sampling(logit_bias={11: 100.0})
    assert choose(process(z, wanted, past()), wanted, None).tolist() == [11, 11, 11]
    best = int(z[0].argmax())
    banned = Sampling(logit_bias={best: float("-inf")})
    assert choose(process(z, banned, past()), banned, None)[0] == z[0].topk(2).indices[1]


def test_history_is_per_row() -> None:
    z = rows(3)
    histories = [torch.tensor([1, 1, 4]), torch.tensor([], dtype=torch.int64), torch.tensor([200])]
    got = process(z, drawn(repetition_penalty=2.0), histories)
    changed = [(row != old).nonzero().flatten().tolist() for row, old in zip(got, z, strict=True)]
    assert changed == [[1, 4], [], [200]]
    alone = process(z[2:], drawn(repetition_penalty=2.0), histories[2:])
    assert torch.equal(alone, got[2:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_raw_logits_are_never_changed(dtype: torch.dtype) -> None:
    z = rows(4).to(dtype)
    before = z.clone()
    for options in (EVERYTHING[0], {}, {**EVERYTHING[0], "temperature": 0.0}, {"temperature": 0.0}):
        got = process(z, drawn(**options), past())
        choose(got, drawn(**options), torch.full((3,), 0.5, dtype=torch.float64))
        assert torch.equal(z, before)
        assert got.data_ptr() != z.data_ptr()


@pytest.mark.parametrize("ties", [False, True])
def test_tiny_top_p_keeps_exactly_one(ties: bool) -> None:
    z = torch.zeros(3, VOCAB) if ties else rows(5)
    got = process(z, drawn(top_p=1e-12), past())
    assert got.isfinite().sum(1).tolist() == [1, 1, 1]
    assert torch.equal(got.argmax(1), z.argmax(1))


@pytest.mark.parametrize("token_id", [-1, VOCAB, 2**40])
def test_bias_outside_the_vocabulary(token_id: int) -> None:
    with pytest.raises(TokenIdError, match=rf"logit_bias\[{token_id}\].*expected 0 … {VOCAB - 1}"):
        process(rows(0), Sampling(logit_bias={1: 0.5, token_id: 1.0}), past())


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_bias_that_is_no_number(value: float) -> None:
    with pytest.raises(OptionError, match=r"logit_bias\[5\]"):
        process(rows(0), Sampling(logit_bias={5: value}), past())


def test_greedy_takes_the_lowest_of_equals() -> None:
    z = torch.tensor([[0.0, 7.0, 7.0, 1.0], [-0.0, 0.0, 0.0, -1.0], [float("-inf"), -5.0, -9.0, -5.0]])
    assert choose(z, Sampling(), None).tolist() == [1, 0, 1]
    assert choose(z.bfloat16(), Sampling(), None).dtype == torch.int64


def test_the_largest_uniform_is_below_every_total() -> None:
    z = rows(8, batch=400, vocab=31) * 0.3
    uniforms = torch.full((400,), LARGEST, dtype=torch.float64)
    totals = z.double().softmax(1).cumsum(1)[:, -1]
    assert totals.min() < 1.0 < totals.max()
    assert choose(z, drawn(), uniforms).tolist() == [30] * 400


def test_the_draw_is_the_inverse_of_the_distribution() -> None:
    shares = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64)
    for u, wanted in [(0.0, 0), (0.49, 0), (0.51, 1), (0.74, 1), (0.76, 2), (0.876, 3), (LARGEST, 3)]:
        uniforms = torch.tensor([u], dtype=torch.float64)
        assert choose(shares.log().float(), drawn(), uniforms).tolist() == [wanted], u


@given(
    st.lists(
        st.sampled_from([float("-inf"), 0.0, 1.0, -30.0, -200.0, -1e4, 1e4]) | st.floats(-20, 20, width=32),
        min_size=1,
        max_size=40,
    ),
    st.sampled_from([0.0, 2.0**-53, 0.5, LARGEST]) | st.floats(0, 1, exclude_max=True),
)
def test_no_token_of_probability_zero_is_drawn(logits: list[float], uniform: float) -> None:
    z = torch.tensor([logits])
    token_id = int(choose(z, drawn(), torch.tensor([uniform], dtype=torch.float64)))
    if z.amax() == float("-inf"):
        assert token_id == -1
    else:
        probabilities = z[0].double().softmax(0)
        assert probabilities[token_id] > 0
        before, after = probabilities[:token_id].sum(), probabilities[: token_id + 1].sum()
        assert before - 1e-12 <= uniform <= after + 1e-12


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_without_distribution_choose_nothing(bad: float) -> None:
    z = torch.zeros(2, 5)
    z[1, 2] = bad
    uniforms = torch.tensor([0.1, 0.1], dtype=torch.float64)
    assert choose(z, Sampling(), None).tolist() == [0, -1]
    assert choose(z, drawn(), uniforms).tolist() == [0, -1]


def test_a_draw_needs_uniforms() -> None:
    with pytest.raises(OptionError, match="uniforms"):
        choose(torch.zeros(1, 3), drawn(), None)


def test_draws_follow_the_probabilities() -> None:
    """Pearson's chi-square over 40,000 draws of one fixed stream."""
    settings = drawn(temperature=1.3, top_k=30, top_p=0.95)
    processed = process(rows(6, batch=1), settings, [torch.tensor([0])])
    count = 40_000
    uniforms = torch.tensor(list(itertools.islice(uniform_stream(3, 0), count)), dtype=torch.float64)
    ids = choose(processed.expand(count, -1), settings, uniforms)
    expected = processed[0].double().softmax(0) * count
    observed = torch.bincount(ids, minlength=VOCAB)
    assert observed[expected == 0].sum() == 0
    assert expected[expected > 0].min() > 5
    assert stats.chisquare(observed[expected > 0].numpy(), expected[expected > 0].numpy()).pvalue > 0.01


def test_draws_do_not_depend_on_the_batch() -> None:
    z, settings = rows(7, batch=16), drawn(temperature=2.0)
    uniforms = torch.tensor([next(uniform_stream(1, i)) for i in range(16)], dtype=torch.float64)
    together = choose(process(z, settings, past(16)), settings, uniforms)
    alone = [
        choose(process(z[i : i + 1], settings, past(16)[i : i + 1]), settings, uniforms[i : i + 1])
        for i in range(16)
    ]
    assert torch.equal(together, torch.cat(alone))
    assert len(set(together.tolist())) > 5


def test_uniform_streams() -> None:
    def first(seed: int, sample_index: int, count: int = 2000) -> list[float]:
        return list(itertools.islice(uniform_stream(seed, sample_index), count))

    assert first(5, 0) == first(5, 0)
    assert all(0.0 <= u < 1.0 for u in first(5, 0))
    streams = [first(5, 0), first(5, 1), first(6, 0), first(1, 5), first(0, 0), first(2**63 - 1, 0)]
    assert len({u for stream in streams for u in stream}) == 6 * 2000
    assert stats.kstest(np.concatenate(streams), "uniform").pvalue > 0.01


def test_uniform_streams_stay_what_they_are() -> None:
    """A seed that was reported must give the same tokens in every later release."""
    wanted = [0.7122142960324449, 0.07050661802753055, 0.3939777489962194]
    assert list(itertools.islice(uniform_stream(42, 3), 3)) == wanted
