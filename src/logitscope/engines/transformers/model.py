"""A causal language model of Transformers as the engine runs it: ids in, rows on the device out."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import inspect
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import nn

from logitscope.engines.transformers.cache import all_slabs, cache_argument, new_cache
from logitscope.errors import ModelLoadError, NotCausalError
from logitscope.head import Head, HeadCheck, compare_head, final_transforms
from logitscope.rows import Ids, Verification

_PROOF_TOKENS = 32
_SAMPLED_VALUES = 1024
# Relative to the largest logit: what rounding may do when the same tokens run in another shape.
_CAUSAL_TOLERANCE = collections.defaultdict(lambda: 0.05, {torch.float32: 1e-3, torch.float64: 1e-6})


class Scratch:
    """Room for logits that nobody keeps, used again for each product of one run."""

    def __init__(self) -> None:
        self._room: torch.Tensor | None = None

    def room(self, head: Head, rows: int) -> torch.Tensor:
        """``[rows, vocab_size]``, overwritten by the next product."""
        if self._room is None or len(self._room) < rows:
            self._room = head.empty(rows)
        return self._room[:rows]


class Product:
    """Rows ``[rows, vocab_size]`` that are multiplied when they are first read.

    Args:
        head: multiplies hidden rows; None when ``source`` holds logits already.
        source: hidden rows ``[rows, hidden_size]``, or logits.
        scratch: where logits go that are not written where they stay.
        shared: whether several chunks read it; then it is multiplied once, into the scratch.
        check_logits: whether NaN and infinity are looked for in the logits and not in hidden rows.
    """

    def __init__(
        self, head: Head | None, source: torch.Tensor, scratch: Scratch, *, shared: bool, check_logits: bool
    ) -> None:
        self.head, self.source, self.scratch = head, source, scratch
        self.shared, self.check_logits = shared, check_logits
        self._done: torch.Tensor | None = source if head is None else None

    def __len__(self) -> int:
        return len(self.source)

    @property
    def device(self) -> torch.device:
        """Where the logits are."""
        return self.source.device if self.head is None else self.head.device

    def logits(self, first: int, last: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of rows ``first … last - 1``, into ``out`` when given."""
        if out is not None and self._done is None and not self.shared and self.head is not None:
            self._done = self.head.project(self.source, out)
            return self._done
        if self._done is None:
            assert self.head is not None
            self._done = self.head.project(self.source, self.scratch.room(self.head, len(self.source)))
        rows = self._done[first:last]
        return rows if out is None else out.copy_(rows)

    def columns(self, first: int, last: int, ids: torch.Tensor) -> torch.Tensor:
        """Some columns of rows ``first … last - 1``; only they are multiplied where nobody read the rows."""
        if self._done is not None or self.head is None:
            return self.logits(first, last)[:, ids]
        return self.head.columns(self.source[first:last], ids)

    def hidden(self, first: int, last: int) -> torch.Tensor:
        """Hidden rows ``first … last - 1``, the input of the head."""
        assert self.head is not None, "rows of the model's own forward"
        return self.source[first:last]

    def non_finite(self, first: int, last: int) -> torch.Tensor:
        """Boolean tensor ``[]``: NaN or infinity in these rows.

        Finite hidden rows times finite weights are finite unless they overflow, which is looked for where
        the dtype makes it likely; so the rows themselves are rarely read again.
        """
        if self.check_logits and self._done is not None:
            return ~(self._done[first:last].amax() < torch.inf)
        return ~self.source[first:last].isfinite().all()


@dataclasses.dataclass
class RowChunk:
    """Rows of one request in a `Product`; a `logitscope.rows.Chunk`."""

    product: Product
    first: int
    positions: NDArray[np.int64]
    targets: Ids

    @property
    def device(self) -> torch.device:
        """Where the logits are."""
        return self.product.device

    def logits(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits ``[rows, vocab_size]``."""
        return self.product.logits(self.first, self.first + len(self.positions), out)

    def columns(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of some columns ``[rows, ids]``."""
        return self.product.columns(self.first, self.first + len(self.positions), ids)

    def hidden(self) -> torch.Tensor:
        """Input of the head ``[rows, hidden_size]``."""
        return self.product.hidden(self.first, self.first + len(self.positions))

    def non_finite(self) -> torch.Tensor:
        """Whether a row is NaN or infinite."""
        return self.product.non_finite(self.first, self.first + len(self.positions))


@dataclasses.dataclass(frozen=True)
class Output:
    """What one forward gave.

    Attributes:
        rows: hidden rows before the head ``[sequences, tokens, hidden_size]``, or logits
            ``[sequences, tokens, vocab_size]`` when the model's own forward is used.
        hidden_states: one tensor ``[sequences, tokens, hidden_size]`` a layer, embeddings first; or empty.
        attentions: one tensor ``[sequences, heads, tokens, keys]`` a layer; or empty.
    """

    rows: torch.Tensor
    hidden_states: Sequence[torch.Tensor] = ()
    attentions: Sequence[torch.Tensor] = ()


class CausalModel:
    """Runs a model and makes products of its rows.

    Args:
        model: a loaded ``PreTrainedModel`` or ``PeftModel`` with a causal head.

    Attributes:
        head: None when rows come from the model's own forward.
        head_check: how the head compared when the model was opened.
        check_logits: whether finite hidden rows may still give NaN or infinity.
        rows_dtype: of the logits; a few models widen them.

    Raises:
        NotCausalError: a later token changes an earlier row.
        ModelLoadError: the head has fewer rows than the vocabulary.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.config = self.inner.config
        self.text_config = self.config.get_text_config(decoder=True)
        self.vocab_size = int(self.text_config.vocab_size)
        self.dtype: torch.dtype = self.inner.dtype
        self.itemsize = int(self.dtype.itemsize)
        self.device: torch.device = self.inner.device
        self.context_length: int | None = getattr(self.text_config, "max_position_embeddings", None)
        prefix = self.inner.base_model_prefix
        base = getattr(self.inner, prefix, None) if prefix else None
        self.base: Any = base if isinstance(base, nn.Module) else self.inner
        self._arguments = inspect.signature(self.base.forward).parameters
        self._cache_argument = cache_argument(self.base)
        self.head: Head | None = None  # until it is proved, rows come from the model's own forward
        self._verified: dict[str, Verification] = {}
        with self.evaluating():
            self.rows_dtype, self.head, self.head_check = self._prove_head()
        self.check_logits = self.dtype == torch.float16 or self.head is None or not self.head.all_finite()

    @property
    def layers(self) -> int:
        """Transformer layers."""
        return int(self.text_config.num_hidden_layers)

    @property
    def can_join(self) -> bool:
        """Whether sequences of different lengths can decode together."""
        return "position_ids" in self._arguments and all_slabs(new_cache(self.config, 1))

    @property
    def keeps_prefixes(self) -> bool:
        """Whether what was read of a prompt can be used for another one that begins the same."""
        return self.head is not None and all_slabs(new_cache(self.config, 1))

    @property
    def state(self) -> tuple[int, ...]:
        """Changes when a weight is replaced or written to."""
        found = []
        for parameter in self.model.parameters():
            found += [parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version]
        return tuple(found)

    def new_cache(self, capacity: int) -> Any:
        """An empty cache with room for ``capacity`` tokens a sequence."""
        return new_cache(self.config, capacity)

    @torch.no_grad()
    def run(
        self,
        token_ids: torch.Tensor,
        *,
        cache: Any = None,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        hidden_states: bool = False,
        attentions: bool = False,
    ) -> Output:
        """One forward over ids ``[sequences, tokens]``; with ``cache``, they follow what it holds."""
        given = {
            "input_ids": token_ids.to(self.device),
            "use_cache": cache is not None,
            self._cache_argument: cache,
            "position_ids": position_ids,
            "attention_mask": attention_mask,
            "output_hidden_states": hidden_states or None,
            "output_attentions": attentions or None,
        }
        given = {name: value for name, value in given.items() if value is not None}
        out = (self.model if self.head is None else self.base)(**given)
        rows = out.logits[..., : self.vocab_size] if self.head is None else out.last_hidden_state
        return Output(rows, out.hidden_states if hidden_states else (), out.attentions if attentions else ())

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Dropout off, and every module's mode put back afterwards: the model may be in training."""
        training = [m for m in self.model.modules() if m.training]
        self.model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True

    @contextlib.contextmanager
    def eager_attention(self) -> Iterator[None]:
        """The attention that can show its weights; what was there comes back afterwards."""
        before = self.config._attn_implementation
        if before == "eager":
            yield
            return
        self.inner.set_attn_implementation("eager")
        try:
            yield
        finally:
            self.inner.set_attn_implementation(before)

    def weights_hash(self) -> str:
        """xxh3 over every weight's name, shape, dtype and 1,024 evenly strided values."""
        digest = xxhash.xxh3_64()
        for name, weight in sorted(self.model.state_dict().items()):
            digest.update(f"{name}{tuple(weight.shape)}{weight.dtype}".encode())
            if weight.device.type == "meta" or not weight.numel():
                continue
            flat = weight.detach().reshape(-1)
            sample = flat[:: max(flat.numel() // _SAMPLED_VALUES, 1)][:_SAMPLED_VALUES]
            digest.update(sample.contiguous().cpu().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    @property
    def hidden_size(self) -> int | None:
        """Of the head's input; None when rows cannot be rebuilt from it."""
        return self.head.weight.shape[1] if self.head is not None and self.head.plain else None

    def verification(self, encode: str) -> Verification:
        """How rows rebuilt from a hidden form compare with the model's own, over the tokens of the proof."""
        if encode not in self._verified:
            self._verified[encode] = self._verify(encode)
        return self._verified[encode]

    # -- the proof at load -----------------------------------------------------------------------------

    @torch.no_grad()
    def _verify(self, encode: str) -> Verification:
        check, ids = self.head_check, self._proof_ids()
        rows = ids.shape[1]
        if encode == "hidden":
            return Verification(rows, self.vocab_size, check.max_abs_difference, check.bound)
        assert self.head is not None
        with self.evaluating():
            hidden = self.run(ids).rows[0]
            own = self.head.project(hidden, self.head.empty(rows))
        dtype = getattr(torch, encode.partition("-")[2])
        rounded = self.head.project(hidden.to(dtype).to(hidden.dtype), self.head.empty(rows))
        difference = float((rounded.double() - own.double()).abs().max())
        return Verification(rows, self.vocab_size, difference, self.head.rounding_bound(hidden, dtype))

    def _proof_ids(self) -> torch.Tensor:
        tokens = min(_PROOF_TOKENS, self.context_length or _PROOF_TOKENS)
        return (torch.arange(tokens) * 7919 % self.vocab_size)[None].to(self.device)

    @torch.no_grad()
    def _prove_head(self) -> tuple[torch.dtype, Head | None, HeadCheck]:
        """The logits' dtype, and the head if it reproduces the model's own rows from hidden ones."""
        ids = self._proof_ids()
        own = self.run(ids).rows[0]
        self._check_causal(ids, own)
        module = self.inner.get_output_embeddings()
        if module is None or self.base is self.inner:
            return own.dtype, None, HeadCheck(False, reason="the model does not show its base and head apart")
        if own.dtype != self.dtype:
            return own.dtype, None, HeadCheck(False, reason=f"the model widens its logits to {own.dtype}")
        columns = int(getattr(getattr(module, "weight", None), "shape", (self.vocab_size,))[0])
        if isinstance(module, nn.Linear) and columns < self.vocab_size:
            raise ModelLoadError(
                "the head has fewer rows than the vocabulary",
                where="output embeddings",
                expected=f"{self.vocab_size} or more",
                got=columns,
            )
        transforms = final_transforms(self.text_config)
        head = Head(module, transforms=transforms, vocab_size=self.vocab_size, dtype=own.dtype)
        hidden = self.base(input_ids=ids, use_cache=False).last_hidden_state[0]
        check = compare_head(head.project(hidden, head.empty(len(hidden))), own)
        return own.dtype, head if check.used else None, check

    def _check_causal(self, ids: torch.Tensor, own: torch.Tensor) -> None:
        half = ids.shape[1] // 2
        if not half:
            return
        alone = self.run(ids[:, :half]).rows[0].cpu().double()
        together = own[:half].cpu().double()
        scale = float(together.abs().max()) or 1.0
        if float((alone - together).abs().max()) > _CAUSAL_TOLERANCE[self.dtype] * scale:
            raise NotCausalError(
                "later tokens change earlier rows",
                where=type(self.inner).__name__,
                expected="a causal language model",
                fix="Encoder and encoder-decoder models have no rows of this kind.",
            )


def pad(prompts: Sequence[Ids]) -> torch.Tensor:
    """Ids ``[prompts, longest]``, zeros behind the shorter ones: in a causal model no real row sees them."""
    padded = torch.zeros(len(prompts), max(len(p) for p in prompts), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = torch.from_numpy(prompt.astype(np.int64))
    return padded


def fingerprint(ids: Ids) -> bytes:
    """Equal for equal prompts."""
    return struct.pack(f"<{len(ids)}i", *ids.tolist())
