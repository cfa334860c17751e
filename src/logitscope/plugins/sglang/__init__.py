"""The SGLang plugin: ``return_logits`` in an unmodified engine.

SGLang finds `register` by this distribution's entry point (group ``sglang.srt.plugins``), in every one of its
processes. `scheduler` holds the hooks where the rows are computed, `frontend` those where users ask.
"""

from __future__ import annotations


def register() -> None:
    """Register every hook; SGLang applies them after all plugins have been loaded."""
    from logitscope.plugins.sglang.hooks import register_all

    register_all()
