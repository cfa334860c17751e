"""One choice of an answer in OpenAI's form as it grows: its text, its tokens, and what their rows say."""

from __future__ import annotations

import codecs
import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from logitscope.engines.base import Engine
from logitscope.errors import IncompleteError
from logitscope.logits import Logits
from logitscope.logits.collect import block_logits
from logitscope.rows import End, Ids, Request, RowBlock
from logitscope.server.text import TextSoFar
from logitscope.server.views import View


@dataclasses.dataclass(frozen=True)
class Score:
    """What the row that scores a token says of it; natural logarithms.

    Attributes:
        logprob: of the token; the same number stands in ``top``, when it is among the best.
        top: the best token ids and their log-probabilities, best first.
        entropy: of the row, in nats; NaN where it was not asked.
        margin: the largest logit minus the second; NaN where it was not asked.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]
    entropy: float
    margin: float


@dataclasses.dataclass
class Token:
    """A token of a choice.

    Attributes:
        token_id: of it.
        position: of the row that scores it; -1 for the first of the prompt, which none scores.
        start: characters of the choice's text before it.
        end: where its text ends; None until that is known.
        score: None until its row came.
    """

    token_id: int
    position: int
    start: int
    end: int | None = None
    score: Score | None = None

    def begins_within(self, length: int) -> bool:
        """Whether some of it, or all of nothing, lies within so many characters."""
        return self.start < length or (self.end is not None and self.end <= length)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one choice needs.

    Attributes:
        request: that the engine is asked.
        scored: rows that score tokens; None without log-probabilities.
        best: how many of the best tokens are named in each place.
        kept: rows that the client gets; None when it asked for none.
        prompt: text of the prompt, when the choice begins with it.
    """

    request: Request
    scored: Request | None
    best: int
    kept: Request | None
    prompt: str | None


class Choice:
    """Takes the items of one request; what is new of it is told once.

    Args:
        engine: whose items they are.
        plan: what is made of them.
        index: of the request in its call.

    Attributes:
        end: how it ended; None until then.
    """

    def __init__(self, engine: Engine, plan: Plan, index: int) -> None:
        self.engine, self.plan, self.index = engine, plan, index
        self.end: End | None = None
        self._ids: list[int] = []
        self._read = 0
        assert engine.tokenizer is not None
        self._text = TextSoFar(engine.tokenizer, plan.request.sampling.stop)
        self._new_text = plan.prompt or ""
        self._base = len(self._new_text)
        self._scores: dict[int, Score] = {}
        self._tokens: collections.deque[Token] = collections.deque()
        self._half: list[Token] = []
        views = [
            None if one is None else View(one, plan.request, index, engine.identity)
            for one in (plan.scored, plan.kept)
        ]
        self._scored, self._kept = views
        if plan.prompt is not None and plan.scored is not None:
            self._tokens.extend(self._prompt_tokens(plan.prompt))

    @property
    def token_ids(self) -> Ids:
        """Prompt and generated ids so far, int32."""
        return np.concatenate([self.plan.request.token_ids, np.asarray(self._ids, np.int32)])

    def take(self, item: RowBlock | End) -> list[RowBlock | End]:
        """Take the next block or the end; returns what it brings of the rows that are kept."""
        if isinstance(item, End):
            return self._ended(item)
        self._ids += item.token_ids.tolist()
        if self._scored is not None and len(item):
            for block in self._scored.blocks(item, self.token_ids):
                self._score(block)
        if self._kept is None:
            return []
        return list(self._kept.blocks(item, self.token_ids)) if len(item) else []

    def new(self) -> tuple[str, list[Token]]:
        """Text that may be shown and was not before, and tokens whose text has been shown by now.

        Raises:
            IncompleteError: it ended before the rows of all its tokens came.
        """
        if self.end is None or self._scored is not None:  # else only the whole text is wanted
            for place in range(self._read, len(self._ids)):
                self._add(place)
            self._read = len(self._ids)
        if self.end is not None:
            text = self.end.text or ""
            self._new_text += self._text.finish(text)
            if isinstance(self.end.stop, str):
                length = self._base + len(text)
                self._tokens = collections.deque(t for t in self._tokens if t.begins_within(length))
        new, self._new_text = self._new_text, ""
        return new, list(self._ready())

    def rows(self, block: RowBlock) -> Logits:
        """A block of the kept rows as a result of its own."""
        assert self.plan.kept is not None
        return self._logits(block, self.plan.kept)

    def _logits(self, block: RowBlock, request: Request) -> Logits:
        engine = self.engine
        return block_logits(
            block, request, self.token_ids, identity=engine.identity, vocabulary=engine.tokenizer
        )

    def _add(self, place: int) -> None:
        """Read the text of a generated token."""
        self._new_text += self._text.add(self._ids[place : place + 1])
        if self._scored is None:
            return
        position = self.plan.request.prompt_length + place - 1
        self._half.append(Token(self._ids[place], position, self._base + self._text.begin))
        self._tokens.append(self._half[-1])
        if not self._text.half:
            for token in self._half:
                token.end = self._base + self._text.known
            self._half.clear()

    def _ended(self, end: End) -> list[RowBlock | End]:
        self.end, self._ids = end, end.generated_ids.tolist()
        if self._scored is not None:
            for item in self._scored.ended(end):
                if isinstance(item, RowBlock):
                    self._score(item)
        return [] if self._kept is None else list(self._kept.ended(end))

    def _ready(self) -> Iterator[Token]:
        shown = self._base + len(self._text.sent)
        while self._tokens:
            token = self._tokens[0]
            whole = self.end is not None or (token.end is not None and token.end <= shown)
            if not whole or (token.position >= 0 and token.position not in self._scores):
                break
            token.score = self._scores.pop(token.position, None)
            yield self._tokens.popleft()
        if self.end is not None and self._tokens:
            raise IncompleteError(
                "the rows of some tokens did not come",
                where=f"request {self.index}",
                expected=f"row {self._tokens[0].position}",
            )

    def _score(self, block: RowBlock) -> None:
        assert self.plan.scored is not None
        self._scores.update(scores(self._logits(block, self.plan.scored), self.plan.best))

    def _prompt_tokens(self, text: str) -> Iterator[Token]:
        ids = self.plan.request.token_ids
        assert self.engine.tokenizer is not None
        spans = prompt_spans(self.engine.tokenizer.token_bytes(ids), text)
        for i, (token_id, (start, end)) in enumerate(zip(ids.tolist(), spans, strict=True)):
            yield Token(token_id, i - 1, start, end)


def scores(rows: Logits, best: int) -> Iterator[tuple[int, Score]]:
    """What rows say of the tokens that they score, by position.

    Log-probabilities of the best tokens are that of the scored one and the difference of their logits, so
    that it is one and the same number where the scored token is among them, and others differ from it
    whenever their logits do.

    Args:
        rows: with ``target_logprob``; and with their ``best`` entries and ``target_logit``, when any.
        best: entries of a row.
    """
    found = {name: array.astype(np.float64) for name, array in rows.summary.items()}
    nothing = np.full(len(rows), np.nan)
    logprobs, ids = found["target_logprob"], np.empty((len(rows), 0), np.int64)
    others = np.empty((len(rows), 0))
    if best:
        entries = rows.values.entries()
        ids = entries.ids.reshape(-1, best)
        logits, own = entries.values.astype(np.float64).reshape(-1, best), found["target_logit"][:, None]
        with np.errstate(invalid="ignore"):
            others = np.where(
                np.isfinite(own), logits - own + logprobs[:, None], logits - found["logsumexp"][:, None]
            )
    columns: Any = zip(
        rows.positions.tolist(),
        logprobs.tolist(),
        ids.tolist(),
        others.tolist(),
        found.get("entropy", nothing).tolist(),
        found.get("top1_margin", nothing).tolist(),
        strict=True,
    )
    for position, logprob, row_ids, row_logprobs, entropy, margin in columns:
        top = tuple(zip(row_ids, row_logprobs, strict=True))
        yield position, Score(logprob, top, entropy, margin)


def prompt_spans(pieces: Sequence[bytes | None], text: str) -> list[tuple[int, int]]:
    """First character and end of each token in the text that they came from.

    What the tokenizer put in front by itself (a beginning-of-sequence token, a space) has no place in it. A
    token that begins within a character begins where the character does.

    Args:
        pieces: bytes of the tokens.
        text: of the prompt.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    ends = np.cumsum([len(decoder.decode(piece or b"")) for piece in pieces])
    total = int(ends[-1]) + len(decoder.decode(b"", final=True))
    ends = np.clip(ends - (total - len(text)), 0, len(text)).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))
