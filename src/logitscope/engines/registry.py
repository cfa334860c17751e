"""Engines by name: one lazy table for our own, one entry-point group for everybody's."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

from logitscope.engines.base import Engine
from logitscope.errors import MissingDependencyError, OptionError

ENTRY_POINT_GROUP = "logitscope.engines"
_BUILT_IN = {
    "transformers": "logitscope.engines.transformers.engine:TransformersEngine",
    "sglang": "logitscope.engines.sglang:SGLangEngine",
    "remote": "logitscope.engines.remote:RemoteEngine",
    "fake": "logitscope.engines.fake:FakeEngine",
}
_LISTED = 40
_TRANSFORMERS_EXTRA = frozenset({"accelerate", "safetensors", "torch", "transformers"})


def engines() -> dict[str, str]:
    """``module:Class`` of every engine by name.

    Raises:
        OptionError: an installed package registers a name that is taken.
    """
    table = dict(_BUILT_IN)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if table.get(point.name, point.value) != point.value:
            raise OptionError(
                "two engines of one name",
                where=f"entry point {ENTRY_POINT_GROUP}:{point.name}",
                got=f"{table[point.name]} and {point.value}",
                fix="Uninstall one of the packages.",
            )
        table[point.name] = point.value
    return table


def engine_class(name: str) -> type[Engine]:
    """The class of an engine; its module is imported now.

    Raises:
        OptionError: no engine of that name.
        MissingDependencyError: a library that it needs is not installed.
    """
    table = engines()
    if name not in table:
        raise OptionError(
            "unknown engine", where="engine", expected=f"one of {', '.join(table)}", got=repr(name)
        )
    module, _, attribute = table[name].partition(":")
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in _TRANSFORMERS_EXTRA:
            raise
        raise MissingDependencyError(
            f"the {name} engine needs {error.name}",
            where="open",
            fix="pip install 'logitscope[transformers]'",
        ) from error
    found: type[Engine] = getattr(imported, attribute)
    return found


def open_engine(
    model: Any,
    *,
    engine: str | None = None,
    workers: int | None = None,
    devices: Sequence[str] | None = None,
    **options: Any,
) -> Engine:
    """Open a model and return its engine.

    Args:
        model: a bundled name (``"smollm2"``), a folder, a ``.gguf`` file, a hub name, a loaded model object,
            the address of a server, as ``"http://box:8000"``, or a list of addresses, which share the work.
        engine: ``"transformers"`` (the default), ``"sglang"``, or another name of `engines`.
        workers: so many processes share the work, and the cores of this machine.
        devices: one process for each of these devices shares the work.
        **options: the engine's own, typed options (see its ``open``); an unknown one is an error.

    Raises:
        OptionError: unknown engine or option.
        ModelError: the model cannot be found, loaded, or is not causal.

    Example:
        >>> engine = open_engine("fake", engine="fake", vocab_size=7)
        >>> engine.logits([1, 2, 3]).shape
        (3, 7)
    """
    several = isinstance(model, list | tuple)
    at_a_server = several or (isinstance(model, str) and model.startswith(("http://", "https://")))
    engine = engine or ("remote" if at_a_server else "transformers")
    found = engine_class(engine)
    known = found.option_names()
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise OptionError(
                "unknown option",
                where=f"open(engine={engine!r})",
                expected=f"one of {', '.join(known)}"
                if len(known) <= _LISTED
                else f"one of {len(known)} names",
                got=name,
                fix=f"Did you mean {near[0]}?" if near else None,
            )
    if several or workers is not None or devices is not None:
        from logitscope.engines.parallel import ParallelEngine

        return ParallelEngine.open(model, engine=engine, workers=workers, devices=devices, options=options)
    return found.open(model, **options)
