"""Which columns of a row are kept: by rank, mass, share or threshold, by list, or drawn; on the device.

Tensors are PyTorch's. `logitscope.numerics.reference` says the same by definition, row by row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from logitscope.numerics.device import best_ids, tiles
from logitscope.rows import Select

_FIRST_WIDTH = 64  # entries that most rows need for a usual mass; those that need more are looked at again


class Kept:
    """Entries of rows, row after row; tensors on the logits' device.

    Attributes:
        lengths: int64 ``[rows]``.
        ids: int64 ``[entries]``.
        values: logits ``[entries]`` in the dtype of the rows.
        counts: int64 ``[entries]``, or None.
    """

    def __init__(self, lengths: Tensor, ids: Tensor, values: Tensor, counts: Tensor | None = None) -> None:
        self.lengths, self.ids, self.values, self.counts = lengths, ids, values, counts


def kept(z: Tensor, select: Select, *, uniforms: NDArray[np.float64] | None = None) -> Kept:
    """What a selection of columns keeps of logits ``[rows, vocab]``.

    Args:
        z: the logits; not changed.
        select: with ``top_k``, ``top_p``, ``min_p``, ``threshold`` or ``sample``.
        uniforms: numbers in [0, 1) for a draw, ``[rows, sample]``.
    """
    if select.top_k is not None:
        return _first(z, best_ids(z.float(), select.top_k))
    parts = []
    for tile in tiles(z):
        rows = z[tile]
        if select.top_p is not None:
            parts.append(_nucleus(rows, select.top_p))
        elif select.sample is not None:
            assert uniforms is not None
            parts.append(_drawn(rows, select.temperature, uniforms[tile]))
        else:
            parts.append(_at_least(rows, select))
    counts = [part.counts for part in parts if part.counts is not None]
    return Kept(
        torch.cat([part.lengths for part in parts]),
        torch.cat([part.ids for part in parts]),
        torch.cat([part.values for part in parts]),
        torch.cat(counts) if counts else None,
    )


def listed(z: Tensor, lengths: Tensor, ids: Tensor) -> Kept:
    """Listed columns of each row: ``lengths[i]`` of the ids belong to row ``i``."""
    rows = torch.repeat_interleave(lengths)
    return Kept(lengths, ids, z[rows, ids])


def uniforms(keys: NDArray[np.uint64], seed: int, count: int) -> NDArray[np.float64]:
    """Numbers in [0, 1) for a draw, ``[rows, count]``: each row's own, whatever the other rows are.

    Args:
        keys: of the rows, ``[rows]``.
        seed: of the draw.
        count: numbers a row.
    """
    found = np.empty((len(keys), count))
    for row, key in zip(found, keys, strict=True):
        # Generator streams of one key pair are independent of those of another (counter-based).
        np.random.Generator(np.random.Philox(key=np.array([seed, key], np.uint64))).random(out=row)
    return found


def _first(z: Tensor, ids: Tensor, lengths: Tensor | None = None) -> Kept:
    """The first ``lengths`` of the ids ``[rows, width]`` of each row; all of them without."""
    values = z.gather(1, ids)
    if lengths is None:
        lengths = torch.full((len(ids),), ids.shape[1], device=ids.device)
        return Kept(lengths, ids.reshape(-1), values.reshape(-1))
    chosen = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    return Kept(lengths, ids[chosen], values[chosen])


def _nucleus(z: Tensor, mass: float) -> Kept:
    """The best tokens until their probability is at least ``mass``."""
    x = z.float()
    weights = (x - x.amax(1, keepdim=True)).exp()
    needed = weights.double().sum(1) * mass
    rows, vocab = z.shape
    width = min(_FIRST_WIDTH, vocab)
    lengths = torch.full((rows,), vocab, device=z.device)
    found: Any = None
    todo = torch.arange(rows, device=z.device)
    widest = []
    while len(todo):
        ids = best_ids(x[todo], width)
        sums = weights[todo].gather(1, ids).double().cumsum(1)
        enough = (sums < needed[todo, None]).sum(1) + 1
        done = (enough <= width) if width < vocab else torch.ones_like(todo, dtype=torch.bool)
        lengths[todo[done]] = enough[done].clamp(max=vocab)
        widest.append((todo[done], ids[done]))
        todo, width = todo[~done], min(8 * width, vocab)
    # Each row's ids lie in the table of the width that was enough for it.
    parts: list[Any] = [found] * rows
    for places, ids in widest:
        for place, own in zip(places.tolist(), ids, strict=True):
            parts[place] = own[: int(lengths[place])]
    flat = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=z.device)
    return Kept(lengths, flat, z[torch.repeat_interleave(lengths), flat])


def _at_least(z: Tensor, select: Select) -> Kept:
    """Every logit of at least a threshold, which may be one below the row's maximum; best first."""
    x = z.float()
    if select.threshold is not None:
        bound = torch.full((len(x), 1), select.threshold, dtype=torch.float64, device=x.device)
    else:
        bound = x.amax(1, keepdim=True).double() + float(np.log(select.min_p or 0.0))
    chosen = x >= bound.float()
    lengths = chosen.sum(1)
    rows, ids = chosen.nonzero(as_tuple=True)
    values = z[rows, ids]
    order = values.float().argsort(descending=True, stable=True)
    order = order[rows[order].argsort(stable=True)]
    return Kept(lengths, ids[order], values[order])


def _drawn(z: Tensor, temperature: float, numbers: NDArray[np.float64]) -> Kept:
    """Ids drawn from the softmax at a temperature, each once, with how often it was drawn."""
    x = z.double()
    sums = ((x - x.amax(1, keepdim=True)) / temperature).exp_().cumsum(1)
    at = torch.from_numpy(numbers).to(z.device) * sums[:, -1:]
    ids = torch.searchsorted(sums, at, right=True).clamp_(max=z.shape[1] - 1).sort(1).values
    new = torch.ones_like(ids, dtype=torch.bool)
    new[:, 1:] = ids[:, 1:] != ids[:, :-1]
    lengths = new.sum(1)
    flat = ids[new]
    starts = new.reshape(-1).nonzero()[:, 0]
    counts = torch.diff(starts, append=starts.new_tensor([new.numel()]))
    return Kept(lengths, flat, z[torch.repeat_interleave(lengths), flat], counts)
