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
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.sent = ""
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._ids: list[int] = []
        self._text = ""
        self._first = self._read = 0

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that may be shown now, and was not before."""
        self._ids += token_ids
        before = self._tokenizer.decode(self._ids[self._first : self._read])
        now = self._tokenizer.decode(self._ids[self._first :])
        if len(now) > len(before) and not now.endswith(_HALF):
            self._text += now[len(before) :]
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
