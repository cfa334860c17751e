"""Whether a plugin can work beside the engine that is installed here."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.table import Table


def state_of(engine: str) -> dict[str, str]:
    """State of each hook of the engine's plugin, by target: ``"ok"`` or what is wrong."""
    assert engine == "sglang"
    from logitscope.plugins.sglang.hooks import examine

    return examine()


def check_table(found: Mapping[str, str]) -> Table:
    """The hooks as a ``rich`` table."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in ("hook", "state"):
        table.add_column(name, overflow="fold")
    for target, state in found.items():
        table.add_row(target, state if state == "ok" else f"[red]{state}[/red]")
    return table
