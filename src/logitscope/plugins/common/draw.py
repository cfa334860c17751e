"""Tokens of a foreign engine chosen by `logitscope.sampling`: the same draws as in every other engine.

The choice is made where the row is, just before the engine's sampler, which then finds one token only.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from logitscope import sampling
from logitscope.errors import OptionError
from logitscope.rows import Request


class Draw:
    """Chooses the next tokens of one request.

    What is chosen depends on the position and not on how often it is asked for: steps that an engine
    repeats, after preemption or ahead of its schedule, come out the same.

    Args:
        request: with its prompt, its sampling and, unless that is greedy, a seed.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._uniforms = sampling.uniform_stream(request.sampling.seed or 0, request.sample_index)
        self._drawn: list[float] = []
        self._history: Any = None
        self._choices: list[tuple[int, Any]] = []

    def choose(self, row: Any, position: int) -> tuple[Any, Any]:
        """The token after a position, int64 ``[1]`` on the device, and the row that it was drawn from.

        Args:
            row: raw, ``[1, vocab_size]``; not changed.
            position: of the row, ``L - 1`` or later.
        """
        settings, length = self._request.sampling, self._request.prompt_length
        if self._history is None:
            ids = np.zeros(length + self._request.max_new_tokens + 1, np.int64)
            ids[:length] = self._request.token_ids
            self._history = row.new_tensor(ids, dtype=sampling.IDS)
        processed = sampling.process(row, settings, [self._history[: position + 1]])
        uniforms = None
        if not settings.greedy:
            uniforms = row.new_tensor([self._uniform(position - length + 1)], dtype=sampling.UNIFORMS)
        chosen = sampling.choose(processed, settings, uniforms)
        if position + 1 < len(self._history):
            self._history[position + 1] = chosen[0]
        self._choices.append((position, chosen))
        return chosen, processed

    def check(self) -> None:
        """Look at the choices since the last time.

        Raises:
            OptionError: a row left no token to choose.
        """
        for position, chosen in self._choices:
            if int(chosen) < 0:
                raise OptionError(
                    "no token is left to choose",
                    where=f"position {position}",
                    got="every logit is -inf after the processors",
                    fix="Loosen logit_bias.",
                )
        self._choices.clear()

    def _uniform(self, step: int) -> float:
        while len(self._drawn) <= step:
            self._drawn.append(next(self._uniforms))
        return self._drawn[step]
