"""``return_logits``: what a user of a foreign engine asks for, and how it travels to where the rows are."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from logitscope.encodings import encoding
from logitscope.errors import OptionError
from logitscope.rows import Request, Select
from logitscope.wire import select_from_json, select_to_json, summary_from_json
from logitscope.wire.requests import known

KEY = "logitscope"
"""Under which options and tickets travel in the engine's own fields."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What is kept of a sequence's rows.

    Args:
        select: rows and columns.
        encode: the value format; None is the dtype that the engine gives.
        summary: per-row summaries that ride beside the rows.
    """

    select: Select = dataclasses.field(default_factory=Select)
    encode: str | None = None
    summary: tuple[str, ...] = ()

    def request(self, token_ids: Sequence[int], max_new_tokens: int) -> Request:
        """The request for these options."""
        return Request(
            np.asarray(token_ids, np.int32),
            max_new_tokens=max_new_tokens,
            select=self.select,
            encode=self.encode,
            summary=self.summary,
        )

    def message(self) -> str:
        """As a string, which every engine carries along; `read_options` reads it."""
        return json.dumps(
            {"select": select_to_json(self.select), "encode": self.encode, "summary": list(self.summary)}
        )


def read_options(given: Any) -> Options | None:
    """Options from ``return_logits``: a boolean, an object, or the string of `Options.message`.

    An object has ``select`` (a `Select`, its positions, or its JSON object), ``encode`` and ``summary``
    (true for all, or a list of names).

    Returns:
        None when nothing is asked.

    Raises:
        OptionError, SelectError: an unknown name, or a value that there is not.

    Example:
        >>> read_options({"select": "generated", "encode": "float16"}).encode
        'float16'
        >>> read_options(True) == Options()
        True
        >>> read_options(False) is None
        True
    """
    if given is None or isinstance(given, bool):
        return Options() if given else None
    if isinstance(given, Options):
        return given
    if isinstance(given, str):
        given = _parsed(given)
    if not isinstance(given, Mapping):
        raise OptionError(
            "neither a boolean nor an object",
            where="return_logits",
            expected="true, or select, encode, summary",
            got=repr(given),
        )
    fields = known(given, ("select", "encode", "summary"), "return_logits")
    select = fields.get("select") or Select()
    options = Options(
        select if isinstance(select, Select) else select_from_json(select),
        fields.get("encode"),
        summary_from_json(fields.get("summary")),
    )
    if options.encode is not None:
        encoding(options.encode)
    options.request([0], 1)  # what contradicts itself is refused here, and not in the engine's loop
    return options


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise OptionError("no JSON", where="return_logits", got=repr(text)) from error
