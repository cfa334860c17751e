"""Where converted models, and heads of servers, are kept on this machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """The user's cache folder of logitscope: ``$LOGITSCOPE_CACHE``, else the platform's own place.

    The folder need not exist yet.
    """
    chosen = os.environ.get("LOGITSCOPE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("logitscope", appauthor=False))
