"""Hooks in the process of SGLang's users: what they ask for goes out, rows come back as `Logits`.

Source of every name: SGLang 0.5.23.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import inspect
import multiprocessing
import sys
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from logitscope.encodings import EncodedRows, HiddenRows, encoding
from logitscope.errors import (
    HiddenRowsWarning,
    LogitscopeError,
    OptionError,
    RowsError,
    UnsupportedError,
)
from logitscope.head import Head
from logitscope.logits import Logits, LogitsBatch
from logitscope.logits.cut import CutRows
from logitscope.plugins.common.heads import gathered
from logitscope.plugins.common.options import KEY, Options, read_options
from logitscope.plugins.common.rows import discarded, received
from logitscope.rows import HIDDEN_FORMS, Identity
from logitscope.tokenizer import Tokenizer
from logitscope.wire import owners, sweep
from logitscope.wire.results import logits_to_json

RESULT = "logits"
"""Under which a request's `Logits` lie in ``meta_info``."""

PROCESSED = "processed_logits"
"""Under which those rows lie that logitscope itself chose tokens from."""

FORM = f"{KEY}_form"
"""In which form they will be sent; under ``"json"`` they lie there as JSON."""

_ENDING_S = 5.0


def generate(
    original: Callable[..., Any], self: Any, *args: Any, return_logits: Any = None, **kwargs: Any
) -> Any:
    """Around ``Engine.generate``: with ``return_logits``, ``meta_info["logits"]`` is a `Logits`."""
    asked, kwargs = _asking(original, self, args, kwargs, return_logits)
    if asked is None:
        return original(self, *args, **kwargs)
    result = original(self, **kwargs)
    if isinstance(result, Iterator):
        return (checked(chunk, asked) for chunk in result)
    return checked(result, asked)


async def async_generate(
    original: Callable[..., Any], self: Any, *args: Any, return_logits: Any = None, **kwargs: Any
) -> Any:
    """Around ``Engine.async_generate``: as `generate`."""
    asked, kwargs = _asking(original, self, args, kwargs, return_logits)
    if asked is None:
        return await original(self, *args, **kwargs)
    result = await original(self, **kwargs)
    return _checked_later(result, asked) if isinstance(result, AsyncIterator) else checked(result, asked)


def logits(
    self: Any,
    prompt: Any = None,
    *,
    input_ids: Any = None,
    select: Any = None,
    encode: str | None = None,
    summary: Any = False,
) -> Logits | LogitsBatch:
    """Rows ``0 … L-1`` of each prompt: no token is sampled.

    Args:
        prompt: a text, or a list of texts.
        input_ids: instead of it: a list of ids, or a list of such lists.
        select: a `Select`, or its positions; None keeps every row and column.
        encode: the value format; None is float32, which SGLang computes.
        summary: names of per-row summaries, or True for all.

    Returns:
        `Logits` for one prompt, a `LogitsBatch` for a list.
    """
    asked = {"select": select, "encode": encode, "summary": summary}
    found = self.generate(prompt, {"max_new_tokens": 0}, input_ids=input_ids, return_logits=asked)
    if isinstance(found, Mapping):
        result: Logits = found["meta_info"][RESULT]
        return result
    return LogitsBatch([one["meta_info"][RESULT] for one in found])


def extend_engine() -> None:
    """Give ``sglang.Engine`` the method `logits`."""
    from sglang.srt.entrypoints.engine import Engine

    Engine.logits = logits


def receive(
    original: Callable[..., Any],
    self: Any,
    meta_info: dict[str, Any],
    state: Any,
    customized_info: Mapping[str, Any],
    index: int,
    finish_reason: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Around ``TokenizerManager.update_request_meta_info``: a ticket becomes rows."""
    rest = {key: values for key, values in customized_info.items() if key != KEY}
    original(self, meta_info, state, rest, index, finish_reason, *args, **kwargs)
    tickets = customized_info.get(KEY)
    ticket = None if tickets is None else tickets[index]
    before = vars(state).pop("logitscope", None)
    if ticket is None:
        return
    try:
        found = _received(self, ticket)
        if state.out_list and before is not None:
            # The user has not taken the chunk before this one yet, and SGLang gives out the newest only.
            found = joined(before, found)
        custom = (state.obj.sampling_params or {}).get("custom_params") or {}
        shown = found if custom.get(FORM) != "json" else _as_json(found)
    except Exception as error:  # noqa: BLE001 - whatever it is, other requests go on
        found = shown = RowsError(f"{type(error).__name__}: {error}", where="return_logits")
    meta_info[RESULT] = shown
    if finish_reason is None:  # SGLang may hold the states of requests that failed, and rows would stay
        state.logitscope = found
    if "processed" in ticket:
        meta_info[PROCESSED] = _received(self, {**ticket, **ticket["processed"]})


def _as_json(found: Logits | LogitscopeError) -> dict[str, Any]:
    return logits_to_json(found) if isinstance(found, Logits) else {"error": str(found)}


def joined(before: Logits | LogitscopeError, after: Logits | LogitscopeError) -> Logits | LogitscopeError:
    """Rows of two chunks of one stream as one result; an error of either is that of both."""
    if isinstance(before, LogitscopeError):
        return before
    if isinstance(after, LogitscopeError):
        return after
    values: Any = after.values
    if isinstance(values, CutRows):
        values = values.joined(before.values)
    elif isinstance(values, EncodedRows):
        assert isinstance(before.values, EncodedRows)
        stored = np.concatenate([before.values.stored, values.stored])
        head = values.head if isinstance(values, HiddenRows) else None
        values = encoding(after.encoding or "").held(stored, after.identity, head)
    elif values is not None:
        values = np.concatenate([before.values, values])
    return dataclasses.replace(
        after,
        values=values,
        positions=np.concatenate([before.positions, after.positions]),
        summary={name: np.concatenate([before.summary[name], a]) for name, a in after.summary.items()},
    )


def _received(manager: Any, ticket: Mapping[str, Any]) -> Logits | LogitscopeError:
    if "error" in ticket:
        return RowsError(ticket["error"], where="return_logits")
    tokenizer = _tokenizer(manager)
    own = {} if tokenizer is None else {"tokenizer_hash": tokenizer.hash, "tokenizer_size": len(tokenizer)}
    if ticket["warning"] is not None:
        warnings.warn(
            f"plain rows in place of hidden ones: {ticket['warning']}", HiddenRowsWarning, stacklevel=2
        )
    identity = Identity(**{**ticket["identity"], **own})
    try:
        return received(ticket, identity, tokenizer, functools.partial(_head, manager, identity.vocab_size))
    except LogitscopeError as error:
        return error


def _head(manager: Any, vocab_size: int, key: tuple[str, int]) -> Head:
    """The engine's head, gathered when it is first needed and again when its weights were changed."""
    held = getattr(manager, "logitscope_head", None)
    if held is None or held[0] != key:
        held = manager.logitscope_head = (key, gathered(key[0], vocab_size))
    found: Head = held[1]
    return found


def launched(original: Callable[..., Any], cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``Engine._launch_subprocesses``: where the HTTP server is, it learns what we add."""
    atexit.register(sweep)  # a server ends without `shutdown`
    server = sys.modules.get("sglang.srt.entrypoints.http_server")
    if server is not None:
        from logitscope.plugins.sglang.http import extend_server

        extend_server(server)
    return original(cls, *args, **kwargs)


async def batch_output(
    original: Callable[..., Any], self: Any, recv_obj: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around ``TokenizerManager._handle_batch_output``: rows of requests that were aborted are given back."""
    gone = [i for i, rid in enumerate(recv_obj.rids) if rid not in self.rid_to_state]
    if gone and getattr(recv_obj, "customized_info", None) is not None:
        from sglang.srt.managers.io_struct import unwrap_from_pickle

        tickets = unwrap_from_pickle(recv_obj.customized_info).get(KEY) or []
        for i in gone:
            if i < len(tickets) and tickets[i] is not None:
                discarded(tickets[i])
    return await original(self, recv_obj, *args, **kwargs)


def shutdown(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``Engine.shutdown``: its processes leave nothing in shared memory; results stay valid."""
    try:
        return original(self, *args, **kwargs)
    finally:
        late = time.monotonic() + _ENDING_S
        while time.monotonic() < late and owners() & {p.pid for p in multiprocessing.active_children()}:
            time.sleep(0.02)
        sweep()


# -- what is asked -------------------------------------------------------------------------------------


def _asking(
    original: Callable[..., Any],
    engine: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    return_logits: Any,
) -> tuple[list[bool] | None, dict[str, Any]]:
    """Which prompts ask, and the call's arguments with what they ask for in their sampling parameters."""
    if return_logits is None or return_logits is False:
        return None, kwargs
    bound = inspect.signature(original).bind(engine, *args, **kwargs).arguments
    given = {name: value for name, value in bound.items() if name != "self"}
    given["sampling_params"], asked = folded(given, return_logits)
    return asked, given


def folded(
    given: Mapping[str, Any], return_logits: Any, *, form: str | None = None
) -> tuple[Any, list[bool]]:
    """Sampling parameters that carry what is asked, and which of the answers will have rows.

    Args:
        given: ``prompt``, ``input_ids`` and ``sampling_params`` of a call.
        return_logits: what is asked.
        form: in which form rows will be sent: ``"json"`` for answers that hold them as JSON, ``"arrow"`` for
            `Logits` that become a stream; None for `Logits` that stay in this process.

    Raises:
        OptionError, SelectError, UnsupportedError: it cannot be asked here.
    """
    from logitscope.plugins.sglang.hooks import check

    check()
    count = _prompts(given)
    options = _options(return_logits, count)
    params = given.get("sampling_params")
    listed = list(params) if isinstance(params, Sequence) else [params or {}] * (count or 1)
    if len(listed) != len(options):
        raise OptionError(
            "as many sampling parameters as prompts",
            where="sampling_params",
            expected=len(options),
            got=len(listed),
        )
    carrying = [_carrying(p, o, form) for p, o in zip(listed, options, strict=True)]
    samples = int(listed[0].get("n", 1))
    asked = [option is not None for option in options for _ in range(samples)]
    return carrying[0] if count is None else carrying, asked


def _prompts(given: Mapping[str, Any]) -> int | None:
    """How many prompts a call has; None when it is one that is no list."""
    prompt, ids = given.get("prompt"), given.get("input_ids")
    if prompt is not None:
        return None if isinstance(prompt, str) else len(prompt)
    if not ids or isinstance(ids[0], int):
        return None
    return len(ids)


def _options(return_logits: Any, count: int | None) -> list[Options | None]:
    if not isinstance(return_logits, list | tuple):
        return [read_options(return_logits)] * (count or 1)
    if count is None or len(return_logits) != count:
        raise OptionError(
            "a list has one entry a prompt",
            where="return_logits",
            expected=count or "no list",
            got=len(return_logits),
        )
    return [read_options(one) for one in return_logits]


def _carrying(params: Mapping[str, Any], options: Options | None, form: str | None) -> dict[str, Any]:
    if options is None:
        return dict(params)
    return {**params, "custom_params": carrying(params.get("custom_params"), options, form)}


def carrying(custom: Mapping[str, Any] | None, options: Options, form: str | None) -> dict[str, Any]:
    """A request's ``custom_params`` with what it asks for.

    Raises:
        UnsupportedError: hidden rows, which need the model's head beside them, in a form that is sent.
    """
    if form is not None and options.encode in HIDDEN_FORMS:
        raise UnsupportedError(
            "hidden rows are not sent over HTTP in this version",
            where="encode",
            expected="a form that is no hidden one",
            got=repr(options.encode),
            fix="Engine.generate and ls.open(..., engine='sglang') give them.",
        )
    return {**(custom or {}), KEY: options.message(), **({} if form is None else {FORM: form})}


# -- what comes back -----------------------------------------------------------------------------------


def checked(result: Any, asked: Sequence[bool]) -> Any:
    """The engine's answer, if everyone who asked has rows; ``asked`` has one entry an answer.

    Raises:
        LogitscopeError: the rows of a request could not be given.
    """
    for i, answer in enumerate(result if isinstance(result, list) else [result]):
        wanted = asked[answer.get("index", i)] if len(asked) > 1 else asked[0]
        found = answer["meta_info"].get(RESULT)
        if isinstance(found, LogitscopeError):
            raise found
        if isinstance(found, Mapping) and "error" in found:
            raise RowsError(found["error"])
        if wanted and found is None:
            raise RowsError(
                "SGLang gave no rows", where=f"prompt {i}", got=answer["meta_info"].get("finish_reason")
            )
    return result


async def _checked_later(chunks: AsyncIterator[Any], asked: Sequence[bool]) -> AsyncIterator[Any]:
    async for chunk in chunks:
        yield checked(chunk, asked)


def _tokenizer(manager: Any) -> Tokenizer | None:
    """The manager's tokenizer as results use it, made once."""
    if manager.tokenizer is None:
        return None
    found: Tokenizer | None = getattr(manager, "logitscope_tokenizer", None)
    if found is None or found.wrapped is not manager.tokenizer:
        found = manager.logitscope_tokenizer = Tokenizer(manager.tokenizer)
    return found
