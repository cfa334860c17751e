"""The engine's KV cache: one preallocated slab a layer, written in place.

A slab holds ``[sequences, kv_heads, capacity, head_dim]``; its capacity comes in blocks of tokens. An
update writes behind what is there and returns views, so nothing is concatenated or copied from step to
step. A sequence is one row of the slab and can be copied into another slab at any column, which is how
prompts of different lengths join one decoding batch (right-aligned; rotary positions are already in the
keys). Layer kinds other than plain and sliding-window attention keep Transformers' own layers.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

BLOCK_TOKENS = 64


class SlabLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of one layer in a preallocated slab.

    Args:
        capacity: tokens; it grows by doubling when more come.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(self, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.capacity = _whole_blocks(capacity)
        self.length = 0
        self.slabs: tuple[torch.Tensor, torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the slabs in the shape of the first states."""
        self.slabs = (_slab(key_states, self.capacity), _slab(value_states, self.capacity))
        self._show()
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new states ``[sequences, kv_heads, new, head_dim]``; returns views of all that are held."""
        if self.slabs is None:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        if end > self.capacity:
            self._grow(end)
        assert self.slabs is not None
        for slab, states in zip(self.slabs, (key_states, value_states), strict=True):
            slab[:, :, self.length : end] = states
        self.length = end
        return self._show()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that the next step sees, and the offset of the first one."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self.length

    def get_max_length(self) -> int:
        """No bound: the slab grows."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; their memory is written again."""
        self.length -= tokens_to_remove
        self._show()

    def keep(self, rows: list[int]) -> None:
        """Keep only these sequences, in this order; the slab shrinks to them."""
        assert self.slabs is not None
        index = torch.tensor(rows, device=self.slabs[0].device)
        self._move([slab[:, :, : self.length].index_select(0, index) for slab in self.slabs])

    def _grow(self, needed: int) -> None:
        assert self.slabs is not None
        self.capacity = _whole_blocks(max(needed, 2 * self.capacity))
        self._move([slab[:, :, : self.length] for slab in self.slabs])

    def _move(self, held: list[torch.Tensor]) -> None:
        """Into fresh slabs of the present capacity."""
        keys, values = (_slab(states, self.capacity) for states in held)
        self.slabs = (keys, values)
        for slab, states in zip(self.slabs, held, strict=True):
            slab[:, :, : self.length] = states
        self._show()

    def _show(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.slabs is not None
        self.keys, self.values = (slab[:, :, : self.length] for slab in self.slabs)
        return self.keys, self.values


def new_cache(config: Any, capacity: int) -> Cache:
    """An empty cache for a model: slabs for attention layers, Transformers' own layers for the others."""
    layers = DynamicCache(config=config).layers
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    return Cache(layers=[SlabLayer(capacity) if type(layer) in plain else layer for layer in layers])


def all_slabs(cache: Cache) -> bool:
    """Whether every layer is a slab: then sequences can be moved, and the cache cropped."""
    return all(isinstance(layer, SlabLayer) for layer in cache.layers)


def join(caches: list[tuple[Cache, int, int, int]], width: int, capacity: int, config: Any) -> Cache:
    """One cache of several sequences, right-aligned at column ``width``.

    Args:
        caches: for each sequence its cache, its row there, its first column, and its length.
        width: tokens of the longest.
        capacity: tokens that the new cache has room for.
        config: of the model.
    """
    joined = new_cache(config, capacity)
    for number, layer in enumerate(joined.layers):
        assert isinstance(layer, SlabLayer)
        for row, (cache, source_row, first, length) in enumerate(caches):
            source = cache.layers[number]
            assert isinstance(source, SlabLayer)
            assert source.slabs is not None
            if layer.slabs is None:
                layer.lazy_initialization(*(s[:1].expand(len(caches), -1, -1, -1) for s in source.slabs))
            assert layer.slabs is not None
            for slab, was in zip(layer.slabs, source.slabs, strict=True):
                slab[row, :, width - length : width] = was[source_row, :, first : first + length]
                slab[row, :, : width - length] = 0  # masked, but NaN left in fresh memory would still spread
        layer.length = width
        layer._show()
    return joined


def cache_argument(base: Any) -> str:
    """What a model's forward calls its cache: ``cache``, or ``past_key_values`` in older releases."""
    names = inspect.signature(base.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def bytes_per_token(config: Any, itemsize: int) -> int:
    """Bytes that one token of one sequence takes in the slabs of all layers, from the config."""
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", 0)
    width = getattr(text, "head_dim", None) or text.hidden_size // max(
        getattr(text, "num_attention_heads", 1), 1
    )
    return int(2 * text.num_hidden_layers * heads * width * itemsize)


def _slab(like: torch.Tensor, capacity: int) -> torch.Tensor:
    sequences, heads, _, width = like.shape
    return torch.empty(sequences, heads, capacity, width, dtype=like.dtype, device=like.device)


def _whole_blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS
