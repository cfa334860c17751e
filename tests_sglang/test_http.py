"""SGLang's own HTTP server with the plugin installed."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from logitscope.wire.results import logits_from_json, read_results

FRANCE = "The capital of France is"
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(smollm2: str) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "model-path": smollm2,
        "port": port,
        "device": "cpu",
        "attention-backend": "torch_native",
        "dtype": "float32",
        "max-total-tokens": 4096,
        "mem-fraction-static": 0.3,
        "grammar-backend": "none",
        "log-level": "warning",
    }
    command = [sys.executable, "-m", "sglang.launch_server", "--skip-server-warmup"]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    address = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command) as process:
        try:
            _wait_until_healthy(address, process)
            yield address
        finally:
            process.terminate()


def _wait_until_healthy(address: str, process: subprocess.Popen[bytes]) -> None:
    late = time.monotonic() + 200
    while time.monotonic() < late:
        assert process.poll() is None, "the server ended"
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5)
        except (OSError, urllib.error.URLError):
            time.sleep(0.5)
        else:
            return
    raise AssertionError("the server did not become healthy")


def post(address: str, body: Any) -> bytes:
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: bytes = answer.read()
    return found


def refused(address: str, body: Any) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as found:
        post(address, body)
    return found.value.code, found.value.read().decode()


def test_generate_gives_rows_as_base64(server: str, oracle: Any, close: Callable[..., None]) -> None:
    body = {"text": FRANCE, "sampling_params": GREEDY, "return_logits": {"summary": True}}
    answer = json.loads(post(f"{server}/generate", body))
    found = logits_from_json(answer["meta_info"]["logits"])
    assert found.token_ids[found.prompt_length :].tolist() == answer["output_ids"]
    truth = oracle(found.token_ids)[:-1]
    close("HTTP, /generate", found, truth)
    assert np.abs(found.summary["max"] - truth.max(-1)).max() < 2e-4
    plain = json.loads(post(f"{server}/generate", {"text": FRANCE, "sampling_params": GREEDY}))
    assert "logits" not in plain["meta_info"]
    assert plain["text"] == answer["text"]


def test_a_stream_gives_the_new_rows_of_each_chunk(server: str, oracle: Any, close: Any) -> None:
    body = {"text": FRANCE, "sampling_params": GREEDY, "return_logits": True, "stream": True}
    lines = post(f"{server}/generate", body).decode().split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    parts = [logits_from_json(chunk["meta_info"]["logits"]) for chunk in chunks]
    assert np.concatenate([part.positions for part in parts]).tolist() == list(range(5 + 6 - 1))
    rows = np.concatenate([np.asarray(part) for part in parts])
    close("HTTP, streaming", rows, oracle(parts[-1].token_ids)[:-1])


@pytest.mark.parametrize("form", ["arrow", "json"])
def test_logits_scores_prompts(server: str, oracle: Any, close: Callable[..., None], form: str) -> None:
    body = {"text": [FRANCE, "Once upon a time"], "summary": ["entropy"], "format": form}
    data = post(f"{server}/logits", body)
    results = (
        read_results(data) if form == "arrow" else [logits_from_json(r) for r in json.loads(data)["logits"]]
    )
    assert [len(r) for r in results] == [5, 4]
    for found in results:
        close("HTTP, /logits", found, oracle(found.token_ids))
        assert not np.isnan(found.entropy()).any()


def test_ids_and_selections_over_http(server: str, oracle: Any, close: Callable[..., None]) -> None:
    ids = [504, 3575, 282, 4649]
    data = post(f"{server}/logits", {"input_ids": ids, "select": "last", "encode": "float16"})
    (found,) = read_results(data)
    assert found.positions.tolist() == [3]
    assert str(np.asarray(found).dtype) == "float16"
    close("HTTP, float16", found, oracle(ids)[-1:], tolerance=0.02)


def test_bad_requests_are_400_and_the_server_goes_on(server: str) -> None:
    for path, body, match in [
        ("generate", {"text": FRANCE, "return_logits": {"selekt": 1}}, "selekt"),
        ("generate", {"text": FRANCE, "return_logits": {"encode": "int3"}}, "int3"),
        ("logits", {"text": FRANCE, "format": "xml"}, "xml"),
        ("logits", {"prompt": FRANCE}, "prompt"),
        ("logits", {"text": FRANCE, "select": [99]}, "99"),
        ("logits", {}, ""),
    ]:
        code, message = refused(f"{server}/{path}", body)
        assert code == 400, message
        assert match in message
    assert len(read_results(post(f"{server}/logits", {"text": FRANCE}))[0]) == 5


def test_the_doctor_finds_every_hook() -> None:
    command = [
        sys.executable,
        "-c",
        "from logitscope.cli import main; raise SystemExit(main())",
        "doctor",
        "sglang",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Scheduler._create_generation_req" in done.stdout
    assert done.stdout.count(" ok") >= 11
