"""What is computed from rows of logits: log-probabilities, summaries, top-k, divergences.

Three modules give the same results: ``reference`` in float64, slow and written to be read; ``host`` for
NumPy arrays, without PyTorch; ``device`` for PyTorch tensors where they lie, without waiting for the device.

The rules that all three keep, for logits ``z`` ``[rows, vocab]``:

- -inf is a masked token: its probability is 0, and 0 · log 0 = 0.
- A row that holds NaN or +inf, or nothing but -inf, has no distribution: NaN for its floats, -1 for its ids
  and ranks.
- A row without a target (-1): NaN for its target's floats, -1 for its target's rank.
- Equal logits are ordered by id, the lower one first; -0.0 equals 0.0.
- A vocabulary without a second token that is not masked has a ``top1_margin`` of +inf.
- Logarithms are natural. Ids and ranks are int32.
"""

from __future__ import annotations

from collections.abc import Iterable

from logitscope.errors import InputError, OptionError
from logitscope.rows import SUMMARIES

MAX_VOCAB = 1 << 24
"""Ids up to here are exact in float32, where ``device`` counts."""


def checked_names(names: Iterable[str]) -> tuple[str, ...]:
    """The names of summaries, as a tuple.

    Raises:
        OptionError: a name that is none of ``rows.SUMMARIES``.
    """
    wanted = tuple(names)
    for name in wanted:
        if name not in SUMMARIES:
            raise OptionError(
                "unknown summary", where="summary", expected=f"of {', '.join(SUMMARIES)}", got=repr(name)
            )
    return wanted


def check_rows(shape: tuple[int, ...], *, dtype: object, accepted: bool) -> None:
    """Refuse logits of another shape than ``[rows, vocab]``, or of a dtype that is not accepted.

    Raises:
        InputError: the shape or the dtype is wrong.
    """
    if len(shape) != 2 or not 1 <= shape[1] <= MAX_VOCAB:
        raise InputError(
            "wrong shape of logits", expected=f"[rows, vocab] with vocab in 1 … {MAX_VOCAB}", got=list(shape)
        )
    if not accepted:
        raise InputError("wrong dtype of logits", expected="a floating-point dtype", got=dtype)


def check_targets(shape: tuple[int, ...], rows: int) -> None:
    """Refuse targets of another shape than ``[rows]``.

    Raises:
        InputError: the shape is wrong.
    """
    if shape != (rows,):
        raise InputError("wrong shape of targets", expected=[rows], got=list(shape))


def check_k(k: int, vocab: int) -> None:
    """Refuse a ``k`` outside ``1 … vocab``.

    Raises:
        OptionError: it lies outside.
    """
    if not 1 <= k <= vocab:
        raise OptionError("value outside its range", where="k", expected=f"1 … {vocab}", got=k)
