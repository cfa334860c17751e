"""Text of a sequence while its tokens come: never half a character, never the beginning of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_HALF = "\N{REPLACEMENT CHARACTER}"


class TextSoFar:
    """What may be shown of a growing sequence.

    Ids are decoded in a window, because the text of an id may depend on the one before it.

    Args:
        tokenizer: decodes.
        stop: strings that end the text; what may be the beginning of one is held back.

    Attributes:
        sent: the text that was given out.
        begin: characters before the text of the ids that were added last; within a character, before that.
        half: whether those ids end within a character, so that their text is not known yet.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.sent, self.begin, self.half = "", 0, False
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._ids: list[int] = []
        self._text = self._tail = ""
        self._first = self._read = 0

    @property
    def known(self) -> int:
        """Characters of the text that are whole, whether they were given out or not."""
        return len(self._text)

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that may be shown now, and was not before."""
        self._ids += token_ids
        before = self._tokenizer.decode(self._ids[self._first : self._read])
        now = self._tokenizer.decode(self._ids[self._first :])
        self.half = now.endswith(_HALF)
        tail = now[len(before) :]
        same = _common(self._tail, tail)  # bytes that are no text stay what they were
        self.begin = len(self._text) + (min(same, len(tail) - 1) if self.half else same)
        self._tail = tail
        if tail and not self.half:
            self._text, self._tail = self._text + tail, ""
            self._first, self._read = self._read, len(self._ids)
        held = max((len(stop) - 1 for stop in self._stop), default=0)
        found = [self._text.find(stop) for stop in self._stop if stop in self._text]
        return self._give(self._text[: max(min([len(self._text) - held, *found]), 0)])

    def finish(self, text: str) -> str:
        """The rest, up to the whole text that the sequence came to."""
        return self._give(text)

    def _give(self, text: str) -> str:
        if not text.startswith(self.sent):
            return ""
        new = text[len(self.sent) :]
        self.sent = text
        return new


def _common(one: str, other: str) -> int:
    """Characters with which both begin."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
