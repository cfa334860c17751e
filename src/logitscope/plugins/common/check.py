"""Whether the hooks are there: engines swallow errors of plugins, so the plugin looks for itself."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Hook:
    """A function of the engine that the plugin wraps.

    Attributes:
        target: its dotted path.
        kind: ``around`` or ``after``.
        run: what is called instead or afterwards.
        parameters: names that its signature must have.
        needed_for: what is missing without it.
    """

    target: str
    kind: str
    run: Callable[..., Any]
    parameters: tuple[str, ...]
    needed_for: str


def resolve(target: str) -> Any:
    """The object at a dotted path.

    Raises:
        ImportError, AttributeError: there is none.
    """
    parts = target.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as error:
            if error.name is not None and not ".".join(parts[:cut]).startswith(error.name):
                raise
            continue
        for name in parts[cut:]:
            found = getattr(found, name)
        return found
    raise ImportError(f"no module of {target}")


def problems(hooks: Iterable[Hook]) -> dict[str, str]:
    """What is wrong with each hook, by target; empty when all of them can work."""
    found = {}
    for hook in hooks:
        problem = _problem(hook)
        if problem:
            found[hook.target] = f"{problem} (needed for {hook.needed_for})"
    return found


def _problem(hook: Hook) -> str | None:
    try:
        function = resolve(hook.target)
    except (ImportError, AttributeError) as error:
        return f"not found: {error}"
    names = inspect.signature(function).parameters
    missing = [name for name in hook.parameters if name not in names]
    return f"has no parameter {', '.join(missing)}" if missing else None
