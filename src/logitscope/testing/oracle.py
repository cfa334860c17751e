"""The truth that engines are measured against: a plain Transformers forward of one sequence.

No cache, no padding, no batch, no generation loop; attention as the model has it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Oracle:
    """Logits of ``model`` by a plain forward; float32 or float64 ``[L, vocab_size]`` for ``L`` ids.

    In float64 the weights are widened exactly, so that the rows are those of the same model without
    rounding, except where the model's own code goes through float32 (normalization and rotary angles
    in most families), which leaves about 1e-7 of relative error.

    Args:
        model: any causal LM; it is not changed.
        dtype: ``float64``; or ``float32``, which is the model as it is, its rows widened.
    """

    def __init__(self, model: PreTrainedModel, *, dtype: Literal["float32", "float64"] = "float64") -> None:
        self._model: Any = model if dtype == "float32" else copy.deepcopy(model).double()
        if dtype == "float64" and hasattr(model, "set_experts_implementation"):
            self._model.set_experts_implementation("eager")  # grouped products have no float64
        self._dtype = np.dtype(dtype)

    def __call__(self, token_ids: Sequence[int] | NDArray[Any]) -> NDArray[Any]:
        """Rows of one sequence."""
        import torch

        ids = torch.as_tensor(np.asarray(token_ids, dtype=np.int64), device=self._model.device)
        with torch.inference_mode():
            rows = self._model(ids[None], use_cache=False).logits[0]
        return np.asarray(rows.to(getattr(torch, self._dtype.name)).cpu().numpy())


def forward_logits(
    model: PreTrainedModel,
    token_ids: Sequence[int] | NDArray[Any],
    *,
    dtype: Literal["float32", "float64"] = "float64",
) -> NDArray[Any]:
    """Logits of one sequence by a plain forward, ``[L, vocab_size]``; see :class:`Oracle`."""
    return Oracle(model, dtype=dtype)(token_ids)


def teacher_forced(
    model: PreTrainedModel,
    prompt_token_ids: Sequence[int] | NDArray[Any],
    generated_token_ids: Sequence[int] | NDArray[Any],
    *,
    dtype: Literal["float32", "float64"] = "float64",
) -> NDArray[Any]:
    """Rows ``0 … L+n-2`` that a generation must return, from one forward over all its tokens.

    The last generated token is never fed back, so it is left out: ``[L + n - 1, vocab_size]``.
    """
    every = np.concatenate([np.asarray(prompt_token_ids), np.asarray(generated_token_ids)[:-1]])
    return forward_logits(model, every, dtype=dtype)
