"""How much memory there is, and how to say it."""

from __future__ import annotations

from pathlib import Path


def available_bytes() -> int:
    """Free memory of this machine or container, in bytes: what can be taken without swapping."""
    import psutil

    return min([int(psutil.virtual_memory().available), *_cgroup_free()])


def _cgroup_free() -> list[int]:
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
    except (OSError, ValueError):
        return []
    return [] if limit == "max" else [max(int(limit) - used, 0)]


def human(size_bytes: int) -> str:
    """Bytes as people read them: ``201.3 MB`` (powers of 1000)."""
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
