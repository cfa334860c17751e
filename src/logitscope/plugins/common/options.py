"""``return_logits``: what a user of a foreign engine asks for, and how it travels to where the rows are."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from logitscope.encodings import encoding
from logitscope.errors import OptionError
from logitscope.rows import Request, Sampling, Select
from logitscope.wire import select_from_json, select_to_json, summary_from_json
from logitscope.wire.requests import known, sampling_from_json, sampling_to_json

_USERS = ("select", "encode", "summary")
_OWN = ("sampling", "processed", "sample_index", "only_stop_ids")

KEY = "logitscope"
"""Under which options and tickets travel in the engine's own fields."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What is kept of a sequence's rows.

    Args:
        select: rows and columns.
        encode: the value format; None is the dtype that the engine gives.
        summary: per-row summaries that ride beside the rows.
        sampling: how tokens are chosen by logitscope itself; None leaves that to the engine.
        processed: whether the rows that it chose from are kept, too.
        sample_index: which sample of its prompt this is, for the draw.
        only_stop_ids: whether nothing but the request's own stop ids and strings may end it.
    """

    select: Select | None = dataclasses.field(default_factory=Select)
    encode: str | None = None
    summary: tuple[str, ...] = ()
    sampling: Sampling | None = None
    processed: bool = False
    sample_index: int = 0
    only_stop_ids: bool = False

    @classmethod
    def of(cls, request: Request) -> Self:
        """What keeps the rows of a request, and chooses its tokens as it says."""
        sampling = request.sampling
        own = bool(request.max_new_tokens) and (not sampling.plain or request.processed)
        return cls(
            request.select,
            request.encode,
            request.summary,
            sampling if own else None,
            request.processed,
            request.sample_index,
            only_stop_ids=sampling.ignore_eos and bool(sampling.stop_token_ids),
        )

    @property
    def idle(self) -> bool:
        """Whether the engine alone does all that is asked."""
        return self.select is None and self.sampling is None and not self.only_stop_ids

    def request(self, token_ids: Sequence[int], max_new_tokens: int) -> Request:
        """The request for these options."""
        return Request(
            np.asarray(token_ids, np.int32),
            max_new_tokens=max_new_tokens,
            select=self.select,
            encode=self.encode,
            summary=self.summary,
            sampling=self.sampling or Sampling(),
            processed=self.processed,
            sample_index=self.sample_index,
        )

    def message(self) -> str:
        """As a string, which every engine carries along; `read_options` reads it."""
        fields: dict[str, Any] = {
            "select": None if self.select is None else select_to_json(self.select),
            "encode": self.encode,
            "summary": list(self.summary),
        }
        if self.sampling is not None:
            fields["sampling"] = sampling_to_json(self.sampling)
            fields |= {"processed": self.processed, "sample_index": self.sample_index}
        if self.only_stop_ids:
            fields["only_stop_ids"] = True
        return json.dumps(fields)


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
    users = not isinstance(given, str)
    if isinstance(given, str):
        given = _parsed(given)
    if not isinstance(given, Mapping):
        raise OptionError(
            "neither a boolean nor an object",
            where="return_logits",
            expected="true, or select, encode, summary",
            got=repr(given),
        )
    fields = known(given, _USERS if users else (*_USERS, *_OWN), "return_logits")
    select = fields.get("select") or (Select() if users else None)
    sampling = fields.get("sampling")
    options = Options(
        select if select is None or isinstance(select, Select) else select_from_json(select),
        fields.get("encode"),
        summary_from_json(fields.get("summary")),
        None if sampling is None else sampling_from_json(sampling),
        fields.get("processed", False),
        fields.get("sample_index", 0),
        fields.get("only_stop_ids", False),
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
