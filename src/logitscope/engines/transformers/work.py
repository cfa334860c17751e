"""What scoring and generation share: the model, how work is cut up, and where rows go."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import torch

from logitscope.engines.transformers.model import CausalModel, Product, Scratch
from logitscope.engines.transformers.prefix import SHORTEST, Prefix, PrefixCache
from logitscope.extract import Extractor, PendingBlock
from logitscope.rows import Buffer, End, Identity, Request, Stage
from logitscope.tokenizer import Tokenizer

_SCRATCH_ROWS, _FRESH_ROWS = 64, 256

Item: TypeAlias = "PendingBlock | End"


@dataclasses.dataclass(frozen=True)
class Settings:
    """How work is cut up. Rows do not depend on it beyond the stated tolerance.

    Attributes:
        block_rows: the most rows of a block.
        uncached_tokens: up to so many tokens a prompt runs in one forward, without a KV cache.
        chunk_tokens: beyond it, tokens a forward, over one preallocated cache.
        forward_tokens: tokens that a forward over several prompts may have.
        forward_cost: tokens that a forward of its own costs a prompt beyond its own; another prompt joins
            a forward when that takes no more padding.
        sequences: that are generated together.
    """

    block_rows: int
    uncached_tokens: int = 8192
    chunk_tokens: int = 512
    forward_tokens: int = 2048
    forward_cost: int = 32
    sequences: int = 32


class NumberedJoining(Protocol):
    """`Joining` with each request's place in the stream."""

    def arrivals(self, room: int) -> Sequence[tuple[int, Request]]:
        """At most so many generating requests that have arrived."""

    def wanted(self, index: int) -> bool:
        """Whether somebody still waits for a request."""


@dataclasses.dataclass(frozen=True)
class Work:
    """One call of the engine.

    Attributes:
        model: that runs.
        identity: of the engine.
        settings: how work is cut up.
        buffer: where values go; None for fresh arrays.
        tokenizer: for stop strings and text.
        eos_ids: ids that end a sequence unless a request ignores them.
        prefixes: prompts that were read before; None when none are kept.
        scratch: this run's own, so that another call may run while a stream is open.
        joining: who joins a generation between its steps, and who leaves it.
    """

    model: CausalModel
    identity: Identity
    settings: Settings
    buffer: Buffer | None
    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]
    prefixes: PrefixCache | None = None
    scratch: Scratch = dataclasses.field(default_factory=Scratch)
    joining: NumberedJoining | None = None

    def extractor(self, request: Request, index: int, stage: Stage = "raw") -> Extractor:
        """The extractor of one request's rows."""
        return Extractor(
            request,
            index,
            identity=self.identity,
            stage=stage,
            buffer=self.buffer,
        )

    def prefix(self, request: Request) -> Prefix | None:
        """The beginning of a prompt that was read before, where it can be used."""
        if self.prefixes is None or request.extras:
            return None
        return self.prefixes.find(request.token_ids)

    def keeps(self, request: Request) -> bool:
        """Whether a prompt is kept for later ones."""
        return self.prefixes is not None and not request.extras and request.prompt_length >= SHORTEST

    def product(self, rows: torch.Tensor, *, shared: bool = False) -> Product:
        """The product of ``rows`` ``[rows, …]`` of a forward; ``shared`` when several chunks read it."""
        model = self.model
        return Product(model.head, rows, self.scratch, shared=shared, check_logits=model.check_logits)

    def ready(self, rows: torch.Tensor) -> Product:
        """Logits ``[rows, vocab_size]`` that are there already, such as processed ones."""
        return Product(None, rows, self.scratch, shared=True, check_logits=True)

    def block_rows(self, extractor: Extractor) -> int:
        """Rows of a block: the most only when they are multiplied into the buffer where they stay."""
        most, head = self.settings.block_rows, self.model.head
        if extractor.multiplies_columns:
            return most
        if not extractor.writes_directly(self.model.device.type):
            return min(most, _SCRATCH_ROWS)
        return most if self.buffer is not None and head is not None and head.plain else min(most, _FRESH_ROWS)

    @property
    def few_rows(self) -> int:
        """Fewer rows than these cost less together with those of other prompts."""
        head = self.model.head
        return min(self.shared_rows, _SCRATCH_ROWS) if head is not None and head.packed else self.shared_rows

    @property
    def shared_rows(self) -> int:
        """Rows of one product for several short prompts."""
        return min(self.settings.block_rows, _FRESH_ROWS)

    def chunk_size(self, tokens: int) -> int:
        """Tokens a forward for a prompt of ``tokens``; smaller without a head: its logits exist whole."""
        limit = self.settings.uncached_tokens if self.model.head is not None else self.settings.chunk_tokens
        return self.settings.chunk_tokens if tokens > limit else tokens
