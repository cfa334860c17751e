"""What users pass in (text, token ids, chats; one or a list) as the token ids that the model is fed."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from logitscope.errors import EmptyInputError, InputError, TokenIdError
from logitscope.rows import Ids
from logitscope.tokenizer import Tokenizer

Inputs: TypeAlias = Any
"""A string, a list of strings; ids, a list of ids (NumPy and PyTorch arrays too); a chat, a list of chats."""


def read_inputs(
    inputs: Inputs, *, tokenizer: Tokenizer | None, vocab_size: int, generate: bool
) -> tuple[list[Ids], bool]:
    """Token ids of every prompt, int32 ``[L]`` each, and whether it was one prompt and no list.

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


def _read_one(one: Any, where: str, tokenizer: Tokenizer | None, vocab_size: int, generate: bool) -> Ids:
    if isinstance(one, Sequence) and not isinstance(one, str) and (not one or _is_ids(one)):
        # Python ints of any size: one beyond int64 is a wrong id like any other.
        check_ids(np.array([int(i) for i in one], dtype=object), vocab_size, where)
        return np.asarray(one, dtype=np.int32)
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
    return ids


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
