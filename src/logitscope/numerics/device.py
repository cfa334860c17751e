"""Numerics of PyTorch tensors on their own device, never waiting for it.

Logits are float32, float16 or bfloat16; the work is done in float32. On a CPU it goes by tiles of rows that
stay in the cache, elsewhere by whole blocks. How far results may lie from the float64 reference, for up to
200,000 tokens: ``max``, ``target_logit``, ids and ranks not at all; ``top1_margin`` 1e-7 relative;
``logsumexp`` 1e-6 relative, and absolute below 1; ``target_logprob`` and log-probabilities 1e-6 + 2e-7 of
their size; ``entropy`` 1e-6 · log(vocab) nats; ``varentropy`` 1e-6 · log²(vocab) nats².
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from logitscope.numerics import check_k, check_rows, check_targets, checked_names, compiled

TILE_VALUES = 200_000
"""Values of a CPU tile: with its work arrays, 800 kB each, it stays in the cache."""

_BLOCK_COLUMNS, _FEW_BLOCKS = 64, 4
_WIDENED_ROWS = 64
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_NO_WEIGHT = -128.0  # its exp is 0 in float32; -inf itself would make 0 * -inf

_FORMULAS: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
    "logsumexp": lambda m: m["max"] + m["total"].log(),
    "max": lambda m: m["max"],
    "argmax": lambda m: m["argmax"],
    "entropy": lambda m: m["total"].log() - m["mean"],
    "varentropy": lambda m: m["variance"],
    "target_logit": lambda m: m["target"],
    "target_logprob": lambda m: (m["target"] - m["max"]) - m["total"].log(),  # max + log would lose digits
    "target_rank": lambda m: m["ahead"] + 1,
    "top1_margin": lambda m: m["margin"],
}


def summaries(z: Tensor, targets: Tensor | None, names: Iterable[str]) -> dict[str, Tensor]:
    """Summaries of logits ``[rows, vocab]``, each ``[rows]`` of ``rows.SUMMARY_DTYPES`` on the same device.

    Args:
        z: the logits; not changed.
        targets: ids that the rows score, int ``[rows]`` on the same device. Ids outside the vocabulary are
            no target: to refuse them would be to wait for the device. None: no row has a target.
        names: of ``rows.SUMMARIES``.

    Raises:
        InputError: a shape or dtype is wrong.
        OptionError: an unknown name.
    """
    z, wanted = _checked(z), checked_names(names)
    measured, has_target = _measures(z, targets, frozenset(wanted))
    valid = measured["max"].isfinite()
    results: dict[str, Tensor] = {}
    for name in wanted:
        values = _FORMULAS[name](measured)
        known = valid & has_target if name.startswith("target_") else valid
        if name in ("argmax", "target_rank"):
            results[name] = torch.where(known, values, -1.0).to(torch.int32)
        else:
            results[name] = torch.where(known, values, math.nan)
    return results


def argmax(z: Tensor) -> Tensor:
    """Id of the highest logit, the lowest one among equals; int32 ``[rows]``.

    Raises:
        InputError: a shape or dtype is wrong.
    """
    return summaries(z, None, ("argmax",))["argmax"]


def log_softmax(z: Tensor) -> Tensor:
    """Log-probabilities in nats, float32 ``[rows, vocab]``.

    Raises:
        InputError: a shape or dtype is wrong.
    """
    z = _checked(z)
    out = torch.empty(z.shape, dtype=torch.float32, device=z.device)
    work = torch.empty((_tile_rows(z), z.shape[1]), dtype=torch.float32, device=z.device)
    for tile in tiles(z):
        # Not torch.log_softmax: on a CPU its sum is ten times less accurate.
        x = z[tile].float()
        gaps = torch.sub(x, x.amax(1, keepdim=True), out=out[tile])
        gaps -= _row_sums(torch.exp(gaps, out=work[: len(x)])).log()[:, None]
    return out


def top_k(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Ids (int32) and logits (dtype of ``z``) of the k highest, ``[rows, k]``, by logit, then by id.

    Raises:
        InputError: a shape or dtype is wrong.
        OptionError: ``k`` is outside ``1 … vocab``.
    """
    z = _checked(z)
    check_k(k, z.shape[1])
    ids = best_ids(z.float(), k)
    valid = z.amax(1, keepdim=True).isfinite()
    values = z.gather(1, ids).masked_fill(~valid, math.nan)
    return torch.where(valid, ids, -1).to(torch.int32), values


def best_ids(x: Tensor, k: int) -> Tensor:
    """Ids int64 ``[rows, k]`` of the highest values, best first, equals by id; ``x`` is float32.

    ``torch.topk`` leaves the order of equals open, and of more equals than it gives it takes any.
    """
    if x.device.type != "cpu":
        return _keyed_ids(x, k)
    values, ids = best_values(x, min(k + 1, x.shape[1]))
    ids, order = ids.sort(1)
    values = values.gather(1, order)
    values, order = values.sort(dim=1, descending=True, stable=True)
    ids = ids.gather(1, order)
    if k < x.shape[1]:
        for row in (values[:, k - 1] == values[:, k]).nonzero()[:, 0].tolist():
            last = values[row, k - 1]
            above = int((values[row, :k] > last).sum())
            ids[row, above:k] = (x[row] == last).nonzero()[: k - above, 0]
    return ids[:, :k]


def best_values(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` highest values of each row, best first, and their ids ``[rows, k]``; of equals, any.

    They lie in the ``k`` blocks of columns with the highest maxima, so that few values are sorted.
    """
    vocab = x.shape[1]
    blocks = vocab // _BLOCK_COLUMNS
    if k * _FEW_BLOCKS > blocks:
        best: tuple[Tensor, Tensor] = x.topk(k, dim=1)
        return best
    even = x[:, : blocks * _BLOCK_COLUMNS].unflatten(1, (blocks, _BLOCK_COLUMNS))  # type: ignore[no-untyped-call]
    chosen = even.amax(2).topk(k, dim=1, sorted=False).indices
    some = even.gather(1, chosen[:, :, None].expand(-1, -1, _BLOCK_COLUMNS)).flatten(1)
    last = blocks * _BLOCK_COLUMNS
    values, places = torch.cat([some, x[:, last:]], 1).topk(k, dim=1)
    block, column = places // _BLOCK_COLUMNS, places % _BLOCK_COLUMNS
    inside = chosen.gather(1, block.clamp(max=k - 1)) * _BLOCK_COLUMNS + column
    return values, torch.where(block < k, inside, places + (last - k * _BLOCK_COLUMNS))


def _keyed_ids(x: Tensor, k: int) -> Tensor:
    """The same without waiting for the device: the id joins the key."""
    bits = (x + 0.0).view(torch.int32).long()  # + 0.0 turns -0.0 into 0.0
    ascending = bits ^ ((bits >> 63) & 0x7FFFFFFF)  # orders as the floats do
    last = x.shape[1] - 1
    keys = ascending * (1 << 32) + torch.arange(last, -1, -1, device=x.device)
    return last - (keys.topk(k, dim=1).values & 0xFFFFFFFF)


def _checked(z: Tensor) -> Tensor:
    check_rows(tuple(z.shape), dtype=z.dtype, accepted=z.dtype in _DTYPES)
    return z.detach()


def tiles(z: Tensor) -> Iterator[slice]:
    """Row slices that cover ``z``; one empty slice when it has no rows."""
    rows = _tile_rows(z)
    for first in range(0, max(len(z), 1), rows):
        yield slice(first, first + rows)


def _tile_rows(z: Tensor) -> int:
    rows = len(z) if z.device.type != "cpu" else min(len(z), TILE_VALUES // z.shape[1])
    return max(rows, 1)


def _measures(z: Tensor, targets: Tensor | None, wanted: frozenset[str]) -> tuple[dict[str, Tensor], Tensor]:
    """What the formulas need, float32 ``[rows]`` each, and which rows have a target.

    ``max`` and ``argmax`` are of the logits; ``margin`` leads from the second-best; ``total`` is the sum of
    the weights ``exp(z - max)``; ``mean`` and ``variance`` are those of ``z - max`` under the distribution;
    ``target`` is the target's logit and ``ahead`` the number of tokens before it.
    """
    rows, vocab = z.shape
    if targets is None:
        targets = torch.full((rows,), -1, device=z.device)
    check_targets(tuple(targets.shape), rows)
    has_target = (targets >= 0) & (targets < vocab)
    targets = targets.long().clamp(0, vocab - 1)[:, None]
    target_logits = z.gather(1, targets).float()
    if z.device.type == "cpu" and compiled.available():
        measured = _compiled_measures(z, targets[:, 0])
        return measured | {"target": target_logits[:, 0]}, has_target
    ids = torch.arange(vocab, dtype=torch.float32, device=z.device)
    # The tiles share their work arrays: fresh memory for each would cost more than the arithmetic.
    work = torch.empty((3, _tile_rows(z), vocab), dtype=torch.float32, device=z.device)
    parts = [
        _measure_tile(z[tile].float(), targets[tile], target_logits[tile], ids, work, wanted)
        for tile in tiles(z)
    ]
    measured = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return measured | {"target": target_logits[:, 0]}, has_target


def _compiled_measures(z: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """All that the formulas need, in one pass; rows of another dtype are widened some at a time."""
    step = max(len(z), 1) if z.dtype == torch.float32 else _WIDENED_ROWS
    parts = []
    for first in range(0, max(len(z), 1), step):
        rows = z[first : first + step].float().contiguous()
        found = compiled.measures(
            rows.numpy(), targets[first : first + step].numpy(), torch.get_num_threads()
        )
        parts.append({name: torch.from_numpy(array) for name, array in found.items()})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _measure_tile(
    x: Tensor, targets: Tensor, target_logits: Tensor, ids: Tensor, work: Tensor, wanted: frozenset[str]
) -> dict[str, Tensor]:
    a, b, c = work[:, : len(x)].unbind()
    best = x.amax(1, keepdim=True)
    found = {"max": best[:, 0]}
    if "target_rank" in wanted:
        # Comparisons into float32 give 0.0 and 1.0, which sum several times faster than booleans.
        higher, equal = torch.gt(x, target_logits, out=a), torch.eq(x, target_logits, out=b)
        before = torch.lt(ids, targets.float(), out=c)
        found["ahead"] = _row_sums(higher.addcmul_(equal, before))
    if wanted <= {"max", "target_logit", "target_rank"}:
        return found
    gaps = torch.sub(x, best, out=a)
    if wanted & {"argmax", "top1_margin"}:
        found |= _leaders(gaps, ids, b, with_margin="top1_margin" in wanted)
    if wanted & {"logsumexp", "target_logprob", "entropy", "varentropy"}:
        found |= _moments(gaps, b, c, order=2 if "varentropy" in wanted else int("entropy" in wanted))
    return found


def _leaders(gaps: Tensor, ids: Tensor, free: Tensor, *, with_margin: bool) -> dict[str, Tensor]:
    """The best id, which is the lowest with gap 0, and its margin."""
    vocab = gaps.shape[1]
    is_best = torch.eq(gaps, 0.0, out=free)
    first = vocab - is_best.mul_(vocab - ids).amax(1, keepdim=True)  # torch.argmax takes five times as long
    if not with_margin:
        return {"argmax": first[:, 0]}
    at = first.clamp(max=vocab - 1).long()  # a row with NaN has no gap 0
    margin = gaps.scatter_(1, at, -math.inf).amax(1).abs()
    gaps.scatter_(1, at, 0.0)
    return {"argmax": first[:, 0], "margin": margin}


def _moments(gaps: Tensor, free: Tensor, free2: Tensor, *, order: int) -> dict[str, Tensor]:
    """Sum of the weights, and mean and variance of the gaps up to ``order``; ``gaps`` are used up."""
    weights = torch.exp(gaps.clamp_(min=_NO_WEIGHT), out=free)
    total = _row_sums(weights)
    found = {"total": total}
    if order >= 1:
        found["mean"] = mean = _row_sums(torch.mul(weights, gaps, out=free2)) / total
    if order >= 2:
        gaps.sub_(mean[:, None])
        found["variance"] = _row_sums(weights.mul_(gaps).mul_(gaps)) / total
    return found


def _row_sums(x: Tensor) -> Tensor:
    """Sums ``[rows]``. On a CPU a row's bits depend neither on the other rows nor on the threads."""
    # PyTorch splits the sum of a single row over the threads, and only that.
    return x.sum(1) if len(x) != 1 else x.expand(2, -1).sum(1)[:1]
