"""SGLang's own HTTP server with the plugin installed."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from cpu import served

from logitscope.wire.results import logits_from_json, read_results

FRANCE = "The capital of France is"
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(smollm2: str) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_REQUEST_STATE_WAIT_TIMEOUT", "1")
        with served(smollm2, chunked_prefill_size=64) as (address, _):
            yield address


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


@pytest.mark.parametrize("cut", [{"top_k": 3}, {"vocab": [504, 9]}, {"sample": 5}], ids=str)
def test_some_columns_over_http(server: str, oracle: Any, close: Callable[..., None], cut: Any) -> None:
    ids = [504, 3575, 282, 4649]
    select = {"positions": [1, 3], **cut}
    body = {"input_ids": ids, "select": select}
    (arrow,) = read_results(post(f"{server}/logits", body))
    plain = logits_from_json(json.loads(post(f"{server}/logits", {**body, "format": "json"}))["logits"])
    asked = {"input_ids": ids, "sampling_params": GREEDY, "return_logits": {"select": select}}
    made = logits_from_json(json.loads(post(f"{server}/generate", asked))["meta_info"]["logits"])
    truth = oracle(ids)
    for found in (arrow, plain, made):
        assert found.positions.tolist() == [1, 3]
        entries = found.values.entries()
        rows = np.repeat([1, 3], entries.lengths)
        close("HTTP, some columns", entries.values, truth[rows, entries.ids])
        assert found.dropped_mass().max() < 1
    assert np.array_equal(arrow.values.ids, plain.values.ids)


def test_bad_requests_are_400_and_the_server_goes_on(server: str) -> None:
    for path, body, match in [
        ("generate", {"text": FRANCE, "return_logits": {"selekt": 1}}, "selekt"),
        ("generate", {"text": FRANCE, "return_logits": {"encode": "int3"}}, "int3"),
        ("logits", {"text": FRANCE, "format": "xml"}, "xml"),
        ("logits", {"prompt": FRANCE}, "prompt"),
        ("logits", {"text": FRANCE, "select": [99]}, "99"),
        ("logits", {"text": FRANCE, "select": {"top_k": 10**6}}, "at most 49152"),
        ("logits", {"text": FRANCE, "select": {"vocab": [" Paris"]}}, "tokenizer"),
        ("generate", {"text": FRANCE, "return_logits": {"select": {"top_k": 3, "top_p": 0.5}}}, "contradict"),
        ("generate", {"text": FRANCE, "return_logits": {"encode": "hidden"}}, "hidden"),
        ("logits", {"text": FRANCE, "encode": "hidden-float16"}, "hidden"),
        ("logits", {}, ""),
    ]:
        code, message = refused(f"{server}/{path}", body)
        assert code == 400, message
        assert match in message
    assert len(read_results(post(f"{server}/logits", {"text": FRANCE}))[0]) == 5


QUESTION = [{"role": "user", "content": "Say hi."}]
SHORT = {"model": "default", "temperature": 0, "max_tokens": 6, "ignore_eos": True}


def asking(options: Any) -> dict[str, Any]:
    return {"custom_params": {"logitscope": options}}


def test_completions_give_rows_in_their_choice(server: str, oracle: Any, close: Callable[..., None]) -> None:
    body = {**SHORT, "prompt": FRANCE}
    answer = json.loads(post(f"{server}/v1/completions", {**body, **asking({"summary": ["entropy"]})}))
    choice = answer["choices"][0]
    found = logits_from_json(choice.pop("logits"))
    close("HTTP, OpenAI routes", found, oracle(found.token_ids)[:-1])
    assert found.positions.tolist() == list(range(5 + 6 - 1))
    assert not np.isnan(found.entropy()).any()
    plain = json.loads(post(f"{server}/v1/completions", body))
    assert plain["choices"] == [choice], "the rest of an answer is SGLang's"
    assert plain.keys() == answer.keys()


def test_several_prompts_and_samples_have_rows_of_their_own(server: str, oracle: Any, close: Any) -> None:
    ids = [[504, 3575, 282], [504, 3575, 282, 4649]]
    body = {**SHORT, "prompt": ids, "n": 2, "temperature": 1.0, "return_token_ids": True, **asking(True)}
    choices = json.loads(post(f"{server}/v1/completions", body))["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    for choice, prompt in zip(choices, [ids[0], ids[0], ids[1], ids[1]], strict=True):
        found = logits_from_json(choice["logits"])
        assert found.token_ids.tolist() == prompt + choice["token_ids"]
        close("HTTP, OpenAI routes", found, oracle(found.token_ids)[:-1])


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"return_meta_info": True, "logprobs": True}])
def test_chats_give_rows_in_their_choices(server: str, oracle: Any, close: Any, more: Any) -> None:
    body = {**SHORT, "messages": QUESTION, "return_token_ids": True, **more}
    asked = asking({"select": "generated", "encode": "float16"})
    choices = json.loads(post(f"{server}/v1/chat/completions", {**body, **asked}))["choices"]
    assert len(choices) == more.get("n", 1)
    for choice in choices:
        found = logits_from_json(choice["logits"])
        assert found.token_ids[found.prompt_length :].tolist() == choice["response_token_ids"]
        assert found.token_ids[: found.prompt_length].tolist() == choice["prompt_token_ids"]
        truth = oracle(found.token_ids)[found.prompt_length - 1 : -1]
        close("HTTP, float16", found, truth, tolerance=0.02)
        assert "logits" not in choice.get("meta_info", {}), "once is enough"
    plain = json.loads(post(f"{server}/v1/chat/completions", body))["choices"]
    assert [choice["message"] for choice in choices] == [choice["message"] for choice in plain]
    assert not any("logits" in choice for choice in plain)


def test_openais_own_client_shows_them(server: str, oracle: Any, close: Callable[..., None]) -> None:
    import openai

    with openai.OpenAI(base_url=f"{server}/v1", api_key="none") as client:
        answer = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "Say hi."}],
            temperature=0,
            extra_body=asking({"select": {"positions": {"start": -2}}}),
        )
    found = logits_from_json(answer.choices[0].logits)
    close("HTTP, OpenAI routes", found, oracle(found.token_ids)[found.positions])


def test_both_spellings_ask_on_every_route(server: str, oracle: Any, close: Callable[..., None]) -> None:
    for spelling in ({"return_logits": {"select": [3]}}, asking({"select": [3]})):
        sampling = {**GREEDY, **({} if "return_logits" in spelling else spelling)}
        answers = [
            json.loads(post(f"{server}/generate", {"text": FRANCE, "sampling_params": sampling, **spelling})),
            json.loads(post(f"{server}/v1/completions", {**SHORT, "prompt": FRANCE, **spelling})),
            json.loads(post(f"{server}/v1/chat/completions", {**SHORT, "messages": QUESTION, **spelling})),
        ]
        places = [answers[0]["meta_info"], answers[1]["choices"][0], answers[2]["choices"][0]]
        for place in places:
            found = logits_from_json(place["logits"])
            assert found.positions.tolist() == [3]
            close("HTTP, OpenAI routes", found, oracle(found.token_ids)[3:4])


@pytest.mark.parametrize(
    ("more", "match"),
    [
        (asking({"selekt": 1}), "selekt"),
        (asking({"encode": "int3"}), "int3"),
        (asking({"encode": ["float16"]}), "unknown encoding"),
        (asking([True]), "neither a boolean nor an object"),
        (asking("{"), "no JSON"),
        ({"return_logits": {"selekt": 1}}, "selekt"),
        (asking({"select": [99]}), "99"),
        (asking({"encode": "hidden"}), "not sent over HTTP"),
        ({"stream": True, **asking(True)}, "POST /generate"),
    ],
)
def test_what_openai_routes_cannot_give_is_a_400(server: str, more: Any, match: str) -> None:
    for path, own in [("completions", {"prompt": FRANCE}), ("chat/completions", {"messages": QUESTION})]:
        code, message = refused(f"{server}/v1/{path}", {**SHORT, **own, **more})
        assert (code, match in message) == (400, True), message


def test_false_asks_nothing_wherever_it_is_said(server: str) -> None:
    for more in ({"return_logits": False}, asking(False), {"custom_params": {"other": 1}}):
        answer = json.loads(post(f"{server}/v1/completions", {**SHORT, "prompt": FRANCE, **more}))
        assert "logits" not in answer["choices"][0]
        body = {"text": FRANCE, "sampling_params": {**GREEDY, **({} if "return_logits" in more else more)}}
        assert "logits" not in json.loads(post(f"{server}/generate", body))["meta_info"]


@contextlib.contextmanager
def client(server: str, path: str, body: Any) -> Iterator[http.client.HTTPConnection]:
    """A client that asks and goes away, whatever comes."""
    connection = http.client.HTTPConnection(server.removeprefix("http://"), timeout=60)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        yield connection
    finally:
        connection.close()


def test_clients_that_go_leave_nothing_and_the_server_goes_on(
    server: str, oracle: Any, close: Any, segments: Callable[[], Any], used: Callable[[], Any], until: Any
) -> None:
    long = {"sampling_params": {**GREEDY, "max_new_tokens": 900}, "return_logits": True}
    short, *prompts = [[504, 3575, 282, 4649], *np.arange(1000, 5000).reshape(2, 2000).tolist()]
    # Bytes that a client reads before it goes; what it asked.
    generating = [
        (0, "/generate", {"text": FRANCE, **long}),
        (9, "/generate", {"text": FRANCE, **long, "stream": True}),
        (9, "/generate", {"text": [FRANCE, "Once"], **long, "stream": True}),
        (0, "/v1/completions", {**SHORT, "prompt": FRANCE, "max_tokens": 900, "n": 2, **asking(True)}),
    ]
    scoring = [(0, "/logits", {"input_ids": [short, *prompts]})]  # the first has its rows soon
    reading = [(9, "/logits", {"input_ids": [prompt[:400] for prompt in prompts]})]
    counts = []
    for asked in [generating, scoring, reading] * 2:
        with contextlib.ExitStack() as clients:
            for count, path, body in asked:
                connection = clients.enter_context(client(server, path, body))
                if count:
                    connection.getresponse().read(count)
            assert until(used, lambda found: found)
            time.sleep(0.5)
        time.sleep(2)  # SGLang looks for its clients once a second here
        assert not until(used, lambda found: not found), asked
        counts.append(len(segments()))
    assert counts[-1] == counts[2], "segments are used again"
    rows = json.loads(post(f"{server}/logits", {"text": FRANCE, "format": "json"}))["logits"]
    found = logits_from_json(rows)
    close("HTTP, /logits", found, oracle(found.token_ids))


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
    assert done.stdout.count(" ok") >= 15
