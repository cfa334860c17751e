"""What a generation gives."""

from __future__ import annotations

import dataclasses
from typing import Self

from logitscope.logits import Logits
from logitscope.logits.collect import Collected
from logitscope.rows import FinishReason, Ids, Request
from logitscope.tokenizer import Tokenizer


def generated_text(tokenizer: Tokenizer | None, generated_ids: Ids, stop: str | int | None) -> str | None:
    """Text of generated ids, trimmed at what ended them; None without a tokenizer."""
    if tokenizer is None:
        return None
    text = tokenizer.decode(generated_ids[:-1] if isinstance(stop, int) else generated_ids)
    return text.split(stop, 1)[0] if isinstance(stop, str) else text


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Generation:
    """One generated sequence.

    Attributes:
        text: the generated text, trimmed at stop strings and special tokens; None without a tokenizer.
        token_ids: every generated id, stop and end-of-sequence tokens included; int32 ``[n]``.
        prompt_token_ids: int32 ``[L]``, as fed.
        finish_reason: ``stop`` or ``length``.
        stop: the stop string or stop id that ended it, if one did.
        logits: raw rows, when asked; ``len(logits.generated) == len(token_ids)``.
        processed: rows just before the draw, when asked.
        seed: of the draw; None when greedy.
        prompt_index: which prompt of the call.
        sample_index: which sample of that prompt.
    """

    text: str | None
    token_ids: Ids
    prompt_token_ids: Ids
    finish_reason: FinishReason | None
    stop: str | int | None = None
    logits: Logits | None = None
    processed: Logits | None = None
    seed: int | None = None
    prompt_index: int = 0
    sample_index: int = 0

    def __repr__(self) -> str:
        rows = "no logits" if self.logits is None else f"logits {self.logits.shape}"
        shown = repr(self.text) if self.text is not None else f"{len(self.token_ids)} ids"
        return (
            f"Generation({shown}, {len(self.token_ids)} tokens, finish_reason={self.finish_reason!r}, {rows})"
        )

    @classmethod
    def of(cls, request: Request, collected: Collected) -> Self:
        """The result of a request, from its collected rows."""
        end = collected.end
        return cls(
            text=end.text,
            token_ids=end.generated_ids,
            prompt_token_ids=request.token_ids,
            finish_reason=end.finish_reason,
            stop=end.stop,
            logits=collected.logits,
            processed=collected.processed,
            seed=end.seed,
            prompt_index=request.prompt_index,
            sample_index=request.sample_index,
        )
