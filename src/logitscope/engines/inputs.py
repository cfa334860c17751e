"""What users pass in (text, token ids, chats; one or a list) as the token ids that the model is fed."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from logitscope.errors import EmptyInputError, InputError, SelectError, TokenIdError
from logitscope.rows import Ids, Select
from logitscope.tokenizer import Tokenizer

Inputs: TypeAlias = Any
"""A string, a list of strings; ids, a list of ids (NumPy and PyTorch arrays too); a chat, a list of chats."""


Selects: TypeAlias = "Select | Sequence[Select] | None"
"""One selection for all prompts, or one for each; None keeps no rows."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        token_ids: that the model is fed, int32 ``[L]``.
        messages: of a chat; None for a text or ids.
    """

    token_ids: Ids
    messages: Sequence[Mapping[str, Any]] | None = None


def read_inputs(
    inputs: Inputs, *, tokenizer: Tokenizer | None, vocab_size: int, generate: bool
) -> tuple[list[Prompt], bool]:
    """Every prompt, and whether it was one and no list.

    Raises:
        EmptyInputError: an empty batch, or a prompt without a token.
        TokenIdError: an id outside the vocabulary.
        InputError: no such form of input, or text for a model without a tokenizer.
    """
    inputs = _plain(inputs)
    if _is_one(inputs):
        return [_read_one(inputs, "input", tokenizer, vocab_size, generate)], True
    if not isinstance(inputs, Sequence):
        raise InputError(
            "no such form of input",
            where="inputs",
            expected="text, token ids or chat messages, or a list of them",
            got=type(inputs).__name__,
        )
    if not inputs:
        raise EmptyInputError("an empty batch", where="inputs", expected="one input or more")
    return [
        _read_one(_plain(one), f"inputs[{i}]", tokenizer, vocab_size, generate)
        for i, one in enumerate(inputs)
    ], False


def check_ids(ids: NDArray[Any], vocab_size: int, where: str) -> None:
    """Raise unless there is an id, and every one is in the vocabulary."""
    if ids.size == 0:
        raise EmptyInputError("an empty prompt", where=where, expected="one token or more", got="none")
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        place = int(np.flatnonzero(outside)[0])
        raise TokenIdError(
            "id outside the vocabulary",
            where=f"{where}[{place}]",
            expected=f"0 … {vocab_size - 1}",
            got=ids[place],
        )


def per_prompt(select: Selects, prompts: int) -> list[Select | None]:
    """The selection of each prompt.

    Raises:
        SelectError: another number of them, or something else among them.
    """
    if select is None or isinstance(select, Select):
        return [select] * prompts
    if not isinstance(select, list | tuple) or not all(isinstance(one, Select) for one in select):
        raise SelectError(
            "no selection",
            where="select",
            expected="a Select, such as Select('last'), or a list with one for each prompt",
            got=repr(select)[:80],
        )
    if len(select) != prompts:
        raise SelectError("one selection for each prompt", where="select", expected=prompts, got=len(select))
    return list(select)


def resolved(
    select: Select | None, prompt: Prompt, tokenizer: Tokenizer | None, max_new_tokens: int
) -> Select | None:
    """A selection in positions and token ids: texts and the assistant's turns are looked up.

    Raises:
        SelectError: a text that is not one token, or a prompt that is no chat.
    """
    if select is None:
        return None
    if select.texts:
        select = dataclasses.replace(select, vocab=_token_ids(select.vocab, tokenizer))
    if select.positions == "assistant" and prompt.messages is not None and tokenizer is not None:
        spans = tokenizer.assistant_tokens(prompt.messages, prompt.token_ids)
        rows = [row for first, last in spans for row in range(first - 1, last - 1) if row >= 0]
        length = len(prompt.token_ids)
        rows += [row for row in range(length - 1, length - 1 + max_new_tokens) if row not in rows[-1:]]
        select = dataclasses.replace(select, positions=rows or slice(0))
    return select


def _token_ids(vocab: Any, tokenizer: Tokenizer | None) -> Any:
    if isinstance(vocab, tuple):
        return tuple(_token_ids(one, tokenizer) for one in vocab)
    if not isinstance(vocab, str):
        return vocab
    if tokenizer is None:
        raise SelectError(
            "the model came without a tokenizer", where="Select.vocab", expected="token ids", got=repr(vocab)
        )
    ids = tokenizer.text_ids(vocab)
    if len(ids) != 1:
        pieces = [repr(piece) for piece in tokenizer.pieces(ids)]
        raise SelectError(
            "a text that is not one token",
            where="Select.vocab",
            expected="one token",
            got=f"{vocab!r}: {' + '.join(pieces) or 'none'}",
            fix="A space before a word belongs to its token: ' Paris' and 'Paris' are two of them.",
        )
    return ids[0]


def _read_one(one: Any, where: str, tokenizer: Tokenizer | None, vocab_size: int, generate: bool) -> Prompt:
    if isinstance(one, Sequence) and not isinstance(one, str) and (not one or _is_ids(one)):
        # Python ints of any size: one beyond int64 is a wrong id like any other.
        check_ids(np.array([int(i) for i in one], dtype=object), vocab_size, where)
        return Prompt(np.asarray(one, dtype=np.int32))
    if not (isinstance(one, str) or _is_chat(one)):
        raise InputError(
            "no such form of input",
            where=where,
            expected="a string, a list of ints, or a list of {'role', 'content'} messages",
            got=repr(one)[:80],
        )
    if tokenizer is None:
        raise InputError(
            "the model came without a tokenizer",
            where=where,
            expected="token ids",
            got="text",
            fix="Give open() a tokenizer, or pass token ids.",
        )
    ids = tokenizer.encode(one) if isinstance(one, str) else tokenizer.encode_chat(one, generate=generate)
    check_ids(ids, vocab_size, where)
    return Prompt(ids, None if isinstance(one, str) else one)


def _plain(value: Any) -> Any:
    """Arrays of ids (NumPy, PyTorch) as nested lists; everything else as it is."""
    if hasattr(value, "tolist") and hasattr(value, "shape"):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def _is_ids(value: Any) -> bool:
    return _is_list(value) and all(isinstance(i, numbers.Integral) and not isinstance(i, bool) for i in value)


def _is_chat(value: Any) -> bool:
    return _is_list(value) and all(isinstance(m, Mapping) and "role" in m and "content" in m for m in value)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0


def _is_one(inputs: Any) -> bool:
    return isinstance(inputs, str) or _is_ids(inputs) or _is_chat(inputs)
