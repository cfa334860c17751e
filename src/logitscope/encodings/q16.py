"""16 bits a value: the square root of the distance below the row's maximum, in 65,535 steps.

Probabilities fall with that distance, so steps are finest where they matter: at the maximum, which is exact.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from logitscope.encodings.base import RowFormat, tiles
from logitscope.encodings.quantized import Quantized, below, decoded, stated
from logitscope.rows import Identity

_STEPS = 65534
_MASKED = 65535
_HEADER = 4  # codes that hold two float32: the maximum, and the step of the root


@dataclasses.dataclass(frozen=True)
class Q16(Quantized):
    """Rows of ``vocab_size`` unsigned 16-bit codes and 8 bytes."""

    name: str = "q16"
    formula = (
        "row of uint16: float32 max, float32 step in the first 4 codes; then value = max - (code * step)**2, "
        "code 65535 = -inf"
    )

    def row_format(self, identity: Identity) -> RowFormat:
        """The codes, after 4 that hold maximum and step."""
        return RowFormat(np.dtype(np.uint16), identity.vocab_size + _HEADER)

    def encode(self, rows: Any, out: Any) -> Any:
        """Write logits, a tensor ``[rows, vocab_size]``, into the tensor ``out``."""
        import torch

        codes, bad = out.view(torch.int16), []
        for tile in tiles(rows):
            found = below(rows[tile])
            found.roots()
            step = found.deepest / _STEPS
            # int16 has the bits of uint16 when 65536 is taken off where the sign bit is set.
            scaled = found.distance.mul_(_per(step)).add_(0.5).to(torch.int32)
            found.mask(scaled, _MASKED)
            codes[tile, _HEADER:].copy_(scaled)
            codes[tile, :_HEADER] = torch.cat([found.top, step], 1).view(torch.int16)
            bad.append(found.bad)
        return torch.stack(bad).any()

    def decode(self, stored: NDArray[Any], ids: NDArray[Any] | None = None) -> NDArray[np.float32]:
        """Values ``[rows, vocab_size]``, or those of some columns, from rows ``[rows, width]`` of codes."""
        top, step = self._header(stored)
        codes = stored[:, _HEADER:] if ids is None else stored[:, _HEADER + ids]
        root = codes.astype(np.float32)
        root *= step
        return decoded(top, root, codes == _MASKED)

    def error_bound(self, stored: NDArray[Any]) -> NDArray[np.float32]:
        """Bound of ``|decoded - value|`` in each row, float32 ``[rows]``."""
        top, step = (part[:, 0].astype(np.float64) for part in self._header(stored))
        deepest = step * _STEPS
        error = 0.51 * step
        rounding = 2.0**-22 * (np.abs(top) + deepest**2)
        return stated(2 * deepest * error + error**2 + rounding)

    def _header(self, stored: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        parts = np.ascontiguousarray(stored[:, :_HEADER]).view(np.float32)
        return parts[:, :1], parts[:, 1:]


def _per(step: Any) -> Any:
    """1 / step; 0 for a row whose values are all equal."""
    return (1 / step).masked_fill_(step == 0, 0.0)
