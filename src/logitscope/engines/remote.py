"""A server of logitscope as an engine: rows come over HTTP, and everything else is as with an engine here."""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from logitscope import tensors
from logitscope.engines.asynchronous import AsyncCalls
from logitscope.engines.base import Capabilities
from logitscope.engines.cache_dir import cache_dir
from logitscope.engines.connection import Body, Client
from logitscope.errors import (
    FileFormatError,
    IdentityMismatchError,
    InputError,
    SelectError,
    UnsupportedError,
)
from logitscope.rows import Buffer, Identity, Ids, Request, RowBlock, Stream
from logitscope.wire import RowReader, request_to_json
from logitscope.wire.shared import PROOF_HEADER, shown_proof


class RemoteEngine(AsyncCalls):
    """An engine at the other end of a connection; many threads may use it at once, and event loops.

    Attributes:
        address: of the server.
    """

    name = "remote"
    _fills_buffers = False

    def __init__(self, client: Client, *, memory_limit_bytes: int | None, shared_memory: bool | None) -> None:
        super().__init__()
        self.address, self._client = client.address, client
        info = client.info()
        self.identity = Identity(**info["identity"])
        self.capabilities = Capabilities(**{**info["capabilities"], "keep_on_device": False})
        self.context_length = info["context_length"]
        self.memory_limit_bytes = memory_limit_bytes
        self._shared_memory = shared_memory
        self._proof = self._host_proof(info)
        self._head_name = info["head"]
        self._head: Any = None
        self._fetching = threading.Lock()
        facts = info["tokenizer"]
        self.tokenizer = None if facts is None else RemoteTokenizer(client, facts)  # type: ignore[assignment]

    @classmethod
    def open(
        cls,
        model: Any,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        retries: int = 3,
        memory_limit_bytes: int | None = None,
        shared_memory: bool | None = None,
    ) -> Self:
        """Connect to a server that ``logitscope serve`` started.

        Args:
            model: its address, as ``http://localhost:8000``.
            api_key: that it asks for.
            timeout_s: how long to wait for the next bytes of an answer, and between tries in all.
            retries: how often at most a request is made again that the server refused because it was busy, or
                that was not sent at all; what asks for rows is never sent twice.
            memory_limit_bytes: larger requests are refused here; None is half of the free memory.
            shared_memory: whether rows of a server on this host come through memory that both share, without
                a copy; None where it can be. Rows that find no room there come over HTTP.

        Raises:
            ConnectionFailedError: nobody answers there, or somebody else.
            UnsupportedError: ``shared_memory=True``, and the server is not on this host or gives none.
        """
        client = Client(str(model), api_key=api_key, timeout_s=timeout_s, retries=retries)
        return cls(client, memory_limit_bytes=memory_limit_bytes, shared_memory=shared_memory)

    @property
    def head(self) -> Any:
        """The server's head, fetched once and kept in the user's cache by its hash; None if it has none."""
        with self._fetching:
            if self._head is None and self._head_name is not None:
                self._head = self._fetched_head(self._head_name)
            return self._head

    def close(self) -> None:
        """Let go of the connections; the server goes on."""
        super().close()
        self._client.close()

    def _working_bytes(self, requests: Sequence[Request]) -> int:
        """A block of the widest rows."""
        return 256 * 4 * self.vocab_size

    def _extras_bytes(self, request: Request) -> int:
        """None are planned here: the server plans hidden states and attention weights."""
        return 0

    def _run(self, requests: Sequence[Request], buffer: Buffer | None) -> Stream:
        body = {"requests": [request_to_json(one) for one in requests]}
        given: dict[tuple[int, str], int] = {}
        with contextlib.ExitStack() as stack:
            answer = self._answer(stack, body)
            reader = RowReader(answer, writable=True, shared=self._proof is not None)
            check_same_model(
                self.identity,
                reader.identity,
                what="the server serves another model by now",
                where=self.address,
                fix="Open it again.",
            )
            for item in reader:
                if isinstance(item, RowBlock) and buffer is not None and item.values is not None:
                    key = (item.index, item.stage)
                    first = given.get(key, 0)
                    place = buffer(item.index, item.stage, first, len(item))
                    place[...] = item.values
                    item.values, item.room = place, None
                    given[key] = first + len(item)
                yield item

    def _answer(self, stack: contextlib.ExitStack, body: Any) -> Body:
        """The answer to a request for rows, until the stack is left."""
        if self._proof is None:
            return stack.enter_context(self._client.rows(body))
        try:
            return stack.enter_context(self._client.rows(body, {PROOF_HEADER: self._proof}))
        except InputError as error:
            if error.where != PROOF_HEADER:
                raise
        self._proof = self._host_proof(self._client.info())  # another server is there by now
        headers = {} if self._proof is None else {PROOF_HEADER: self._proof}
        return stack.enter_context(self._client.rows(body, headers))

    def _host_proof(self, info: Mapping[str, Any]) -> str | None:
        """What shows the server that it is on this host; None where it is not, or shall not be used."""
        path = info.get("shared_memory")
        proof = None if path is None or self._shared_memory is False else shown_proof(str(path))
        if proof is None and self._shared_memory:
            raise UnsupportedError(
                "no memory is shared with the server",
                where=self.address,
                expected="a server on this host, of the same user",
                got="one that gives none" if path is None else f"{path} cannot be read here",
                fix="Leave out shared_memory=True: rows come over HTTP.",
            )
        return proof

    # -- the head --------------------------------------------------------------------------------------

    def _fetched_head(self, name: str) -> Any:
        file = cache_dir() / "heads" / f"{name}.safetensors"
        if file.exists():
            try:
                return _head_of(file.read_bytes(), name)
            except FileFormatError:
                file.unlink(missing_ok=True)
        data = self._client.data("GET", f"/heads/{name}")
        head = _head_of(data, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{secrets.token_hex(4)}")
        part.write_bytes(data)
        part.replace(file)
        return head


class RemoteTokenizer:
    """The server's tokenizer; what `logitscope.tokenizer.Tokenizer` is, asked over the connection."""

    def __init__(self, client: Client, facts: Mapping[str, Any]) -> None:
        self._client = client
        self._fetching = threading.Lock()
        self._fetched: Any = None
        self._size = int(facts["size"])
        self.hash = str(facts["hash"])
        self.eos_token_id = facts["eos_token_id"]
        self.special_ids = frozenset(facts["special_ids"])
        self.has_chats = bool(facts["has_chats"])

    def __len__(self) -> int:
        return self._size

    def encode(self, text: str) -> Ids:
        """Ids of a text, with the special tokens that the tokenizer adds by itself; int32 ``[L]``."""
        return self._ids({"text": text})

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, generate: bool) -> Ids:
        """Ids of a chat by the tokenizer's own template; int32 ``[L]``."""
        return self._ids({"messages": list(messages), "generate": generate})

    def text_ids(self, text: str) -> list[int]:
        """Ids of a text by itself."""
        return [int(i) for i in self._ids({"text": text, "special": False})]

    def assistant_tokens(
        self, messages: Sequence[Mapping[str, Any]], token_ids: Ids
    ) -> list[tuple[int, int]]:
        """First token of each of the assistant's messages in a chat, and the one after its last.

        Args:
            messages: the chat.
            token_ids: that `encode_chat` made of it.

        Raises:
            SelectError: the template writes a message otherwise when others follow.
        """
        body = {"messages": list(messages), "assistant": True}
        for generate in (False, True):  # they differ where an assistant's last message is left open
            found = self._client.json("POST", "/tokenize", {**body, "generate": generate})
            if np.array_equal(found["token_ids"], token_ids):
                return [(int(first), int(last)) for first, last in found["assistant_tokens"]]
        raise SelectError(
            "these are not the chat's token ids", where="messages", fix="Give the positions themselves."
        )

    def decode(self, token_ids: Sequence[int] | NDArray[Any], *, special: bool = False) -> str:
        """Text of a run of ids; special tokens are left out unless ``special``."""
        body = {"token_ids": [int(i) for i in token_ids], "special": special}
        return str(self._client.json("POST", "/detokenize", body)["text"])

    def pieces(self, token_ids: Sequence[int] | NDArray[Any]) -> list[str]:
        """Text of each id by itself."""
        pieces = self._vocabulary()["pieces"]
        return [str(pieces[int(i)]) for i in token_ids]

    def token_bytes(self, token_ids: Sequence[int] | NDArray[Any]) -> list[bytes | None]:
        """Bytes of each id by itself; None for an id without a token."""
        vocabulary = self._vocabulary()
        found = []
        for token_id in (int(i) for i in token_ids):
            data = vocabulary["bytes"].get(str(token_id), vocabulary["pieces"][token_id].encode().hex())
            found.append(None if data is None else bytes.fromhex(data))
        return found

    def _vocabulary(self) -> Any:
        with self._fetching:
            if self._fetched is None:
                self._fetched = self._client.json("GET", "/vocabulary")
        return self._fetched

    def _ids(self, body: dict[str, Any]) -> Ids:
        return np.asarray(self._client.json("POST", "/tokenize", body)["token_ids"], np.int32)


def check_same_model(
    ours: Identity, theirs: Identity, *, what: str, where: str, fix: str | None = None
) -> None:
    """Raise unless rows of the two may be mixed.

    Raises:
        IdentityMismatchError: weights, tokenizer, vocabulary or dtype differ.
    """
    for field in ("weights_hash", "tokenizer_hash", "vocab_size", "dtype"):
        if getattr(ours, field) != getattr(theirs, field):
            raise IdentityMismatchError(
                f"{what}: {field} differs",
                where=where,
                expected=getattr(ours, field),
                got=getattr(theirs, field),
                fix=fix,
            )


def _head_of(data: bytes, name: str) -> Any:
    """The head of the bytes of a safetensors file.

    Raises:
        FileFormatError: damaged, or another head.
    """
    from safetensors import SafetensorError, deserialize

    from logitscope.head import Head

    try:
        size = int.from_bytes(data[:8], "little")
        facts = json.loads(data[8 : 8 + size])["__metadata__"]
        dtypes = json.loads(facts["dtypes"])
        arrays = {}
        for key, entry in deserialize(data):  # type: ignore[no-untyped-call]
            kind = tensors.BFLOAT16 if dtypes[key] == "bfloat16" else np.dtype(dtypes[key])
            arrays[key] = np.frombuffer(bytearray(entry["data"]), kind).reshape(entry["shape"])
        head = Head.from_arrays(arrays, json.loads(facts["facts"]))
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise FileFormatError("no head, or a damaged one", got=f"{type(error).__name__}: {error}") from error
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            "hidden rows need PyTorch to be read",
            where="encode",
            fix="pip install 'logitscope[transformers]'",
        ) from error
    if head.hash != name:
        raise FileFormatError("another head than its name says", expected=name, got=head.hash)
    return head
