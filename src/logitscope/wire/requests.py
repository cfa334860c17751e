"""Requests as JSON: what is asked of an engine in another process.

Selections, options and requests are plain objects with the names of their Python fields; a slice of
positions is ``{"start": …, "stop": …, "step": …}``. What is not known is refused by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from logitscope.errors import LogitscopeError, OptionError, SelectError
from logitscope.rows import SUMMARIES, Request, Sampling, Select

_SLICE = ("start", "stop", "step")
_CUTS = tuple(field.name for field in dataclasses.fields(Select) if field.name not in ("positions", "vocab"))
_TUPLES = ("summary", "hidden_states", "attentions")
_FIELDS = tuple(field.name for field in dataclasses.fields(Request))


def request_to_json(request: Request) -> dict[str, Any]:
    """A request as an object that ``json`` takes; `request_from_json` reads it."""
    fields = {name: getattr(request, name) for name in _FIELDS}
    return {
        **fields,
        "token_ids": request.token_ids.tolist(),
        "sampling": sampling_to_json(request.sampling),
        "select": None if request.select is None else select_to_json(request.select),
        **{name: list(fields[name]) for name in _TUPLES},
    }


def request_from_json(given: Mapping[str, Any]) -> Request:
    """The request that such an object describes.

    Raises:
        OptionError, SelectError: an unknown name, or a value outside its range.
    """
    fields = dict(known(given, _FIELDS, "request"))
    if "sampling" in fields:
        fields["sampling"] = sampling_from_json(fields["sampling"])
    if "select" in fields:
        fields["select"] = None if fields["select"] is None else select_from_json(fields["select"])
    with _typed("request", OptionError):
        fields |= {name: tuple(fields[name]) for name in _TUPLES if name in fields}
        fields["token_ids"] = np.asarray(fields.get("token_ids", ()), dtype=np.int32)
        return Request(**fields)


def sampling_to_json(sampling: Sampling) -> dict[str, Any]:
    """How the next token is chosen, as a JSON object; biases are pairs of id and bias."""
    fields = dataclasses.asdict(sampling)
    fields["logit_bias"] = [[int(i), float(b)] for i, b in sampling.logit_bias.items()]
    return fields


def sampling_from_json(given: Any) -> Sampling:
    """What such an object describes.

    Raises:
        OptionError: an unknown name, or a value outside its range.
    """
    fields = dict(known(given, tuple(field.name for field in dataclasses.fields(Sampling)), "sampling"))
    with _typed("sampling", OptionError):
        fields["logit_bias"] = {int(i): float(b) for i, b in fields.get("logit_bias", ())}
        return Sampling(**fields)


def select_to_json(select: Select) -> dict[str, Any]:
    """A selection as a JSON object."""
    positions: Any = select.positions
    if isinstance(positions, slice):
        positions = {name: getattr(positions, name) for name in _SLICE}
    elif not isinstance(positions, str):
        positions = list(positions)
    vocab: Any = select.vocab
    if isinstance(vocab, tuple):
        vocab = [list(one) if isinstance(one, tuple) else one for one in vocab]
    plain = Select()
    cuts = {name: getattr(select, name) for name in _CUTS if getattr(select, name) != getattr(plain, name)}
    return {"positions": positions, "vocab": vocab, **cuts}


def select_from_json(given: Any) -> Select:
    """A selection from its JSON object, or from its positions alone.

    Raises:
        OptionError, SelectError: an unknown name, or positions that there are not.

    Example:
        >>> select_from_json({"positions": "last"}) == select_from_json("last") == Select("last")
        True
        >>> select_to_json(Select("last", top_k=8))
        {'positions': 'last', 'vocab': 'all', 'top_k': 8}
    """
    if not isinstance(given, Mapping):
        given = {"positions": given}
    fields = dict(known(given, ("positions", "vocab", *_CUTS), "select"))
    positions = fields.get("positions")
    if isinstance(positions, Mapping):
        bounds = known(positions, _SLICE, "select.positions")
        fields["positions"] = slice(*(bounds.get(name) for name in _SLICE))
    with _typed("select", SelectError):
        return Select(**fields)


def summary_from_json(given: Any) -> tuple[str, ...]:
    """Names of summaries: ``true`` is all of them.

    Raises:
        OptionError: neither a boolean nor a list of names.
    """
    if isinstance(given, bool) or given is None:
        return SUMMARIES if given else ()
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise OptionError(
            "no list of summaries",
            where="summary",
            expected="true, false or a list of names",
            got=repr(given),
        )
    return tuple(str(name) for name in given)


def known(given: Any, names: Iterable[str], where: str) -> Mapping[str, Any]:
    """The object, if all its names are known.

    Raises:
        OptionError: it is no object, or has an unknown name.
        SelectError: the same in a selection.
    """
    error = SelectError if where.startswith("select") else OptionError
    expected = f"an object with {', '.join(names)}"
    if not isinstance(given, Mapping):
        raise error("no object", where=where, expected=expected, got=repr(given))
    unknown = [name for name in given if name not in names]
    if unknown:
        raise error("unknown name", where=where, expected=expected, got=repr(unknown[0]))
    return given


@contextlib.contextmanager
def _typed(where: str, error: type[LogitscopeError]) -> Iterator[None]:
    """A value whose type does not fit is an error of ours."""
    try:
        yield
    except LogitscopeError:
        raise
    except (TypeError, ValueError, AttributeError, OverflowError) as found:
        raise error("a value of another type", where=where, got=str(found)[:200]) from found
