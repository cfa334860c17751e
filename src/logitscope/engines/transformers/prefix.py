"""Prompts that were read before: their keys, values and hidden rows, for prompts that begin the same.

A cached prefix costs no forward: its KV cache is copied, and its rows of logits are one head product of its
hidden rows. What is held is bounded in bytes; the least recently used prompt goes first.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np
import torch

from logitscope.engines.transformers.cache import SlabLayer
from logitscope.rows import Ids

SHORTEST = 64
"""Tokens: a shorter prefix is read again, which costs about as much as to look for it and copy it."""


@dataclasses.dataclass(frozen=True)
class Prefix:
    """The beginning of a prompt, as it was read before.

    Attributes:
        layers: keys and values of each layer, ``[1, kv_heads, tokens, head_dim]``.
        hidden: input of the head, ``[tokens, hidden_size]``.
    """

    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    hidden: torch.Tensor

    @property
    def tokens(self) -> int:
        """Of the prefix."""
        return len(self.hidden)

    def first(self, tokens: int) -> Prefix:
        """Its first tokens."""
        layers = tuple((keys[:, :, :tokens], values[:, :, :tokens]) for keys, values in self.layers)
        return Prefix(layers, self.hidden[:tokens])

    def fill(self, cache: Any) -> None:
        """Copy keys and values into an empty cache."""
        for layer, (keys, values) in zip(cache.layers, self.layers, strict=True):
            layer.update(keys, values)


@dataclasses.dataclass(frozen=True)
class _Held:
    token_ids: Ids
    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    hidden: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Of the memory that it keeps, which may be more than it reads."""
        tensors = [self.hidden, *(states for layer in self.layers for states in layer)]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    def common(self, token_ids: Ids) -> int:
        """Tokens that both begin with."""
        return common(self.token_ids, token_ids)


class PrefixCache:
    """Prompts by their tokens, least recently used first.

    Args:
        limit_bytes: of everything that is held.

    Attributes:
        hits: prompts of which a beginning was held.
        hit_tokens: tokens of those beginnings.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.hits = self.hit_tokens = 0
        self._held: collections.OrderedDict[bytes, _Held] = collections.OrderedDict()
        self._state: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Of everything that is held."""
        return sum(held.nbytes for held in self._held.values())

    def clear(self) -> None:
        """Forget everything."""
        self._held.clear()

    def belongs_to(self, state: tuple[int, ...]) -> None:
        """Forget everything if the weights are others than before."""
        if state != self._state:
            self.clear()
            self._state = state

    def common(self, token_ids: Ids) -> int:
        """How many of these tokens some prompt begins with."""
        return max((held.common(token_ids) for held in self._held.values()), default=0)

    def find(self, token_ids: Ids) -> Prefix | None:
        """The longest beginning of these tokens that was read before; None when it is too short."""
        key, tokens = self._best(token_ids)
        if tokens < SHORTEST:
            return None
        self._held.move_to_end(key)
        self.hits, self.hit_tokens = self.hits + 1, self.hit_tokens + tokens
        held = self._held[key]
        return Prefix(held.layers, held.hidden).first(tokens)

    def keep(self, token_ids: Ids, cache: Any, hidden: torch.Tensor) -> None:
        """Keep a prompt that was read.

        Args:
            token_ids: of the prompt.
            cache: of one sequence, which begins with it.
            hidden: its hidden rows ``[tokens, hidden_size]``.

        One that is the beginning of it is replaced; one that differs in its last quarter only is enough.
        """
        tokens = len(token_ids)
        if tokens < SHORTEST:
            return
        key, shared = self._best(token_ids)
        extends = shared > 0 and shared == len(self._held[key].token_ids)
        enough = shared >= SHORTEST and tokens - shared <= tokens // 4
        if shared == tokens or (enough and not extends):
            self._held.move_to_end(key)
            return
        layers = tuple(_states(layer, tokens) for layer in cache.layers)
        held = _Held(np.array(token_ids), layers, hidden)
        if held.nbytes > self.limit_bytes:
            return
        if extends:
            del self._held[key]
        self._held[held.token_ids.tobytes()] = held
        while self.nbytes > self.limit_bytes:
            self._held.popitem(last=False)

    def _best(self, token_ids: Ids) -> tuple[bytes, int]:
        """Which prompt shares the most tokens, and how many."""
        found = [(held.common(token_ids), key) for key, held in self._held.items()]
        tokens, key = max(found, default=(0, b""))
        return key, tokens


def common(one: Ids, other: Ids) -> int:
    """Tokens that both begin with."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if differ.size else length


def _states(layer: Any, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the first tokens; decoding writes behind them."""
    assert isinstance(layer, SlabLayer)
    assert layer.slabs is not None
    keys, values = layer.slabs
    return keys[:1, :, :tokens], values[:1, :, :tokens]
