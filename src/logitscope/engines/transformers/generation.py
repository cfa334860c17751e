"""Generation: the loop that needs every row. Prompts of all lengths decode together."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from logitscope import sampling
from logitscope.engines.results import generated_text
from logitscope.engines.transformers.cache import join
from logitscope.engines.transformers.model import Output, Product, RowChunk, fingerprint, pad
from logitscope.engines.transformers.scoring import attach, plan, select_rows
from logitscope.engines.transformers.work import Item, Work
from logitscope.errors import OptionError
from logitscope.extract import PendingBlock, non_finite
from logitscope.rows import End, FinishReason, Ids, Request, targets

_SPARE_STOP_TOKENS = 4


@dataclasses.dataclass
class _Part:
    """Rows of one forward, kept until their sequence is complete."""

    rows: torch.Tensor
    positions: NDArray[np.int64]
    out: Output
    out_row: int
    first: int


class _Live:
    """One sequence while it is generated: its tokens, its draws, and where its rows go."""

    def __init__(self, work: Work, request: Request, index: int) -> None:
        self.request, self.index, self.length = request, index, request.prompt_length
        self.history = torch.empty(self.length + request.max_new_tokens, dtype=torch.long)
        self.history[: self.length] = torch.from_numpy(request.token_ids.astype(np.int64))
        self.new = 0
        self.seed = None if request.sampling.greedy else request.sampling.seed
        if not request.sampling.greedy and self.seed is None:
            self.seed = secrets.randbits(63)
        self.uniforms = sampling.uniform_stream(self.seed or 0, request.sample_index)
        self.raw = work.extractor(request, index)
        self.processed = work.extractor(request, index, "processed")
        self.deferred = request.select is not None and request.select.from_the_end
        self.parts: list[_Part] = []
        self.wanted = np.zeros(self.length + request.max_new_tokens, dtype=bool)
        if request.select is not None and not self.deferred:
            self.wanted[request.select.rows(prompt_length=self.length, new_tokens=request.max_new_tokens)] = (
                True
            )

    @property
    def tokens(self) -> int:
        """Of the prompt and generated so far."""
        return self.length + self.new

    @property
    def seen(self) -> torch.Tensor:
        """Prompt and generated ids so far, int64."""
        return self.history[: self.tokens]

    @property
    def token_ids(self) -> Ids:
        """Prompt and generated ids so far."""
        return self.seen.numpy().astype(np.int32)

    @property
    def generated(self) -> Ids:
        """Generated ids so far."""
        return self.token_ids[self.length :]

    def append(self, token_id: int) -> None:
        """The next token was chosen."""
        self.history[self.length + self.new] = token_id
        self.new += 1

    def chunk(self, product: Product, first: int, positions: NDArray[np.int64]) -> RowChunk:
        """Rows of a product as a chunk of this sequence."""
        return RowChunk(product, first, positions, targets(self.token_ids, positions))


def generate(work: Work, requests: Sequence[tuple[int, Request]]) -> Iterator[Item]:
    """Blocks and ends of generating requests; sequences of near prompt lengths decode together."""
    lives = [_Live(work, r, i) for i, r in sorted(requests, key=lambda item: item[1].prompt_length)]
    # Attention weights are aligned with positions, and joining shifts them; so such a sequence runs alone.
    together = [s for s in lives if work.model.can_join and not s.request.attentions]
    size = work.settings.sequences
    groups = [together[a : a + size] for a in range(0, len(together), size)]
    for group in groups + [[s] for s in lives if s not in together]:
        yield from _Batch(work, group).run()


class _Batch:
    """Sequences that decode together, one token a step."""

    def __init__(self, work: Work, lives: Sequence[_Live]) -> None:
        self.work, self.model, self.live = work, work.model, list(lives)
        self.hidden_states = any(s.request.hidden_states for s in lives)
        self.attentions = any(s.request.attentions for s in lives)

    def run(self) -> Iterator[Item]:
        """Prefill, then decode until every sequence ended."""
        with self.model.eager_attention() if self.attentions else contextlib.nullcontext():
            cache, rows, places = yield from self._prefill()
            yield from self._decode(cache, rows, places)

    # -- prompts ---------------------------------------------------------------------------------------

    def _prefill(self) -> Generator[Item, None, tuple[Any, torch.Tensor, list[tuple[Output, int, int]]]]:
        """Prompt rows; returns the joined cache, each sequence's last prompt row, and where it came from."""
        samples: dict[bytes, list[_Live]] = {}
        for s in self.live:
            samples.setdefault(fingerprint(s.request.token_ids), []).append(s)
        prompts = list(samples.values())
        found: dict[int, tuple[Any, int, torch.Tensor, Output, int]] = {}
        for group in plan([same[0].length for same in prompts], self.work.settings):
            chosen = [prompts[i] for i in group]
            longest = chosen[-1][0].length
            # A lone sequence keeps this cache for its decoding.
            room = longest + self.live[0].request.max_new_tokens if len(self.live) == 1 else longest
            cache = self.model.new_cache(room)
            size = self.work.chunk_size(longest)
            ids = pad([same[0].request.token_ids for same in chosen])
            request = chosen[0][0].request
            keeps = len(chosen) == 1 and not (self.hidden_states or self.attentions)
            keeps = keeps and self.work.keeps(request)
            prefix = self.work.prefix(request) if keeps else None
            start, hidden = 0, []
            if prefix is not None:
                # The last token is read again: its row is where the decoding begins.
                start = min(prefix.tokens, longest - 1)
                prefix = prefix.first(start)
                prefix.fill(cache)
                hidden.append(prefix.hidden)
                yield from self._prompt_rows(chosen[0], Output(prefix.hidden[None]), 0, 0)
            for first in range(start, longest, size):
                out = self.model.run(
                    ids[:, first : first + size],
                    cache=cache,
                    hidden_states=self.hidden_states,
                    attentions=self.attentions,
                )
                hidden += [out.rows[0]] if keeps else []
                for row, same in enumerate(chosen):
                    yield from self._prompt_rows(same, out, row, first)
                    last = same[0].length - 1 - first
                    if 0 <= last < out.rows.shape[1]:
                        for s in same:
                            found[s.index] = (cache, row, out.rows[row, last].clone(), out, first)
            if keeps:
                assert self.work.prefixes is not None
                self.work.prefixes.keep(request.token_ids, cache, torch.cat(hidden))
        return self._joined([found[s.index] for s in self.live])

    def _joined(
        self, found: Sequence[tuple[Any, int, torch.Tensor, Output, int]]
    ) -> tuple[Any, torch.Tensor, list[tuple[Output, int, int]]]:
        rows = torch.stack([last for _, _, last, _, _ in found])
        extras = self.hidden_states or self.attentions
        places = [(out if extras else Output(rows), row, first) for _, row, _, out, first in found]
        if len(found) == 1:
            return found[0][0], rows, places
        width = max(s.length for s in self.live)
        room = width + max(s.request.max_new_tokens for s in self.live)
        sources = [
            (cache, row, 0, s.length) for (cache, row, _, _, _), s in zip(found, self.live, strict=True)
        ]
        return join(sources, width, room, self.model.config), rows, places

    def _prompt_rows(
        self, same: Sequence[_Live], out: Output, row: int, first: int
    ) -> Iterator[PendingBlock]:
        """Rows before ``L - 1`` of a prompt, for each of its samples; the head is applied once."""
        last = min(same[0].length - 1, first + out.rows.shape[1])
        every = np.arange(first, last, dtype=np.int64)
        for s in same:
            if s.deferred:
                s.parts.append(_Part(out.rows[row, : last - first].clone(), every, out, row, first))
        now = [s for s in same if not s.deferred and s.wanted[first:last].any()]
        if not now:
            return
        positions = every[now[0].wanted[first:last]]
        rows = select_rows(out.rows[row], positions - first)
        size = self.work.block_rows(now[0].raw)
        for a in range(0, len(positions), size):
            b = a + size
            product = self.work.product(rows[a:b], shared=len(now) > 1)
            for s in now:
                pending = s.raw.extract(s.chunk(product, 0, positions[a:b]))
                attach(pending, s.request, out, row, positions[a:b] - first)
                yield pending

    # -- decoding --------------------------------------------------------------------------------------

    def _decode(
        self, cache: Any, rows: torch.Tensor, places: list[tuple[Output, int, int]]
    ) -> Iterator[Item]:
        width = max(s.length for s in self.live)
        mask = self._mask(width)
        while True:
            guests = self._guests()
            if guests is not None:
                cache, guests_rows, guests_places, width = yield from self._with(guests, cache, width)
                rows, places = torch.cat([rows, guests_rows]), places + guests_places
                mask = self._mask(width)
            product = self.work.product(rows, shared=True)
            chosen, processed = self._choose(product)
            for s, token_id in zip(self.live, chosen, strict=True):
                s.append(token_id)
            for i, s in enumerate(self.live):
                yield from self._step_rows(s, product, i, processed, places[i])
            going = []
            for i, s in enumerate(self.live):
                end = self._ending(s)
                if end is not None:
                    yield from self._finish(s, *end)
                elif self.work.joining is None or self.work.joining.wanted(s.index):
                    going.append(i)
            if not going:
                return
            if len(going) < len(self.live):
                self.live = [self.live[i] for i in going]
                for layer in cache.layers:
                    layer.keep(going)
                mask = None if mask is None else mask[going]
            width += 1
            out = self._forward(cache, mask, width)
            rows, places = out.rows[:, -1], [(out, i, s.length + s.new - 1) for i, s in enumerate(self.live)]

    def _guests(self) -> _Batch | None:
        """Sequences that have arrived meanwhile and can join; None when there are none."""
        room = self.work.settings.sequences - len(self.live)
        if self.work.joining is None or room < 1 or self.attentions or not self.model.can_join:
            return None
        arrived = sorted(self.work.joining.arrivals(room), key=lambda item: item[1].prompt_length)
        return _Batch(self.work, [_Live(self.work, r, i) for i, r in arrived]) if arrived else None

    def _with(
        self, guests: _Batch, cache: Any, width: int
    ) -> Generator[Item, None, tuple[Any, torch.Tensor, list[tuple[Output, int, int]], int]]:
        """Read the guests' prompts and take them in: one cache of all, their rows, the new width."""
        own, theirs = self.live, guests.live
        guests_cache, rows, places = yield from guests._prefill()
        sources = [(cache, i, width - s.tokens, s.tokens) for i, s in enumerate(own)]
        reach = max(s.length for s in theirs)
        sources += [(guests_cache, i, reach - s.length, s.length) for i, s in enumerate(theirs)]
        self.live = own + theirs
        self.hidden_states = self.hidden_states or guests.hidden_states
        width = max(s.tokens for s in self.live)
        return join(sources, width, width + self._most_left, self.model.config), rows, places, width

    @property
    def _most_left(self) -> int:
        """Tokens that a sequence may still come to."""
        return max(s.request.max_new_tokens - s.new for s in self.live)

    def _mask(self, width: int) -> torch.Tensor | None:
        """1 where a column of the joined cache holds a token, ``[sequences, columns]``; None if all do."""
        if all(s.tokens == width for s in self.live):
            return None
        mask = torch.ones(len(self.live), width + self._most_left, dtype=torch.long)
        for row, s in enumerate(self.live):
            mask[row, : width - s.tokens] = 0
        return mask.to(self.model.device)

    def _forward(self, cache: Any, mask: torch.Tensor | None, width: int) -> Output:
        last = torch.stack([s.history[s.length + s.new - 1] for s in self.live])
        positions = torch.tensor([s.length + s.new - 1 for s in self.live])
        return self.model.run(
            last[:, None],
            cache=cache,
            position_ids=None if mask is None else positions[:, None].to(self.model.device),
            attention_mask=None if mask is None else mask[:, :width],
            hidden_states=self.hidden_states,
            attentions=self.attentions,
        )

    def _choose(self, product: Product) -> tuple[list[int], dict[int, torch.Tensor]]:
        """The next id of each sequence, and its processed row where one was needed."""
        logits = product.logits(0, len(self.live))
        if bool(product.non_finite(0, len(self.live))):
            raise non_finite(f"generation, step {self.live[0].new}")
        chosen = [0] * len(self.live)
        processed: dict[int, torch.Tensor] = {}
        groups: dict[int, list[int]] = {}
        for i, s in enumerate(self.live):
            groups.setdefault(id(s.request.sampling), []).append(i)
        for members in groups.values():
            settings = self.live[members[0]].request.sampling
            rows = logits if len(members) == len(self.live) else logits[members]
            if not settings.plain or any(self.live[i].request.processed for i in members):
                history = [self.live[i].seen.to(logits.device) for i in members]
                rows = sampling.process(rows, settings, history)
                processed.update(zip(members, rows, strict=True))
            draws = None if settings.greedy else [next(self.live[i].uniforms) for i in members]
            uniforms = None if draws is None else torch.tensor(draws, dtype=torch.float64)
            for i, token_id in zip(members, sampling.choose(rows, settings, uniforms).tolist(), strict=True):
                chosen[i] = self._possible(self.live[i], token_id)
        return chosen, processed

    def _possible(self, s: _Live, token_id: int) -> int:
        if token_id >= 0:
            return token_id
        raise OptionError(
            "no token is left to choose",
            where=f"request {s.index}, step {s.new}",
            got="every logit is -inf after the processors",
            fix="Loosen logit_bias.",
        )

    def _step_rows(
        self,
        s: _Live,
        product: Product,
        row: int,
        processed: dict[int, torch.Tensor],
        place: tuple[Output, int, int],
    ) -> Iterator[PendingBlock]:
        """The row that scores the newest token, raw and processed; the token itself comes with it."""
        position = s.length + s.new - 2
        out, out_row, first = place
        positions = np.array([position], dtype=np.int64)
        if s.deferred:
            s.parts.append(_Part(product.source[row : row + 1].clone(), positions, out, out_row, first))
        if not s.wanted[position]:
            positions = positions[:0]
        pending = s.raw.extract(s.chunk(product, row, positions), token_ids=s.generated[-1:])
        if len(positions):
            attach(pending, s.request, out, out_row, positions - first)
        yield pending
        if s.request.processed and len(positions):
            own = self.work.ready(processed[row][None])
            yield s.processed.extract(s.chunk(own, 0, positions))

    # -- ends ------------------------------------------------------------------------------------------

    def _ending(self, s: _Live) -> tuple[FinishReason, str | int | None] | None:
        """Why a sequence ends now: the reason, and the stop string or id; None while it goes on."""
        settings, last = s.request.sampling, int(s.history[s.length + s.new - 1])
        if last in settings.stop_token_ids or (last in self.work.eos_ids and not settings.ignore_eos):
            return "stop", last
        stop = self._stop_string(s)
        if stop is not None:
            return "stop", stop
        return ("length", None) if s.new == s.request.max_new_tokens else None

    def _stop_string(self, s: _Live) -> str | None:
        """The stop string that the newest token completed, if it did; looks at the end of the text only."""
        if not s.request.sampling.stop or self.work.tokenizer is None:
            return None
        longest = max(len(stop.encode()) for stop in s.request.sampling.stop)
        places: list[tuple[int, str]] = []
        for special in (True, False):
            tail = self._tail(s, longest, special=special)
            places += [(tail.find(stop), stop) for stop in s.request.sampling.stop if stop in tail]
        return min(places)[1] if places else None

    def _tail(self, s: _Live, size: int, *, special: bool) -> str:
        """The end of the text, at least ``size`` characters of it where there are so many."""
        assert self.work.tokenizer is not None
        tokens = size + _SPARE_STOP_TOKENS  # most tokens bring a byte or more; those of no text are rare
        while True:
            tail = self.work.tokenizer.decode(s.generated[-tokens:], special=special)
            if len(tail) >= size + _SPARE_STOP_TOKENS or tokens >= s.new:
                return tail
            tokens *= 2

    def _finish(self, s: _Live, reason: FinishReason, stop: str | int | None) -> Iterator[Item]:
        yield from self._deferred_rows(s)
        yield End(
            s.index,
            s.generated,
            rows=s.raw.rows,
            processed_rows=s.processed.rows,
            finish_reason=reason,
            stop=stop,
            text=generated_text(self.work.tokenizer, s.generated, stop),
            seed=s.seed,
        )

    def _deferred_rows(self, s: _Live) -> Iterator[PendingBlock]:
        if not s.deferred:
            return
        assert s.request.select is not None
        wanted = s.request.select.rows(prompt_length=s.length, new_tokens=s.new, ended_early=True)
        size = self.work.block_rows(s.raw)
        for part in s.parts:
            keep = np.flatnonzero(np.isin(part.positions, wanted))
            for a in range(0, len(keep), size):
                places = keep[a : a + size]
                positions = part.positions[places]
                product = self.work.product(select_rows(part.rows, places))
                pending = s.raw.extract(s.chunk(product, 0, positions))
                attach(pending, s.request, part.out, part.out_row, positions - part.first)
                yield pending
        s.parts.clear()
