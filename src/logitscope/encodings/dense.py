"""Dense rows: every column, in a floating-point dtype."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

_NUMPY: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
_UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclasses.dataclass(frozen=True)
class Dense:
    """Rows ``[rows, vocab_size]`` in one dtype; a narrower one than the model's rounds to nearest even.

    Attributes:
        name: ``float32``, ``bfloat16`` or ``float16``.
    """

    name: str

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy dtype of the values; bfloat16 is the ml_dtypes one."""
        return _NUMPY[self.name]

    def bytes_per_row(self, vocab_size: int) -> int:
        """Exact size of an encoded row."""
        return vocab_size * self.dtype.itemsize

    def relative_error(self, model_dtype: str) -> float:
        """Bound of ``|decoded - value| / |value|`` for normal values; 0 when nothing is rounded."""
        return 0.0 if self.name in (model_dtype, "float32") else _UNIT_ROUNDOFF[self.name]

    def encode(self, logits: Any, out: Any) -> Any | None:
        """Write logits, a tensor ``[rows, vocab_size]``, into the tensor ``out`` of this dtype.

        Returns:
            None, or a boolean tensor on the logits' device: whether a finite value became infinite.
        """
        import torch

        out.copy_(logits)
        if self.name != "float16" or logits.dtype == torch.float16:
            return None
        return (out.isinf() & logits.isfinite()).any()
