"""A server of logitscope as an engine: rows come over HTTP, and everything else is as with an engine here."""

from __future__ import annotations

import functools
import http.client
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import urllib3
from numpy.typing import NDArray

from logitscope import tensors
from logitscope.engines.base import Capabilities, Engine
from logitscope.engines.cache_dir import cache_dir
from logitscope.errors import (
    ConnectionFailedError,
    FileFormatError,
    LogitscopeError,
    SelectError,
    UnsupportedError,
)
from logitscope.rows import Buffer, End, Identity, Ids, Request, RowBlock, Stream
from logitscope.wire import RowReader, request_to_json
from logitscope.wire.errors import error_from_json

_CONNECT_S = 10.0


class RemoteEngine(Engine):
    """An engine at the other end of a connection.

    Attributes:
        address: of the server.
    """

    name = "remote"

    def __init__(
        self, address: str, *, api_key: str | None, timeout_s: float, memory_limit_bytes: int | None
    ) -> None:
        self.address = address.rstrip("/")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        timeout = urllib3.Timeout(connect=_CONNECT_S, read=timeout_s)
        # What asks for rows is never sent twice by itself: the server may be working on it.
        self._pool = urllib3.PoolManager(headers=headers, timeout=timeout, retries=False, maxsize=8)
        info = self._info()
        self.identity = Identity(**info["identity"])
        self.capabilities = Capabilities(**{**info["capabilities"], "keep_on_device": False})
        self.context_length = info["context_length"]
        self.memory_limit_bytes = memory_limit_bytes
        self._head_name = info["head"]
        facts = info["tokenizer"]
        self.tokenizer = None if facts is None else RemoteTokenizer(self._json, facts)  # type: ignore[assignment]

    @classmethod
    def open(
        cls,
        model: Any,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        memory_limit_bytes: int | None = None,
    ) -> Self:
        """Connect to a server that ``logitscope serve`` started.

        Args:
            model: its address, as ``http://localhost:8000``.
            api_key: that it asks for.
            timeout_s: how long to wait for the next bytes of an answer.
            memory_limit_bytes: larger requests are refused here; None is half of the free memory.

        Raises:
            ConnectionFailedError: nobody answers there, or somebody else.
        """
        return cls(str(model), api_key=api_key, timeout_s=timeout_s, memory_limit_bytes=memory_limit_bytes)

    @functools.cached_property
    def head(self) -> Any:
        """The server's head, fetched once and kept in the user's cache by its hash; None if it has none."""
        return None if self._head_name is None else self._fetched_head(self._head_name)

    def close(self) -> None:
        """Let go of the connections; the server goes on."""
        super().close()
        self._pool.clear()

    def _working_bytes(self, requests: Sequence[Request]) -> int:
        """A block of the widest rows."""
        return 256 * 4 * self.vocab_size

    def _extras_bytes(self, request: Request) -> int:
        """None are planned here: the server plans hidden states and attention weights."""
        return 0

    def _run(self, requests: Sequence[Request], buffer: Buffer | None) -> Stream:
        body = json.dumps({"requests": [request_to_json(one) for one in requests]}).encode()
        answer = self._ask("POST", "/rows", body)
        given: dict[tuple[int, str], int] = {}
        complete = False
        try:
            for item in _read(answer):
                if isinstance(item, RowBlock) and buffer is not None and item.values is not None:
                    key = (item.index, item.stage)
                    first = given.get(key, 0)
                    place = buffer(item.index, item.stage, first, len(item))
                    place[...] = item.values
                    item.values = place
                    given[key] = first + len(item)
                yield item
            complete = True
        finally:
            if complete:
                answer.drain_conn()
                answer.release_conn()
            else:
                answer.close()  # the server sees that nobody reads

    # -- HTTP ------------------------------------------------------------------------------------------

    def _info(self) -> dict[str, Any]:
        info = self._json("GET", "/info")
        if not isinstance(info, dict) or info.get("server") != "logitscope":
            raise ConnectionFailedError(
                "no server of logitscope", where=self.address, fix="Start one: logitscope serve MODEL"
            )
        return info

    def _json(self, method: str, path: str, content: Any = None) -> Any:
        body = None if content is None else json.dumps(content).encode()
        answer = self._ask(method, path, body)
        try:
            return json.loads(answer.read())
        except ValueError as error:
            raise ConnectionFailedError(
                "no server of logitscope", where=f"{self.address}{path}", got=str(error)[:80]
            ) from error
        except urllib3.exceptions.HTTPError as error:
            raise _lost(self.address, error) from error
        finally:
            answer.release_conn()

    def _ask(self, method: str, path: str, body: bytes | None = None) -> Any:
        headers = {**self._pool.headers, "Content-Type": "application/json"}
        try:
            answer = self._pool.request(
                method, self.address + path, body=body, headers=headers, preload_content=False
            )
        except urllib3.exceptions.HTTPError as error:
            raise ConnectionFailedError(
                "nobody answers",
                where=self.address + path,
                got=f"{type(error).__name__}: {error}",
                fix="Is the server running, and is that its address?",
            ) from error
        if answer.status == 200:
            return answer
        raise self._refused(answer, path)

    def _refused(self, answer: Any, path: str) -> LogitscopeError:
        data = answer.read()
        answer.release_conn()
        try:
            found = json.loads(data)["error"]
            if answer.status != 404:
                return error_from_json(found)
        except (ValueError, KeyError, TypeError):
            pass
        return ConnectionFailedError(
            "no server of logitscope", where=f"{self.address}{path}", got=f"status {answer.status}"
        )

    # -- the head --------------------------------------------------------------------------------------

    def _fetched_head(self, name: str) -> Any:
        file = cache_dir() / "heads" / f"{name}.safetensors"
        if file.exists():
            try:
                return _head_of(file.read_bytes(), name)
            except FileFormatError:
                file.unlink(missing_ok=True)
        data = self._ask("GET", f"/heads/{name}").read()
        head = _head_of(data, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{secrets.token_hex(4)}")
        part.write_bytes(data)
        part.replace(file)
        return head


class RemoteTokenizer:
    """The server's tokenizer; what `logitscope.tokenizer.Tokenizer` is, asked over the connection."""

    def __init__(self, ask: Any, facts: Mapping[str, Any]) -> None:
        self._ask = ask
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
        """Not here: the template is the server's.

        Raises:
            SelectError: always.
        """
        raise SelectError(
            "rows of the assistant are not known at a client in this version",
            where="Select.positions",
            fix="Give the positions themselves.",
        )

    def decode(self, token_ids: Sequence[int] | NDArray[Any], *, special: bool = False) -> str:
        """Text of a run of ids; special tokens are left out unless ``special``."""
        body = {"token_ids": [int(i) for i in token_ids], "special": special}
        return str(self._ask("POST", "/detokenize", body)["text"])

    def pieces(self, token_ids: Sequence[int] | NDArray[Any]) -> list[str]:
        """Text of each id by itself."""
        return [self._pieces[int(i)] for i in token_ids]

    @functools.cached_property
    def _pieces(self) -> list[str]:
        return [str(piece) for piece in self._ask("GET", "/vocabulary")["pieces"]]

    def _ids(self, body: dict[str, Any]) -> Ids:
        return np.asarray(self._ask("POST", "/tokenize", body)["token_ids"], np.int32)


def _read(answer: Any) -> Iterator[RowBlock | End]:
    """The items of an answer; a connection that breaks is an error."""
    try:
        # urllib3's own readinto() reads into fresh memory first, which costs as much as the network.
        yield from RowReader(answer._fp, writable=True)
    except (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError) as error:
        raise _lost("the server", error) from error


def _lost(where: str, error: BaseException) -> ConnectionFailedError:
    return ConnectionFailedError(
        "the connection broke", where=where, got=f"{type(error).__name__}: {error}", fix="Ask again."
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
