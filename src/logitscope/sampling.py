"""From a row of logits to the next token: processors, warpers, and the draw.

Repetition penalty and logit bias come first. Unless the choice is greedy, the warpers follow, in the order of
Transformers: temperature, top-k, top-p, min-p. Removed tokens are -inf.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from logitscope.errors import OptionError, TokenIdError
from logitscope.numerics import device
from logitscope.rows import Sampling

IDS, UNIFORMS = torch.int64, torch.float64
"""Dtypes of a history of ids, and of the numbers that are drawn with."""


def process(logits: Tensor, sampling: Sampling, history: Sequence[Tensor]) -> Tensor:
    """Logits just before the draw, a new float32 ``[batch, vocab]``.

    Args:
        logits: raw, ``[batch, vocab]``, in the model's dtype; not changed.
        sampling: how the next token of these sequences is chosen.
        history: for each sequence its prompt's and generated ids, int64, on the device of the logits.

    Raises:
        TokenIdError: ``logit_bias`` names an id outside the vocabulary.
        OptionError: ``logit_bias`` holds NaN or +inf.
    """
    scores = logits.to(torch.float32, copy=True)
    if sampling.repetition_penalty != 1.0:
        _penalize(scores, history, sampling.repetition_penalty)
    if sampling.logit_bias:
        _add_bias(scores, sampling.logit_bias)
    if sampling.greedy:
        return scores
    scores /= sampling.temperature
    if sampling.top_k:
        scores = _keep_top_k(scores, sampling.top_k)
    if sampling.top_p < 1.0:
        scores = _keep_top_p(scores, sampling.top_p)
    if sampling.min_p:
        scores = _keep_min_p(scores, sampling.min_p)
    return scores


def _penalize(scores: Tensor, history: Sequence[Tensor], penalty: float) -> None:
    """Source: Keskar et al., 2019, "CTRL", section 4.1; negative logits are multiplied."""
    for row, ids in zip(scores, history, strict=True):
        seen = row[ids]
        row[ids] = torch.where(seen < 0, seen * penalty, seen / penalty)


def _add_bias(scores: Tensor, bias: Mapping[int, float]) -> None:
    vocab = scores.shape[1]
    for token_id, value in bias.items():
        where = f"logit_bias[{token_id}]"
        if not 0 <= token_id < vocab:
            raise TokenIdError(
                "id outside the vocabulary", where=where, expected=f"0 … {vocab - 1}", got=token_id
            )
        if not value < float("inf"):
            raise OptionError(
                "value outside its range", where=where, expected="a number below inf", got=value
            )
    ids = torch.tensor(list(bias), dtype=torch.int64, device=scores.device)
    scores[:, ids] += torch.tensor(list(bias.values()), dtype=torch.float32, device=scores.device)


def _keep_top_k(scores: Tensor, k: int) -> Tensor:
    """Keep the k highest, and what equals the k-th."""
    kth = scores.topk(min(k, scores.shape[1]), dim=1).values[:, -1:]
    return scores.masked_fill(scores < kth, float("-inf"))


def _keep_top_p(scores: Tensor, p: float) -> Tensor:
    """Keep the smallest set with mass p, at least one token; among equals the lower ids.

    Source: Holtzman et al., 2020, "The Curious Case of Neural Text Degeneration", section 3.1.
    """
    best_first, ids = scores.sort(dim=1, descending=True, stable=True)
    # Summed from the worst token on, as Transformers does it, where the rounding is smallest.
    worst_first = best_first.flip(1)
    removed = worst_first.softmax(1).cumsum(1) <= 1 - p
    removed[:, -1] = False
    return scores.masked_fill(removed.scatter(1, ids.flip(1), removed), float("-inf"))


def _keep_min_p(scores: Tensor, p: float) -> Tensor:
    """Keep tokens with at least ``p`` of the best token's probability.

    Source: Nguyen et al., 2024, "Turning Up the Heat: Min-p Sampling", section 3.
    """
    probabilities = scores.softmax(1)
    return scores.masked_fill(probabilities < p * probabilities.amax(1, keepdim=True), float("-inf"))


def choose(processed: Tensor, sampling: Sampling, uniforms: Tensor | None) -> Tensor:
    """Next ids, int64 ``[batch]``; -1 for a row that has no distribution.

    Greedy takes the best token, the lowest id among equals, and needs no uniforms. Otherwise the inverse of
    the cumulative distribution in float64 is taken at ``uniforms``, float64 ``[batch]`` in [0, 1) on any
    device; a token of probability 0 is never drawn.
    """
    if sampling.greedy:
        return device.argmax(processed).long()
    if uniforms is None:
        raise OptionError("a draw without uniforms", where="uniforms", expected="float64 [batch] in [0, 1)")
    if processed.device.type == "mps":  # has no float64
        return choose(processed.cpu(), sampling, uniforms).to(processed.device)
    probabilities = processed.double().softmax(1)
    # A parallel sum may differ in its last bit across tokens of probability 0, which must not win by that.
    cumulative = probabilities.cumsum(1).masked_fill(probabilities == 0, 0.0)
    total = cumulative.amax(1)
    point = uniforms.to(total.device) * total  # below the total, after rounding too
    first_above = (cumulative > point[:, None]).byte().argmax(1)
    return torch.where(total > 0, first_above, -1)


def uniform_stream(seed: int, sample_index: int) -> Iterator[float]:
    """Float64 uniforms in [0, 1), one for each step of a sequence, without end.

    They depend on the seed and the sample's index alone: not on the batch, the device or the engine.

    Source: Salmon et al., 2011, "Parallel Random Numbers: As Easy as 1, 2, 3", Philox 4×64, as in NumPy.

    Example:
        >>> stream = uniform_stream(seed=7, sample_index=0)
        >>> 0.0 <= next(stream) < 1.0
        True
    """
    # NumPy promises the raw bits of every release to be the same, but not its floats.
    bits = np.random.Philox(key=np.array([seed, sample_index], dtype=np.uint64))
    while True:
        yield (int(bits.random_raw()) >> 11) * 2.0**-53
