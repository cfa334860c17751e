"""Small results made by hand, for the tests of what holds them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from logitscope.logits import Logits
from logitscope.rows import SUMMARIES, Identity, row_count, targets

VOCAB = 13
DTYPES = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


class Words:
    """A vocabulary whose every id has a text."""

    def pieces(self, token_ids: Any) -> list[str]:
        return [f" w{int(i)}" for i in token_ids]


def identity(**changes: Any) -> Identity:
    return Identity(
        **{
            "model": "tiny",
            "weights_hash": "w1",
            "tokenizer_hash": "t1",
            "vocab_size": VOCAB,
            "tokenizer_size": VOCAB,
            "dtype": "float32",
            "engine": "fake",
            "engine_version": "1",
            "device": "cpu",
            **changes,
        }
    )


def random_values(rows: int, dtype: Any = np.float32, *, vocab: int = VOCAB, seed: int = 0) -> NDArray[Any]:
    return np.random.default_rng(seed).normal(scale=3, size=(rows, vocab)).astype(dtype)


def token_ids(count: int, *, vocab: int = VOCAB, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng(seed + 1).integers(0, vocab, count).astype(np.int32)


def make_logits(
    prompt_length: int = 5,
    new_tokens: int = 3,
    dtype: Any = np.float32,
    *,
    vocab: int = VOCAB,
    seed: int = 0,
    positions: Any = None,
    **fields: Any,
) -> Logits:
    rows = row_count(prompt_length, new_tokens)
    chosen = np.arange(rows) if positions is None else np.asarray(positions, dtype=np.int64)
    if "values" not in fields:
        fields["values"] = random_values(rows, dtype, vocab=vocab, seed=seed)[chosen]
    given = {
        "positions": chosen.astype(np.int64),
        "token_ids": token_ids(prompt_length + new_tokens, vocab=vocab, seed=seed),
        "prompt_length": prompt_length,
        "identity": identity(vocab_size=vocab),
        "vocabulary": Words(),
    }
    return Logits(**{**given, **fields})


def reference(logits: Logits) -> dict[str, NDArray[Any]]:
    """Every summary, row by row in float64."""
    found: dict[str, list[float]] = {name: [] for name in SUMMARIES}
    scored = targets(logits.token_ids, logits.positions)
    for row, target in zip(np.asarray(logits.to_numpy(), np.float64), scored, strict=True):
        best = sorted(row, reverse=True)
        logsumexp = np.log(np.exp(row).sum())
        logprobs = row - logsumexp
        entropy = -(np.exp(logprobs) * logprobs).sum()
        found["logsumexp"].append(logsumexp)
        found["max"].append(best[0])
        found["argmax"].append(list(row).index(best[0]))
        found["entropy"].append(entropy)
        found["varentropy"].append((np.exp(logprobs) * (logprobs + entropy) ** 2).sum())
        found["target_logit"].append(row[target] if target >= 0 else np.nan)
        found["target_logprob"].append(logprobs[target] if target >= 0 else np.nan)
        ahead = [i for i, z in enumerate(row) if z > row[target] or (z == row[target] and i < target)]
        found["target_rank"].append(len(ahead) + 1 if target >= 0 else -1)
        found["top1_margin"].append(best[0] - best[1])
    return {name: np.array(values) for name, values in found.items()}
