"""What goes wrong between a client and a server, over real sockets: an error by name, or exactly the rows."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from test_client import Scripted, http, remote
from test_server import VOCAB, fake, health, post, serving, until

import logitscope as ls
from logitscope.engines.fake import FakeEngine, fake_rows
from logitscope.errors import (
    ConnectionFailedError,
    IncompleteError,
    LogitscopeError,
    NonFiniteError,
    RowsError,
)
from logitscope.rows import RowBlock
from logitscope.server.runner import Limits
from logitscope.testing import save_tiny

PROMPTS = [list(range(11)), [7, 8], list(range(40, 60))]
TRUTH = [fake_rows(ids, VOCAB) for ids in PROMPTS]


def check(engine: Any) -> bool:
    """Ask: whether rows came, which are then exactly the right ones; what else comes is an error by name."""
    try:
        found = engine.logits(PROMPTS)
    except LogitscopeError:
        return False
    assert len(found) == len(TRUTH)
    for one, rows in zip(found, TRUTH, strict=True):
        assert np.array_equal(one.to_numpy(), rows)
    return True


class Proxy:
    """Passes bytes on, and does harm to the answers of ``POST /rows``.

    Attributes:
        cut_at: bytes of the answer after which it hangs up.
        flip: place of a byte in the answer, and the bits of it that are turned.
        answer: what the server said last.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("http://").rpartition(":")
        self._target = (host, int(port))
        self.cut_at: int | None = None
        self.flip: tuple[int, int] | None = None
        self.answer = bytearray()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join(10)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(self._target)
                for run in (self._up, self._down):
                    threading.Thread(target=run, args=(client, server), daemon=True).start()

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                if data.startswith(b"POST /rows"):
                    self.answer.clear()
                server.sendall(data)
        self._hang_up(client, server)

    def _down(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(server.recv(1 << 16)):
                first = len(self.answer)
                self.answer += data
                if self.flip is not None and first <= self.flip[0] < first + len(data):
                    data[self.flip[0] - first] ^= self.flip[1]
                if self.cut_at is not None and first + len(data) >= self.cut_at:
                    client.sendall(data[: self.cut_at - first])
                    break
                client.sendall(data)
        self._hang_up(client, server)

    def _hang_up(self, *sockets: socket.socket) -> None:
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    with serving(fake(block_rows=4)) as address:
        found = Proxy(address)
        try:
            yield found
        finally:
            found.close()


@pytest.fixture
def answer(proxy: Proxy) -> bytes:
    """An answer as it is on the wire, with its headers and chunks."""
    proxy.cut_at = proxy.flip = None
    with remote(proxy.address) as engine:
        assert check(engine)
    return bytes(proxy.answer)


def chunks_of(answer: bytes) -> list[tuple[int, int]]:
    """Where the data of each chunk begins, and how long it is."""
    place, found = answer.index(b"\r\n\r\n") + 4, []
    while True:
        line = answer.index(b"\r\n", place)
        size = int(answer[place:line], 16)
        if not size:
            return found
        found.append((line + 2, size))
        place = line + 2 + size + 2


def body_of(answer: bytes) -> bytes:
    return b"".join(answer[first : first + size] for first, size in chunks_of(answer))


def boundaries_of(body: bytes) -> list[int]:
    """Where each message of an Arrow stream ends; the last of them is the one that says it is complete."""
    reader, found = pa.BufferReader(body), []
    with contextlib.suppress(EOFError):
        while True:
            pa.ipc.read_message(reader)
            found.append(reader.tell())
    return found


# -- connections that break ----------------------------------------------------------------------------


def test_a_cut_at_every_batch_and_between_is_an_error(proxy: Proxy, answer: bytes) -> None:
    chunks, body = chunks_of(answer), body_of(answer)
    boundaries = boundaries_of(body)
    assert len(boundaries) > 12, "a schema, blocks, ends, and the last one"
    places = [0, 1, 20, answer.index(b"\r\n\r\n") + 4]
    places += [
        place for first, size in chunks for place in (first, first + 7, first + size // 2, first + size)
    ]
    places += np.linspace(2, len(answer) - 40, 60).astype(int).tolist()
    done = 0
    for first, size in chunks:
        # Batches that share a chunk: where they end on the wire.
        places += [first + end - done for end in boundaries if done < end <= done + size]
        done += size
    needed = chunks[-1][0] + boundaries[-1] - (len(body) - chunks[-1][1])
    with remote(proxy.address) as engine:
        for place in sorted(set(places)):
            proxy.cut_at = place
            whole = check(engine)
            assert not whole or place >= needed, place
        proxy.cut_at = None
        assert check(engine)


def test_an_answer_that_ends_too_early_by_the_rules_of_http_is_an_error(answer: bytes) -> None:
    """A proxy that buffers, and makes a whole answer of a part."""
    body = body_of(answer)
    boundaries = boundaries_of(body)
    said = b""
    with contextlib.closing(Scripted(lambda line, count: said)) as server, serving(fake()) as address:
        info = http(200, json.dumps(_info(address)).encode())
        said = info
        with remote(server.address) as engine:
            for end in (0, 1, 100, *boundaries[:-1]):
                said = http(200, body[:end])
                with pytest.raises((IncompleteError, ls.errors.FileFormatError)):
                    engine.logits(PROMPTS)
            said = http(200, body[: boundaries[-1]])
            assert check(engine)


def test_a_flipped_bit_anywhere_is_an_error_or_harmless(proxy: Proxy, answer: bytes) -> None:
    random = np.random.default_rng(0)
    between = [place for first, size in chunks_of(answer) for place in range(first + size, first + size + 6)]
    places = [
        *random.integers(0, answer.index(b"\r\n\r\n") + 8, 25).tolist(),
        *random.choice(between, 40).tolist(),
        *random.integers(0, len(answer), 300).tolist(),
        *range(len(answer) - 12, len(answer)),
    ]
    right = 0
    with remote(proxy.address, timeout_s=0.5) as engine:
        for place in places:
            proxy.flip = (place, 1 << int(random.integers(8)))
            right += check(engine)
        proxy.flip = None
        assert check(engine)
    assert right < len(places) / 4


# -- processes that are killed -------------------------------------------------------------------------

_SERVER = """
import sys
from logitscope.engines.fake import FakeEngine
from logitscope.server.serve import serve
engine = FakeEngine.open("fake", vocab_size=20_000, block_rows=8)
serve(engine, port=int(sys.argv[1]), ready=lambda address: print(address, flush=True))
"""

_CLIENT = """
import sys, time
import logitscope as ls
engine = ls.open(sys.argv[1])
stream = engine.stream(engine.requests([list(range(3000))]))
next(stream)
print("reading", flush=True)
time.sleep(100)
"""


@contextlib.contextmanager
def running(code: str, argument: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A program, and the first line that it says."""
    with subprocess.Popen(
        [sys.executable, "-c", code, argument], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_a_server_that_is_killed_in_the_middle() -> None:
    with contextlib.ExitStack() as stack:
        process, address = stack.enter_context(running(_SERVER, "0"))
        engine = stack.enter_context(remote(address))
        stream = engine.stream(engine.requests([list(range(3000))]))
        assert isinstance(next(stream), RowBlock)
        process.send_signal(signal.SIGKILL)
        with pytest.raises((ConnectionFailedError, IncompleteError)):
            list(stream)
        process.wait(10)
        with pytest.raises(ConnectionFailedError, match="nobody answers"):
            engine.logits([1, 2])
        _, again = stack.enter_context(running(_SERVER, address.rpartition(":")[2]))
        assert again == address
        assert np.array_equal(engine.logits([1, 2]).to_numpy(), fake_rows([1, 2], 20_000))


def test_a_client_that_is_killed_frees_what_it_had() -> None:
    engine = fake(vocab_size=20_000)
    with serving(engine, limits=Limits(shared_bytes=1 << 20, ahead_bytes=1 << 20)) as address:
        for _ in range(2):
            with running(_CLIENT, address) as (process, line):
                assert line == "reading"
                until(lambda: health(address)["buffered_bytes"] > 0)
                process.send_signal(signal.SIGKILL)
                until(lambda: health(address)["buffered_bytes"] == 0, 1.5)
        with remote(address) as client:
            assert client.logits([1, 2]).shape == (2, 20_000)


def test_an_engine_that_raises_in_the_middle_is_the_error() -> None:
    class Failing(FakeEngine):
        error: Exception = RuntimeError("the fan is off")

        def _run(self, requests: Any, buffer: Any) -> Any:
            for count, item in enumerate(super()._run(requests, buffer)):
                if count == 3 and 99 in requests[0].token_ids:
                    raise self.error
                yield item

    engine = Failing.open("fake", vocab_size=VOCAB)
    with serving(engine) as address, remote(address) as client:
        with pytest.raises(RowsError, match="RuntimeError: the fan is off"):
            client.logits([99] * 60)
        engine.error = NonFiniteError("NaN", where="row 7")
        with pytest.raises(NonFiniteError, match="row 7"):
            client.logits([99] * 60)
        assert check(client)


def test_an_engine_whose_process_dies_is_an_error_by_name(tmp_path: Any) -> None:
    engine = ls.open(str(save_tiny(tmp_path)), devices=["cpu", "cpu"])
    processes = [worker._process for worker in engine._workers]  # type: ignore[attr-defined]
    with serving(engine) as address, remote(address) as client:
        random = np.random.default_rng(0)
        prompts = [random.integers(4, 900, 150).tolist() for _ in range(400)]

        def kill(done: int, total: int) -> None:
            os.kill(processes[0].pid, signal.SIGKILL)

        with pytest.raises((ConnectionFailedError, IncompleteError)):
            client.logits(prompts, encode="float16", progress=kill)
        with pytest.raises(ConnectionFailedError, match="nobody answers"):
            client.logits(prompts[:20])
        assert health(address)["status"] == "ok"
        until(lambda: health(address)["buffered_bytes"] == 0)
    assert all(process.wait(15) is not None for process in processes)


# -- clients that do nothing, or little ----------------------------------------------------------------


def test_connections_that_send_nothing_are_in_nobodys_way() -> None:
    with serving(fake()) as address, remote(address) as engine:
        assert check(engine)
        place = (address.removeprefix("http://").partition(":")[0], int(address.rpartition(":")[2]))
        before = psutil.Process().num_fds()
        with contextlib.ExitStack() as stack:
            silent = [stack.enter_context(socket.create_connection(place)) for _ in range(200)]
            for i, one in enumerate(silent):
                one.sendall(
                    [b"", b"POST /rows HTT", b"POST /rows HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"][i % 3]
                )
            until(lambda: psutil.Process().num_fds() >= before + 400)
            for _ in range(5):
                started = time.monotonic()
                assert check(engine)
                assert time.monotonic() - started < 1
                with remote(address) as other:
                    assert check(other)
            assert health(address)["waiting_sequences"] == 0
        until(lambda: psutil.Process().num_fds() <= before + 5)
        assert check(engine)
        assert health(address)["buffered_bytes"] == 0


def test_a_request_that_comes_byte_by_byte_is_answered() -> None:
    with serving(fake()) as address, remote(address) as engine:
        place = (address.removeprefix("http://").partition(":")[0], int(address.rpartition(":")[2]))
        body = b'{"input_ids": [1, 2], "format": "json"}'
        head = f"POST /logits HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(place) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for i, byte in enumerate(head.encode() + body):
                connection.sendall(bytes([byte]))
                time.sleep(0.001)
                assert i % 40 or check(engine), "others are answered meanwhile"
            said = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        assert said.startswith(b"HTTP/1.1 200")
        assert json.loads(said.partition(b"\r\n\r\n")[2]) == json.loads(post(address, "/logits", body)[1])


def _info(address: str) -> Any:
    with urllib.request.urlopen(address + "/info", timeout=30) as answer:
        return json.load(answer)
