"""The client of a server: many threads, event loops, what is asked again and what never is, who is there."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import contextvars
import inspect
import json
import os
import pty
import re
import select
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from test_server import VOCAB, fake, post, serving

import logitscope as ls
from logitscope.engines import connection
from logitscope.engines.base import Engine
from logitscope.engines.fake import FakeEngine, fake_rows
from logitscope.engines.remote import RemoteEngine
from logitscope.errors import (
    BusyError,
    ConnectionFailedError,
    EngineClosedError,
    IdentityMismatchError,
    LogitscopeError,
    OptionError,
    SelectError,
)
from logitscope.rows import End, RowBlock, Select
from logitscope.testing import tiny_model, tiny_tokenizer

IDS = [1, 2, 3]
HTML = b"<!DOCTYPE html><html><head><title>Welcome to nginx!</title></head></html>"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(fake()) as found:
        yield found


def remote(address: str, **options: Any) -> contextlib.closing[Any]:
    return contextlib.closing(ls.open(address, **options))


# -- servers that are told what to say -----------------------------------------------------------------


def http(status: int, body: bytes, **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} Status", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


BUSY = http(429, b'{"error": {"type": "BusyError", "what": "too many wait"}}', Retry_After="0")


class Cut(bytes):
    """What is said before the connection is cut."""


class Scripted:
    """A server on plain sockets, told what to say to the first line of a request that came so often.

    Attributes:
        asked: how often each first line came.
        connections: that were accepted.
    """

    def __init__(self, say: Callable[[str, int], bytes]) -> None:
        self._say = say
        self.asked: collections.Counter[str] = collections.Counter()
        self.connections = 0
        self.ended = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.ended.set()
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join(10)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                self.connections += 1
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as file, contextlib.suppress(OSError):
            while line := file.readline().decode("latin-1").rpartition(" HTTP")[0]:
                size = 0
                while header := file.readline().strip().lower():
                    name, _, value = header.partition(b":")
                    size = int(value) if name == b"content-length" else size
                file.read(size)
                self.asked[line] += 1
                said = self._say(line, self.asked[line])
                connection.sendall(said)
                if isinstance(said, Cut):
                    connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def scripted(say: Callable[[str, int], bytes]) -> Iterator[Scripted]:
    server = Scripted(say)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def recorded(address: str) -> dict[str, bytes]:
    """What a server of ours says."""
    with urllib.request.urlopen(address + "/info", timeout=30) as answer:
        info = answer.read()
    rows = post(address, "/rows", {"requests": [{"token_ids": IDS}]})[1]
    return {"GET /info": http(200, info), "POST /rows": http(200, rows)}


# -- what is asked again, and what never is ------------------------------------------------------------


@pytest.mark.parametrize("part", [0, 1, 15, 60, 100, 2000])
def test_rows_are_never_asked_for_twice(recorded: dict[str, bytes], part: int) -> None:
    """The connection is cut before the answer, in its headers, in its body."""

    def say(line: str, count: int) -> bytes:
        return Cut(recorded[line][:part]) if line == "POST /rows" else recorded[line]

    with scripted(say) as server, remote(server.address, retries=5) as engine:
        with pytest.raises(LogitscopeError):
            engine.logits(IDS)
        time.sleep(0.3)
        assert server.asked["POST /rows"] == 1


@pytest.mark.parametrize("refusal", [BUSY, http(503, HTML, Retry_After="0")], ids=["ours", "a proxy's"])
def test_what_was_refused_is_asked_again(recorded: dict[str, bytes], refusal: bytes) -> None:
    def say(line: str, count: int) -> bytes:
        return refusal if line == "POST /rows" and count % 2 else recorded[line]

    with scripted(say) as server, remote(server.address) as engine:
        for done in (1, 2):
            assert np.array_equal(engine.logits(IDS).to_numpy(), fake_rows(IDS, VOCAB))
            assert server.asked["POST /rows"] == 2 * done
        assert server.connections == 1, "connections are kept"


@pytest.mark.parametrize(
    ("refusal", "options", "asked", "error"),
    [
        (BUSY, {"retries": 2}, 3, BusyError),
        (BUSY, {"retries": 0}, 1, BusyError),
        (BUSY.replace(b"Retry-After: 0", b"Retry-After: 99"), {"timeout_s": 5}, 1, BusyError),
        (BUSY.replace(b"Retry-After: 0", b"X: 0"), {}, 1, BusyError),
        (
            http(500, b'{"error": {"type": "RowsError", "what": "x"}}', Retry_After="0"),
            {},
            1,
            LogitscopeError,
        ),
        (http(503, HTML), {}, 1, ConnectionFailedError),
    ],
    ids=["thrice", "retries=0", "too long", "not said when", "an error", "not said when, a proxy"],
)
def test_tries_are_bounded(
    recorded: dict[str, bytes], refusal: bytes, options: Any, asked: int, error: Any
) -> None:
    def say(line: str, count: int) -> bytes:
        return refusal if line == "POST /rows" else recorded[line]

    with scripted(say) as server, remote(server.address, **options) as engine:
        with pytest.raises(error):
            engine.logits(IDS)
        assert server.asked["POST /rows"] == asked


def test_what_may_be_repeated_is_asked_again_when_the_connection_breaks(recorded: dict[str, bytes]) -> None:
    def say(line: str, count: int) -> bytes:
        if line == "POST /tokenize":
            return (
                Cut(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{")
                if count < 3
                else http(200, b'{"token_ids": [7]}')
            )
        return Cut() if count == 1 else recorded[line]

    padded = b'"tokenizer":{"size":9,"hash":"","eos_token_id":1,"special_ids":[],"has_chats":0}'
    recorded = dict(recorded)
    info = recorded["GET /info"].partition(b"\r\n\r\n")[2].replace(b'"tokenizer":null', padded)
    recorded["GET /info"] = http(200, info)
    with scripted(say) as server, remote(server.address) as engine:
        assert server.asked["GET /info"] == 2
        assert engine.tokenizer.encode("x").tolist() == [7]
        assert server.asked["POST /tokenize"] == 3


def test_a_server_that_starts_meanwhile_is_found(recorded: dict[str, bytes]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = taken.getsockname()
    with contextlib.ExitStack() as stack:

        def start() -> None:
            time.sleep(0.2)
            listening = stack.enter_context(socket.create_server(place))
            connection = stack.enter_context(listening.accept()[0])
            connection.recv(10_000)
            connection.sendall(recorded["GET /info"])

        thread = threading.Thread(target=start)
        thread.start()
        with remote(f"http://127.0.0.1:{place[1]}", retries=8):
            thread.join()
    with pytest.raises(ConnectionFailedError, match="nobody answers"):
        ls.open(f"http://127.0.0.1:{place[1]}", retries=0)


def test_idle_connections_are_opened_again(
    recorded: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may hang up on them just when the next request is sent, which is then lost."""
    monkeypatch.setattr(connection, "_IDLE_S", 0.2)
    with scripted(lambda line, count: recorded[line]) as server, remote(server.address) as engine:
        engine.logits(IDS)
        assert server.connections == 1
        time.sleep(0.3)
        engine.logits(IDS)
        engine.logits(IDS)
        assert server.connections == 2


def test_a_connection_that_a_late_end_cut_is_opened_again(recorded: dict[str, bytes]) -> None:
    """Its call was done already: the next one that has it must not pay for that."""
    late = connection.Call()

    def asked() -> None:
        connection.CURRENT.set(late)
        held.request("GET", "/info")
        held.getresponse().read()

    with scripted(lambda line, count: recorded[line]) as server:
        held = connection._HeldHTTP("127.0.0.1", int(server.address.rpartition(":")[2]))
        contextvars.copy_context().run(asked)
        late.abort()
        held.request("GET", "/info")
        assert held.getresponse().status == 200
        held.close()


def test_another_model_behind_the_address_is_no_answer(recorded: dict[str, bytes]) -> None:
    with serving(fake(seed=1)) as other:
        rows = http(200, post(other, "/rows", {"requests": [{"token_ids": IDS}]})[1])
    with (
        scripted(lambda line, count: rows if line == "POST /rows" else recorded[line]) as server,
        remote(server.address) as engine,
        pytest.raises(IdentityMismatchError, match="another model"),
    ):
        engine.logits(IDS)


# -- time-outs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [0, 20, 3000])
def test_a_server_that_says_no_more_is_an_error_in_time(recorded: dict[str, bytes], said: int) -> None:
    def say(line: str, count: int) -> bytes:
        return recorded[line][:said] if line == "POST /rows" else recorded[line]

    with scripted(say) as server, remote(server.address, timeout_s=0.4) as engine:
        started = time.monotonic()
        with pytest.raises(ConnectionFailedError, match=r"within 0\.4 s\. Raise timeout_s"):
            engine.logits(IDS)
        assert 0.3 < time.monotonic() - started < 3
        assert server.asked["POST /rows"] == 1


def test_a_server_that_never_says_anything() -> None:
    with scripted(lambda line, count: b"") as server:
        with pytest.raises(ConnectionFailedError, match=r"within 0\.3 s\. Raise timeout_s"):
            ls.open(server.address, timeout_s=0.3)
        assert server.asked["GET /info"] == 1


@pytest.mark.skipif(sys.platform != "linux", reason="a full queue of connections is Linux's")
def test_nobody_accepts() -> None:
    with socket.socket() as listening, contextlib.ExitStack() as stack:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        with pytest.raises(ConnectionFailedError, match=r"no connection in time.* within 0\.5 s"):
            ls.open(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout_s=0.5)


# -- who is there ----------------------------------------------------------------------------------------


def models(owner: str) -> bytes:
    return http(200, json.dumps({"object": "list", "data": [{"id": "qwen", "owned_by": owner}]}).encode())


@pytest.mark.parametrize(
    ("info", "listed", "match"),
    [
        (
            http(200, HTML),
            None,
            r"status 200, an HTML page \(Welcome to nginx!\)\. Start one: logitscope serve",
        ),
        (http(200, b'{"version": 3, "name": "x"}'), None, "status 200, JSON with version, name"),
        (http(200, b"[1]"), None, r"status 200, '\[1\]'"),
        (http(404, b""), None, "status 404, no body"),
        (http(307, b"", Location="https://elsewhere"), None, "status 307"),
        (http(401, b'{"error": "Unauthorized"}'), None, "status 401, JSON with error"),
        (
            http(404, b'{"detail": "Not Found"}'),
            models("vllm"),
            r"OpenAI's form \(vllm: qwen\), which gives no",
        ),
        (
            http(404, b'{"error": {"code": 404, "message": "File Not Found"}}'),
            models("llamacpp"),
            "llamacpp: qwen",
        ),
        (b"SSH-2.0-OpenSSH_9.6\r\n", None, r"speaks no HTTP.*SSH-2\.0-OpenSSH"),
        (b"-ERR unknown command 'GET'\r\n", None, "speaks no HTTP.*-ERR"),
    ],
    ids=["page", "another API", "a list", "nothing", "redirect", "key", "vLLM", "llama.cpp", "SSH", "Redis"],
)
def test_somebody_else(info: bytes, listed: bytes | None, match: str) -> None:
    def say(line: str, count: int) -> bytes:
        return info if line == "GET /info" else listed or http(404, b"")

    with scripted(say) as server, pytest.raises(ConnectionFailedError, match=match) as found:
        ls.open(server.address)
    assert "logitscope serve" in str(found.value)


def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ConnectionFailedError, match=r"no secure connection.*begins with http://"):
        ls.open(address.replace("http://", "https://"))
    with pytest.raises(ConnectionFailedError, match=r"under this path.* alone, as http://host:port"):
        ls.open(address + "/v1")
    for wrong in ("http://", "http://[::1", "http://host:port"):
        with pytest.raises(OptionError, match="no address"):
            ls.open(wrong)
    for option in ({"retries": -1}, {"retries": 1.5}, {"timeout_s": 0}):
        with pytest.raises(OptionError, match="outside its range"):
            ls.open(address, **option)


# -- many threads --------------------------------------------------------------------------------------


def test_one_client_in_many_threads(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head and the vocabulary are fetched once, and everybody has their own rows."""
    monkeypatch.setenv("LOGITSCOPE_CACHE", str(tmp_path))
    local = ls.open(tiny_model("llama"), tokenizer=tiny_tokenizer())
    random = np.random.default_rng(0)
    prompts = [random.integers(4, 900, 12).tolist() for _ in range(24)]
    wanted = [local.logits(one).to_numpy() for one in prompts]
    with serving(ls.open(local.model, tokenizer=tiny_tokenizer())) as address, remote(address) as engine:
        asked: list[str] = []
        data = engine._client.data
        monkeypatch.setattr(engine._client, "data", lambda *given: (asked.append(given[1]), data(*given))[1])
        together, failures = threading.Barrier(len(prompts)), []

        def ask(i: int) -> None:
            try:
                together.wait()
                found = engine.logits(prompts[i], encode="hidden")
                assert np.allclose(found.to_numpy(), wanted[i], atol=1e-4)
                assert found.tokens == local.tokenizer.pieces(prompts[i])
            except BaseException as error:  # noqa: BLE001 - told below
                failures.append(error)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert sorted(asked) == [f"/heads/{engine.head.hash}", "/vocabulary"]


def test_plain_rows_need_no_head(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGITSCOPE_CACHE", str(tmp_path))
    with serving(ls.open(tiny_model("llama"))) as address, remote(address) as engine:
        engine.logits(IDS)
        assert not list(tmp_path.iterdir())
        engine.logits(IDS, encode="hidden")
        assert len(list((tmp_path / "heads").iterdir())) == 1


# -- event loops ---------------------------------------------------------------------------------------


class Slow(FakeEngine):
    """Blocks of one row, each after a hundredth of a second; it notes what was closed early."""

    left = 0

    def _run(self, requests: Any, buffer: Any) -> Any:
        try:
            for item in super()._run(requests, buffer):
                time.sleep(0.01)
                yield item
        except GeneratorExit:
            type(self).left += 1
            raise


@pytest.fixture(scope="module")
def slow() -> Iterator[str]:
    with serving(Slow.open("fake", vocab_size=VOCAB, block_rows=1)) as found:
        yield found


def test_a_hundred_at_once_and_the_loop_goes_on(address: str) -> None:
    prompts = [[i, 2 * i, 3 * i] for i in range(100)]
    gaps: list[float] = []

    async def tick() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.005)
            gaps.append(time.monotonic() - before)

    async def main(engine: RemoteEngine) -> list[Any]:
        ticking = asyncio.create_task(tick())
        scored = asyncio.gather(*(engine.alogits(one) for one in prompts))
        made = asyncio.gather(*(engine.agenerate(one, max_new_tokens=3) for one in prompts))
        found = [await scored, await made, await read(engine)]
        ticking.cancel()
        return found

    async def read(engine: RemoteEngine) -> list[Any]:
        requests = await engine.arequests(prompts[:7])
        return [item async for item in engine.astream(requests)]

    with remote(address) as engine:
        scored, made, items = asyncio.run(main(engine))
        again = engine.generate(prompts, max_new_tokens=3)
    for ids, found in zip(prompts, scored, strict=True):
        assert np.array_equal(found.to_numpy(), fake_rows(ids, VOCAB))
    assert [one.token_ids.tolist() for one in made] == [one.token_ids.tolist() for one in again]
    assert sum(isinstance(item, End) for item in items) == 7
    assert sum(len(item) for item in items if isinstance(item, RowBlock)) == 21
    assert len(gaps) > 10
    assert float(np.median(gaps)) < 0.05


def test_the_loop_goes_on_while_a_call_waits(slow: str) -> None:
    async def main(engine: RemoteEngine) -> float:
        asked = asyncio.create_task(engine.alogits([1] * 80))
        worst = 0.0
        while not asked.done():
            before = time.monotonic()
            await asyncio.sleep(0.005)
            worst = max(worst, time.monotonic() - before)
        assert (await asked).shape == (80, VOCAB)
        return worst

    with remote(slow) as engine:
        assert asyncio.run(main(engine)) < 0.4


@pytest.mark.parametrize("how", ["alogits", "agenerate", "astream"])
def test_a_cancelled_task_ends_the_call_at_the_server(slow: str, how: str) -> None:
    async def main(engine: RemoteEngine) -> None:
        async def stream() -> None:
            async for _ in engine.astream(engine.requests([1] * 3000)):
                pass

        calls: dict[str, Callable[[], Any]] = {
            "alogits": lambda: engine.alogits([1] * 3000),
            "agenerate": lambda: engine.agenerate([1], max_new_tokens=3000, ignore_eos=True),
            "astream": stream,
        }
        left = Slow.left
        task = asyncio.create_task(calls[how]())
        await asyncio.sleep(0.3)
        task.cancel()
        started = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - started < 0.1
        while Slow.left == left:
            assert time.monotonic() - started < 1, "the server goes on"
            await asyncio.sleep(0.01)
        assert (await engine.alogits(IDS)).shape == (3, VOCAB)

    with remote(slow) as engine:
        asyncio.run(main(engine))
        # Threads that read are at their end, and can take the next call.
        started = time.monotonic()
        engine._threads.shutdown(wait=True)
        assert time.monotonic() - started < 1


def test_cancelling_before_the_server_says_anything(recorded: dict[str, bytes]) -> None:
    def say(line: str, count: int) -> bytes:
        return b"" if line == "POST /rows" else recorded[line]

    async def main(engine: RemoteEngine) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.alogits(IDS), 0.3)

    with scripted(say) as server, remote(server.address) as engine:
        asyncio.run(main(engine))
        started = time.monotonic()
        engine._threads.shutdown(wait=True)
        assert time.monotonic() - started < 1
        assert server.asked["POST /rows"] == 1


@pytest.mark.parametrize("closing", [True, False])
def test_a_loop_that_is_left_early_ends_the_stream(slow: str, closing: bool) -> None:
    async def main(engine: RemoteEngine) -> None:
        left = Slow.left
        requests = engine.requests([1] * 3000)
        if closing:
            async with contextlib.aclosing(engine.astream(requests)) as items:
                assert isinstance(await anext(items), RowBlock)
        else:
            async for _ in engine.astream(requests):
                break
        started = time.monotonic()
        while Slow.left == left:
            assert time.monotonic() - started < 1, "the server goes on"
            await asyncio.sleep(0.01)

    with remote(slow) as engine:
        asyncio.run(main(engine))


def test_ending_one_call_ends_no_other(address: str) -> None:
    """Tasks that are cancelled at any time, among others that share the connections."""

    async def main(engine: RemoteEngine) -> int:
        random = np.random.default_rng(0)

        async def cancelled() -> None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(engine.alogits([5] * 40), float(random.uniform(0, 0.03)))

        async def whole(i: int) -> bool:
            ids = [i % VOCAB] * 20
            return np.array_equal((await engine.alogits(ids)).to_numpy(), fake_rows(ids, VOCAB))

        right = 0
        for _ in range(10):
            calls = [call for i in range(10) for call in (whole(i), cancelled())]
            right += sum(one is True for one in await asyncio.gather(*calls))
        return right

    with remote(address) as engine:
        assert asyncio.run(main(engine)) == 100


def test_errors_and_closed_engines(address: str) -> None:
    async def main(engine: RemoteEngine) -> None:
        with pytest.raises(SelectError):
            await engine.alogits(IDS, select=Select([9]))
        with pytest.raises(SelectError):
            await engine.arequests(IDS, select=Select([9]))
        engine.close()
        with pytest.raises(EngineClosedError):
            await engine.alogits(IDS)
        with pytest.raises(EngineClosedError):
            await anext(engine.astream([]))

    with remote(address) as engine:
        asyncio.run(main(engine))


@pytest.mark.parametrize("name", ["logits", "generate", "requests"])
def test_coroutines_have_the_arguments_of_the_calls(name: str) -> None:
    awaited, plain = getattr(RemoteEngine, f"a{name}"), getattr(Engine, name)
    assert inspect.iscoroutinefunction(awaited)
    assert inspect.signature(awaited) == inspect.signature(plain)
    assert awaited.__name__ == f"a{name}"
    assert plain.__doc__ in awaited.__doc__


# -- like an engine here -------------------------------------------------------------------------------


CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello there"},
    {"role": "user", "content": "More"},
    {"role": "assistant", "content": "Well then"},
]


@pytest.mark.parametrize("new_tokens", [0, 4])
def test_rows_of_the_assistant_are_the_same_here_and_there(new_tokens: int) -> None:
    tokenizer = tiny_tokenizer()
    local = fake(vocab_size=1001, tokenizer=tokenizer)
    with serving(fake(vocab_size=1001, tokenizer=tokenizer)) as address, remote(address) as engine:
        for chat in (CHAT, CHAT[:2], CHAT[:3], CHAT[:1]):
            options = {"select": Select("assistant"), "max_new_tokens": new_tokens}
            (ours,), (theirs,) = (one.requests([chat], **options) for one in (engine, local))
            assert np.array_equal(ours.token_ids, theirs.token_ids)
            assert ours.select == theirs.select
            rows, wanted = (
                one.logits(chat, select=Select("assistant"))
                if not new_tokens
                else one.generate(
                    chat, max_new_tokens=4, ignore_eos=True, return_logits=True, select=Select("assistant")
                ).logits
                for one in (engine, local)
            )
            assert np.array_equal(rows.positions, wanted.positions)
            assert np.array_equal(rows.to_numpy(), wanted.to_numpy())
        assert len(local.logits(CHAT, select=Select("assistant"))) > 2
        with pytest.raises(SelectError, match="chat"):
            engine.logits("Hello", select=Select("assistant"))
        with pytest.raises(SelectError, match="not the chat's"):
            engine.tokenizer.assistant_tokens(CHAT, np.array([1, 2], np.int32))
        body = {"messages": CHAT, "assistant": True}
        found = json.loads(post(address, "/tokenize", body)[1])
        spans = local.tokenizer.assistant_tokens(CHAT, local.tokenizer.encode_chat(CHAT, generate=False))
        assert found["assistant_tokens"] == [list(span) for span in spans]


def test_progress_comes_as_rows_do(address: str) -> None:
    seen: list[tuple[int, int]] = []
    with remote(address) as engine:
        engine.logits([[1] * 30, [2] * 10], progress=lambda done, total: seen.append((done, total)))
    assert len(seen) > 2
    assert seen == sorted(seen)
    assert seen[-1] == (40, 40)


def test_the_command_shows_progress_of_a_server(tmp_path: Any) -> None:
    prompts = tmp_path / "prompts.txt"
    with serving(Slow.open("fake", vocab_size=1001, block_rows=1, tokenizer=tiny_tokenizer())) as address:
        prompts.write_text("one two three four five six seven eight nine ten " * 3)
        program = "import sys; from logitscope.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", program, "logits", address, "--file", str(prompts), "--summary"]
        ours, theirs = pty.openpty()
        with subprocess.Popen(
            command, stderr=theirs, stdout=subprocess.DEVNULL, env={**os.environ, "TERM": "xterm"}
        ) as process:
            os.close(theirs)
            shown = b""
            while select.select([ours], [], [], 60)[0]:
                try:
                    shown += os.read(ours, 65536)
                except OSError:  # the other end is closed
                    break
        os.close(ours)
        assert process.returncode == 0, shown
    bars = {(int(done), int(total)) for done, total in re.findall(rb"(\d+)/(\d+)\S* \S*rows", shown)}
    assert any(0 < done < total for done, total in bars), shown
