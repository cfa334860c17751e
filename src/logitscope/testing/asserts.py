"""Assertions about rows that an engine's tests share, and the budgets that they allow."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from logitscope import rows

if TYPE_CHECKING:
    from logitscope.engines.results import Generation
    from logitscope.logits import Logits


@dataclasses.dataclass(frozen=True)
class Budget:
    """How far a row may lie from the float64 truth, in units of ``eps`` of its largest absolute logit.

    A model is a chain of products: one rounding per result moves a logit by ``eps / 2`` of its size, and
    the roundings of some twenty products, norms and sums before it add up like a random walk. float32
    sums of a product are rounded at each step as well, so that its budget in ``eps`` is wider. The
    budgets hold for models of a few layers; a deep model needs a wider one.

    Attributes:
        eps: distance from 1 to the next number.
        worst: bound of the largest difference.
        rms: bound of the root mean square of a row's differences: a drift that every column shares, such
            as a forgotten bias or scale, breaks it first.
    """

    eps: float
    worst: float
    rms: float


BUDGETS: dict[str, Budget] = {
    "float64": Budget(2.0**-52, 64, 16),
    "float32": Budget(2.0**-23, 64, 16),
    "float16": Budget(2.0**-10, 12, 3),
    "bfloat16": Budget(2.0**-7, 12, 3),
}
"""Budget of each dtype that a model computes in."""


def assert_rows_close(actual: Any, expected: Any, *, dtype: str, what: str = "rows") -> float:
    """Check rows ``[rows, vocab]`` against the truth within the budget of ``dtype``.

    Returns:
        The largest absolute difference, to be published.

    Raises:
        AssertionError: another shape, a value that is not finite, or a row beyond the budget.
    """
    got, truth = _float64(actual), _float64(expected)
    assert got.shape == truth.shape, f"{what}: shape {got.shape}, expected {truth.shape}"
    if not got.size:
        return 0.0
    bad = np.flatnonzero(~np.isfinite(got).all(axis=-1))
    assert not bad.size, f"{what}: row {bad[0]} of {len(got)} is not finite"
    difference, budget = np.abs(got - truth), BUDGETS[dtype]
    unit = budget.eps * np.maximum(np.abs(truth).max(axis=-1), 1e-30)
    worst = difference.max(axis=-1) / unit
    rms = np.sqrt(np.square(difference).mean(axis=-1)) / unit
    for name, found, allowed in (("largest", worst, budget.worst), ("rms", rms, budget.rms)):
        row = int(found.argmax())
        assert found[row] <= allowed, (
            f"{what}: row {row} of {len(got)}: {name} difference {found[row]:.3g} eps of its largest logit, "
            f"allowed {allowed:g} in {dtype} (largest absolute difference {difference[row].max():.3g})"
        )
    return float(difference.max())


def _float64(values: Any) -> NDArray[np.float64]:
    if hasattr(values, "detach"):
        values = values.detach().cpu().double()
    return np.asarray(values).astype(np.float64)


def assert_same_bits(actual: Any, expected: Any, *, what: str = "values") -> None:
    """Check that two arrays have the same dtype, shape and bits, NaN payloads and signed zeros included."""
    got, wanted = np.ascontiguousarray(actual), np.ascontiguousarray(expected)
    assert got.dtype == wanted.dtype, f"{what}: dtype {got.dtype}, expected {wanted.dtype}"
    assert got.shape == wanted.shape, f"{what}: shape {got.shape}, expected {wanted.shape}"
    assert got.tobytes() == wanted.tobytes(), f"{what}: bits differ"


def rounded(values: Any, dtype: str) -> NDArray[Any]:
    """Values rounded to nearest, ties to even, in ``dtype``; bfloat16 is the ml_dtypes one."""
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return np.asarray(values).astype(kind)


def assert_aligned(
    logits: Logits, token_ids: Any, *, prompt_length: int, select: rows.Select | None = None
) -> None:
    """Check that each row says which position it is, and which token it scores.

    Args:
        logits: rows of one sequence.
        token_ids: all its ids, prompt and generated: ``[N]``.
        prompt_length: ``L``.
        select: what was asked for; all rows by default.

    Raises:
        AssertionError: other positions than selected, or a row with another token than ``t[p + 1]``.
    """
    ids = np.asarray(token_ids, dtype=np.int32)
    wanted = (select or rows.Select()).rows(prompt_length=prompt_length, new_tokens=len(ids) - prompt_length)
    positions = np.asarray(logits.positions)
    assert np.array_equal(positions, wanted), f"positions {positions}, expected {wanted}"
    found, targets = np.asarray(logits.targets), rows.targets(ids, wanted)
    assert np.array_equal(found, targets), f"targets {found}, expected {targets}"
    assert len(logits) == len(wanted), f"{len(logits)} rows, expected {len(wanted)}"


def assert_complete(generation: Generation) -> None:
    """Check that a generation with all its raw rows has one row a token, aligned, each finite.

    Raises:
        AssertionError: a row is missing, left over, out of place or not finite.
    """
    logits, prompt, new = generation.logits, generation.prompt_token_ids, generation.token_ids
    assert logits is not None, "no logits were asked for"
    assert len(logits.generated) == len(new), f"{len(logits.generated)} generated rows, {len(new)} tokens"
    assert len(logits.prompt) == len(prompt) - 1, f"{len(logits.prompt)} prompt rows, {len(prompt)} tokens"
    assert_aligned(logits, np.concatenate([prompt, new]), prompt_length=len(prompt))
    assert np.isfinite(np.asarray(logits).astype(np.float64)).all(), "a row is not finite"
    assert generation.finish_reason in ("stop", "length"), f"finish_reason {generation.finish_reason!r}"
