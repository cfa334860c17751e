"""Scoring: every row of given tokens. The base model runs once; the head is applied in row blocks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from logitscope.engines.transformers.model import Output, RowChunk, pad
from logitscope.engines.transformers.prefix import SHORTEST, common
from logitscope.engines.transformers.work import Item, Settings, Work
from logitscope.extract import Extractor, PendingBlock, to_host
from logitscope.rows import NO_IDS, End, Request, targets


@dataclasses.dataclass
class Job:
    """One request on its way: its place, its extractor, its rows."""

    index: int
    request: Request
    extractor: Extractor
    positions: NDArray[np.int64]


def score(work: Work, requests: Sequence[tuple[int, Request]]) -> Iterator[Item]:
    """Blocks and ends of scoring requests; short prompts of near lengths share a forward."""
    jobs = [
        Job(i, r, work.extractor(r, i), _positions(r))
        for i, r in sorted(requests, key=lambda item: item[1].prompt_length)
    ]
    shared = _beginning_the_same(work, jobs)
    alone = [
        j
        for j in jobs
        if j.request.extras or work.chunk_size(j.request.prompt_length) < j.request.prompt_length
    ]
    together = [j for j in jobs if j not in alone and j not in shared]
    for group in plan([j.request.prompt_length for j in together], work.settings):
        if len(group) == 1:
            yield from _score_one(work, together[group[0]])
        else:
            yield from _score_group(work, [together[i] for i in group])
    for job in shared + [j for j in alone if j not in shared]:
        yield from _score_one(work, job)


def _beginning_the_same(work: Work, jobs: Sequence[Job]) -> list[Job]:
    """Jobs whose prompts begin as others do, or as one that was read before; each after its beginning."""
    able = [job for job in jobs if work.keeps(job.request)]
    able.sort(key=lambda job: job.request.token_ids.tolist())
    found = []
    for i, job in enumerate(able):
        assert work.prefixes is not None
        ids = job.request.token_ids
        near = [other.request.token_ids for other in (*able[max(i - 1, 0) : i], *able[i + 1 : i + 2])]
        shared = max([work.prefixes.common(ids), *(common(ids, other) for other in near)])
        if shared >= SHORTEST and shared >= len(ids) // 2:
            found.append(job)
    return found


def plan(lengths: Sequence[int], settings: Settings) -> list[list[int]]:
    """Group ascending lengths into forwards: a prompt joins where padding costs less than an own forward.

    Example:
        >>> plan([8, 8, 9, 100], Settings(block_rows=8))
        [[0, 1, 2], [3]]
    """
    groups: list[list[int]] = []
    for i, length in enumerate(lengths):
        group = groups[-1] if groups else []
        padding = len(group) * (length - lengths[i - 1])
        fits = (len(group) + 1) * length <= settings.forward_tokens
        if group and fits and padding <= settings.forward_cost:
            group.append(i)
        else:
            groups.append([i])
    return groups


def _positions(request: Request) -> NDArray[np.int64]:
    if request.select is None:
        return np.empty(0, np.int64)
    return request.select.rows(prompt_length=request.prompt_length, new_tokens=0)


def _score_group(work: Work, jobs: Sequence[Job]) -> Iterator[Item]:
    out = work.model.run(pad([j.request.token_ids for j in jobs]))
    small: list[tuple[Job, torch.Tensor]] = []
    for row, job in enumerate(jobs):
        rows = select_rows(out.rows[row], job.positions)
        if len(jobs) > 1 and len(rows) < work.few_rows:
            small.append((job, rows))
        else:
            yield from emit(work, job, rows, job.positions)
    yield from _emit_together(work, small)
    for job in jobs:
        yield End(job.index, NO_IDS, rows=len(job.positions))


def _score_one(work: Work, job: Job) -> Iterator[Item]:
    request, length = job.request, job.request.prompt_length
    size, keeps = work.chunk_size(length), work.keeps(request)
    ids = pad([request.token_ids])
    prefix = work.prefix(request)
    start, hidden = 0, []
    cache = work.model.new_cache(length) if size < length or keeps else None
    if prefix is not None:
        start = prefix.tokens
        hidden.append(prefix.hidden)
        if start < length:
            prefix.fill(cache)
        positions = job.positions[job.positions < start]
        yield from emit(work, job, select_rows(prefix.hidden, positions), positions)
    with work.model.eager_attention() if request.attentions else contextlib.nullcontext():
        for first in range(start, length, size):
            out = work.model.run(
                ids[:, first : first + size],
                cache=cache,
                hidden_states=bool(request.hidden_states),
                attentions=bool(request.attentions),
            )
            positions = job.positions[(job.positions >= first) & (job.positions < first + size)]
            rows = select_rows(out.rows[0], positions - first)
            if keeps:
                hidden.append(out.rows[0])
            yield from emit(work, job, rows, positions, out=out, first=first)
    if keeps and start < length:
        assert work.prefixes is not None
        work.prefixes.keep(request.token_ids, cache, torch.cat(hidden))
    yield End(job.index, NO_IDS, rows=len(job.positions))


def emit(
    work: Work,
    job: Job,
    rows: torch.Tensor,
    positions: NDArray[np.int64],
    *,
    out: Output | None = None,
    first: int = 0,
) -> Iterator[PendingBlock]:
    """Row blocks of rows that a forward gave: ``rows[i]`` belongs to ``positions[i]``.

    With ``out``, its hidden states and attention weights ride along; ``first`` is the position of its
    first token.
    """
    scored = targets(job.request.token_ids, positions)
    size = work.block_rows(job.extractor)
    for a in range(0, len(positions), size):
        b = a + size
        chunk = RowChunk(work.product(rows[a:b]), 0, positions[a:b], scored[a:b])
        pending = job.extractor.extract(chunk)
        if out is not None:
            attach(pending, job.request, out, 0, positions[a:b] - first)
        yield pending


def _emit_together(work: Work, small: Sequence[tuple[Job, torch.Tensor]]) -> Iterator[PendingBlock]:
    """One head product for the rows of several short prompts."""
    waiting = list(small)
    while waiting:
        taken: list[tuple[Job, torch.Tensor]] = []
        rows = 0
        while waiting and (not taken or rows + len(waiting[0][1]) <= work.shared_rows):
            taken.append(waiting.pop(0))
            rows += len(taken[-1][1])
        product = work.product(torch.cat([rows for _, rows in taken]), shared=len(taken) > 1)
        first = 0
        for job, own in taken:
            scored = targets(job.request.token_ids, job.positions)
            yield job.extractor.extract(RowChunk(product, first, job.positions, scored))
            first += len(own)


def select_rows(rows: torch.Tensor, places: NDArray[np.int64]) -> torch.Tensor:
    """Rows at ascending places, without a copy when they are consecutive."""
    if not len(places):
        return rows[:0]
    if places[-1] - places[0] + 1 == len(places):
        return rows[places[0] : places[-1] + 1]
    return rows[torch.from_numpy(places).to(rows.device)]


def attach(pending: PendingBlock, request: Request, out: Output, row: int, places: NDArray[np.int64]) -> None:
    """Hidden states and attention weights of these tokens of a forward's sequence ``row`` ride along."""
    for layer in request.hidden_states:
        pending.block.hidden_states[layer] = to_host(
            select_rows(out.hidden_states[layer][row], places), pending
        )
    for layer in request.attentions:
        weights = out.attentions[layer][row].transpose(0, 1)
        pending.block.attentions[layer] = to_host(select_rows(weights, places).contiguous(), pending)
