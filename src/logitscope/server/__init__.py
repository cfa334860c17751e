"""Logits over HTTP: ``logitscope serve``."""
