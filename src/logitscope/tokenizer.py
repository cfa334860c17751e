"""A Transformers tokenizer as engines and results use it: ids in, text and pieces out, and its hash."""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from logitscope.errors import InputError, SelectError
from logitscope.rows import Ids


class Tokenizer:
    """Wraps a Transformers tokenizer; every id it returns is what the model is fed.

    Args:
        tokenizer: a ``PreTrainedTokenizerBase``.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.wrapped = tokenizer

    def encode(self, text: str) -> Ids:
        """Ids of a text, with the special tokens that the tokenizer adds by itself; int32 ``[L]``.

        Raises:
            InputError: half of a surrogate pair, which is no character.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                "text with half of a surrogate pair",
                where=f"character {error.start}",
                expected="Unicode characters",
                got=repr(text[error.start]),
            ) from error
        return np.asarray(self.wrapped(text, verbose=False)["input_ids"], dtype=np.int32)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, generate: bool) -> Ids:
        """Ids of a chat by the tokenizer's own template; int32 ``[L]``.

        The assistant's turn is opened unless the last message is the assistant's own; then, when
        generating, that message is left open and goes on.
        """
        own = messages[-1].get("role") == "assistant"
        return self._templated(messages, opened=not own, going_on=generate and own)

    def assistant_tokens(
        self, messages: Sequence[Mapping[str, Any]], token_ids: Ids
    ) -> list[tuple[int, int]]:
        """First token of each of the assistant's messages in a chat, and the one after its last.

        The token that ends the turn belongs to it, white space after that does not.

        Args:
            messages: the chat.
            token_ids: that `encode_chat` made of it.

        Raises:
            SelectError: the template writes a message otherwise when others follow.
        """
        found = []
        for i, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self._templated(messages[:i], opened=True)
            after = self._templated(messages[: i + 1], opened=False)
            last = min(len(after), len(token_ids))
            same = len(before) <= last and np.array_equal(token_ids[: len(before)], before)
            if not same or not np.array_equal(token_ids[:last], after[:last]):
                raise SelectError(
                    "the chat template writes a message otherwise when others follow",
                    where=f"messages[{i}]",
                    fix="Give the positions themselves.",
                )
            found.append((len(before), self._turn_end(token_ids, len(before), last)))
        return found

    def text_ids(self, text: str) -> list[int]:
        """Ids of a text by itself, without the special tokens that the tokenizer adds."""
        return [int(i) for i in self.wrapped(text, add_special_tokens=False, verbose=False)["input_ids"]]

    def _turn_end(self, token_ids: Ids, first: int, last: int) -> int:
        """Where a message ends: after its last special token, if nothing but white space follows."""
        end = last
        while end > first and int(token_ids[end - 1]) not in self.special_ids:
            if self.pieces(token_ids[end - 1 : end])[0].strip():
                return last
            end -= 1
        return end if end > first else last

    def _templated(
        self, messages: Sequence[Mapping[str, Any]], *, opened: bool, going_on: bool = False
    ) -> Ids:
        try:
            encoded = self.wrapped.apply_chat_template(
                list(messages),
                add_generation_prompt=opened,
                continue_final_message=going_on,
                tokenize=True,
                return_dict=True,
            )
        except Exception as error:  # a template is a program, which may raise anything
            raise InputError(f"the chat template failed: {error}", where="messages") from error
        return np.asarray(encoded["input_ids"], dtype=np.int32)

    def decode(self, token_ids: Sequence[int] | NDArray[Any], *, special: bool = False) -> str:
        """Text of a run of ids; special tokens are left out unless ``special``."""
        return str(
            self.wrapped.decode(
                [int(i) for i in token_ids],
                skip_special_tokens=not special,
                clean_up_tokenization_spaces=False,
            )
        )

    def pieces(self, token_ids: Sequence[int] | NDArray[Any]) -> list[str]:
        """Text of each id by itself; incomplete UTF-8 shows as U+FFFD, an id without a token as ``<id>``."""
        table = self._token_bytes
        return [
            table[i].decode("utf-8", "replace") if i in table else f"<{i}>"
            for i in (int(i) for i in token_ids)
        ]

    def token_bytes(self, token_ids: Sequence[int] | NDArray[Any]) -> list[bytes | None]:
        """Bytes of each id by itself, half characters as they are; None for an id without a token.

        Those of a run of ids, put together, are the UTF-8 text of the run, special tokens included.
        """
        return [self._token_bytes.get(int(i)) for i in token_ids]

    def __len__(self) -> int:
        return len(self.wrapped)

    @property
    def has_chats(self) -> bool:
        """Whether it has a template for chats."""
        return self.wrapped.chat_template is not None

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for no text."""
        return frozenset(int(i) for i in self.wrapped.all_special_ids)

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's end-of-sequence id, if it has one."""
        return None if self.wrapped.eos_token_id is None else int(self.wrapped.eos_token_id)

    @functools.cached_property
    def _token_bytes(self) -> dict[int, bytes]:
        to_bytes = _piece_to_bytes(self.wrapped)
        added = {int(i): str(token) for i, token in self.wrapped.added_tokens_decoder.items()}
        table = {int(i): to_bytes(piece) for piece, i in self.wrapped.get_vocab().items()}
        return table | {i: text.encode() for i, text in added.items()}

    @functools.cached_property
    def hash(self) -> str:
        """``<ids to bytes>-<special tokens>``, two xxh3 hashes; the same for a GGUF and its original."""
        ids = xxhash.xxh3_64()
        for token_id, data in sorted(self._token_bytes.items()):
            ids.update(struct.pack("<ii", token_id, len(data)) + data)
        special = sorted(self.special_ids)
        return f"{ids.hexdigest()}-{xxhash.xxh3_64_hexdigest(struct.pack(f'<{len(special)}i', *special))}"


def _piece_to_bytes(tokenizer: Any) -> Any:
    """How the vocabulary's strings spell bytes: byte-level alphabet, or SentencePiece's marks."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = json.dumps(json.loads(backend.to_str()).get("decoder") or {}) if backend is not None else ""
    if "ByteLevel" in decoder:
        alphabet = _byte_level_alphabet()
        return lambda piece: b"".join(alphabet.get(c) or c.encode() for c in piece)
    return _sentencepiece_bytes


def _sentencepiece_bytes(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("\u2581", " ").encode()


def _byte_level_alphabet() -> dict[str, bytes]:
    """GPT-2's visible stand-in for each byte: printable Latin-1 as it is, the others from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in visible]
    table = {chr(b): bytes([b]) for b in visible}
    return table | {chr(0x100 + n): bytes([b]) for n, b in enumerate(hidden)}
