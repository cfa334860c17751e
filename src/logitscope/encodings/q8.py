"""8 bits a value: as in `q16`, in blocks of 64 columns with a range of their own; the best tokens are exact.

The values nearest the maximum are kept beside the codes as they are, so the order of the best tokens, and
the token that is chosen, never change.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from logitscope.encodings.base import RowFormat, tiles
from logitscope.encodings.quantized import Quantized, below, decoded, stated
from logitscope.rows import Identity

_BLOCK = 64
_STEPS, _MASKED = 254, 255
_MOST_EXACT, _EXACT_SHARE = 64, 256
_GROWTH = 1 + 2.0**-10  # so that the last step of a block is not below its largest value when rounded


@dataclasses.dataclass(frozen=True)
class _Places:
    """Where the parts of a row lie, in bytes."""

    vocab_size: int

    @property
    def blocks(self) -> int:
        """Blocks of columns; the last one may be smaller."""
        return -(-self.vocab_size // _BLOCK)

    @property
    def exact(self) -> int:
        """Values that are kept as they are."""
        return min(_MOST_EXACT, max(1, self.vocab_size // _EXACT_SHARE))

    @property
    def parts(self) -> dict[str, tuple[slice, Any]]:
        """Bytes and dtype of each part before the codes."""
        found, first = {}, 0
        for name, dtype, count in (
            ("scale", np.float32, 2),
            ("ids", np.int32, self.exact),
            ("values", np.float32, self.exact),
            ("low", np.float16, self.blocks),
            ("step", np.float16, self.blocks),
        ):
            size = np.dtype(dtype).itemsize * count
            found[name] = (slice(first, first + size), dtype)
            first += size
        return found

    @property
    def codes(self) -> int:
        """Where the codes begin."""
        end: int = self.parts["step"][0].stop
        return end

    @classmethod
    def of(cls, width: int) -> _Places:
        """The places in a row of so many bytes."""
        low, high = 1, width
        while low < high:
            middle = (low + high) // 2
            places = cls(middle)
            low, high = (middle + 1, high) if places.codes + middle < width else (low, middle)
        return cls(low)


@dataclasses.dataclass(frozen=True)
class Q8(Quantized):
    """Rows of ``vocab_size`` unsigned 8-bit codes, 4 bytes a block of 64, and the best tokens exactly."""

    name: str = "q8"
    formula = (
        "row of bytes: float32 max and deepest; int32 ids and float32 values of the best tokens (vocab/256, "
        "1 to 64); float16 low and step of each block of 64 columns; uint8 codes. value = max - (deepest * "
        "(low + code * step))**2, code 255 = -inf; the best tokens have their values"
    )

    def row_format(self, identity: Identity) -> RowFormat:
        """The codes, after scales and best tokens."""
        return RowFormat(np.dtype(np.uint8), _Places(identity.vocab_size).codes + identity.vocab_size)

    def encode(self, rows: Any, out: Any) -> Any:
        """Write logits, a tensor ``[rows, vocab_size]``, into the tensor ``out``."""
        import torch

        places, bad = _Places(rows.shape[1]), []
        room = rows.new_zeros((0, 0), dtype=torch.float32)
        for tile in tiles(rows):
            found = below(rows[tile])
            found.roots()
            count = len(found.top)
            padded = places.blocks * _BLOCK
            if padded == places.vocab_size:
                root = found.distance
            else:
                room = room if len(room) >= count else rows.new_zeros((count, padded), dtype=torch.float32)
                root = room[:count]
                root[:, : places.vocab_size] = found.distance
                root[:, places.vocab_size :] = found.distance[:, -1:]
            root.mul_((1 / found.deepest).masked_fill_(found.deepest == 0, 0.0))
            blocks = root.view(count, places.blocks, _BLOCK)
            low = blocks.amin(2, keepdim=True).half()
            step = ((blocks.amax(2, keepdim=True) - low.float()).clamp_(min=0) * (_GROWTH / _STEPS)).half()
            wide = step.float()
            blocks.sub_(low.float()).mul_((1 / wide).masked_fill_(wide == 0, 0.0)).add_(0.5)
            codes = out[tile, places.codes :]
            codes.copy_(root.clamp_(0.0, _STEPS + 0.5)[:, : places.vocab_size])
            found.mask(codes, _MASKED)
            best, ids = _best(rows[tile], places.exact)
            values = {
                "scale": torch.cat([found.top, found.deepest], 1),
                "ids": ids.int(),
                "values": best.float(),
                "low": low[:, :, 0],
                "step": step[:, :, 0],
            }
            for name, part in values.items():
                out[tile, places.parts[name][0]] = part.contiguous().view(torch.uint8)
            bad.append(found.bad)
        return torch.stack(bad).any()

    def decode(self, stored: NDArray[Any], ids: NDArray[Any] | None = None) -> NDArray[np.float32]:
        """Values ``[rows, vocab_size]``, or those of some columns, from rows ``[rows, width]`` of bytes."""
        places = _Places.of(stored.shape[1])
        part = self._parts(stored, places)
        columns = np.arange(places.vocab_size) if ids is None else np.asarray(ids, np.int64)
        codes = stored[:, places.codes :] if ids is None else stored[:, places.codes + columns]
        low, step = part["low"].astype(np.float32), part["step"].astype(np.float32)
        root = codes.astype(np.float32)
        if ids is None:
            low, step = (np.repeat(x, _BLOCK, axis=1)[:, : places.vocab_size] for x in (low, step))
        else:
            low, step = low[:, columns // _BLOCK], step[:, columns // _BLOCK]
        root *= step
        root += low
        root *= part["scale"][:, 1:]
        found: NDArray[np.float32] = decoded(part["scale"][:, :1], root, codes == _MASKED)
        # No other token may come out as good as one of the best, or better.
        below_best = np.nextafter(part["values"][:, -1:], np.float32(-np.inf))
        np.minimum(found, below_best, out=found)
        return _with_best(found, part["ids"], part["values"], None if ids is None else columns)

    def error_bound(self, stored: NDArray[Any]) -> NDArray[np.float32]:
        """Bound of ``|decoded - value|`` in each row, float32 ``[rows]``."""
        part = self._parts(stored, _Places.of(stored.shape[1]))
        low, step = part["low"].astype(np.float64), part["step"].astype(np.float64)
        top, deepest = part["scale"][:, 0].astype(np.float64), part["scale"][:, 1].astype(np.float64)
        high = low + _STEPS * step
        error = 0.51 * step + 2.0**-11 * low + 2.0**-16
        worst = (2 * high * error + error**2).max(axis=1) * deepest**2
        return stated(worst + 2.0**-21 * (np.abs(top) + deepest**2))

    def _parts(self, stored: NDArray[Any], places: _Places) -> dict[str, NDArray[Any]]:
        return {
            name: np.ascontiguousarray(stored[:, place]).view(dtype)
            for name, (place, dtype) in places.parts.items()
        }


def _best(rows: Any, count: int) -> tuple[Any, Any]:
    """The best values of each row and their ids, best first; the token that is chosen is among them."""
    from logitscope.numerics.device import best_values

    best, ids = best_values(rows, count)
    if rows.device.type != "cpu" or bool((best[:, :1] == best[:, -1:]).any()):
        # Of more equals than it gives topk takes any; the first one must be there.
        first = rows.argmax(1, keepdim=True)
        tied = (best[:, :1] == best[:, -1:]) & ~(ids == first).any(1, keepdim=True)
        ids[:, -1:] = ids[:, -1:].where(~tied, first)
    return best, ids


def _with_best(
    found: NDArray[np.float32], best: NDArray[Any], values: NDArray[Any], columns: NDArray[Any] | None
) -> NDArray[np.float32]:
    """Put the values of the best tokens in their places, where these columns were asked for."""
    if columns is None:
        np.put_along_axis(found, best.astype(np.int64), values, axis=1)
        return found
    order = np.argsort(columns, kind="stable")
    for row, (ids, exact) in enumerate(zip(best, values, strict=True)):
        for side in range(len(ids)):
            hits = order[
                np.searchsorted(columns, ids[side], "left", sorter=order) : np.searchsorted(
                    columns, ids[side], "right", sorter=order
                )
            ]
            found[row, hits] = exact[side]
    return found
