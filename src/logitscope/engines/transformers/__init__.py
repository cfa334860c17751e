"""The embedded engine on PyTorch and Transformers."""
