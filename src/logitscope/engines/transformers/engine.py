"""The embedded engine: any causal LM that Transformers loads, in this process."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
import transformers

import logitscope
from logitscope.engines.base import Capabilities, Engine
from logitscope.engines.memory import available_bytes
from logitscope.engines.transformers.cache import bytes_per_token
from logitscope.engines.transformers.generation import generate
from logitscope.engines.transformers.load import Loaded, LoadOptions, load
from logitscope.engines.transformers.model import CausalModel
from logitscope.engines.transformers.prefix import PrefixCache
from logitscope.engines.transformers.scoring import score
from logitscope.engines.transformers.work import Item, Settings, Work
from logitscope.errors import ModelLoadError, OptionError, OutOfMemoryError
from logitscope.extract import in_order
from logitscope.rows import HIDDEN_FORMS, Buffer, End, Identity, Joining, Request, Stream
from logitscope.tokenizer import Tokenizer

_BLOCK_BYTES = 256 * 2**20
_BLOCK_ROWS = (16, 1024)
_PREFIX_SHARE = 16
# Measured on a CPU (135 million parameters); an accelerator reads all weights for up to some hundred tokens.
_FORWARD_COST = collections.defaultdict(lambda: 256, {"cpu": 32})


class TransformersEngine(Engine):
    """Complete logits of a model on PyTorch and Transformers, on CPU, CUDA or MPS.

    Attributes:
        model: the loaded model, as it was given or loaded.
        prefixes: prompts that were read, for others which begin the same; None when none are kept.
        head_check: how the head compared with the model's own forward at load; ``head_check.used`` is
            False when rows come from the model's own forward, and ``head_check.reason`` says why.
        settings: how work is cut up.
    """

    name = "transformers"
    joins = True

    def __init__(
        self,
        loaded: Loaded,
        *,
        memory_limit_bytes: int | None,
        pack: bool,
        block_rows: int | None,
        uncached_tokens: int,
        chunk_tokens: int,
        sequences: int,
        prefix_cache_bytes: int | None,
    ) -> None:
        self._model = CausalModel(loaded.model)
        kept = _prefix_bytes(self._model.device) if prefix_cache_bytes is None else prefix_cache_bytes
        self.prefixes = PrefixCache(kept) if kept and self._model.keeps_prefixes else None
        self.tokenizer = None if loaded.tokenizer is None else Tokenizer(loaded.tokenizer)
        self.memory_limit_bytes = memory_limit_bytes
        self.context_length = self._model.context_length
        self.settings = Settings(
            block_rows=block_rows or _block_rows(self._model),
            uncached_tokens=uncached_tokens,
            chunk_tokens=chunk_tokens,
            forward_cost=_FORWARD_COST[self._model.device.type],
            sequences=sequences,
        )
        self.capabilities = Capabilities(
            processed=True,
            hidden_states=True,
            attentions=True,
            keep_on_device=True,
            hidden=self._model.hidden_size is not None,
        )
        self.identity = self._identify(loaded)
        if pack and self._model.head is not None:
            self._model.head.pack()

    @classmethod
    def open(
        cls,
        model: Any,
        *,
        tokenizer: Any = None,
        dtype: str | None = None,
        device: str | None = None,
        device_map: Any = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        quantization_config: Any = None,
        adapter: str | None = None,
        memory_limit_bytes: int | None = None,
        pack: bool = True,
        block_rows: int | None = None,
        uncached_tokens: int = 8192,
        chunk_tokens: int = 512,
        sequences: int = 32,
        prefix_cache_bytes: int | None = None,
    ) -> Self:
        """Load a model, or take one that is loaded.

        Args:
            model: ``"smollm2"`` (bundled), a folder, a ``.gguf`` file, a hub name, or a model object
                (plain, PEFT, quantized, hooked; it is not changed).
            tokenizer: of a model object; a name or an object. Without it only token ids go in.
            dtype, device, device_map, revision, trust_remote_code, quantization_config, adapter: as in
                `logitscope.engines.transformers.load.LoadOptions`; not for model objects.
            memory_limit_bytes: larger requests are refused; None is half of the free memory.
            pack: on CPUs in float32, keep a second, packed copy of the head, which makes products of a
                few rows bit-stable at no cost in time. False saves that memory.
            block_rows: the most rows of a block; None is 1024, or as many as 256 MiB hold. Blocks that are
                not written into a consumer's buffer have 256 at most, summaries alone 64.
            uncached_tokens: up to so many tokens a prompt runs in one forward, without a KV cache.
            chunk_tokens: beyond it, tokens a forward, over one preallocated cache.
            sequences: that are generated together.
            prefix_cache_bytes: for prompts that were read, so that others which begin the same need no
                forward for that part; 0 keeps none. None is a sixteenth of the free memory for a model that
                is loaded here, and 0 for a model object, which may be changed meanwhile.
        """
        for option, value in (
            ("prefix_cache_bytes", 1 if prefix_cache_bytes is None else prefix_cache_bytes + 1),
            ("block_rows", 1 if block_rows is None else block_rows),
            ("uncached_tokens", uncached_tokens + 1),
            ("chunk_tokens", chunk_tokens),
            ("sequences", sequences),
        ):
            if value < 1:
                raise OptionError(
                    "value outside its range", where=option, expected="a positive int", got=value
                )
        options = LoadOptions(
            dtype, device, device_map, revision, trust_remote_code, quantization_config, adapter
        )
        loaded = load(model, options) if isinstance(model, str | Path) else _given(model, tokenizer, options)
        return cls(
            loaded,
            memory_limit_bytes=memory_limit_bytes,
            pack=pack,
            block_rows=block_rows,
            uncached_tokens=uncached_tokens,
            chunk_tokens=chunk_tokens,
            sequences=sequences,
            prefix_cache_bytes=prefix_cache_bytes
            if isinstance(model, str | Path)
            else prefix_cache_bytes or 0,
        )

    @property
    def model(self) -> Any:
        """The Transformers model."""
        return self._model.model

    @property
    def head(self) -> Any:
        """The `logitscope.head.Head` that multiplies hidden rows; None when it is not used."""
        return self._model.head

    @property
    def head_check(self) -> Any:
        """How the head compared with the model's own forward at load."""
        return self._model.head_check

    def counters(self) -> dict[str, int]:
        """Prompts of which a beginning was kept from before, and the tokens that were not read again."""
        kept = self.prefixes
        return {} if kept is None else {"cache_hits": kept.hits, "cached_prompt_tokens": kept.hit_tokens}

    def close(self) -> None:
        """Let go of the model; results stay valid."""
        super().close()
        self.prefixes = None
        if hasattr(self, "_model"):
            del self._model

    def _run(self, requests: Sequence[Request], buffer: Buffer | None) -> Stream:
        return self._run_joined(list(requests), buffer, None)

    @torch.no_grad()
    def _run_joined(self, requests: list[Request], buffer: Buffer | None, joining: Joining | None) -> Stream:
        with _named_memory_errors(), self._model.evaluating():
            for item in in_order(self._items(requests, buffer, joining)):
                yield self._verified(item, requests[item.index]) if isinstance(item, End) else item

    def _verified(self, end: End, request: Request) -> End:
        if request.encode not in HIDDEN_FORMS:
            return end
        return dataclasses.replace(end, verification=self._model.verification(request.encode))

    def _items(
        self, requests: list[Request], buffer: Buffer | None, joining: Joining | None
    ) -> Iterator[Item]:
        if self.prefixes is not None:
            self.prefixes.belongs_to(self._model.state)
        work = Work(
            self._model,
            self.identity,
            self.settings,
            buffer,
            self.tokenizer,
            self._eos_ids(),
            self.prefixes,
            joining=None if joining is None else _Numbered(joining, requests),
        )
        numbered = list(enumerate(requests))
        yield from score(work, [(i, r) for i, r in numbered if not r.max_new_tokens])
        yield from generate(work, [(i, r) for i, r in numbered if r.max_new_tokens])

    def _eos_ids(self) -> frozenset[int]:
        """The model's own end-of-sequence ids, from its generation config, config and tokenizer."""
        found: set[int] = set()
        for holder in (getattr(self._model.inner, "generation_config", None), self._model.text_config):
            ids = getattr(holder, "eos_token_id", None)
            found.update([ids] if isinstance(ids, int) else ids or ())
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            found.add(self.tokenizer.eos_token_id)
        return frozenset(found)

    def _working_bytes(self, requests: Sequence[Request]) -> int:
        """Activations of the largest forward, KV cache, and two blocks of rows outside a buffer.

        Activations are counted as six vectors of the hidden size and three of the feed-forward size a
        token; a model without a usable head adds its logits.
        """
        config, itemsize = self._model.text_config, self._model.itemsize
        inner: int = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        work = Work(self._model, self.identity, self.settings, None, None, frozenset())
        tokens = max(min(work.chunk_size(r.prompt_length), r.prompt_length) for r in requests)
        if len(requests) > 1:
            tokens = max(tokens, self.settings.forward_tokens)
        per_token = (6 * config.hidden_size + 3 * inner) * itemsize
        if self._model.head is None:
            per_token += self.vocab_size * itemsize
        rows = min(max(r.max_rows for r in requests) or 1, work.shared_rows)
        blocks = 2 * rows * self.vocab_size * 4
        size: int = tokens * per_token + self._cache_bytes(requests, work) + blocks
        return size

    def _cache_bytes(self, requests: Sequence[Request], work: Work) -> int:
        per_token = bytes_per_token(self._model.config, self._model.itemsize)
        scored = [
            r.prompt_length
            for r in requests
            if work.chunk_size(r.prompt_length) < r.prompt_length or self.prefixes is not None
        ]
        generated = sorted(
            (r.prompt_length + r.max_new_tokens for r in requests if r.max_new_tokens), reverse=True
        )
        # Joining copies the prompts' caches once: both exist for a moment.
        joined = 2 * sum(generated[: self.settings.sequences])
        return per_token * max([joined, *scored])

    def _extras_bytes(self, request: Request) -> int:
        config, itemsize = self._model.text_config, self._model.itemsize
        keys = request.prompt_length + request.max_new_tokens
        heads = getattr(config, "num_attention_heads", 0)
        size: int = itemsize * (
            len(request.hidden_states) * config.hidden_size + len(request.attentions) * heads * keys
        )
        return size

    def _check_capabilities(self, request: Request, where: str) -> None:
        super()._check_capabilities(request, where)
        for name, layers in (("hidden_states", self._model.layers + 1), ("attentions", self._model.layers)):
            for layer in getattr(request, name):
                if not 0 <= layer < layers:
                    raise OptionError("no such layer", where=name, expected=f"0 … {layers - 1}", got=layer)

    def _identify(self, loaded: Loaded) -> Identity:
        model = self._model
        head = model.head
        return Identity(
            model=loaded.name,
            weights_hash=model.weights_hash(),
            tokenizer_hash=None if self.tokenizer is None else self.tokenizer.hash,
            vocab_size=model.vocab_size,
            tokenizer_size=None if self.tokenizer is None else len(self.tokenizer),
            dtype=str(model.rows_dtype).removeprefix("torch."),
            engine=self.name,
            engine_version=f"transformers {transformers.__version__}, torch {torch.__version__}",
            device=str(model.device),
            quantization=loaded.quantization,
            kernel=None if head is None else head.kernel,
            hidden_size=model.hidden_size,
            hidden_dtype=None if head is None else str(head.dtype).removeprefix("torch."),
            version=logitscope.__version__,
        )


class _Numbered:
    """Who joins, with their places in the stream.

    Args:
        joining: is asked.
        requests: of the stream so far; it grows.
    """

    def __init__(self, joining: Joining, requests: list[Request]) -> None:
        self._requests, self.wanted, self._joining = requests, joining.wanted, joining

    def arrivals(self, room: int) -> list[tuple[int, Request]]:
        first = len(self._requests)
        self._requests += self._joining.arrivals(room)
        return list(enumerate(self._requests[first:], first))


@contextlib.contextmanager
def _named_memory_errors() -> Iterator[None]:
    """PyTorch's ways to say that memory ran out, as ours."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise OutOfMemoryError(
            "memory ran out while the model ran",
            where="transformers",
            got=str(error).splitlines()[0],
            fix="Ask for fewer prompts or rows at once, or lower chunk_tokens and uncached_tokens in open().",
        ) from error


def _given(model: Any, tokenizer: Any, options: LoadOptions) -> Loaded:
    """A model object, with its tokenizer; options of loading do not apply."""
    if options != LoadOptions():
        raise OptionError(
            "the model is loaded already",
            where="open",
            expected="no dtype, device or other option of loading",
        )
    if not hasattr(model, "get_output_embeddings") or not hasattr(model, "config"):
        raise ModelLoadError(
            "no Transformers model",
            where="open",
            expected="a name, a folder, a .gguf file, or a loaded PreTrainedModel or PeftModel",
            got=type(model).__name__,
        )
    if isinstance(tokenizer, str):
        tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer)
    name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
    return Loaded(model, tokenizer, name, None)


def _prefix_bytes(device: torch.device) -> int:
    """A sixteenth of the memory that is free where the model is."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
    return int(free) // _PREFIX_SHARE


def _block_rows(model: CausalModel) -> int:
    """1024 rows, or as many as 256 MiB hold."""
    least, most = _BLOCK_ROWS
    rows = _BLOCK_BYTES // (model.vocab_size * model.rows_dtype.itemsize)
    return max(min(rows, most) // least * least, least)
