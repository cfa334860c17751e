"""One pass over float32 rows on a CPU, compiled by Numba: what the summaries' formulas need.

It is used where Numba is installed (``pip install 'logitscope[fast]'``), and takes half the time of
PyTorch's operators, which read a row some twenty times. `logitscope.numerics.device` states how far results
may lie from the float64 reference; they are the same here.
"""

from __future__ import annotations

import concurrent.futures
import functools
import importlib.util
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCK = 512  # columns whose weights are summed in float32, before they are added up in float64
_LOWEST = np.float32(-104.0)  # of a gap: its weight is 0 in float32
_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
# exp(f) = 1 + f + f² · polynomial(f) for |f| ≤ ln(2) / 2, to 2 units in the last place (Cephes, expf).
_EXP = tuple(
    np.float32(c)
    for c in (
        1.9875691500e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    )
)


@functools.cache
def available() -> bool:
    """Whether Numba is installed; it is not imported yet."""
    return importlib.util.find_spec("numba") is not None


def measures(
    rows: NDArray[np.float32], targets: NDArray[np.int64], threads: int
) -> dict[str, NDArray[np.float32]]:
    """Figures of each row, float32 ``[rows]`` each.

    Args:
        rows: ``[rows, vocab]``, C-contiguous.
        targets: ids ``[rows]`` in the vocabulary.
        threads: that share the rows.

    Returns:
        ``max`` and ``argmax``; ``margin`` to the second-best; ``total`` of the weights ``exp(z - max)``;
        ``mean`` and ``variance`` of ``z - max`` under the distribution; ``ahead``, the number of tokens
        before the target. A row with NaN has NaN for a maximum.
    """
    names = ("max", "argmax", "margin", "total", "mean", "variance", "ahead")
    found = np.empty((len(names), len(rows)), np.float32)
    kernel = _kernel()
    share = -(-len(rows) // max(threads, 1))
    parts = [slice(a, min(a + share, len(rows))) for a in range(0, len(rows), max(share, 1))]
    if len(parts) > 1:
        work = [(rows[part], targets[part], found[:, part]) for part in parts]
        list(_pool(threads).map(lambda arguments: kernel(*arguments), work))
    elif parts:
        kernel(rows, targets, found)
    return dict(zip(names, found, strict=True))


@functools.cache
def _pool(threads: int) -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(threads, "logitscope-numerics")


@functools.cache
def _kernel() -> Any:
    import numba

    c0, c1, c2, c3, c4, c5 = _EXP
    half, one, low = np.float32(0.5), np.float32(1), np.float32(-np.inf)

    # No flag that forgets NaN or infinities; sums may be taken in any order, so that they are vectorized.
    @numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz", "arcp"})
    def measure(rows: Any, targets: Any, found: Any) -> None:
        vocab = rows.shape[1]
        gap, power, bits = (
            np.empty(_BLOCK, np.float32),
            np.empty(_BLOCK, np.float32),
            np.empty(_BLOCK, np.int32),
        )
        scale = bits.view(np.float32)
        for r in range(rows.shape[0]):
            row = rows[r]
            target = targets[r]
            scored = row[target]
            best, lost, ahead = low, np.int32(0), np.int32(0)
            for j in range(vocab):
                best = max(best, row[j])
                lost += np.int32(row[j] != row[j])
                ahead += np.int32(row[j] > scored)
            for j in range(target):
                ahead += np.int32(row[j] == scored)
            place = 0
            while place < vocab - 1 and row[place] != best:
                place += 1
            second = low
            for j in range(place):
                second = max(second, row[j])
            for j in range(place + 1, vocab):
                second = max(second, row[j])
            total, mean, square = 0.0, 0.0, 0.0
            for first in range(0, vocab, _BLOCK):
                count = min(_BLOCK, vocab - first)
                for j in range(count):
                    d = max(row[first + j] - best, _LOWEST)
                    k = np.floor(d * _LOG2E + half)
                    f = d - k * _LN2_HIGH - k * _LN2_LOW
                    p = ((((c0 * f + c1) * f + c2) * f + c3) * f + c4) * f + c5
                    gap[j], power[j] = d, p * f * f + f + one
                    bits[j] = max(np.int32(k) + np.int32(127), np.int32(0)) << np.int32(23)
                s0: Any = np.float32(0)
                s1: Any = np.float32(0)
                s2: Any = np.float32(0)
                for j in range(count):
                    weight = power[j] * scale[j]
                    part = weight * gap[j]
                    s0 += weight
                    s1 += part
                    s2 += part * gap[j]
                total += s0
                mean += s1
                square += s2
            mean /= total
            found[0, r] = best if lost == 0 else np.float32(np.nan)
            found[1, r] = place
            found[2, r] = best - second
            found[3, r] = total
            found[4, r] = mean
            found[5, r] = max(square / total - mean * mean, 0.0)
            found[6, r] = ahead

    return measure
