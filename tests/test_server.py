"""Logits over HTTP: a real server on a real socket, and its clients."""

from __future__ import annotations

import contextlib
import http.client
import json
import pathlib
import signal
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
import uvicorn
from transformers import AutoModelForCausalLM

import logitscope as ls
from logitscope.engines.fake import FakeEngine, fake_rows
from logitscope.engines.remote import RemoteEngine
from logitscope.errors import (
    BusyError,
    ConnectionFailedError,
    IncompleteError,
    InputError,
    MemoryLimitError,
    OptionError,
    RowsError,
    SelectError,
)
from logitscope.logits import Logits
from logitscope.rows import End, RowBlock, Select
from logitscope.server.app import make_app
from logitscope.server.runner import Limits, Runner
from logitscope.testing import EngineCase, EngineSuite, Oracle, save_tiny, tiny_model
from logitscope.wire.results import logits_from_json, read_results

VOCAB = 301


@contextlib.contextmanager
def serving(engine: Any, *, limits: Limits | None = None, port: int = 0, **options: Any) -> Iterator[str]:
    """A server in a thread of its own; its address."""
    runner = Runner(engine, limits)
    app = make_app(runner, **options)
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port))
        port = free.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def fake(**options: Any) -> FakeEngine:
    return FakeEngine.open("fake", **{"vocab_size": VOCAB, **options})


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(fake()) as found:
        yield found


def post(address: str, path: str, body: Any, **headers: str) -> tuple[int, bytes]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def health(address: str) -> Any:
    with urllib.request.urlopen(address + "/health", timeout=30) as answer:
        return json.load(answer)


def until(check: Callable[[], bool], seconds: float = 10) -> None:
    late = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < late, "not in time"
        time.sleep(0.01)


# -- the engine's conformance, over a socket -----------------------------------------------------------


@contextlib.contextmanager
def commanded(folder: Any, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """``logitscope serve FOLDER`` in a process of its own."""
    program = "import sys; from logitscope.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "serve", str(folder), "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            line = next(line for line in process.stderr if "http://" in line)
            yield "http://" + line.rsplit("http://", 1)[1].strip(), process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def remote_case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCase]:
    folder = save_tiny(tmp_path_factory.mktemp("tiny"))
    with (
        commanded(folder, "--no-shared-memory") as (address, _),
        contextlib.closing(ls.open(address)) as engine,
    ):
        model = AutoModelForCausalLM.from_pretrained(folder)
        yield EngineCase(engine, Oracle(model), "remote, llama float32", eos_token_id=2)


class TestRemote(EngineSuite):
    @pytest.fixture
    def case(self, remote_case: EngineCase) -> EngineCase:
        return remote_case


@pytest.fixture(scope="module")
def shared_case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCase]:
    folder = save_tiny(tmp_path_factory.mktemp("tiny"))
    program = """if True:
        import sys
        import logitscope as ls
        from logitscope.server.runner import Limits
        from logitscope.server.serve import serve
        limits = Limits(lent_bytes=1)
        serve(ls.open(sys.argv[1]), port=0, limits=limits, ready=lambda found: print(found, flush=True))
    """
    command = [sys.executable, "-c", program, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        with contextlib.closing(ls.open(address, shared_memory=True)) as engine:
            model = AutoModelForCausalLM.from_pretrained(folder)
            yield EngineCase(engine, Oracle(model), "remote, shared memory", eos_token_id=2)
            assert health(address)["segments"] > 0
        process.terminate()
    assert not list(pathlib.Path("/dev/shm").glob(f"logitscope-{process.pid}-*"))


@pytest.mark.skipif(sys.platform != "linux", reason="rows go through Linux shared memory")
class TestSharedMemory(EngineSuite):
    @pytest.fixture
    def case(self, shared_case: EngineCase) -> EngineCase:
        return shared_case


# -- the routes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["arrow", "json"])
def test_logits_of_prompts(address: str, form: str) -> None:
    prompts = [[1, 2, 3], [7, 8]]
    body = {"input_ids": prompts, "summary": True, "select": {"positions": "all"}, "format": form}
    code, data = post(address, "/logits", body)
    assert code == 200
    results = (
        read_results(data) if form == "arrow" else [logits_from_json(r) for r in json.loads(data)["logits"]]
    )
    for found, ids in zip(results, prompts, strict=True):
        assert np.array_equal(found.to_numpy(), fake_rows(ids, VOCAB))
        assert np.array_equal(found.argmax(), fake_rows(ids, VOCAB).argmax(1))
    code, data = post(address, "/logits", {"input_ids": prompts[0], "select": {"top_k": 3}, "format": "json"})
    assert logits_from_json(json.loads(data)["logits"]).values.lengths.tolist() == [3, 3, 3]


def test_generations_in_sglangs_form(address: str) -> None:
    body = {
        "input_ids": [[1, 2, 3], [4]],
        "sampling_params": {
            "max_new_tokens": 4,
            "ignore_eos": True,
            "n": 2,
            "temperature": 1.0,
            "sampling_seed": 3,
        },
        "return_logits": {"select": "generated", "summary": ["entropy"]},
    }
    code, data = post(address, "/generate", body)
    assert code == 200
    answers = json.loads(data)
    made = fake().generate(
        [[1, 2, 3], [4]], max_new_tokens=4, ignore_eos=True, n=2, temperature=1.0, seed=3, return_logits=True
    )
    for answer, one in zip(answers, made, strict=True):
        assert answer["output_ids"] == one.token_ids.tolist()
        rows = logits_from_json(answer["meta_info"]["logits"])
        assert np.array_equal(rows.to_numpy(), one.logits.generated.to_numpy())
        assert answer["meta_info"]["finish_reason"]["type"] == "length"
    code, data = post(address, "/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}})
    assert "logits" not in json.loads(data)["meta_info"]


@pytest.mark.parametrize(
    ("path", "body", "code", "match"),
    [
        ("/logits", b"{", 400, "no JSON"),
        ("/logits", b"[" * 100_000, 400, "no JSON"),
        ("/logits", [], 400, "no object"),
        ("/logits", {"prompt": "x"}, 400, "unknown name"),
        ("/logits", {}, 400, "one kind of prompts"),
        ("/logits", {"text": 3}, 400, "another type"),
        ("/logits", {"input_ids": "x"}, 400, "another type"),
        ("/logits", {"input_ids": []}, 400, "empty"),
        ("/logits", {"input_ids": [999]}, 400, "outside the vocabulary"),
        ("/logits", {"input_ids": [2**70]}, 400, "outside the vocabulary"),
        ("/logits", {"input_ids": [1], "select": [9]}, 400, "outside the sequence"),
        ("/logits", {"input_ids": [1], "select": {"top_k": 9999}}, 400, "at most"),
        ("/logits", {"input_ids": [1], "encode": "int3"}, 400, "unknown encoding"),
        ("/logits", {"input_ids": [1], "encode": ["q8"]}, 400, "another type"),
        ("/logits", {"input_ids": [1], "format": "xml"}, 400, "'arrow' or 'json'"),
        ("/generate", {"input_ids": [1], "sampling_params": {"heat": 1}}, 400, "unknown name"),
        ("/generate", {"input_ids": [1], "sampling_params": {"n": "2"}}, 400, "integer"),
        ("/generate", {"input_ids": [1], "sampling_params": {"temperature": "hot"}}, 400, "type"),
        ("/generate", {"input_ids": [1], "return_logits": 3}, 400, "another type"),
        ("/generate", {"input_ids": [1], "stream": 1}, 400, "boolean"),
        ("/rows", {"requests": 3}, 400, "valid array"),
        ("/rows", {"requests": [{"token_ids": [1], "unknown": 1}]}, 400, "unknown name"),
        ("/tokenize", {"text": 3}, 400, ""),
        ("/tokenize", {"messages": 3}, 400, ""),
        ("/detokenize", {"token_ids": "x"}, 400, "valid array"),
        ("/nothing", {}, 404, ""),
    ],
)
def test_what_cannot_be_asked_is_refused(address: str, path: str, body: Any, code: int, match: str) -> None:
    found, data = post(address, path, body)
    assert (found, match in data.decode()) == (code, True), data
    assert set(json.loads(data)["error"]) >= {"type", "what"}
    assert post(address, "/logits", {"input_ids": [1]})[0] == 200


def test_a_key_is_asked_for() -> None:
    with serving(fake(), api_key="secret") as address:
        assert post(address, "/logits", {"input_ids": [1]})[0] == 401
        assert post(address, "/logits", {"input_ids": [1]}, Authorization="Bearer wrong")[0] == 401
        assert post(address, "/logits", {"input_ids": [1]}, Authorization="Bearer secret")[0] == 200
        assert health(address)["status"] == "ok"
        with pytest.raises(InputError, match="key"):
            ls.open(address)
        with contextlib.closing(ls.open(address, api_key="secret")) as engine:
            assert engine.logits([1, 2]).shape == (2, VOCAB)


def test_bodies_and_calls_that_are_too_large() -> None:
    limits = Limits(call_sequences=3, call_tokens=60)
    with serving(fake(), limits=limits, body_bytes=2000) as address:
        assert post(address, "/logits", {"input_ids": [1] * 2000})[0] == 413
        assert post(address, "/logits", {"input_ids": [[1]] * 4})[0] == 413
        code, data = post(address, "/logits", {"input_ids": [[1] * 25] * 3})
        assert (code, b"75" in data, b"60" in data) == (413, True, True)
        many = {"input_ids": [1], "sampling_params": {"max_new_tokens": 60}}
        assert post(address, "/generate", many)[0] == 413
        with (
            contextlib.closing(ls.open(address)) as engine,
            pytest.raises(MemoryLimitError, match="sequences"),
        ):
            engine.logits([[1]] * 4)
        assert post(address, "/logits", {"input_ids": [[1]] * 3})[0] == 200


# -- clients ---------------------------------------------------------------------------------------------


def test_a_remote_engine_is_like_any_other(address: str) -> None:
    with contextlib.closing(ls.open(address)) as engine:
        assert isinstance(engine, RemoteEngine)
        assert engine.vocab_size == VOCAB
        assert "remote" in repr(engine).lower()
        batch = engine.logits([[1, 2, 3], [4, 5]], summary=True, encode="float16")
        assert np.array_equal(batch[0].to_numpy(), fake_rows([1, 2, 3], VOCAB).astype(np.float16))
        assert batch.lengths.tolist() == [3, 2]
        with pytest.raises(SelectError, match="outside"):
            engine.logits([1], select=Select([7]))
        seen = [type(item) for item in engine.stream(engine.requests([[1, 2]]))]
        assert seen[-1] is End
        assert RowBlock in seen
    with pytest.raises(ls.errors.EngineClosedError):
        engine.logits([1])


def test_nobody_there_and_somebody_else(address: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ConnectionFailedError, match="nobody answers"):
        ls.open(f"http://127.0.0.1:{port}")
    with pytest.raises(ConnectionFailedError):
        ls.open(address + "/health")
    with pytest.raises(OptionError, match="api_key"):
        ls.open(address, apikey="x")


def test_many_clients_share_and_get_their_own() -> None:
    with serving(fake()) as address, contextlib.closing(ls.open(address)) as engine:
        failures: list[Any] = []

        def ask(seed: int) -> None:
            random = np.random.default_rng(seed)
            for _ in range(8):
                prompts = [random.integers(0, VOCAB, n).tolist() for n in random.integers(1, 30, 4)]
                try:
                    for found, ids in zip(engine.logits(prompts), prompts, strict=True):
                        assert np.array_equal(found.to_numpy(), fake_rows(ids, VOCAB))
                except BaseException as error:  # noqa: BLE001 - told below
                    failures.append(error)

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert health(address)["served_sequences"] == 12 * 8 * 4


def test_texts_are_read_from_many_clients_at_once() -> None:
    from logitscope.testing import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    engine = fake(vocab_size=1001, tokenizer=tokenizer)
    texts = [f"{word} number {i}" * (1 + i % 7) for i, word in enumerate(["alpha", "beta", "gamma"] * 20)]
    truth = [tokenizer(text)["input_ids"] for text in texts]
    with serving(engine) as address:
        found: list[Any] = [None] * len(texts)

        def ask(first: int) -> None:
            for i in range(first, len(texts), 6):
                found[i] = json.loads(post(address, "/tokenize", {"text": texts[i]})[1])["token_ids"]
                code, data = post(address, "/logits", {"text": texts[i], "format": "json"})
                assert code == 200, data

        threads = [threading.Thread(target=ask, args=(first,)) for first in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == truth


def test_what_the_engine_gets_wrong_is_raised_here() -> None:
    for fault, error in (("swap_blocks", IncompleteError), ("hang_up", IncompleteError)):
        with serving(fake(fault=fault)) as address, contextlib.closing(ls.open(address)) as engine:
            with pytest.raises(error):
                engine.logits(list(range(60)))
            assert health(address)["buffered_bytes"] == 0


def test_an_error_of_one_is_not_that_of_others() -> None:
    class Picky(FakeEngine):
        def _run(self, requests: Any, buffer: Any) -> Any:
            if any(13 in request.token_ids for request in requests):
                raise RuntimeError("thirteen")
            yield from super()._run(requests, buffer)

    gate = threading.Event()

    class Slow(Picky):
        def _run(self, requests: Any, buffer: Any) -> Any:
            gate.wait(20)
            yield from super()._run(requests, buffer)

    engine = Slow.open("fake", vocab_size=VOCAB)
    with serving(engine) as address, contextlib.closing(ls.open(address)) as client:
        found: dict[int, Any] = {}

        def ask(token: int) -> None:
            try:
                found[token] = client.logits([1, token])
            except RowsError as error:
                found[token] = error

        threads = [threading.Thread(target=ask, args=(token,)) for token in (5, 13, 7)]
        for thread in threads:
            thread.start()
        until(lambda: health(address)["waiting_sequences"] >= 1 or len(found) > 0)
        gate.set()
        for thread in threads:
            thread.join()
        assert "thirteen" in str(found[13])
        for token in (5, 7):
            assert isinstance(found[token], Logits), found[token]


def test_a_client_that_goes_frees_what_it_had() -> None:
    engine = fake(vocab_size=20_000, block_rows=8)
    limits = Limits(shared_bytes=1 << 20, ahead_bytes=1 << 20)
    with serving(engine, limits=limits) as address:
        body = json.dumps({"input_ids": [1] * 3000}).encode()
        for _ in range(3):
            connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=30)
            connection.request("POST", "/logits", body, {"Content-Type": "application/json"})
            assert len(connection.getresponse().read(1000)) == 1000
            until(lambda: health(address)["buffered_bytes"] > 0)
            assert health(address)["buffered_bytes"] < 20 * 2**20, "it runs ahead of its client"
            assert post(address, "/logits", {"input_ids": [5]})[0] == 200, "others go on"
            connection.close()
            until(lambda: health(address)["buffered_bytes"] == 0)
        with contextlib.closing(ls.open(address)) as client:
            stream = client.stream(client.requests([list(range(3000))]))
            next(stream)
            stream.close()  # type: ignore[attr-defined]
            until(lambda: health(address)["buffered_bytes"] == 0)
            rows = client.logits(list(range(50)))
            assert np.array_equal(rows.to_numpy(), fake_rows(list(range(50)), 20_000))


def test_a_full_server_says_so() -> None:
    gate = threading.Event()

    class Slow(FakeEngine):
        def _run(self, requests: Any, buffer: Any) -> Any:
            gate.wait(20)
            yield from super()._run(requests, buffer)

    engine = Slow.open("fake", vocab_size=VOCAB)
    with (
        serving(engine, limits=Limits(waiting_sequences=2)) as address,
        contextlib.closing(ls.open(address)) as client,
    ):
        results: list[Any] = []
        threads = []
        for _ in range(3):  # one runs, two wait
            threads.append(threading.Thread(target=lambda: results.append(client.logits([1]))))
            threads[-1].start()
            time.sleep(0.3)
        code, data = post(address, "/logits", {"input_ids": [1]})
        assert (code, json.loads(data)["error"]["type"]) == (429, "BusyError")
        with pytest.raises(BusyError, match="wait"):
            client.logits([2])
        gate.set()
        for thread in threads:
            thread.join()
        assert len(results) == 3


def test_a_long_generation_does_not_keep_short_texts_waiting() -> None:
    order: list[str] = []

    class Noting(FakeEngine):
        def _run(self, requests: Any, buffer: Any) -> Any:
            for item in super()._run(requests, buffer):
                order.append("generation" if requests[0].max_new_tokens else "text")
                time.sleep(0.002)
                yield item

    engine = Noting.open("fake", vocab_size=VOCAB)
    with serving(engine) as address, contextlib.closing(ls.open(address)) as client:
        long = threading.Thread(target=lambda: client.generate([1], max_new_tokens=500, ignore_eos=True))
        long.start()
        until(lambda: len(order) > 5)
        client.logits([1, 2, 3])
        assert order.count("generation") < 400, "it waited"
        long.join()


def test_a_server_that_ends_finishes_what_runs() -> None:
    engine = fake(vocab_size=2000)
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(serving(engine))
        client = stack.enter_context(contextlib.closing(ls.open(address)))
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(client.logits(list(range(500)))))
        thread.start()
        time.sleep(0.05)
    thread.join()
    assert len(results) == 1
    with pytest.raises(ConnectionFailedError):
        ls.open(address)


def test_a_connection_that_is_cut_is_an_error() -> None:
    """A proxy that passes some bytes on and hangs up."""
    with (
        serving(fake(vocab_size=5000, block_rows=4)) as address,
        contextlib.closing(ls.open(address)) as client,
    ):
        whole = post(address, "/rows", {"requests": [{"token_ids": list(range(40))}]})[1]
        for cut in np.linspace(1, len(whole) - 40, 25).astype(int).tolist():
            with pytest.raises(ls.errors.LogitscopeError):
                read_results(whole[:cut])
        assert client.logits([1]).shape == (1, 5000)


def test_hidden_rows_are_rebuilt_at_the_client(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGITSCOPE_CACHE", str(tmp_path))
    local = ls.open(tiny_model("gemma2"))
    rows = local.logits(list(range(4, 30)))
    with serving(ls.open(local.model)) as address:
        for _ in range(2):
            with contextlib.closing(ls.open(address)) as client:
                found = client.logits(list(range(4, 30)), encode="hidden")
                assert np.allclose(found.to_numpy(), rows.to_numpy(), atol=1e-5)
                assert found.nbytes < rows.nbytes / 10
    (file,) = (tmp_path / "heads").iterdir()
    assert file.name == f"{local.head.hash}.safetensors"


def test_the_command_serves_until_it_is_told_to_end(tmp_path: Any) -> None:
    with commanded(save_tiny(tmp_path)) as (address, process):
        with contextlib.closing(ls.open(address)) as engine:
            assert engine.logits([4, 5, 6]).shape == (3, engine.vocab_size)
        program = "import sys; from logitscope.cli import main; sys.exit(main())"
        port = address.rsplit(":", 1)[1]
        taken = subprocess.run(
            [sys.executable, "-c", program, "serve", str(tmp_path), "--port", port],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert taken.returncode == 1
        assert "cannot listen" in taken.stderr
        shown = subprocess.run(
            [sys.executable, "-c", program, "logits", address, "hello", "--json"],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert json.loads(shown.stdout)["shape"] == [3, 1001]
        same = subprocess.run(
            [sys.executable, "-c", program, "logits", "--url", address, "hello", "--json"],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert same.stdout == shown.stdout
        refused = subprocess.run(
            [sys.executable, "-c", program, "logits", address, "hello", "--dtype", "float16"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (refused.returncode, "serve" in refused.stderr) == (2, True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) in (0, -signal.SIGTERM)
