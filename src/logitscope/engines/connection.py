"""A client's connections to a server: pooled, tried again where nothing is done twice, ended from outside.

A request is asked again when the server refused it before any work (429 or 503 with ``Retry-After``), when no
connection came about, or when it changes nothing and may be repeated. What asks for rows is never sent twice
once its sending has begun: the server may be working on it.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import http.client
import json
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from logitscope.errors import BusyError, ConnectionFailedError, LogitscopeError, OptionError
from logitscope.wire.errors import error_from_json

_CONNECT_S = 10.0
_QUICK_S = 60.0  # what asks for no rows waits for no other client
_FIRST_WAIT_S = 0.1
_REST_S = 1.0
_IDLE_S = 4.0  # servers hang up on idle connections, ours after 5 s: a request that meets that is lost
_POOLED = 128
_REFUSAL_BYTES = 1 << 20
_START = "Start one: logitscope serve MODEL"

T = TypeVar("T")


class Call:
    """What one thread asks of a server, so that another thread can end it."""

    def __init__(self) -> None:
        self.connection: _Held | None = None
        self._aborted = threading.Event()

    @property
    def aborted(self) -> bool:
        """Whether it was ended."""
        return self._aborted.is_set()

    def abort(self) -> None:
        """End it: its connection is cut, and its thread raises a `ConnectionFailedError`."""
        with _HOLDING:
            self._aborted.set()
            if self.connection is not None and self.connection.call is self:
                self.connection.cut()

    def sleep(self, seconds: float) -> None:
        """Wait so long, or until it is ended."""
        self._aborted.wait(seconds)


CURRENT: contextvars.ContextVar[Call | None] = contextvars.ContextVar("logitscope_call", default=None)
"""The call that this thread makes; None where nobody could end it."""

_HOLDING = threading.Lock()


class _Held:
    """Mixed into urllib3's connections: which call has one, so that it ends no other's."""

    call: Call | None = None
    sock: Any
    _used_s = 0.0
    _socket: Any = None  # http.client lets go of its own while an answer is still read from it

    def connect(self) -> None:
        """Open a socket."""
        with _HOLDING:
            self.call, self._used_s = None, time.monotonic()
        super().connect()  # type: ignore[misc]
        self._take()

    def request(self, *arguments: Any, **options: Any) -> None:
        """Send a request."""
        self._take()
        super().request(*arguments, **options)  # type: ignore[misc]

    def cut(self) -> None:
        """Shut the socket: who reads from it is at its end at once, which closing alone does not do."""
        with contextlib.suppress(OSError):
            if self._socket is not None:
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _take(self) -> None:
        call, now_s = CURRENT.get(), time.monotonic()
        with _HOLDING:
            cut = self.call is not None and self.call is not call and self.call.aborted
            stale = self.sock is not None and now_s - self._used_s > _IDLE_S
            self._used_s = now_s
            self.call, self._socket = call, self.sock
            if call is not None:
                call.connection = self
                if call.aborted:
                    self.cut()
        if cut or stale:
            self.close()  # type: ignore[attr-defined] # it opens again by itself


class _HeldHTTP(_Held, HTTPConnection):
    pass


class _HeldHTTPS(_Held, HTTPSConnection):
    pass


class _Pool(HTTPConnectionPool):
    ConnectionCls = _HeldHTTP


class _SecurePool(HTTPSConnectionPool):
    ConnectionCls = _HeldHTTPS


class _FailedTry(Exception):  # noqa: N818 - it never leaves this module
    """A try that failed.

    Args:
        error: what is raised of it.
        undone: the server did nothing for it: anything may be asked again.
        broken: the connection broke: what may be repeated may be asked again.
        wait_s: how long the server wants to be left alone.
    """

    def __init__(
        self, error: LogitscopeError, *, undone: bool = False, broken: bool = False, wait_s: float = 0.0
    ) -> None:
        super().__init__(str(error))
        self.error, self.undone, self.broken, self.wait_s = error, undone, broken, wait_s


class Body:
    """The body of an answer as a file, received where it is read into.

    Args:
        file: that `http.client` made.
        failure: what a failure to read is raised as.
    """

    def __init__(self, file: Any, failure: Callable[[Exception], _FailedTry]) -> None:
        self._file, self._failure = file, failure

    def read(self, size: int | None = None) -> bytes:
        """At most so many bytes; none at the end."""
        with self._named():
            return bytes(self._file.read(size))

    def readinto(self, room: memoryview) -> int:
        """Read into memory; how many bytes."""
        with self._named():
            return int(self._file.readinto(room))

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except (http.client.HTTPException, OSError) as error:
            raise self._failure(error).error from error


class Client:
    """Asks one server; many threads may ask at once.

    Args:
        address: of the server, as ``http://localhost:8000``.
        api_key: that it asks for.
        timeout_s: how long to wait for the next bytes of an answer, and between tries in all.
        retries: how often at most something is asked again.

    Raises:
        OptionError: no address, or a value outside its range.
    """

    def __init__(self, address: str, *, api_key: str | None, timeout_s: float, retries: int) -> None:
        for option, value, good, expected in (
            ("retries", retries, type(retries) is int and retries >= 0, "an int ≥ 0"),
            ("timeout_s", timeout_s, timeout_s > 0, "seconds > 0"),
        ):
            if not good:
                raise OptionError("value outside its range", where=option, expected=expected, got=repr(value))
        self.address = address.rstrip("/")
        self._timeout_s, self._retries = timeout_s, retries
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._pool = urllib3.PoolManager(
            retries=False,
            maxsize=_POOLED,
        )
        self._pool.pool_classes_by_scheme = {"http": _Pool, "https": _SecurePool}

    def close(self) -> None:
        """Let go of the connections."""
        self._pool.clear()

    def info(self) -> dict[str, Any]:
        """What the server says of itself.

        Raises:
            ConnectionFailedError: nobody answers, or somebody else: the message says who.
        """
        status, data = self._tried(lambda: self._whole("GET", "/info", None), repeatable=True)
        found = _parsed(data)
        if status == 200 and isinstance(found, dict) and found.get("server") == "logitscope":
            return found
        ours = _error_of(found)
        if ours is not None and status != 404:
            raise ours
        if ours is not None:
            raise ConnectionFailedError(
                "no server of logitscope under this path",
                where=self.address,
                fix="Give its address alone, as http://host:port.",
            )
        raise ConnectionFailedError(
            "no server of logitscope", where=self.address, got=self._stranger(status, data), fix=_START
        )

    def json(self, method: str, path: str, content: Any = None) -> Any:
        """The JSON of an answer to what may be repeated.

        Raises:
            ConnectionFailedError: no answer, or none of a server of ours.
            LogitscopeError: the server's own.
        """
        data = self.data(method, path, content)
        try:
            return json.loads(data)
        except ValueError as error:
            raise self._foreign(200, data, path) from error

    def data(self, method: str, path: str, content: Any = None) -> bytes:
        """The bytes of an answer to what may be repeated.

        Raises:
            ConnectionFailedError, LogitscopeError: as `json`.
        """

        def attempt() -> bytes:
            status, data = self._whole(method, path, content)
            if status != 200:
                raise _FailedTry(self._foreign(status, data, path))
            return data

        return self._tried(attempt, repeatable=True)

    @contextlib.contextmanager
    def rows(self, content: Any, headers: Mapping[str, str] | None = None) -> Iterator[Body]:
        """The answer of ``POST /rows``, to be read as it comes; leaving it early tells the server so.

        It is sent at most once: only what was refused, or not sent at all, is asked again.

        Args:
            content: of the request, as JSON.
            headers: beside the usual ones.

        Raises:
            ConnectionFailedError, LogitscopeError: as `json`, also while it is read.
        """
        path = "/rows"

        def attempt() -> Any:
            found = self._sent("POST", path, content, headers)
            if found.status != 200:
                raise _FailedTry(self._foreign(found.status, _some_of(found), path))
            return found

        found = self._tried(attempt, repeatable=False)
        try:
            # urllib3's own readinto() reads into fresh memory first, which costs as much as the network.
            yield Body(found._fp, functools.partial(self._failure, path))
        except BaseException:
            found.close()
            raise
        _give_back(found)

    # -- tries -----------------------------------------------------------------------------------------

    def _tried(self, attempt: Callable[[], T], *, repeatable: bool) -> T:
        call, late = CURRENT.get(), time.monotonic() + self._timeout_s
        tries = 0
        while True:
            try:
                return attempt()
            except _FailedTry as failure:
                wait_s = max(failure.wait_s, _FIRST_WAIT_S * 2**tries) * random.uniform(1, 1.5)
                again = failure.undone or (repeatable and failure.broken)
                if not again or tries == self._retries or time.monotonic() + wait_s > late:
                    raise failure.error from failure.__cause__
                (time.sleep if call is None else call.sleep)(wait_s)
                tries += 1

    def _whole(self, method: str, path: str, content: Any) -> tuple[int, bytes]:
        """Status and body of an answer."""
        found = self._sent(method, path, content)
        if found.status != 200:
            return found.status, _some_of(found)
        try:
            data = bytes(found.read())
        except urllib3.exceptions.HTTPError as error:
            raise self._failure(path, error) from error
        finally:
            found.release_conn()
        return found.status, data

    def _sent(self, method: str, path: str, content: Any, headers: Mapping[str, str] | None = None) -> Any:
        """An answer of which the body is still to be read."""
        call = CURRENT.get()
        if call is not None and call.aborted:
            raise _FailedTry(_ended(self.address + path))
        body = None if content is None else json.dumps(content).encode()
        try:
            found = self._pool.request(
                method,
                self.address + path,
                body=body,
                headers={**self._headers, **(headers or {})},
                timeout=self._timeout(self._timeout_s if path == "/rows" else _QUICK_S),
                preload_content=False,
            )
        except urllib3.exceptions.HTTPError as error:
            raise self._failure(path, error) from error
        if found.status in (429, 503) and "Retry-After" in found.headers:
            refused = _error_of(_parsed(_some_of(found))) or BusyError(
                "the server is busy", where=self.address + path, got=f"status {found.status}"
            )
            raise _FailedTry(refused, undone=True, wait_s=_seconds(found.headers["Retry-After"]))
        return found

    def _timeout(self, seconds: float) -> urllib3.Timeout:
        read_s = min(seconds, self._timeout_s)
        return urllib3.Timeout(connect=min(_CONNECT_S, self._timeout_s), read=read_s)

    def _failure(self, path: str, error: Exception) -> _FailedTry:
        """What went wrong in or below HTTP, by name."""
        where, got = self.address + path, f"{type(error).__name__}: {error}"[:300]
        call, cause = CURRENT.get(), error.args[-1] if error.args else None
        running = "Is the server running, and is that its address?"
        if call is not None and call.aborted:
            return _FailedTry(_ended(where))
        match error:
            case urllib3.exceptions.NewConnectionError():
                return _FailedTry(
                    ConnectionFailedError("nobody answers", where=where, got=got, fix=running), undone=True
                )
            case urllib3.exceptions.ConnectTimeoutError():
                limit = f"one within {min(_CONNECT_S, self._timeout_s):g} s"
                return _FailedTry(
                    ConnectionFailedError("no connection in time", where=where, expected=limit, fix=running)
                )
            case urllib3.exceptions.ReadTimeoutError() | TimeoutError():
                limit = f"bytes within {self._timeout_s:g} s"
                fix = "Raise timeout_s of open(), or ask for less at once."
                return _FailedTry(
                    ConnectionFailedError("no answer in time", where=where, expected=limit, fix=fix)
                )
            case urllib3.exceptions.SSLError():
                fix = (
                    "A certificate must be one that this machine trusts (SSL_CERT_FILE); the address of a "
                    "server without one begins with http://."
                )
                return _FailedTry(
                    ConnectionFailedError("no secure connection", where=where, got=got, fix=fix)
                )
            case urllib3.exceptions.LocationValueError():
                return _FailedTry(
                    OptionError("no address", where=where, expected="http://HOST:PORT", got=got)
                )
        if isinstance(cause, http.client.BadStatusLine) and not isinstance(cause, ConnectionError):
            what = "the other side speaks no HTTP"
            return _FailedTry(ConnectionFailedError(what, where=where, got=str(cause)[:100], fix=_START))
        broke = ConnectionFailedError("the connection broke", where=where, got=got, fix="Ask again.")
        return _FailedTry(broke, broken=True)

    # -- servers of others -----------------------------------------------------------------------------

    def _foreign(self, status: int, data: bytes, path: str) -> LogitscopeError:
        """The error that an answer brings; an answer in another form is none of ours."""
        ours = _error_of(_parsed(data))
        if ours is not None and status != 404:
            return ours
        return ConnectionFailedError(
            "no such answer of a server of logitscope",
            where=self.address + path,
            got=_shown(status, data) if ours is None else ours.what,
            fix=_START if ours is None else "Open it again: it may serve another model by now.",
        )

    def _stranger(self, status: int, data: bytes) -> str:
        """What is there instead of a server of ours."""
        with contextlib.suppress(_FailedTry):
            listed, models = self._whole("GET", "/v1/models", None)
            found = _parsed(models)
            if listed == 200 and isinstance(found, Mapping) and isinstance(found.get("data"), list):
                named = [one for one in found["data"] if isinstance(one, Mapping)]
                owners = {str(one["owned_by"]) for one in named if one.get("owned_by")}
                ids = ", ".join(str(one.get("id")) for one in named)
                return (
                    f"a server in OpenAI's form ({', '.join(sorted(owners)) or 'of nobody'}: {ids[:80]}), "
                    "which gives no complete logits"
                )
        return _shown(status, data)


def _ended(where: str) -> ConnectionFailedError:
    return ConnectionFailedError("the call was ended from this side", where=where)


def _some_of(answer: Any) -> bytes:
    """The beginning of a body that says why something was refused; the connection is done with."""
    with contextlib.suppress(urllib3.exceptions.HTTPError):
        data = bytes(answer.read(_REFUSAL_BYTES))
        if len(data) < _REFUSAL_BYTES:
            answer.release_conn()
            return data
    answer.close()
    return b""


def _give_back(answer: Any) -> None:
    """Keep the connection of an answer that brought everything, if its last bytes come soon."""
    connection = answer.connection
    if connection is not None and connection.sock is not None:
        connection.sock.settimeout(_REST_S)
    answer.drain_conn()
    answer.release_conn()


def _parsed(data: bytes) -> Any:
    """JSON, or None."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _error_of(found: Any) -> LogitscopeError | None:
    """The error in an answer of a server of ours."""
    given = found.get("error") if isinstance(found, Mapping) else None
    if isinstance(given, Mapping) and "what" in given and "type" in given:
        return error_from_json(given)
    return None


def _shown(status: int, data: bytes) -> str:
    """An answer in a few words."""
    text = data[:2000].decode("utf-8", "replace").strip()
    found = _parsed(data)
    if isinstance(found, Mapping):
        form = f"JSON with {', '.join(map(str, found))[:80] or 'nothing'}"
    elif text.lower().startswith(("<!doctype html", "<html")):
        title = re.search(r"<title>(.*?)</title>", text, re.IGNORECASE | re.DOTALL)
        form = f"an HTML page{f' ({title[1].strip()[:80]})' if title else ''}"
    else:
        form = repr(text[:80]) if text else "no body"
    return f"status {status}, {form}"


def _seconds(retry_after: str) -> float:
    """What a Retry-After header asks for; nothing if it cannot be read."""
    try:
        return urllib3.Retry().parse_retry_after(retry_after)
    except urllib3.exceptions.InvalidHeader:
        return 0.0
