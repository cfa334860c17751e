"""What the views show of each row: tokens as people read them, surprise, and the best alternatives."""

from __future__ import annotations

import dataclasses
import math
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from logitscope.rows import NO_TARGET, Kind

if TYPE_CHECKING:
    from logitscope.logits.sequence import Logits

LEVEL_PROBABILITIES: tuple[float, ...] = (0.9, 0.5, 0.2, 0.05, 0.005)
"""A token of at least the i-th probability is of surprise level i; of less than all, of the last level."""

_SHOWN_AS = {"\n": "↵", "\t": "⇥"}


@dataclasses.dataclass(frozen=True)
class Alternative:
    """One of the best tokens of a row, with its probability."""

    token_id: int
    text: str
    probability: float


@dataclasses.dataclass(frozen=True)
class ViewRow:
    """One row as the views show it; None where it has no target or the number was not kept."""

    position: int
    kind: Kind
    token: str
    target_id: int | None
    target: str | None
    logprob: float | None
    rank: int | None
    entropy: float | None
    alternatives: tuple[Alternative, ...]

    @property
    def level(self) -> int | None:
        """Surprise level of the target, 0 (expected) … 5; None without a number."""
        if self.logprob is None or math.isnan(self.logprob):
            return None
        return surprise_level(self.logprob)


@dataclasses.dataclass(frozen=True)
class MeanNLL:
    """Mean negative log-probability of ``n`` tokens in nats, with the standard error of that mean."""

    mean: float
    standard_error: float
    n: int

    @property
    def perplexity(self) -> float:
        """Exponential of the mean; infinite where it overflows."""
        return math.exp(self.mean) if self.mean < 700 else math.inf


def surprise_level(logprob: float) -> int:
    """Level 0 (p ≥ 0.9) … 5 (p < 0.005) of a log-probability in nats.

    Example:
        >>> [surprise_level(math.log(p)) for p in (0.95, 0.6, 0.3, 0.1, 0.01, 0.001)]
        [0, 1, 2, 3, 4, 5]
    """
    return sum(logprob < math.log(p) for p in LEVEL_PROBABILITIES)


def view_rows(logits: Logits, top: int) -> list[ViewRow]:
    """Every row with its ``top`` best tokens; without them where only summaries were kept."""
    logprobs, ranks, entropies = _numbers(logits, ("target_logprob", "target_rank", "entropy"))
    tokens = pieces(logits, logits.token_ids[logits.positions])
    targets = pieces(logits, logits.targets)
    alternatives = _alternatives(logits, top)
    return [
        ViewRow(
            position=int(position),
            kind=kind,
            token=tokens[i],
            target_id=None if target_id == NO_TARGET else int(target_id),
            target=None if target_id == NO_TARGET else targets[i],
            logprob=None if target_id == NO_TARGET else logprobs[i],
            rank=None if target_id == NO_TARGET else ranks[i],
            entropy=entropies[i],
            alternatives=alternatives[i],
        )
        for i, (position, kind, target_id) in enumerate(
            zip(logits.positions, logits.kinds, logits.targets, strict=True)
        )
    ]


def mean_nll(logits: Logits) -> MeanNLL | None:
    """Over the rows that have a target; None when there are none, or their log-probabilities are unknown."""
    scored = logits.targets != NO_TARGET
    if not scored.any():
        return None
    if "target_logprob" not in logits.available:
        return None
    nll = -logits.target_logprob()[scored].astype(np.float64)
    with np.errstate(invalid="ignore"):  # an impossible token makes the mean infinite, its error unknown
        spread = float(np.std(nll, ddof=1) / math.sqrt(len(nll))) if len(nll) > 1 else math.nan
    return MeanNLL(float(nll.mean()), spread, len(nll))


def pieces(logits: Logits, token_ids: NDArray[np.int32]) -> list[str]:
    """Text of each id, or the id itself where no vocabulary is known; empty for a missing target."""
    real = token_ids[token_ids != NO_TARGET]
    texts = [str(i) for i in real] if logits.vocabulary is None else logits.vocabulary.pieces(real)
    found = iter(texts)
    return [next(found) if token_id != NO_TARGET else "" for token_id in token_ids]


def visible(text: str, *, space: str = "␣") -> str:
    """``text`` on one line with nothing hidden: controls, spaces and invisible characters as signs.

    Example:
        >>> visible(" a\\n\\x1b[0m")
        '␣a↵\\\\x1b[0m'
    """
    shown = "".join(_visible_character(c, space) for c in text) or "∅"
    return "◌" + shown if unicodedata.category(shown[0]).startswith("M") else shown


def percent(probability: float) -> str:
    """``41%``, ``0.3%``, ``<0.1%``; ``?`` for NaN.

    Example:
        >>> [percent(p) for p in (1.0, 0.412, 0.0951, 0.003, 0.0001)]
        ['100%', '41%', '9.5%', '0.3%', '<0.1%']
    """
    if math.isnan(probability):
        return "?"
    if probability < 0.0005:
        return "<0.1%"
    return f"{probability:.0%}" if probability >= 0.0995 else f"{probability:.1%}"


def _visible_character(character: str, space: str) -> str:
    if character == " ":
        return space
    if character in _SHOWN_AS:
        return _SHOWN_AS[character]
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def _numbers(logits: Logits, names: Sequence[str]) -> list[list[Any]]:
    """Summaries as plain numbers, by name; None where they cannot be had."""
    had = [name for name in names if name in logits.available]
    found = logits.summaries(had)
    return [found[name].tolist() if name in found else [None] * len(logits) for name in names]


def _alternatives(logits: Logits, top: int) -> list[tuple[Alternative, ...]]:
    shown = min(top, logits.best_known)
    if not len(logits) or not shown:
        return [()] * len(logits)
    best = logits.top_k(shown)
    rows, k = best.token_ids.shape
    texts = pieces(logits, best.token_ids.reshape(-1))
    ids, probabilities = best.token_ids.tolist(), np.exp(best.logprobs).tolist()
    return [
        tuple(
            Alternative(ids[r][c], texts[r * k + c], probabilities[r][c])
            for c in range(k)
            if ids[r][c] != NO_TARGET
        )
        for r in range(rows)
    ]
