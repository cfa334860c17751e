"""The numerics in float64, row by row and by definition: what ``host`` and ``device`` are tested against."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from logitscope.numerics import checked_names
from logitscope.rows import SUMMARY_DTYPES, Select

Floats = NDArray[np.float64]


def has_distribution(row: Floats) -> bool:
    """Whether logits ``[vocab]`` define one: no NaN, no +inf, not all masked."""
    return bool(np.all(row < np.inf) and np.any(row > -np.inf))


def order(row: Floats) -> NDArray[np.int64]:
    """Ids from best to worst: higher logits first, then lower ids."""
    return np.lexsort((np.arange(len(row)), -row))


def row_log_softmax(row: Floats) -> Floats:
    """Log-probabilities in nats of logits ``[vocab]``."""
    if not has_distribution(row):
        return np.full_like(row, np.nan)
    gaps = row - row.max()
    return np.asarray(gaps - np.log(np.exp(gaps).sum()))


def log_softmax(z: NDArray[Any]) -> Floats:
    """Log-probabilities in nats ``[rows, vocab]``."""
    return np.stack([row_log_softmax(row) for row in z.astype(np.float64)])


def row_summary(name: str, row: Floats, target: int) -> float:
    """One summary of logits ``[vocab]``; NaN, or -1 for ids and ranks, where there is none."""
    no_target = name.startswith("target_") and target < 0
    if no_target or not has_distribution(row):
        return -1 if SUMMARY_DTYPES[name] is np.int32 else np.nan
    return _ROW_SUMMARIES[name](row, target)


def _entropy(row: Floats) -> float:
    logprobs = row_log_softmax(row)
    kept = logprobs[logprobs > -np.inf]
    return float(-(np.exp(kept) * kept).sum())


def _varentropy(row: Floats) -> float:
    logprobs = row_log_softmax(row)
    kept = logprobs[logprobs > -np.inf]
    return float((np.exp(kept) * (-kept - _entropy(row)) ** 2).sum())


def _margin(row: Floats) -> float:
    best = row[order(row)]
    return float(best[0] - best[1]) if len(row) > 1 else np.inf


_ROW_SUMMARIES: dict[str, Callable[[Floats, int], float]] = {
    "logsumexp": lambda row, target: float(row.max() + np.log(np.exp(row - row.max()).sum())),
    "max": lambda row, target: float(row.max()),
    "argmax": lambda row, target: int(order(row)[0]),
    "entropy": lambda row, target: _entropy(row),
    "varentropy": lambda row, target: _varentropy(row),
    "target_logit": lambda row, target: float(row[target]),
    "target_logprob": lambda row, target: float(row_log_softmax(row)[target]),
    "target_rank": lambda row, target: int(np.flatnonzero(order(row) == target)[0]) + 1,
    "top1_margin": lambda row, target: _margin(row),
}


def summaries(z: NDArray[Any], targets: NDArray[Any], names: Iterable[str]) -> dict[str, NDArray[Any]]:
    """Summaries of logits ``[rows, vocab]``: float64 or int32 ``[rows]`` each."""
    pairs = list(zip(z.astype(np.float64), targets.tolist(), strict=True))
    return {
        name: np.array(
            [row_summary(name, row, target) for row, target in pairs],
            dtype=np.int32 if SUMMARY_DTYPES[name] is np.int32 else np.float64,
        )
        for name in checked_names(names)
    }


def top_k(z: NDArray[Any], k: int) -> tuple[NDArray[np.int32], NDArray[Any]]:
    """Ids int32 and logits ``[rows, k]`` of the k highest, by logit, then by id."""
    ids = np.full((len(z), k), -1, np.int32)
    values = np.full((len(z), k), np.nan, z.dtype)
    for i, row in enumerate(z):
        if has_distribution(row.astype(np.float64)):
            ids[i] = order(row.astype(np.float64))[:k]
            values[i] = row[ids[i]]
    return ids, values


def _kl(p: Floats, q: Floats) -> float:
    """Σ p · log(p / q) of log-probabilities ``[vocab]``."""
    kept = p != -np.inf
    if np.any(q[kept] == -np.inf):
        return np.inf
    return float((np.exp(p[kept]) * (p[kept] - q[kept])).sum())


def kl_divergence(p: NDArray[Any], q: NDArray[Any]) -> Floats:
    """KL(p ‖ q) in nats of logits ``[rows, vocab]``, float64 ``[rows]``."""
    return np.array([_kl(a, b) for a, b in zip(log_softmax(p), log_softmax(q), strict=True)])


def _js(p: Floats, q: Floats) -> float:
    """Mean KL to the mixture, of log-probabilities ``[vocab]``."""
    with np.errstate(invalid="ignore"):  # a NaN row stays one
        mixture = np.logaddexp(p, q) - np.log(2)
    return (_kl(p, mixture) + _kl(q, mixture)) / 2


def js_divergence(p: NDArray[Any], q: NDArray[Any]) -> Floats:
    """Jensen–Shannon divergence in nats of logits ``[rows, vocab]``, float64 ``[rows]``."""
    return np.array([_js(a, b) for a, b in zip(log_softmax(p), log_softmax(q), strict=True)])


def total_variation(p: NDArray[Any], q: NDArray[Any]) -> Floats:
    """Half the sum of the differences of the probabilities, float64 ``[rows]``."""
    return np.asarray(np.abs(np.exp(log_softmax(p)) - np.exp(log_softmax(q))).sum(axis=1) / 2)


def kept(row: Floats, select: Select, uniforms: Floats | None = None) -> tuple[list[int], list[int] | None]:
    """Ids that a selection keeps of logits ``[vocab]``, in their order; and counts where they are drawn.

    Args:
        row: the logits.
        select: with ``top_k``, ``top_p``, ``min_p``, ``threshold`` or ``sample``.
        uniforms: numbers in [0, 1) for a draw.
    """
    best = order(row)
    probabilities = np.exp(row_log_softmax(row))
    if select.top_k is not None:
        return best[: select.top_k].tolist(), None
    if select.top_p is not None:
        enough = np.flatnonzero(np.cumsum(probabilities[best]) >= select.top_p)
        return best[: enough[0] + 1 if enough.size else len(row)].tolist(), None
    if select.sample is not None:
        assert uniforms is not None
        mass = np.exp((row - row.max()) / select.temperature).cumsum()
        drawn = np.searchsorted(mass, uniforms * mass[-1], side="right").clip(max=len(row) - 1)
        ids, counts = np.unique(drawn, return_counts=True)
        return ids.tolist(), counts.tolist()
    bound = select.threshold if select.min_p is None else row.max() + np.log(select.min_p)
    return [int(i) for i in best if row[i] >= np.float32(bound)], None
