"""logitscope: the complete logits of language models, correct and aligned.

    import logitscope as ls
    engine = ls.open("smollm2")
    rows = engine.logits("The capital of France is")      # [seq_len, vocab]

Importing this costs NumPy; PyTorch, Transformers and the others are imported where they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logitscope.engines.registry import open_engine as open
    from logitscope.engines.results import Generation
    from logitscope.logits import Logits, LogitsBatch, load
    from logitscope.rows import Request, Sampling, Select

__version__ = "0.1.0"
__all__ = ["Generation", "Logits", "LogitsBatch", "Request", "Sampling", "Select", "load", "open"]

_WHERE = {
    "open": ("logitscope.engines.registry", "open_engine"),
    "load": ("logitscope.logits", "load"),
    "Generation": ("logitscope.engines.results", "Generation"),
    "Logits": ("logitscope.logits", "Logits"),
    "LogitsBatch": ("logitscope.logits", "LogitsBatch"),
    "Request": ("logitscope.rows", "Request"),
    "Sampling": ("logitscope.rows", "Sampling"),
    "Select": ("logitscope.rows", "Select"),
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _WHERE[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
