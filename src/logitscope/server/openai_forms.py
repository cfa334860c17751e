"""How choices are written in OpenAI's two forms; all numbers are finite: -9999.0 stands for ``-inf``."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from logitscope.server.choice import Score, Token

_INFINITE = 9999.0


class Form(abc.ABC):
    """One of the forms.

    Args:
        tokenizer: tells the texts and bytes of tokens.
    """

    prefix: str
    whole_name: str
    part_name: str

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @abc.abstractmethod
    def begin(self) -> list[dict[str, Any]]:
        """What comes before the first part of a stream."""

    @abc.abstractmethod
    def part(self, text: str, tokens: Sequence[Token], *, scored: bool) -> dict[str, Any]:
        """What is new in a stream."""

    @abc.abstractmethod
    def last(self) -> dict[str, Any]:
        """What comes with the reason of the end of a stream."""

    @abc.abstractmethod
    def whole(self, text: str, tokens: Sequence[Token], *, scored: bool) -> dict[str, Any]:
        """A choice that does not come as a stream."""


class CompletionForm(Form):
    """Of ``/v1/completions``."""

    prefix, whole_name, part_name = "cmpl-", "text_completion", "text_completion"

    def begin(self) -> list[dict[str, Any]]:
        """Nothing."""
        return []

    def part(self, text: str, tokens: Sequence[Token], *, scored: bool) -> dict[str, Any]:
        """Text, and what is known of its tokens."""
        return {"text": text, "logprobs": self._logprobs(tokens) if scored else None}

    def last(self) -> dict[str, Any]:
        """No more text."""
        return {"text": "", "logprobs": None}

    def whole(self, text: str, tokens: Sequence[Token], *, scored: bool) -> dict[str, Any]:
        """The same as a part."""
        return self.part(text, tokens, scored=scored)

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        return {
            "tokens": self._texts([token.token_id for token in tokens]),
            "token_logprobs": [None if t.score is None else finite(t.score.logprob) for t in tokens],
            "top_logprobs": [None if t.score is None else self._top(t.token_id, t.score) for t in tokens],
            "text_offset": [token.start for token in tokens],
        }

    def _top(self, token_id: int, score: Score) -> dict[str, float]:
        """Log-probabilities by text, the token's own too; of two with the same text the higher."""
        pairs = [*score.top, (token_id, score.logprob)]
        found: dict[str, float] = {}
        for text, (_, logprob) in zip(self._texts([i for i, _ in pairs]), pairs, strict=True):
            found[text] = max(finite(logprob), found.get(text, -float("inf")))
        return found

    def _texts(self, token_ids: Sequence[int]) -> list[str]:
        """Texts of tokens; of half a character, which has none, its bytes in OpenAI's words."""
        found = zip(self.tokenizer.pieces(token_ids), self.tokenizer.token_bytes(token_ids), strict=True)
        return [
            piece
            if data is None or piece.encode() == data
            else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            for piece, data in found
        ]


class ChatForm(Form):
    """Of ``/v1/chat/completions``."""

    prefix, whole_name, part_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def begin(self) -> list[dict[str, Any]]:
        """Whose message it is."""
        return [{"delta": {"role": "assistant", "content": ""}, "logprobs": None}]

    def part(self, text: str, tokens: Sequence[Token], *, scored: bool) -> dict[str, Any]:
        """Text, and what is known of its tokens."""
        return {"delta": {"content": text}, "logprobs": self._logprobs(tokens) if scored else None}

    def last(self) -> dict[str, Any]:
        """No more text."""
        return {"delta": {}, "logprobs": None}

    def whole(self, text: str, tokens: Sequence[Token], *, scored: bool) -> dict[str, Any]:
        """The message."""
        return {
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs(tokens) if scored else None,
        }

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        content = []
        for token in tokens:
            assert token.score is not None  # a chat's first token is scored by the prompt's last row
            score = token.score
            ids = [token.token_id, *(i for i, _ in score.top)]
            own, *top = self._named(ids, [score.logprob, *(logprob for _, logprob in score.top)])
            rest = {"entropy": finite(score.entropy), "margin": finite(score.margin)}
            content.append({**own, "top_logprobs": top, **rest})
        return {"content": content, "refusal": None}

    def _named(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> list[dict[str, Any]]:
        texts, data = self.tokenizer.pieces(token_ids), self.tokenizer.token_bytes(token_ids)
        return [
            {"token": text, "bytes": None if found is None else list(found), "logprob": finite(logprob)}
            for text, found, logprob in zip(texts, data, logprobs, strict=True)
        ]


def finite(value: float) -> float:
    """The number; 9999.0 and -9999.0 for infinities, which JSON does not have.

    Example:
        >>> finite(-float("inf")), finite(-0.5)
        (-9999.0, -0.5)
    """
    return max(-_INFINITE, min(value, _INFINITE)) if value in (float("inf"), -float("inf")) else value
