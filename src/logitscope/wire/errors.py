"""Errors as JSON: what went wrong in another process is raised here as what it was there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from logitscope import errors
from logitscope.errors import LogitscopeError, RowsError

_FIELDS = ("what", "where", "expected", "got", "fix")


def error_to_json(error: BaseException) -> dict[str, Any]:
    """An error as an object that ``json`` takes; one that is not ours keeps its class's name as text.

    Example:
        >>> from logitscope.errors import OptionError
        >>> error_to_json(OptionError("unknown", where="encode", got="'int3'"))
        {'type': 'OptionError', 'what': 'unknown', 'where': 'encode', 'got': "'int3'"}
    """
    if not isinstance(error, LogitscopeError):
        return {"type": RowsError.__name__, "what": f"{type(error).__name__}: {error}"}
    fields = {name: getattr(error, name) for name in _FIELDS}
    found = {name: str(value) for name, value in fields.items() if value is not None}
    sizes = {name: value for name in ("needed_bytes", "limit_bytes") if (value := getattr(error, name, None))}
    return {"type": type(error).__name__, **found, **sizes}


def error_from_json(given: Any) -> LogitscopeError:
    """The error that `error_to_json` wrote; what is no such object becomes a `RowsError`.

    Example:
        >>> error = error_from_json({"type": "OptionError", "what": "unknown", "where": "encode"})
        >>> type(error).__name__, str(error)
        ('OptionError', 'encode: unknown')
    """
    if not isinstance(given, Mapping) or not isinstance(given.get("what"), str):
        return RowsError("an error of the other side that cannot be read", got=repr(given)[:200])
    kind = getattr(errors, str(given.get("type")), RowsError)
    if not (isinstance(kind, type) and issubclass(kind, LogitscopeError)):
        kind = RowsError
    found: LogitscopeError = kind.__new__(kind)
    LogitscopeError.__init__(found, given["what"], **{name: given.get(name) for name in _FIELDS[1:]})
    for name in ("needed_bytes", "limit_bytes"):
        if name in given:
            setattr(found, name, int(given[name]))
    return found
