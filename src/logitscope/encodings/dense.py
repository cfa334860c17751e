"""Dense rows: every column, in a floating-point dtype."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from logitscope.encodings.base import RowFormat, RowHead, tiles
from logitscope.rows import Identity

DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
"""NumPy's floating-point dtypes of values by name; bfloat16 is the ml_dtypes one."""

_FLOAT16_ROUNDS_UP = 65520.0
_CHECKED_VALUES = 800_000  # at a time: they stay in the cache
_FLOAT16_MAGNITUDE, _FLOAT16_INFINITY = 0x7FFF, 0x7C00
_UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclasses.dataclass(frozen=True)
class Dense:
    """Rows ``[rows, vocab_size]`` in one dtype; a narrower one than the model's rounds to nearest even.

    Attributes:
        name: ``float32``, ``bfloat16`` or ``float16``.
    """

    name: str
    of_hidden = False
    expected = "at most 65504 in absolute value"

    def row_format(self, identity: Identity) -> RowFormat:
        """``vocab_size`` values of the dtype."""
        return RowFormat(DTYPES[self.name], identity.vocab_size)

    def relative_error(self, model_dtype: str) -> float:
        """Bound of ``|decoded - value| / |value|`` for normal values; 0 when nothing is rounded."""
        return 0.0 if self.name in (model_dtype, "float32") else _UNIT_ROUNDOFF[self.name]

    def error_bound(self, largest: NDArray[np.float64], model_dtype: str) -> NDArray[np.float32]:
        """Bound of ``|decoded - value|`` in rows whose largest absolute values are given."""
        spacing = {"float16": 2.0**-25}.get(self.name, 0.0)  # half a step of float16's smallest numbers
        relative = self.relative_error(model_dtype)
        bound = (largest * relative / (1 - relative) + spacing) * (1 + 2.0**-20)
        return bound.astype(np.float32)

    def encode(self, rows: Any, out: Any) -> Any | None:
        """Write logits, a tensor ``[rows, vocab_size]``, into the tensor ``out`` of this dtype.

        Returns:
            None, or a boolean tensor on the logits' device: whether a finite value became infinite.
        """
        return rounded_into(rows, out)

    def held(self, stored: NDArray[Any], identity: Identity, head: RowHead | None) -> NDArray[Any]:
        """The rows themselves."""
        return stored


def rounded_into(rows: Any, out: Any) -> Any | None:
    """Write a tensor into another one of a floating-point dtype, rounding to nearest even.

    Returns:
        None, or a boolean tensor: whether a finite value became infinite, where that can be.
    """
    import torch

    out.copy_(rows)
    if out.dtype != torch.float16 or rows.dtype == torch.float16:
        return None
    if rows.device.type == "cpu" and not _has_infinities(out):
        return None
    return ((rows.abs() >= _FLOAT16_ROUNDS_UP) & rows.isfinite()).any()


def _has_infinities(halves: Any) -> bool:
    """Whether a float16 tensor has infinities or NaN; looked for in its bits, some rows at a time."""
    import torch

    room = torch.empty(0, dtype=torch.int16)
    for tile in tiles(halves, _CHECKED_VALUES):
        bits = halves[tile].view(torch.int16)
        room = room if len(room) >= len(bits) else torch.empty_like(bits)
        magnitudes = torch.bitwise_and(bits, _FLOAT16_MAGNITUDE, out=room[: len(bits)])
        if bits.numel() and int(magnitudes.amax()) >= _FLOAT16_INFINITY:
            return True
    return False
