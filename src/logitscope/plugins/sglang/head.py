"""The head of an SGLang model, and how its input is captured.

Source of every name: SGLang 0.5.23.
"""

from __future__ import annotations

from typing import Any

from logitscope.head import Transform
from logitscope.plugins.common.heads import CapturedHead

_PLAIN_METHODS = ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod", "NoneType")
_DTYPES = ("float32", "bfloat16", "float16")


def find_head(scheduler: Any, *, rows_dtype: str) -> CapturedHead | str:
    """This rank's part of the model's head, or why rows cannot be rebuilt by it."""
    try:
        return _found(scheduler, rows_dtype)
    except (ImportError, AttributeError, TypeError) as error:  # another SGLang: plain rows work as ever
        return f"the head was not found: {type(error).__name__}: {error}"


def _found(scheduler: Any, rows_dtype: str) -> CapturedHead | str:
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.runtime_context import get_parallel

    owners = [
        module
        for module in scheduler.tp_worker.model_runner.model.modules()
        if isinstance(getattr(module, "logits_processor", None), LogitsProcessor)
    ]
    found = {id(head): (head, owner.logits_processor) for owner in owners for head in _heads(owner)}
    if len(found) != 1:
        return f"the model shows {len(found)} heads"
    head, processor = next(iter(found.values()))
    why = _why_not(head)
    if why is not None:
        return why
    parallel = get_parallel()
    ranks = parallel.tp_size if processor.do_tensor_parallel_all_gather else 1
    shard = getattr(head, "shard_indices", None)
    if shard is None and ranks > 1:
        return "the head does not show its shards"
    first, last = (
        (0, len(head.weight)) if shard is None else (shard.org_vocab_start_index, shard.org_vocab_end_index)
    )
    last = min(last, processor.vocab_size)
    return CapturedHead(
        head.weight.data[: last - first],
        first,
        transforms=_transforms(processor),
        rank=parallel.tp_rank if ranks > 1 else 0,
        ranks=ranks,
        rows_dtype=rows_dtype,
    )


def capture_mode(batch: Any, given: Any) -> Any:
    """The mode in which a forward gives the head's input for the last token of each sequence, or more.

    Under CUDA graphs that were captured without it the step runs without a graph: start the server with
    ``return_hidden_states_mode="last"`` to keep them.
    """
    from sglang.srt.model_executor.forward_batch_info import (
        CaptureHiddenMode,
        get_server_return_hidden_states_mode,
    )

    asked = [CaptureHiddenMode.LAST, batch.return_hidden_states_mode, get_server_return_hidden_states_mode()]
    return max([*asked, given] if given is not None else asked)


def _heads(owner: Any) -> list[Any]:
    """What may be a model's head: its ``lm_head``, else its embeddings, which some models multiply with."""
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    head = getattr(owner, "lm_head", None)
    if head is not None:
        return [head]
    return [module for module in owner.modules() if isinstance(module, VocabParallelEmbedding)]


def _why_not(head: Any) -> str | None:
    """Why the head is no plain matrix; None when it is one."""
    weight = getattr(head, "weight", None)
    dtype = str(getattr(weight, "dtype", None)).removeprefix("torch.")
    if weight is None or weight.dim() != 2 or dtype not in _DTYPES:
        return "the head is quantized"
    if hasattr(head, "set_lora"):
        return "the head has LoRA adapters"
    if getattr(head, "use_intel_amx_backend", False):
        return "the head is packed for AMX"
    method = type(getattr(head, "quant_method", None)).__name__
    return None if method in _PLAIN_METHODS else f"the head is quantized ({method})"


def _transforms(processor: Any) -> tuple[Transform, ...]:
    found: list[Transform] = []
    if processor.logit_scale is not None:
        found.append(("multiply", float(processor.logit_scale)))
    if processor.final_logit_softcapping:
        found.append(("softcap", float(processor.final_logit_softcapping)))
    return tuple(found)
