"""Float8 (e4m3): the distance below the row's maximum with 3 bits of mantissa, scaled to its range."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from logitscope.encodings.base import RowFormat, tiles
from logitscope.encodings.quantized import Quantized, below, stated
from logitscope.rows import Identity

_LARGEST = 448.0
_LEAST_SCALE = 2.0**-120  # whose inverse is a float32
_MASKED = 0x7F  # NaN in e4m3, which has no infinity
_HEADER = 8  # bytes of two float32: the maximum, and the scale


@dataclasses.dataclass(frozen=True)
class Float8(Quantized):
    """Rows of ``vocab_size`` e4m3 numbers and 8 bytes."""

    name: str = "float8"
    formula = (
        "row of bytes: float32 max, float32 scale; then e4m3 numbers: value = max - scale * number, "
        "NaN = -inf"
    )

    def row_format(self, identity: Identity) -> RowFormat:
        """The numbers, after maximum and scale."""
        return RowFormat(np.dtype(np.uint8), identity.vocab_size + _HEADER)

    def encode(self, rows: Any, out: Any) -> Any:
        """Write logits, a tensor ``[rows, vocab_size]``, into the tensor ``out``."""
        import torch

        bad = []
        for tile in tiles(rows):
            found = below(rows[tile])
            scale = found.deepest / _LARGEST
            found.distance.mul_(1 / scale.clamp_(min=_LEAST_SCALE)).clamp_(max=_LARGEST)
            numbers = found.distance.to(torch.float8_e4m3fn).view(torch.uint8)
            found.mask(numbers, _MASKED)
            out[tile, _HEADER:] = numbers
            out[tile, :_HEADER] = torch.cat([found.top, scale], 1).view(torch.uint8)
            bad.append(found.bad)
        return torch.stack(bad).any()

    def decode(self, stored: NDArray[Any], ids: NDArray[Any] | None = None) -> NDArray[np.float32]:
        """Values ``[rows, vocab_size]``, or those of some columns, from rows ``[rows, width]`` of bytes."""
        top, scale = self._header(stored)
        codes = np.ascontiguousarray(stored[:, _HEADER:] if ids is None else stored[:, _HEADER + ids])
        found: NDArray[np.float32] = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        found *= -scale
        found += top
        found[codes == _MASKED] = -np.inf
        return found

    def error_bound(self, stored: NDArray[Any]) -> NDArray[np.float32]:
        """Bound of ``|decoded - value|`` in each row, float32 ``[rows]``: a sixteenth of its range."""
        top, scale = (part[:, 0].astype(np.float64) for part in self._header(stored))
        return stated(scale * _LARGEST * (2.0**-4 + 2.0**-20) + 2.0**-22 * np.abs(top))

    def _header(self, stored: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        parts = np.ascontiguousarray(stored[:, :_HEADER]).view(np.float32)
        return parts[:, :1], parts[:, 1:]
