"""Numerics of NumPy arrays of logits ``[rows, vocab]``, without PyTorch.

Logits are float32, float16, bfloat16 (the ml_dtypes one) or float64. The work is done in float32 and floats
come back as float32; for float64 logits both are float64. Divergences are always float64. The work goes by
tiles of rows that stay in the cache. Against the float64 reference, float32 results keep the bounds that
``device`` states; float64 results agree to 1e-12.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from logitscope.errors import InputError, TokenIdError
from logitscope.numerics import check_k, check_rows, check_targets, checked_names
from logitscope.rows import NO_TARGET, Ids

TILE_VALUES = 200_000
"""Values of a tile: with its work arrays, 800 kB each in float32, it stays in the cache."""

_DTYPES = tuple(np.dtype(d) for d in (np.float32, np.float16, ml_dtypes.bfloat16, np.float64))

_NO_WEIGHT = {"f": -128.0, "d": -800.0}  # exp of it is 0 in that dtype; -inf itself would make 0 * -inf

Measures: TypeAlias = dict[str, NDArray[Any]]

_FORMULAS: dict[str, Callable[[Measures], NDArray[Any]]] = {
    "logsumexp": lambda m: m["max"] + np.log(m["total"]),
    "max": lambda m: m["max"],
    "argmax": lambda m: m["argmax"],
    "entropy": lambda m: np.log(m["total"]) - m["mean"],
    "varentropy": lambda m: m["variance"],
    "target_logit": lambda m: m["target"],
    "target_logprob": lambda m: (m["target"] - m["max"]) - np.log(m["total"]),  # max + log would lose digits
    "target_rank": lambda m: m["ahead"] + 1,
    "top1_margin": lambda m: m["margin"],
}


def summaries(z: NDArray[Any], targets: Ids | None, names: Iterable[str]) -> dict[str, NDArray[Any]]:
    """Summaries ``[rows]`` of logits ``[rows, vocab]``, in one pass; ids and ranks are int32.

    Args:
        z: the logits; not changed.
        targets: ids that the rows score, int ``[rows]``, -1 for none. None: no row has a target.
        names: of ``rows.SUMMARIES``.

    Raises:
        InputError: a shape or dtype is wrong.
        OptionError: an unknown name.
        TokenIdError: a target outside the vocabulary.
    """
    wanted = checked_names(names)
    _check(z)
    targets = _checked_targets(targets, z)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        measured = _measures(z, targets, frozenset(wanted))
        valid = np.isfinite(measured["max"])
        results: dict[str, NDArray[Any]] = {}
        for name in wanted:
            values = _FORMULAS[name](measured)
            known = valid & (targets >= 0) if name.startswith("target_") else valid
            if name in ("argmax", "target_rank"):
                results[name] = np.where(known, values, -1).astype(np.int32)
            else:
                results[name] = np.where(known, values, values.dtype.type(np.nan))
    return results


def logsumexp(z: NDArray[Any]) -> NDArray[Any]:
    """Log of the sum of the exponentials of the logits, ``[rows]``."""
    return summaries(z, None, ("logsumexp",))["logsumexp"]


def maximum(z: NDArray[Any]) -> NDArray[Any]:
    """Highest logit, ``[rows]``; the summary ``max``."""
    return summaries(z, None, ("max",))["max"]


def argmax(z: NDArray[Any]) -> Ids:
    """Id of the highest logit, the lowest one among equals; int32 ``[rows]``."""
    return summaries(z, None, ("argmax",))["argmax"]


def entropy(z: NDArray[Any]) -> NDArray[Any]:
    """Entropy of the distribution in nats, ``[rows]``."""
    return summaries(z, None, ("entropy",))["entropy"]


def varentropy(z: NDArray[Any]) -> NDArray[Any]:
    """Variance of the log-probability under the distribution in nats², ``[rows]``."""
    return summaries(z, None, ("varentropy",))["varentropy"]


def target_logit(z: NDArray[Any], targets: Ids) -> NDArray[Any]:
    """Logit of the target, ``[rows]``."""
    return summaries(z, targets, ("target_logit",))["target_logit"]


def target_logprob(z: NDArray[Any], targets: Ids) -> NDArray[Any]:
    """Log-probability of the target in nats, ``[rows]``."""
    return summaries(z, targets, ("target_logprob",))["target_logprob"]


def target_rank(z: NDArray[Any], targets: Ids) -> Ids:
    """Rank of the target, 1 for the best token; int32 ``[rows]``."""
    return summaries(z, targets, ("target_rank",))["target_rank"]


def top1_margin(z: NDArray[Any]) -> NDArray[Any]:
    """Best minus second-best logit, ``[rows]``."""
    return summaries(z, None, ("top1_margin",))["top1_margin"]


def log_softmax(z: NDArray[Any]) -> NDArray[Any]:
    """Log-probabilities in nats, ``[rows, vocab]``.

    Raises:
        InputError: a shape or dtype is wrong.
    """
    _check(z)
    out = np.empty(z.shape, _work_dtype(z))
    for tile in _tiles(z):
        out[tile] = z[tile]
        _log_softmax(out[tile])
    return out


def top_k(z: NDArray[Any], k: int) -> tuple[Ids, NDArray[Any]]:
    """Ids (int32) and logits (dtype of ``z``) of the k highest, ``[rows, k]``, by logit, then by id.

    Raises:
        InputError: a shape or dtype is wrong.
        OptionError: ``k`` is outside ``1 … vocab``.
    """
    _check(z)
    check_k(k, z.shape[1])
    ids = np.full((len(z), k), -1, np.int32)
    for i, row in enumerate(z):
        x = row.astype(_work_dtype(z))
        kth = np.partition(x, len(x) - k)[len(x) - k]
        if np.isfinite(x.max()):
            candidates = np.flatnonzero(x >= kth)
            ids[i] = candidates[np.argsort(-x[candidates], kind="stable")[:k]]
    values = np.take_along_axis(z, np.maximum(ids, 0).astype(np.int64), axis=1)
    values[ids < 0] = np.nan
    return ids, values


def kl_divergence(p: NDArray[Any], q: NDArray[Any]) -> NDArray[np.float64]:
    """KL(p ‖ q) in nats between two arrays of logits, float64 ``[rows]``.

    +inf where a token that p does not mask is masked in q; NaN where a row has no distribution.

    Raises:
        InputError: a shape or dtype is wrong, or the shapes differ.
    """
    return _divergence(p, q, _kl)


def js_divergence(p: NDArray[Any], q: NDArray[Any]) -> NDArray[np.float64]:
    """Jensen–Shannon divergence in nats, in 0 … log 2, float64 ``[rows]``.

    Source: Lin, "Divergence measures based on the Shannon entropy", 1991, equation 4.1 with weights 1/2.

    Raises:
        InputError: a shape or dtype is wrong, or the shapes differ.
    """
    return _divergence(p, q, _js)


def total_variation(p: NDArray[Any], q: NDArray[Any]) -> NDArray[np.float64]:
    """Total variation distance: half the summed differences of the probabilities, float64 ``[rows]``.

    Raises:
        InputError: a shape or dtype is wrong, or the shapes differ.
    """
    return _divergence(p, q, lambda log_p, log_q: np.abs(np.exp(log_p) - np.exp(log_q)).sum(axis=1) / 2)


def _check(z: NDArray[Any]) -> None:
    check_rows(z.shape, dtype=z.dtype, accepted=z.dtype in _DTYPES)


def _checked_targets(targets: Ids | None, z: NDArray[Any]) -> Ids:
    if targets is None:
        return np.full(len(z), NO_TARGET, np.int32)
    check_targets(targets.shape, len(z))
    outside = targets[(targets < NO_TARGET) | (targets >= z.shape[1])]
    if outside.size:
        raise TokenIdError(
            "target outside the vocabulary", expected=f"-1 … {z.shape[1] - 1}", got=int(outside[0])
        )
    return targets


def _work_dtype(z: NDArray[Any]) -> np.dtype[Any]:
    return np.dtype(np.float64 if z.dtype == np.float64 else np.float32)


def _tiles(z: NDArray[Any]) -> Iterator[slice]:
    """Row slices that cover ``z``; one empty slice when it has no rows."""
    rows = _tile_rows(z)
    for first in range(0, max(len(z), 1), rows):
        yield slice(first, first + rows)


def _tile_rows(z: NDArray[Any]) -> int:
    rows: int = TILE_VALUES // z.shape[1]
    return max(1, min(len(z), rows))


def _measures(z: NDArray[Any], targets: Ids, wanted: frozenset[str]) -> Measures:
    """What the formulas need, ``[rows]`` each.

    ``max`` and ``argmax`` are of the logits; ``margin`` leads from the second-best; ``total`` is the sum of
    the weights ``exp(z - max)``; ``mean`` and ``variance`` are those of ``z - max`` under the distribution;
    ``target`` is the target's logit and ``ahead`` the number of tokens before it.
    """
    dtype = _work_dtype(z)
    # The tiles share their work arrays: fresh memory for each would cost more than the arithmetic.
    work = np.empty((4, _tile_rows(z), z.shape[1]), dtype)
    parts = []
    for tile in _tiles(z):
        free = work[:, : len(z[tile])]
        x = z[tile]
        if x.dtype != dtype:
            free[3] = x
            x = free[3]
        parts.append(_measure_tile(x, targets[tile], free, wanted))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _measure_tile(x: NDArray[Any], targets: Ids, free: NDArray[Any], wanted: frozenset[str]) -> Measures:
    each, at = np.arange(len(x)), np.maximum(targets, 0)
    found: Measures = {"max": x.max(axis=1), "target": x[each, at]}
    gaps = np.subtract(x, found["max"][:, None], out=free[0])
    if wanted & {"argmax", "top1_margin"}:
        found["argmax"] = best = x.argmax(axis=1)
    if "top1_margin" in wanted:
        gaps[each, best] = -np.inf
        found["margin"] = np.abs(gaps.max(axis=1))
        gaps[each, best] = 0.0
    if wanted & {"logsumexp", "target_logprob", "entropy", "varentropy"}:
        found |= _moments(
            gaps, free[1], free[2], order=2 if "varentropy" in wanted else int("entropy" in wanted)
        )
    if "target_rank" in wanted:
        found["ahead"] = np.array([_ahead(row, t) for row, t in zip(x, at.tolist(), strict=True)], np.int64)
    return found


def _ahead(row: NDArray[Any], target: int) -> int:
    """Number of tokens of a row ``[vocab]`` that come before the target."""
    return int(np.count_nonzero(row > row[target]) + np.count_nonzero(row[:target] == row[target]))


def _moments(gaps: NDArray[Any], free: NDArray[Any], free2: NDArray[Any], *, order: int) -> Measures:
    """Sum of the weights, and mean and variance of the gaps up to ``order``; ``gaps`` are used up."""
    np.maximum(gaps, _NO_WEIGHT[gaps.dtype.char], out=gaps)
    weights = np.exp(gaps, out=free)
    total = weights.sum(axis=1)
    found = {"total": total}
    if order >= 1:
        found["mean"] = mean = np.multiply(weights, gaps, out=free2).sum(axis=1) / total
    if order >= 2:
        gaps -= mean[:, None]
        weights *= gaps
        weights *= gaps
        found["variance"] = weights.sum(axis=1) / total
    return found


def _log_softmax(x: NDArray[Any]) -> NDArray[Any]:
    """Turn float32 or float64 logits ``[rows, vocab]`` into log-probabilities, in place."""
    with np.errstate(invalid="ignore", over="ignore"):
        x -= x.max(axis=1, keepdims=True)
        x -= np.log(np.exp(x).sum(axis=1, keepdims=True))
    return x


Formula: TypeAlias = Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]]


def _divergence(p: NDArray[Any], q: NDArray[Any], formula: Formula) -> NDArray[np.float64]:
    """``formula`` over the log-probabilities of ``p`` and ``q``, tile by tile."""
    _check(p)
    _check(q)
    if p.shape != q.shape:
        raise InputError(
            "two arrays of logits of different shapes", expected=list(p.shape), got=list(q.shape)
        )
    out = np.empty(len(p))
    for tile in _tiles(p):
        log_p, log_q = (_log_softmax(z[tile].astype(np.float64)) for z in (p, q))
        with np.errstate(invalid="ignore", divide="ignore"):
            out[tile] = formula(log_p, log_q)
    return out


def _kl(log_p: NDArray[np.float64], log_q: NDArray[np.float64]) -> NDArray[np.float64]:
    infinite = ((log_q == -np.inf) & (log_p > -np.inf)).any(axis=1)
    return np.where(infinite, np.inf, _expected_gap(log_p, log_q))


def _js(log_p: NDArray[np.float64], log_q: NDArray[np.float64]) -> NDArray[np.float64]:
    log_m = np.log(np.exp(log_p) + np.exp(log_q)) - math.log(2)
    return (_expected_gap(log_p, log_m) + _expected_gap(log_q, log_m)) / 2


def _expected_gap(log_p: NDArray[np.float64], log_q: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean of ``log_p - log_q`` under p, ``[rows]``; rounding cannot make it negative."""
    p = np.exp(log_p)
    mean: NDArray[np.float64] = np.where(p == 0, 0.0, p * (log_p - log_q)).sum(axis=1)
    return np.maximum(mean, 0.0)
