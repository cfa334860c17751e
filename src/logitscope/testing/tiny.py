"""Random-weight models of the common families, and a tokenizer, built in code in under a second.

Nothing is downloaded. The weights are scaled so that logits spread over several units, soft-caps
bite and positions matter: a fault in alignment or in the head's last steps moves rows far beyond
any rounding.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from logitscope.errors import OptionError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

PAD, BOS, EOS, TURN = "<|pad|>", "<|bos|>", "<|im_end|>", "<|im_start|>"
SPECIAL_TOKENS: tuple[str, ...] = (PAD, BOS, EOS, TURN)
"""The tokenizer's special tokens; their ids are 0, 1, 2, 3."""

VOCAB_SIZE = 1001
TOKENIZER_SIZE = 750
CONTEXT = 160
SLIDING_WINDOW = 8

_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "final_logit_softcapping": 3.0,
        "attn_logit_softcapping": 2.0,
        "sliding_window": SLIDING_WINDOW,
    },
    "cohere": {"logit_scale": 0.25},
    "granite": {
        "logits_scaling": 4.0,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.3,
    },
    "phi": {"partial_rotary_factor": 0.5},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
FAMILIES: tuple[str, ...] = tuple(_FAMILIES)
"""Model families that :func:`tiny_model` builds."""

_LOGIT_STD = 3.0
_NAMES = {"gpt2": {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embd"}}


def tiny_model(
    family: str,
    *,
    vocab_size: int = VOCAB_SIZE,
    seed: int = 0,
    tie: bool | None = None,
    dtype: str = "float32",
    context: int = CONTEXT,
    layers: int = 2,
    eos_token_id: int | None = 2,
) -> PreTrainedModel:
    """A random-weight causal LM of ``family``, hidden size 64, on the CPU, in evaluation mode.

    The same arguments give the same weights. Lower dtypes are the rounded float32 weights.

    Args:
        family: one of :data:`FAMILIES`.
        vocab_size: rows of the head; odd by default, and larger than :func:`tiny_tokenizer`'s.
        seed: of the weights.
        tie: whether head and embedding share weights; None keeps the family's habit.
        dtype: ``float32``, ``float64``, ``bfloat16`` or ``float16``.
        context: the most tokens that the model takes.
        layers: number of transformer layers.
        eos_token_id: the id that ends a generation; None for a model without one.

    Raises:
        OptionError: the family or the dtype is unknown.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if family not in _FAMILIES:
        raise OptionError("unknown family", where="family", expected=f"of {', '.join(FAMILIES)}", got=family)
    if dtype not in ("float32", "float64", "bfloat16", "float16"):
        raise OptionError("unknown dtype", where="dtype", got=dtype)
    settings: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context,
    }
    names = _NAMES.get(family, {})
    settings = {names.get(name, name): value for name, value in settings.items()} | _FAMILIES[family]
    if tie is not None:
        settings["tie_word_embeddings"] = tie
    config = AutoConfig.for_model(
        family, vocab_size=vocab_size, pad_token_id=0, bos_token_id=1, eos_token_id=eos_token_id, **settings
    )
    factory: Any = AutoModelForCausalLM
    model: Any = factory.from_config(config, dtype=getattr(torch, dtype))
    _fill(model, seed)
    made: PreTrainedModel = model.eval()
    return made


def _fill(model: Any, seed: int) -> None:
    """Replace every weight by a seeded draw whose scale keeps the logits' spread near ``_LOGIT_STD``."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    head = model.get_output_embeddings().weight
    config = model.config
    gain = _LOGIT_STD * getattr(config, "logits_scaling", 1.0) / getattr(config, "logit_scale", 1.0)
    # Sharper attention shows faults better; experts that are chosen sharply make rounding grow.
    inside = 1.0 if hasattr(config, "num_local_experts") else 1.2
    norm_mean = 0.0 if config.model_type.startswith("gemma") else 1.0  # Gemma adds 1 itself
    with torch.no_grad():
        for name, weight in model.named_parameters():  # tied weights come once
            draw = torch.randn(weight.shape, generator=generator)
            if weight is head:
                draw *= gain / weight.shape[-1] ** 0.5
            elif weight.ndim == 1:
                draw = draw * 0.1 + norm_mean if name.endswith("weight") else draw * 0.3
            else:
                draw *= 0.5 if _is_embedding(name) else inside * min(weight.shape[-2:]) ** -0.5
            weight.copy_(draw)


def _is_embedding(name: str) -> bool:
    return "embed" in name or ".wte." in name or ".wpe." in name


CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML, as of Qwen and SmolLM; the assistant's words and their end are marked."""

_SENTENCES = (
    "The capital of France is Paris, and the capital of Japan is Tokyo.",
    "A model reads tokens and gives one row of numbers for each of them.",
    "Naïve café façade, déjà vu; 日本語 and Ελληνικά; 🙂 ends the line.",
    "if (x == 10) { return y[3] + 0.25; }  # a comment\n\tindented",
    "Twelve boxers jumped quickly over the lazy dog, 1234567890 times.",
)


def _corpus() -> Iterator[str]:
    """Plain sentences, and made-up words enough for two thousand merges."""
    yield from _SENTENCES
    for first in "bcdfghklmnprst":
        for middle in "aeiou":
            yield " ".join(first + middle + last + ending for last in "lmnrst" for ending in ("", "a", "ing"))


def tiny_tokenizer(vocab_size: int = TOKENIZER_SIZE, *, bos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with exactly ``vocab_size`` ids, special tokens and a ChatML template.

    Ids 0 to 3 are :data:`SPECIAL_TOKENS`; the 256 bytes and the merges follow. Every string encodes,
    and decodes to itself.

    Args:
        vocab_size: number of ids, from 260 to about 1600.
        bos: whether the tokenizer puts ``<|bos|>`` before every text.

    Raises:
        OptionError: the corpus does not give so many ids.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise OptionError(
            "the corpus does not give so many ids",
            where="vocab_size",
            expected=f"260 … {tokenizer.get_vocab_size()}",
            got=vocab_size,
        )
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, SPECIAL_TOKENS.index(BOS))]
        )
    factory: Any = PreTrainedTokenizerFast
    made: PreTrainedTokenizerFast = factory(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[TURN],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    return made


def save_tiny(
    folder: str | pathlib.Path,
    family: str = "llama",
    *,
    bos: bool = False,
    seed: int = 0,
    tie: bool | None = None,
    dtype: str = "float32",
) -> pathlib.Path:
    """Write a tiny model with its tokenizer as a Transformers folder, and return the folder's path."""
    path = pathlib.Path(folder)
    tiny_model(family, seed=seed, tie=tie, dtype=dtype).save_pretrained(path)
    tiny_tokenizer(bos=bos).save_pretrained(path)
    return path
