"""The forms of the routes: OpenAPI holds for any body; JSON in both forms, streams, metrics."""

from __future__ import annotations

import contextlib
import itertools
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from test_server import VOCAB, fake, health, post, serving

import logitscope as ls
from logitscope.engines.fake import fake_rows
from logitscope.server.text import TextSoFar
from logitscope.testing import save_tiny, tiny_tokenizer
from logitscope.wire.results import logits_from_json, read_results

ARROW = "application/vnd.apache.arrow.stream"
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(fake(vocab_size=1001, tokenizer=tiny_tokenizer())) as found:
        yield found


@pytest.fixture(scope="module")
def described(address: str) -> Any:
    return schemathesis.openapi.from_url(address + "/openapi.json")


ROUTES = {
    "/rows": "POST",
    "/logits": "POST",
    "/generate": "POST",
    "/tokenize": "POST",
    "/detokenize": "POST",
    "/info": "GET",
    "/health": "GET",
    "/metrics": "GET",
    "/vocabulary": "GET",
    "/heads/{name}": "GET",
    "/v1/completions": "POST",
    "/v1/chat/completions": "POST",
    "/v1/models": "GET",
    "/v1/models/{name}": "GET",
}


@pytest.mark.parametrize("path", ROUTES)
def test_any_body_gets_an_answer_that_is_described(described: Any, path: str) -> None:
    @given(case=described[path][ROUTES[path]].as_strategy())
    @settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def check(case: Any) -> None:
        if isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = "fake"  # or the rest is never looked at
        case.call_and_validate(checks=CHECKS, timeout=60)

    check()


def test_every_route_is_tried(described: Any) -> None:
    assert set(described.raw_schema["paths"]) == set(ROUTES)


# -- JSON ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encode", [None, "bfloat16", "float16", "q16", "q8", "float8"])
@pytest.mark.parametrize("form", ["base64", "float"])
def test_both_forms_of_arrays_bring_the_same_values(form: str, encode: str | None) -> None:
    with serving(fake()) as address, contextlib.closing(ls.open(address)) as engine:
        body = {"input_ids": [1, 2, 3], "encode": encode, "summary": True, "encoding_format": form}
        code, data = post(address, "/logits", body)
        assert code == 200
        found = logits_from_json(json.loads(data)["logits"])
        rows = engine.logits([1, 2, 3], encode=encode, summary=True)
        assert np.array_equal(found.to_numpy(), rows.to_numpy())
        for name, array in rows.summary.items():
            assert np.array_equal(found.summary[name], array, equal_nan=True), name


def test_numbers_that_are_not_finite_are_named() -> None:
    class Masked(type(fake())):  # type: ignore[misc]
        def _run(self, requests: Any, buffer: Any) -> Any:
            for item in super()._run(requests, buffer):
                if getattr(item, "values", None) is not None:
                    item.values = item.values.copy()
                    item.values[:, 7] = -np.inf
                yield item

    with serving(Masked.open("fake", vocab_size=VOCAB)) as address:
        for form in ("float", "base64"):
            data = post(address, "/logits", {"input_ids": [1, 2], "encoding_format": form})[1]
            assert b"NaN" not in data
            found = logits_from_json(json.loads(data)["logits"]).to_numpy()
            assert np.isneginf(found[:, 7]).all()
            assert np.isfinite(np.delete(found, 7, 1)).all()


@pytest.mark.parametrize(
    ("fields", "accept", "arrow"),
    [
        ({}, "*/*", True),
        ({}, "application/json", False),
        ({}, f"application/json, {ARROW}", True),
        ({"format": "arrow"}, "application/json", True),
        ({"format": "json"}, ARROW, False),
        ({"encoding_format": "float"}, "*/*", False),
    ],
)
def test_arrow_or_json_by_the_body_or_by_accept(
    address: str, fields: dict[str, Any], accept: str, arrow: bool
) -> None:
    code, data = post(address, "/logits", {"input_ids": [1], **fields}, Accept=accept)
    assert code == 200
    found = read_results(data)[0] if arrow else logits_from_json(json.loads(data)["logits"])
    assert np.array_equal(found.to_numpy(), fake_rows([1], 1001))


def test_generations_come_as_arrow_too(address: str) -> None:
    body = {
        "input_ids": [1],
        "sampling_params": {"max_new_tokens": 3, "ignore_eos": True},
        "return_logits": True,
    }
    (found,) = read_results(post(address, "/generate", body, Accept=ARROW)[1])
    assert found.shape == (3, 1001)
    assert len(found.token_ids) == 4


# -- streams ---------------------------------------------------------------------------------------------


def events(address: str, body: Any) -> list[Any]:
    code, data = post(address, "/generate", {**body, "stream": True})
    assert code == 200, data
    *found, last, rest = data.decode().split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(one.removeprefix("data: ")) for one in found]


def test_a_stream_says_what_the_whole_says(tmp_path: Any) -> None:
    body = {
        "text": ["the cat", "a dog ran"],
        "sampling_params": {
            "max_new_tokens": 12,
            "temperature": 1.0,
            "sampling_seed": 5,
            "n": 2,
            "ignore_eos": True,
        },
        "return_logits": {"summary": ["entropy"]},
    }
    with serving(ls.open(str(save_tiny(tmp_path)))) as address:
        whole = json.loads(post(address, "/generate", body)[1])
        parts = events(address, body)
    assert [one["meta_info"]["finish_reason"] for one in parts].count(None) == len(parts) - 4
    for i, one in enumerate(whole):
        own = [part for part in parts if part["index"] == i]
        assert (own[-1]["text"], own[-1]["output_ids"]) == (one["text"], one["output_ids"])
        for before, after in itertools.pairwise(own):
            assert after["text"].startswith(before["text"])
            assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        rows = [logits_from_json(p["meta_info"]["logits"]) for p in own if "logits" in p["meta_info"]]
        every = logits_from_json(one["meta_info"]["logits"])
        assert np.array_equal(np.concatenate([r.positions for r in rows]), every.positions)
        assert np.allclose(np.concatenate([r.to_numpy() for r in rows]), every.to_numpy(), atol=1e-4)
        assert len(rows) > 2


def test_a_stream_without_rows_has_text_only(address: str) -> None:
    parts = events(address, {"input_ids": [3], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}})
    assert all("logits" not in part["meta_info"] for part in parts)
    assert [len(part["output_ids"]) for part in parts] == [1, 2, 3, 4, 4]


def test_an_error_comes_through_the_stream() -> None:
    with serving(fake(fault="hang_up")) as address:
        parts = events(address, {"input_ids": [1], "sampling_params": {"max_new_tokens": 9}})
        assert parts[-1]["error"]["type"] == "IncompleteError"
        assert health(address)["buffered_bytes"] == 0


def test_text_is_never_half_a_character_or_a_beginning_of_a_stop() -> None:
    class Bytes:
        def decode(self, ids: Any, *, special: bool = False) -> str:
            return bytes(ids).decode("utf-8", "replace")

    whole = "naïve 日本語 👩‍🚀 ENDING and END!"
    for stop in ((), ("END!",), ("END!", "zzzzzzzz")):
        sofar, parts = TextSoFar(Bytes(), stop), []
        for byte in whole.encode():
            parts.append(sofar.add([byte]))
            assert "\N{REPLACEMENT CHARACTER}" not in sofar.sent
            assert "END!" not in sofar.sent or not stop
        final = whole.split("END!")[0] if stop else whole
        parts.append(sofar.finish(final))
        assert "".join(parts) == final
        assert sum(map(bool, parts)) > 10


# -- what is counted -------------------------------------------------------------------------------------


def metrics(address: str) -> dict[str, float]:
    with urllib.request.urlopen(address + "/metrics", timeout=30) as answer:
        assert answer.headers["content-type"].startswith("text/plain")
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_metrics_count_what_happened(tmp_path: Any) -> None:
    with serving(ls.open(str(save_tiny(tmp_path)))) as address:
        prompt = list(range(4, 100))
        for _ in range(2):
            assert post(address, "/logits", {"input_ids": [prompt]})[0] == 200
        code, _ = post(
            address,
            "/generate",
            {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 7, "ignore_eos": True}},
        )
        assert (code, post(address, "/logits", {})[0]) == (200, 400)
        found = metrics(address)
    assert found['logitscope_http_requests_total{route="/logits",status="200"}'] == 2
    assert found['logitscope_http_requests_total{route="/logits",status="400"}'] == 1
    assert found['logitscope_http_request_seconds_count{route="/generate"}'] == 1
    assert found["logitscope_sequences_total"] == 3
    assert found["logitscope_prompt_tokens_total"] == 2 * 96 + 2
    assert found["logitscope_generated_tokens_total"] == 7
    assert found["logitscope_engine_cache_hits_total"] == 1
    assert found["logitscope_engine_cached_prompt_tokens_total"] >= 95
    assert found["logitscope_sent_bytes_total"] > 2 * 96 * 1001 * 4
    assert found["logitscope_waiting_sequences"] == found["logitscope_buffered_bytes"] == 0


def test_web_pages_of_other_origins_are_let_in_only_when_named() -> None:
    for origins, allowed in (((), None), (("http://lab.example",), "http://lab.example")):
        with serving(fake(), origins=origins) as address:
            request = urllib.request.Request(address + "/health", headers={"Origin": "http://lab.example"})
            with urllib.request.urlopen(request, timeout=30) as answer:
                assert answer.headers.get("access-control-allow-origin") == allowed
