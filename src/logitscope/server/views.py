"""Two selections of the rows of one sequence: both are cut from whole rows, of which an engine gives one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from logitscope import tensors
from logitscope.rows import End, Identity, Ids, Request, RowBlock, Select, targets


def covering(views: Sequence[Request]) -> Request:
    """What an engine is asked, so that each of the views can be taken of its rows: with `View`.

    Args:
        views: of one sequence; they differ in selection, encoding and summaries.
    """
    if len(views) == 1:
        return views[0]
    rows: list[int] = []
    for view in views:
        assert view.select is not None
        if view.select.from_the_end:
            return _whole(view, "all")
        found = view.select.rows(prompt_length=view.prompt_length, new_tokens=view.max_new_tokens)
        rows = np.union1d(rows, found).astype(int).tolist()
    return _whole(views[0], rows or slice(0))


def _whole(view: Request, positions: Any) -> Request:
    return dataclasses.replace(view, select=Select(positions), encode=None, summary=())


class View:
    """The rows of one selection, as an engine would have given them.

    Args:
        wanted: what is to come of it.
        asked: what the engine was asked: the same, or `covering` it.
        index: of the request in its call.
        identity: of the engine.
    """

    def __init__(self, wanted: Request, asked: Request, index: int, identity: Identity) -> None:
        self.wanted, self._index = wanted, index
        self._held: list[RowBlock] = []
        self._extractor: Any = None
        if wanted is not asked:
            from logitscope.extract import Extractor

            self._extractor = Extractor(wanted, index, identity=identity)

    def blocks(self, block: RowBlock, token_ids: Ids) -> Iterator[RowBlock]:
        """What is wanted of a block of the engine; ``token_ids`` are prompt and generated ids so far."""
        if self._extractor is None:
            yield block
        elif self._select.from_the_end:
            self._held.append(block)
        else:
            most = self.wanted.max_new_tokens
            rows = self._select.rows(prompt_length=self.wanted.prompt_length, new_tokens=most)
            yield from self._cut(block, rows, token_ids)

    def ended(self, end: End) -> Iterator[RowBlock | End]:
        """What was wanted of the last rows, and the end as it is for these rows."""
        if self._extractor is not None:
            length = self.wanted.prompt_length
            rows = self._select.rows(
                prompt_length=length,
                new_tokens=len(end.generated_ids),
                ended_early=self.wanted.max_new_tokens > 0,
            )
            token_ids = np.concatenate([self.wanted.token_ids, end.generated_ids])
            for block in self._held:
                yield from self._cut(block, rows, token_ids)
            end = dataclasses.replace(end, rows=self._extractor.rows)
        yield end

    @property
    def _select(self) -> Select:
        assert self.wanted.select is not None
        return self.wanted.select

    def _cut(self, block: RowBlock, rows: NDArray[np.int64], token_ids: Ids) -> Iterator[RowBlock]:
        from logitscope.extract import LogitsChunk

        chosen = np.flatnonzero(np.isin(block.positions, rows))
        if len(chosen):
            positions = block.positions[chosen]
            values = tensors.to_torch(np.ascontiguousarray(block.values[chosen]))
            chunk = LogitsChunk(values, positions, targets(token_ids, positions))
            yield self._extractor.extract(chunk).wait()
