"""Public test kit: a conformance suite for engines, tiny models with their oracle, and assertions.

:class:`EngineSuite` and :class:`EngineCase` need pytest; :func:`tiny_model`, :func:`tiny_tokenizer` and
:class:`Oracle` need PyTorch and Transformers. Each is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logitscope.testing.asserts import (
        BUDGETS,
        assert_aligned,
        assert_complete,
        assert_rows_close,
        assert_same_bits,
    )
    from logitscope.testing.case import EngineCase
    from logitscope.testing.oracle import Oracle, forward_logits, teacher_forced
    from logitscope.testing.suite import EngineSuite, OracleSuite
    from logitscope.testing.tiny import FAMILIES, save_tiny, tiny_model, tiny_tokenizer

_MODULES = {
    "BUDGETS": "asserts",
    "FAMILIES": "tiny",
    "EngineCase": "case",
    "EngineSuite": "suite",
    "Oracle": "oracle",
    "OracleSuite": "suite",
    "assert_aligned": "asserts",
    "assert_complete": "asserts",
    "assert_rows_close": "asserts",
    "assert_same_bits": "asserts",
    "forward_logits": "oracle",
    "save_tiny": "tiny",
    "teacher_forced": "oracle",
    "tiny_model": "tiny",
    "tiny_tokenizer": "tiny",
}

__all__ = [
    "BUDGETS",
    "FAMILIES",
    "EngineCase",
    "EngineSuite",
    "Oracle",
    "OracleSuite",
    "assert_aligned",
    "assert_complete",
    "assert_rows_close",
    "assert_same_bits",
    "forward_logits",
    "save_tiny",
    "teacher_forced",
    "tiny_model",
    "tiny_tokenizer",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
