"""The fast numerics against the float64 reference, on rows made to hurt."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from logitscope.errors import InputError, OptionError, TokenIdError
from logitscope.numerics import compiled, device, host, reference
from logitscope.rows import SUMMARIES, SUMMARY_DTYPES

Array = np.ndarray[Any, Any]
F32, F16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
DTYPES = (F32, F16, BF16)
VOCABS = (1, 2, 1001, 49152)
KINDS = ("host", "device", "compiled")
TARGET_SUMMARIES = [name for name in SUMMARIES if name.startswith("target_")]


def to_tensor(z: Array) -> torch.Tensor:
    if z.dtype == BF16:
        return torch.from_numpy(z.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(z)


def to_array(tensor: torch.Tensor) -> Array:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(BF16)
    return tensor.numpy()


def summaries(kind: str, z: Array, targets: Array | None, names: Any = SUMMARIES) -> dict[str, Array]:
    if kind == "host":
        return host.summaries(z, targets, names)
    ids = None if targets is None else torch.from_numpy(targets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "available", lambda: kind == "compiled")
        return {name: to_array(t) for name, t in device.summaries(to_tensor(z), ids, names).items()}


def top_k(kind: str, z: Array, k: int) -> tuple[Array, Array]:
    if kind == "host":
        return host.top_k(z, k)
    ids, values = device.top_k(to_tensor(z), k)
    return to_array(ids), to_array(values)


def log_softmax(kind: str, z: Array) -> Array:
    return host.log_softmax(z) if kind == "host" else to_array(device.log_softmax(to_tensor(z)))


@functools.cache
def hostile(vocab: int, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Rows that have a distribution, and their targets."""
    rng = np.random.default_rng(vocab)
    normal = rng.standard_normal((12, vocab)).astype(np.float32)
    first = np.zeros(vocab, np.float32)
    first[vocab // 2] = 1.0
    masked = np.where(rng.random(vocab) < 0.9, -np.inf, normal[0])
    masked[-1] = 0.5
    alone = np.full(vocab, -np.inf, np.float32)
    alone[vocab // 3] = -7.0
    rows = [
        normal[0] * 3,
        normal[1] * 30,
        normal[2] * 0.01,
        normal[3] + 1e4,
        np.zeros(vocab),
        np.full(vocab, 1e4),
        np.full(vocab, -1e4),
        first * 1e4,
        first * 5,
        first * -1e4,
        np.linspace(-1e4, 1e4, vocab),
        normal[4] * 1e-40,
        np.round(normal[5] * 2),
        np.where(normal[6] > 0, 0.0, -0.0),
        np.where(normal[7] > 2, -90.0, normal[7]),
        np.where(normal[8] > 0, 1e38, -1e38),
        masked,
        alone,
    ]
    z = np.stack(rows).astype(np.float32)
    with np.errstate(over="ignore"):  # 1e38 is no float16: that row is left out there
        z = z.astype(dtype)
    z = z[[reference.has_distribution(row.astype(np.float64)) for row in z]]
    targets = rng.integers(0, vocab, len(z)).astype(np.int32)
    targets[::5] = vocab - 1
    return z, targets


@functools.cache
def truth(vocab: int, dtype: np.dtype[Any]) -> dict[str, Array]:
    return reference.summaries(*hostile(vocab, dtype), SUMMARIES)


def bound(name: str, wanted: Array, vocab: int) -> Array:
    """How far a float32 result may lie from the truth: the bounds that ``device`` states."""
    size = np.where(np.isfinite(wanted), np.abs(wanted), 0.0)
    bounds: dict[str, Array] = {
        "logsumexp": 1e-6 * np.maximum(size, 1.0),
        "max": 0 * size,
        "target_logit": 0 * size,
        "top1_margin": 1e-7 * size,
        "target_logprob": 1e-6 + 2e-7 * size,
        "entropy": 1e-6 * np.log(vocab) + 0 * size,
        "varentropy": 1e-6 * np.log(vocab) ** 2 + 0 * size,
    }
    return bounds[name]


def assert_close(got: Array, wanted: Array, tolerance: Array) -> None:
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(got[~finite], wanted[~finite])
    error = np.abs(got[finite].astype(np.float64) - wanted[finite])
    assert np.all(error <= tolerance[finite]), (got, wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
def test_summaries_keep_their_bounds(kind: str, dtype: np.dtype[Any], vocab: int) -> None:
    z, targets = hostile(vocab, dtype)
    found = summaries(kind, z, targets)
    assert list(found) == list(SUMMARIES)
    for name, wanted in truth(vocab, dtype).items():
        assert found[name].dtype == SUMMARY_DTYPES[name]
        if SUMMARY_DTYPES[name] is np.int32:
            np.testing.assert_array_equal(found[name], wanted, err_msg=name)
        else:
            assert_close(found[name], wanted, bound(name, wanted, vocab))


@pytest.mark.parametrize("vocab", VOCABS)
def test_float64_logits_stay_float64(vocab: int) -> None:
    z, targets = hostile(vocab, F32)
    exact = z.astype(np.float64) + 1e-9
    wanted = reference.summaries(exact, targets, SUMMARIES)
    found = host.summaries(exact, targets, SUMMARIES)
    for name in SUMMARIES:
        assert found[name].dtype == (np.int32 if SUMMARY_DTYPES[name] is np.int32 else np.float64)
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-12, atol=1e-12, err_msg=name)
    logprobs = host.log_softmax(exact)
    assert logprobs.dtype == np.float64
    np.testing.assert_allclose(logprobs, reference.log_softmax(exact), rtol=1e-12, atol=1e-12)


def test_one_function_a_summary() -> None:
    z, targets = hostile(1001, F32)
    wanted = host.summaries(z, targets, SUMMARIES)
    for name in SUMMARIES:
        function: Callable[..., Array] = getattr(host, "maximum" if name == "max" else name)
        got = function(z, targets) if name in TARGET_SUMMARIES else function(z)
        np.testing.assert_array_equal(got, wanted[name], err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_distribution_give_no_number(kind: str) -> None:
    z = np.tile(np.linspace(-1, 1, 33, dtype=np.float32), (5, 1))
    z[1, 3], z[2, 4], z[3, :], z[4, 5:7] = np.nan, np.inf, -np.inf, (np.inf, np.nan)
    targets = np.full(5, 8, np.int32)
    found = summaries(kind, z, targets)
    wanted = reference.summaries(z, targets, SUMMARIES)
    for name, values in found.items():
        if SUMMARY_DTYPES[name] is np.int32:
            assert values[1:].tolist() == [-1] * 4, name
            assert values[0] == wanted[name][0]
        else:
            assert np.isnan(values[1:]).all(), name
            assert np.isfinite(values[0])
    assert np.isnan(log_softmax(kind, z)[1:]).all()
    ids, values = top_k(kind, z, 3)
    assert (ids[1:] == -1).all()
    assert np.isnan(values[1:]).all()
    assert ids[0].tolist() == [32, 31, 30]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_target(kind: str) -> None:
    z, targets = hostile(1001, F32)
    some = targets.copy()
    some[1::2] = -1
    with_targets, found = summaries(kind, z, targets), summaries(kind, z, some)
    none = summaries(kind, z, None)
    for name in SUMMARIES:
        empty = [-1] if SUMMARY_DTYPES[name] is np.int32 else [np.nan]
        if name in TARGET_SUMMARIES:
            np.testing.assert_array_equal(found[name][1::2], empty * len(some[1::2]))
            np.testing.assert_array_equal(none[name], empty * len(z))
            np.testing.assert_array_equal(found[name][::2], with_targets[name][::2])
        else:
            np.testing.assert_array_equal(found[name], with_targets[name])
            np.testing.assert_array_equal(none[name], with_targets[name])


def test_target_outside_the_vocabulary() -> None:
    z = np.zeros((2, 7), np.float32)
    for outside in (7, -2):
        targets = np.array([3, outside], np.int32)
        with pytest.raises(TokenIdError, match=f"got {outside}"):
            host.summaries(z, targets, ("target_rank",))
        found = summaries("device", z, targets)
        assert found["target_rank"].tolist() == [4, -1]
        assert np.isnan(found["target_logprob"][1])


@pytest.mark.parametrize("kind", KINDS)
def test_masked_target_is_ranked_by_id(kind: str) -> None:
    z = np.array([[-np.inf, 0.0, -np.inf, 1.0, -np.inf]] * 3, np.float32)
    found = summaries(kind, z, np.array([0, 2, 4], np.int32))
    assert found["target_rank"].tolist() == [3, 4, 5]
    assert found["target_logprob"].tolist() == [-np.inf] * 3
    assert found["target_logit"].tolist() == [-np.inf] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_sure_rows_are_exact(kind: str) -> None:
    z = np.array([[-np.inf, 2.5, -np.inf], [0.0, -1e4, -1e4], [4.0, 4.0, -np.inf]], np.float32)
    found = summaries(kind, z, np.array([1, 0, 0], np.int32))
    assert found["entropy"][:2].tolist() == [0.0, 0.0]
    assert found["varentropy"].tolist() == [0.0, 0.0, 0.0]
    assert found["target_logprob"][:2].tolist() == [0.0, 0.0]
    assert [str(x) for x in found["top1_margin"]] == ["inf", "10000.0", "0.0"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
def test_log_softmax(kind: str, dtype: np.dtype[Any], vocab: int) -> None:
    z, _ = hostile(vocab, dtype)
    got, wanted = log_softmax(kind, z), reference.log_softmax(z)
    assert got.dtype == np.float32
    assert_close(got, wanted, 1e-6 + 2e-7 * np.abs(wanted))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("vocab", "k"), [(1, 1), (2, 2), (1001, 1), (1001, 50), (1001, 1001), (49152, 20)])
def test_top_k(kind: str, dtype: np.dtype[Any], vocab: int, k: int) -> None:
    z, _ = hostile(vocab, dtype)
    ids, values = top_k(kind, z, k)
    wanted_ids, wanted_values = reference.top_k(z, k)
    assert (ids.dtype, values.dtype) == (np.int32, dtype)
    np.testing.assert_array_equal(ids, wanted_ids)
    np.testing.assert_array_equal(values, wanted_values)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [0, 6, -1])
def test_top_k_out_of_range(kind: str, k: int) -> None:
    with pytest.raises(OptionError, match=r"k: .* expected 1 … 5; got"):
        top_k(kind, np.zeros((1, 5), np.float32), k)


def test_argmax_takes_the_lowest_id() -> None:
    z, _ = hostile(49152, F32)
    wanted = truth(49152, F32)["argmax"]
    np.testing.assert_array_equal(host.argmax(z), wanted)
    np.testing.assert_array_equal(device.argmax(to_tensor(z)).numpy(), wanted)


logits = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=12),
    elements=st.sampled_from([-np.inf, -2.0, -1.0, -0.0, 0.0, 1.0, 1.5, 1e-45, 80.0, np.inf, np.nan])
    | st.floats(-100, 100, width=32),
)


@given(logits, st.data())
def test_any_small_rows(z: Array, data: st.DataObject) -> None:
    targets = data.draw(hnp.arrays(np.int32, len(z), elements=st.integers(-1, z.shape[1] - 1)))
    k = data.draw(st.integers(1, z.shape[1]))
    wanted = reference.summaries(z, targets, SUMMARIES)
    wanted_ids, wanted_values = reference.top_k(z, k)
    for kind in KINDS:
        for name, values in summaries(kind, z, targets).items():
            np.testing.assert_allclose(values, wanted[name], rtol=2e-6, atol=1e-5, err_msg=name)
        ids, values = top_k(kind, z, k)
        np.testing.assert_array_equal(ids, wanted_ids)
        np.testing.assert_array_equal(values, wanted_values)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [1001, 49152, 201_001])
def test_a_row_is_the_same_alone_and_among_others(kind: str, vocab: int) -> None:
    rng = np.random.default_rng(5)
    z = (rng.standard_normal((5, vocab)) * 3).astype(np.float32)
    targets = rng.integers(0, vocab, 5).astype(np.int32)
    together = summaries(kind, z, targets)
    for i in range(5):
        for name, values in summaries(kind, z[i : i + 1], targets[i : i + 1]).items():
            np.testing.assert_array_equal(values, together[name][i : i + 1], err_msg=name)


@pytest.mark.parametrize("fast", [False, True])
def test_threads_do_not_change_bits(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "available", lambda: fast)
    z, targets = (torch.from_numpy(array) for array in hostile(49152, F32))
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(
                [device.summaries(z[rows], targets[rows], SUMMARIES) for rows in ([0], [0, 1, 2, 3])]
            )
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert all(torch.equal(one[name], two[name]) for name in SUMMARIES)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_not_changed(kind: str) -> None:
    for dtype in DTYPES:
        z, targets = hostile(1001, dtype)
        before = z.tobytes()
        summaries(kind, z, targets)
        top_k(kind, z, 4)
        log_softmax(kind, z)
        assert z.tobytes() == before


@pytest.mark.parametrize("kind", KINDS)
def test_one_summary_alone_equals_all(kind: str) -> None:
    z, targets = hostile(1001, BF16)
    every = summaries(kind, z, targets)
    for name in SUMMARIES:
        alone = summaries(kind, z, targets, (name,))
        assert list(alone) == [name]
        np.testing.assert_array_equal(alone[name], every[name])
    assert summaries(kind, z, targets, ()) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows(kind: str) -> None:
    z, targets = np.empty((0, 9), np.float32), np.empty(0, np.int32)
    assert {name: len(values) for name, values in summaries(kind, z, targets).items()} == dict.fromkeys(
        SUMMARIES, 0
    )
    assert [part.shape for part in top_k(kind, z, 3)] == [(0, 3), (0, 3)]
    assert log_softmax(kind, z).shape == (0, 9)


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_a_wider_array(kind: str) -> None:
    """A head wider than the vocabulary is cut by a view whose rows are not adjacent."""
    wide = np.random.default_rng(1).standard_normal((6, 40)).astype(np.float32)
    wide[:, 33:] = 100.0
    targets = np.arange(6, dtype=np.int32)
    cut, copied = summaries(kind, wide[:, :33], targets), summaries(kind, wide[:, :33].copy(), targets)
    for name in SUMMARIES:
        np.testing.assert_array_equal(cut[name], copied[name], err_msg=name)
    np.testing.assert_array_equal(top_k(kind, wide[:, :33], 5)[0], top_k(kind, wide[:, :33].copy(), 5)[0])


def test_the_device_is_never_waited_for() -> None:
    """Tensors without data: whatever would read a value on the host raises."""
    z = torch.empty((5, 70_000), device="meta", dtype=torch.bfloat16)
    targets = torch.empty(5, device="meta", dtype=torch.int32)
    found = device.summaries(z, targets, SUMMARIES)
    assert {(t.shape, t.device.type) for t in found.values()} == {((5,), "meta")}
    assert [t.shape for t in device.top_k(z, 4)] == [(5, 4), (5, 4)]
    assert device.log_softmax(z).shape == z.shape
    with pytest.raises(NotImplementedError):
        z.nonzero()


def test_logits_that_require_grad() -> None:
    z = torch.zeros((1, 3), requires_grad=True)
    assert device.summaries(z, None, ("entropy",))["entropy"].tolist() == [pytest.approx(np.log(3))]


@pytest.mark.parametrize("kind", KINDS)
def test_bad_calls(kind: str) -> None:
    z, targets = np.zeros((2, 3), np.float32), np.zeros(2, np.int32)
    with pytest.raises(OptionError, match="perplexity"):
        summaries(kind, z, targets, ("entropy", "perplexity"))
    with pytest.raises(InputError, match=r"targets; expected \[2\]; got \[3\]"):
        summaries(kind, z, np.zeros(3, np.int32))
    for bad in (np.zeros(3, np.float32), np.zeros((1, 2, 3), np.float32), np.zeros((2, 0), np.float32)):
        for call in (lambda bad=bad: top_k(kind, bad, 1), lambda bad=bad: log_softmax(kind, bad)):
            with pytest.raises(InputError, match="wrong shape of logits"):
                call()
    with pytest.raises(InputError, match=r"wrong dtype of logits.*int32"):
        summaries(kind, z.astype(np.int32), targets)


DIVERGENCES = [
    (host.kl_divergence, reference.kl_divergence),
    (host.js_divergence, reference.js_divergence),
    (host.total_variation, reference.total_variation),
]


@pytest.mark.parametrize(("fast", "slow"), DIVERGENCES, ids=lambda f: f.__module__.rsplit(".")[-1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 1001])
def test_divergences(
    fast: Callable[..., Array], slow: Callable[..., Array], dtype: np.dtype[Any], vocab: int
) -> None:
    z, _ = hostile(vocab, dtype)
    p, q = z.repeat(len(z), axis=0), np.tile(z, (len(z), 1))  # every pair
    got, wanted = fast(p, q), slow(p, q)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, wanted, rtol=1e-10, atol=1e-12)
    assert np.all(got >= 0)
    np.testing.assert_allclose(fast(z, z), 0.0, atol=1e-16)


def test_divergences_by_hand() -> None:
    p, q = np.log(np.array([[0.5, 0.5, 0.0001]])), np.log(np.array([[0.25, 0.75, 0.0001]]))
    p[:, 2] = q[:, 2] = -np.inf
    assert host.kl_divergence(p, q)[0] == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3), rel=1e-14)
    assert host.total_variation(p, q)[0] == pytest.approx(0.25, rel=1e-14)
    apart = np.array([[0.0, -np.inf, -np.inf]]), np.array([[-np.inf, 0.0, 3.0]])
    assert host.js_divergence(*apart)[0] == pytest.approx(np.log(2), rel=1e-14)
    assert host.total_variation(*apart)[0] == 1.0


def test_kl_where_q_masks_what_p_does_not() -> None:
    p = np.array([[0.0, 1.0, -1000.0], [0.0, 1.0, -np.inf]])
    q = np.array([[0.0, 1.0, -np.inf], [0.0, 1.0, 2.0]])
    assert host.kl_divergence(p, q)[0] == np.inf  # also where exp(-1000) is 0 in float64
    assert host.kl_divergence(p, q)[1] == pytest.approx(np.log(1 + np.exp(2) / (1 + np.e)))
    assert np.isfinite(host.js_divergence(p, q)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_divergences_without_distribution(bad: float) -> None:
    p = np.zeros((1, 4), np.float32)
    q = p.copy()
    q[0, : 4 if bad == -np.inf else 1] = bad
    for fast, slow in DIVERGENCES:
        for pair in ((p, q), (q, p), (q, q)):
            assert np.isnan(fast(*pair)), fast
            assert np.isnan(slow(*pair)), slow


def test_divergences_of_different_shapes() -> None:
    with pytest.raises(InputError, match=r"expected \[2, 3\]; got \[2, 4\]"):
        host.kl_divergence(np.zeros((2, 3)), np.zeros((2, 4)))


@pytest.mark.parametrize("vocab", [64, 300, 2048, 5000, 20_003])
@pytest.mark.parametrize("k", [1, 5, 64])
def test_the_best_values_are_found_in_the_best_blocks(vocab: int, k: int) -> None:
    random = np.random.default_rng(vocab)
    for x in (
        random.normal(0, 3, (5, vocab)),
        random.integers(0, 4, (5, vocab)),
        np.arange(vocab)[None] % 977,
        np.where(random.random((5, vocab)) < 0.99, -np.inf, random.normal(0, 3, (5, vocab))),
    ):
        rows = torch.from_numpy(x.astype(np.float32))
        values, ids = device.best_values(rows, k)
        assert torch.equal(values, rows.topk(k, dim=1).values)
        assert torch.equal(rows.gather(1, ids), values)
        assert all(len(set(row)) == k for row in ids.tolist())
        assert torch.equal(device.best_ids(rows, k), device._keyed_ids(rows, k))
