"""The routes of OpenAI's form, asked by OpenAI's own client and by lm-evaluation-harness."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
import torch
from test_server import VOCAB, fake, health, post, serving, until
from transformers import AutoModelForCausalLM

import logitscope as ls
from logitscope.engines.fake import FakeEngine, _states
from logitscope.rows import Select
from logitscope.server.choice import prompt_spans
from logitscope.server.runner import Limits
from logitscope.testing import save_tiny, tiny_tokenizer
from logitscope.tokenizer import Tokenizer
from logitscope.wire.results import logits_from_json

CHAT = [{"role": "user", "content": "the cat"}]


@dataclasses.dataclass
class Served:
    """A tiny model, and the server of it."""

    folder: str
    address: str
    model: str
    client: openai.OpenAI
    engine: Any
    tokenizer: Any
    hf: Any

    def logits(self, ids: Any) -> Any:
        """Of Transformers, float64 ``[L, vocab]``."""
        with torch.no_grad():
            return self.hf(torch.tensor([[int(i) for i in ids]])).logits[0].double()

    def logprobs(self, ids: Any) -> Any:
        return self.logits(ids).log_softmax(1).numpy()

    def greedy(self, ids: Any, count: int) -> list[int]:
        ids = [int(i) for i in ids]
        for _ in range(count):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[-count:]


def client_of(address: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=address + "/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = str(save_tiny(tmp_path_factory.mktemp("tiny")))
    engine = ls.open(folder)
    with serving(engine) as address, client_of(address) as client:
        name = client.models.list().data[0].id
        local = ls.open(folder)
        hf = AutoModelForCausalLM.from_pretrained(folder)
        yield Served(folder, address, name, client, local, tiny_tokenizer(), hf)


class Speaker(FakeEngine):
    """Says a text after a prompt, and then ends."""

    @classmethod
    def of(cls, prompt: list[int], text: str, **options: Any) -> Speaker:
        tokenizer = tiny_tokenizer(260)  # every byte is a token
        engine = cls.open("speaker", vocab_size=260, tokenizer=tokenizer, eos_token_id=2, **options)
        ids = [*prompt, *tokenizer(text)["input_ids"], 2]
        states = _states(ids, 0)[len(prompt) - 1 : -1]
        engine.says = {int(s): i for s, i in zip(states, ids[len(prompt) :], strict=True)}
        return engine

    def rows(self, states: Any) -> Any:
        found = super().rows(states)
        for row, state in zip(found, states, strict=True):
            if int(state) in self.says:
                row[self.says[int(state)]] = 9.0
        return found


def chunks_of(stream: Any) -> tuple[dict[int, str], dict[int, list[Any]], dict[int, Any], list[Any]]:
    """Text, log-probabilities and reasons of a stream's choices, and all its chunks."""
    texts: dict[int, str] = {}
    items: dict[int, list[Any]] = {}
    reasons: dict[int, Any] = {}
    every = list(stream)
    for chunk in every:
        for choice in chunk.choices:
            assert choice.index not in reasons, "nothing comes after the end"
            text = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
            found = choice.logprobs
            if found is not None and hasattr(found, "content"):
                items.setdefault(choice.index, []).extend(found.content)
            elif found is not None:
                columns = (found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset)
                items.setdefault(choice.index, []).extend(zip(*columns, strict=True))
            if choice.finish_reason is not None:
                reasons[choice.index] = choice.finish_reason
    return texts, items, reasons, every


def legacy(found: Any) -> list[Any]:
    columns = (found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset)
    return list(zip(*columns, strict=True))


# -- models ----------------------------------------------------------------------------------------------


def test_the_model_that_is_served_is_listed(served: Served) -> None:
    (found,) = served.client.models.list().data
    assert (found.id, found.object) == (served.engine.identity.model, "model")
    assert served.client.models.retrieve(found.id).id == found.id
    with pytest.raises(openai.NotFoundError, match="another model") as caught:
        served.client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"


# -- completions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["text", "texts", "ids", "lists of ids"])
def test_completions_of_every_form_of_prompt(served: Served, form: str) -> None:
    texts = ["The capital of France", "naïve 日本"] if form in ("texts", "lists of ids") else ["naïve 日本"]
    ids = [served.tokenizer(text)["input_ids"] for text in texts]
    prompt: Any = {"text": texts[0], "texts": texts, "ids": ids[0], "lists of ids": ids}[form]
    found = served.client.completions.create(
        model=served.model, prompt=prompt, max_tokens=5, temperature=0, echo=True, logprobs=3
    )
    assert found.object == "text_completion"
    assert found.usage.prompt_tokens == sum(map(len, ids))
    assert found.usage.completion_tokens == 5 * len(ids)
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    for choice, text, own in zip(found.choices, texts, ids, strict=True):
        new = served.greedy(own, 5)
        truth = served.logprobs([*own, *new])
        assert choice.text == text + served.tokenizer.decode(new, skip_special_tokens=True)
        assert choice.finish_reason == "length"
        scores = choice.logprobs
        assert len(scores.tokens) == len(own) + 5
        assert (scores.token_logprobs[0], scores.top_logprobs[0]) == (None, None)
        rows = np.arange(len(own) + 4)
        targets = np.array([*own, *new])[1:]
        assert np.allclose(scores.token_logprobs[1:], truth[rows, targets], atol=1e-5)
        for row, target, logprob, top in zip(
            rows, targets, scores.token_logprobs[1:], scores.top_logprobs[1:], strict=True
        ):
            best = np.argsort(-truth[row])[:3]
            assert len(top) == len({*best, target})
            assert np.allclose(sorted(top.values())[-3:], np.sort(truth[row])[-3:], atol=1e-5)
            assert logprob in top.values(), "the same number in both places"
            assert (logprob == max(top.values())) == (target == best[0])
        for token, offset in zip(scores.tokens, scores.text_offset, strict=True):
            if not token.startswith("bytes:") and token.isascii() and "<" not in token:
                assert choice.text[offset : offset + len(token)] == token
        assert scores.text_offset == sorted(scores.text_offset)


def test_a_prompt_is_scored_without_new_tokens(served: Served) -> None:
    ids = served.tokenizer("The cat sat, déjà vu.")["input_ids"]
    found = served.client.completions.create(
        model=served.model, prompt=[ids, ids[:1]], max_tokens=0, echo=True, logprobs=0
    )
    whole, single = found.choices
    assert np.allclose(
        whole.logprobs.token_logprobs[1:], served.logprobs(ids)[range(len(ids) - 1), ids[1:]], atol=1e-5
    )
    assert [len(top) for top in whole.logprobs.top_logprobs[1:]] == [1] * (len(ids) - 1)
    assert (whole.text, whole.finish_reason) == ("The cat sat, déjà vu.", "length")
    assert single.logprobs.token_logprobs == [None]
    assert found.usage.completion_tokens == 0
    plain = served.client.completions.create(model=served.model, prompt="abc", max_tokens=0, echo=True)
    assert (plain.choices[0].text, plain.choices[0].logprobs) == ("abc", None)


def test_what_the_tokenizer_puts_in_front_has_no_place_in_the_text(tmp_path: Any) -> None:
    engine = ls.open(str(save_tiny(tmp_path, bos=True)))
    with serving(engine) as address, client_of(address) as client:
        name = client.models.list().data[0].id
        found = client.completions.create(model=name, prompt="the cat", max_tokens=0, echo=True, logprobs=1)
        (choice,) = found.choices
        ids = engine_ids = Tokenizer(tiny_tokenizer(bos=True)).encode("the cat").tolist()
        assert choice.text == "the cat"
        assert choice.logprobs.tokens[0] == "<|bos|>"
        assert choice.logprobs.text_offset[:2] == [0, 0]
        assert len(choice.logprobs.token_logprobs) == len(ids) == found.usage.prompt_tokens
        assert None not in choice.logprobs.token_logprobs[1:]
        again = client.completions.create(
            model=name, prompt=engine_ids, max_tokens=0, echo=True, logprobs=1
        ).choices[0]
        assert again.text == "<|bos|>the cat", "ids are shown as they are"
        assert again.logprobs.text_offset[1] == len("<|bos|>")
        assert again.logprobs.token_logprobs == choice.logprobs.token_logprobs


def test_where_tokens_begin_in_a_text() -> None:
    assert prompt_spans([b"ab", b"c"], "abc") == [(0, 2), (2, 3)]
    assert prompt_spans([b"<s>", b" Hello", b" you"], "Hello you") == [(0, 0), (0, 5), (5, 9)]
    assert prompt_spans(["é".encode()[:1], "é".encode()[1:], None, b"x"], "éx") == [
        (0, 0),
        (0, 1),
        (1, 1),
        (1, 2),
    ]


def test_two_tokens_of_one_text_leave_the_higher() -> None:
    from logitscope.server.choice import Score, Token
    from logitscope.server.openai_forms import CompletionForm

    class Same:
        def pieces(self, ids: Any) -> list[str]:
            return ["same" for _ in ids]

        def token_bytes(self, ids: Any) -> list[bytes]:
            return [b"same" for _ in ids]

    token = Token(7, 0, 0, 4, Score(-3.0, ((5, -1.0), (6, -2.0)), math.nan, math.nan))
    part = CompletionForm(Same()).part("same", [token], scored=True)
    assert part["logprobs"]["top_logprobs"] == [{"same": -1.0}]
    assert part["logprobs"]["token_logprobs"] == [-3.0]


# -- chats -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_and_what_its_tokens_rows_say(served: Served, stream: bool) -> None:
    prompt = served.engine.tokenizer.encode_chat(CHAT, generate=True)
    made = served.engine.generate(
        CHAT,
        max_new_tokens=6,
        return_logits=True,
        select=Select("generated"),
        summary=["entropy", "top1_margin"],
    )
    truth = served.logprobs([*prompt, *made.token_ids])[len(prompt) - 1 :]
    found: Any = served.client.chat.completions.create(
        model=served.model,
        messages=CHAT,
        max_tokens=6,
        temperature=0,
        logprobs=True,
        top_logprobs=4,
        stream=stream,
    )
    if stream:
        texts, items, reasons, chunks = chunks_of(found)
        text, content, reason = texts[0], items[0], reasons[0]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[0].object == "chat.completion.chunk"
        assert all(chunk.usage is None for chunk in chunks)
    else:
        (choice,) = found.choices
        text, content, reason = choice.message.content, choice.logprobs.content, choice.finish_reason
        assert (choice.message.role, found.object) == ("assistant", "chat.completion")
        assert found.usage.prompt_tokens == len(prompt)
    assert (text, reason) == (made.text, made.finish_reason)
    assert len(content) == len(made.token_ids)
    data = served.engine.tokenizer.token_bytes(made.token_ids)
    for j, (item, token_id, own) in enumerate(zip(content, made.token_ids, data, strict=True)):
        assert item.bytes == (None if own is None else list(own))
        assert item.token == served.engine.tokenizer.pieces([token_id])[0]
        assert abs(item.logprob - truth[j, token_id]) < 1e-5
        assert [top.token for top in item.top_logprobs] == served.engine.tokenizer.pieces(
            np.argsort(-truth[j], kind="stable")[:4]
        )
        assert np.allclose([top.logprob for top in item.top_logprobs], np.sort(truth[j])[::-1][:4], atol=1e-5)
        assert item.top_logprobs[0].logprob == item.logprob
        assert item.entropy == pytest.approx(float(made.logits.entropy()[j]), abs=1e-5)
        assert item.margin == pytest.approx(float(made.logits.top1_margin()[j]), abs=1e-5)
        assert item.entropy == pytest.approx(-(np.exp(truth[j]) * truth[j]).sum(), abs=1e-4)


def test_messages_in_parts_and_with_what_changes_nothing(served: Served) -> None:
    ask = functools.partial(
        served.client.chat.completions.create, model=served.model, max_tokens=4, temperature=0
    )
    plain = ask(messages=[{"role": "system", "content": "ab"}, *CHAT])
    parts: Any = [{"type": "text", "text": "the"}, {"type": "text", "text": " cat"}]
    again = ask(
        messages=[{"role": "system", "content": "ab", "name": "x"}, {"role": "user", "content": parts}],
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        presence_penalty=0,
        frequency_penalty=0.0,
        user="me",
        metadata={"a": "b"},
        store=False,
        logit_bias=None,
        stop=None,
        n=1,
    )
    assert again.choices[0].message.content == plain.choices[0].message.content
    assert again.usage == plain.usage


def test_a_chat_without_a_number_of_tokens_ends_with_the_context(served: Served) -> None:
    found = served.client.chat.completions.create(
        model=served.model, messages=CHAT, temperature=0, extra_body={"ignore_eos": True}
    )
    context = served.engine.context_length
    assert found.usage.completion_tokens == context - found.usage.prompt_tokens + 1 < 512
    with serving(fake(tokenizer=tiny_tokenizer(), vocab_size=1001)) as address, client_of(address) as client:
        found = client.chat.completions.create(model="fake", messages=CHAT)
        assert found.usage.completion_tokens == 512
        both: Any = {"max_tokens": 9, "max_completion_tokens": 3}
        found = client.chat.completions.create(model="fake", messages=CHAT, **both)
        assert found.usage.completion_tokens == 3


# -- streams ---------------------------------------------------------------------------------------------

SAID = "naïve 日本語, 👩‍🚀 and ENDING or END!"


@pytest.mark.parametrize("stop", [None, "END!", ["ENDX", " or"], ["本"], "n"])
@pytest.mark.parametrize("echo", [False, True])
def test_text_and_tokens_are_the_same_in_a_stream(stop: Any, echo: bool) -> None:
    prompt = [5, 6, 7]
    with serving(Speaker.of(prompt, SAID)) as address, client_of(address) as client:
        ask = functools.partial(
            client.completions.create,
            model="speaker",
            prompt=prompt,
            max_tokens=100,
            temperature=0,
            stop=stop,
            echo=echo,
            logprobs=2,
        )
        whole = ask().choices[0]
        texts, items, reasons, chunks = chunks_of(ask(stream=True))
    first = min(
        (SAID.find(one) for one in ([stop] if isinstance(stop, str) else stop or []) if one in SAID),
        default=None,
    )
    before = Tokenizer(tiny_tokenizer(260)).decode(prompt) if echo else ""
    assert whole.text == texts[0] == before + SAID[:first]
    assert whole.finish_reason == reasons[0] == "stop"
    assert items.get(0, []) == legacy(whole.logprobs)
    assert len(chunks) >= (1 if first == 0 else 6)
    said = SAID[:first].encode()
    ended = 0 if stop else 1  # the token that ends a text is a token of it
    assert len(items.get(0, [])) == len(said) + ended + (len(prompt) if echo else 0)
    assert sum(map(len, texts.values())) == len(whole.text)
    offsets = whole.logprobs.text_offset[len(prompt) if echo else 0 :]
    starts = [len(before) + len(said[:i].decode(errors="ignore")) for i in range(len(said) + ended)]
    assert offsets == starts
    shown = 0
    for chunk in chunks:
        for choice in chunk.choices:
            assert "\N{REPLACEMENT CHARACTER}" not in choice.text
            shown += len(choice.text)
            if choice.logprobs is not None:
                assert max(choice.logprobs.text_offset) <= shown


@pytest.mark.parametrize("chat", [False, True])
def test_random_tokens_are_the_same_in_a_stream(served: Served, chat: bool) -> None:
    """A tiny model says bytes that are no text."""
    common: Any = {"model": served.model, "max_tokens": 30, "n": 3, "seed": 7, "stop": ["a", "zz"]}
    create: Any = (
        functools.partial(served.client.chat.completions.create, messages=CHAT, logprobs=True, top_logprobs=2)
        if chat
        else functools.partial(
            served.client.completions.create, prompt=["the cat", "a"], logprobs=2, echo=True
        )
    )
    whole = create(**common)
    texts, items, reasons, chunks = chunks_of(
        create(**common, stream=True, stream_options={"include_usage": True})
    )
    assert len(whole.choices) == (3 if chat else 6)
    assert len(set(texts.values())) > 2
    for choice in whole.choices:
        text = choice.message.content if chat else choice.text
        found = choice.logprobs.content if chat else legacy(choice.logprobs)
        assert texts[choice.index] == text
        assert reasons[choice.index] == choice.finish_reason
        own = items.get(choice.index, [])
        if not chat:
            assert [one[0] for one in own] == [one[0] for one in found]
            assert [one[3] for one in own] == [one[3] for one in found]
            assert np.allclose([one[1] for one in own[1:]], [one[1] for one in found[1:]], atol=1e-4)
        else:
            assert [one.token for one in own] == [one.token for one in found]
            assert np.allclose([one.entropy for one in own], [one.entropy for one in found], atol=1e-4)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_the_asynchronous_client(served: Served) -> None:
    async def ask() -> tuple[Any, str]:
        async with openai.AsyncOpenAI(base_url=served.address + "/v1", api_key="none") as client:
            options: Any = {"model": served.model, "messages": CHAT, "max_tokens": 5, "temperature": 0}
            wholes = await asyncio.gather(*(client.chat.completions.create(**options) for _ in range(4)))
            stream = await client.chat.completions.create(**options, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            return wholes, text

    wholes, text = asyncio.run(ask())
    assert {one.choices[0].message.content for one in wholes} == {text}


def test_a_client_that_goes_away_aborts() -> None:
    engine = fake(vocab_size=1001, tokenizer=tiny_tokenizer())
    seen: list[int] = []

    class Slow(type(engine)):  # type: ignore[misc]
        def _run(self, requests: Any, buffer: Any) -> Any:
            for item in super()._run(requests, buffer):
                seen.append(1)
                time.sleep(0.002)
                yield item

    engine = Slow.open("fake", vocab_size=1001, tokenizer=tiny_tokenizer())
    with serving(engine) as address, client_of(address) as client:
        stream = client.completions.create(model="fake", prompt=[1], max_tokens=20_000, stream=True)
        next(iter(stream))
        stream.close()
        with contextlib.suppress(openai.APITimeoutError):
            client.completions.create(model="fake", prompt=[1], max_tokens=20_000, timeout=0.5)
        until(lambda: health(address)["buffered_bytes"] == 0)
        time.sleep(0.1)
        before = len(seen)
        time.sleep(0.2)
        assert len(seen) - before <= 2, "nobody waits for it"


# -- rows ------------------------------------------------------------------------------------------------

KEPT: list[dict[str, Any]] = [
    {},
    {"select": "last"},
    {"select": {"positions": "generated", "top_k": 3}},
    {"select": {"positions": [0, 3, -1], "vocab": [7, 5]}},
    {"select": {"top_p": 0.5}, "summary": ["entropy"]},
    {"select": {"vocab": None}, "summary": True},
    {"select": {"sample": 4, "seed": 3}},
    {"encode": "q8"},
    {"encode": "float16", "summary": ["target_rank"]},
]


@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_rows_come_with_each_choice(served: Served, kept: Any, logprobs: int | None, stream: bool) -> None:
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    select = kept.get("select")
    chosen = Select(select) if isinstance(select, str) else Select(**(select or {}))
    options: Any = {"max_new_tokens": 4, "ignore_eos": True, "temperature": 1.0, "seed": 3}
    made = served.engine.generate(
        prompts,
        return_logits=True,
        select=chosen,
        encode=kept.get("encode"),
        summary=kept.get("summary", False),
        **options,
    )
    found: Any = served.client.completions.create(
        model=served.model,
        prompt=prompts,
        max_tokens=4,
        temperature=1,
        seed=3,
        logprobs=logprobs,
        stream=stream,
        extra_body={"return_logits": True, "ignore_eos": True, **kept},
    )
    parts: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in found if stream else [found]:
        for choice in chunk.choices:
            if "logits" in (choice.model_extra or {}):
                parts[choice.index].append(logits_from_json(choice.logits))
            if logprobs is not None and choice.logprobs is not None and not stream:
                ids = [*prompts[choice.index], *made[choice.index].token_ids]
                truth = served.logprobs(ids)[len(ids) - 5 : -1]
                assert np.allclose(choice.logprobs.token_logprobs, truth[range(4), ids[-4:]], atol=1e-5)
                assert {len(top) for top in choice.logprobs.top_logprobs} <= {1, 2, 3}
    for i, one in enumerate(made):
        rows = parts[i]
        assert np.concatenate([part.positions for part in rows]).tolist() == one.logits.positions.tolist()
        for name, array in one.logits.summary.items():
            both = np.concatenate([part.summary[name] for part in rows])
            assert np.allclose(both, array, atol=1e-4, equal_nan=True), name
        if one.logits.cut:
            ids = np.concatenate([part.values.entries().ids for part in rows])
            assert ids.tolist() == one.logits.values.entries().ids.tolist()
            values = np.concatenate([part.values.entries().values for part in rows])
            assert np.allclose(values, one.logits.values.entries().values, atol=1e-4)
        elif one.logits.values is not None:
            values = np.concatenate([np.asarray(part.to_numpy(), np.float32) for part in rows])
            bound = 1e-4 + 2 * one.logits.error_bound()[:, None]
            assert (np.abs(values - np.asarray(one.logits.to_numpy(), np.float32)) <= bound).all()
            assert rows[0].encoding == kept.get("encode")


def test_rows_of_scored_prompts(served: Served) -> None:
    ids = [5, 6, 7, 8]
    for kept in ({}, {"select": "last"}):
        found: Any = served.client.completions.create(
            model=served.model,
            prompt=ids,
            max_tokens=0,
            echo=True,
            logprobs=1,
            extra_body={"return_logits": True, **kept},
        )
        rows = logits_from_json(found.choices[0].logits)
        assert np.allclose(rows.to_numpy(), served.logits(ids)[rows.positions], atol=1e-4)
        assert rows.positions.tolist() == ([3] if kept else [0, 1, 2, 3])
        assert np.allclose(
            found.choices[0].logprobs.token_logprobs[1:], served.logprobs(ids)[range(3), ids[1:]], atol=1e-5
        )


def test_infinite_values_are_written_as_openai_does() -> None:
    class Masked(FakeEngine):
        def rows(self, states: Any) -> Any:
            found = super().rows(states)
            found[:, 7] = -np.inf
            found[:, 9:] = -np.inf
            return found

    with serving(Masked.open("fake", vocab_size=VOCAB, tokenizer=tiny_tokenizer(300))) as address:
        body: Any = {"model": "fake", "prompt": [5, 7, 6], "max_tokens": 0, "echo": True, "logprobs": 12}
        code, data = post(address, "/v1/completions", body)
        assert code == 200
        found = json.loads(data)["choices"][0]["logprobs"]
        assert found["token_logprobs"][1] == -9999.0
        assert min(found["top_logprobs"][1].values()) == -9999.0
        assert -20 < found["token_logprobs"][2] <= max(found["top_logprobs"][2].values()) < 0
        bias = {"logit_bias": {"5": 100}, "max_tokens": 2, "logprobs": True, "top_logprobs": 12}
        code, data = post(address, "/v1/chat/completions", {"model": "fake", "messages": CHAT, **bias})
        assert b"NaN" not in data
        item = json.loads(data)["choices"][0]["logprobs"]["content"][0]
        assert [top["logprob"] for top in item["top_logprobs"]][-3:] == [-9999.0] * 3
        own = [top["logprob"] for top in item["top_logprobs"] if top["token"] == item["token"]]
        assert own == [item["logprob"]]
        assert math.isfinite(item["entropy"] + item["margin"])


# -- how tokens are chosen -------------------------------------------------------------------------------


def test_biases_seeds_samples_and_stops(served: Served) -> None:
    ask = functools.partial(
        served.client.completions.create, model=served.model, prompt="the cat", max_tokens=8
    )
    (word,) = served.tokenizer(" the")["input_ids"]
    forced = ask(logit_bias={str(word): 1000}, temperature=0).choices[0]
    assert forced.text == " the" * 8
    raw = ask(logit_bias={str(word): 1000}, logprobs=0, max_tokens=1).choices[0].logprobs.token_logprobs[0]
    ids = served.tokenizer("the cat")["input_ids"]
    assert raw == pytest.approx(served.logprobs(ids)[-1, word], abs=1e-5), "the bias is not in it"
    one, again, other = ask(seed=1, n=4), ask(seed=1, n=4), ask(seed=2, n=4)
    assert [c.text for c in one.choices] == [c.text for c in again.choices]
    assert [c.text for c in one.choices] != [c.text for c in other.choices]
    assert len({c.text for c in one.choices}) > 1
    assert [c.index for c in one.choices] == [0, 1, 2, 3]
    assert one.usage.prompt_tokens == len(ids)
    assert ask().choices[0].text != "" or ask().choices[0].text != "", "drawn by default, at temperature 1"
    stopped = ask(temperature=0, logit_bias={str(word): 1000}, extra_body={"stop_token_ids": [word]})
    assert (stopped.usage.completion_tokens, stopped.choices[0].finish_reason) == (1, "stop")
    kept = ask(seed=1, extra_body={"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.0}).choices[0].text
    assert kept == ask(temperature=0).choices[0].text
    assert ask(seed=1, extra_body={"top_k": -1}).choices[0].text == ask(seed=1).choices[0].text
    assert (
        served.client.completions.create(
            model=served.model, prompt="a", temperature=0
        ).usage.completion_tokens
        == 16
    )


# -- errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -1}, "frequency_penalty"),
        ({"heat": 1}, "heat"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 5000}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 5000}, "prompt"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": -5}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": 3}, "stop"),
        ({"n": 0}, "n"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias or stop_token_ids"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"select": "last"}, "select"),
        ({"summary": True}, "summary"),
        ({"encode": "q8"}, "encode"),
        ({"return_logits": True, "encode": "hidden"}, "encode"),
        ({"return_logits": True, "encode": "int3"}, "encode"),
        ({"return_logits": True, "select": {"top_k": 0}}, "select"),
        ({"return_logits": True, "select": "first"}, "select"),
        ({"return_logits": True, "summary": ["mood"]}, "summary"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
    ],
    ids=str,
)
def test_completions_that_are_refused(served: Served, fields: dict[str, Any], param: str) -> None:
    body = {"model": served.model, "prompt": "the cat", **fields}
    code, data = post(served.address, "/v1/completions", body)
    found = json.loads(data)["error"]
    assert (code, found["param"], found["type"]) == (400, param, "invalid_request_error"), found
    assert set(found) == {"message", "type", "param", "code"}
    with pytest.raises(openai.BadRequestError) as caught:
        served.client.completions.create(model=served.model, prompt="the cat", extra_body=fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"functions": [{}]}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"audio": {}}, "audio"),
        ({"store": True}, "store"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 5000}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 5000}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]}, "messages[0].tool_calls"),
        ({"messages": "hi"}, "messages"),
        ({"echo": True}, "echo"),
    ],
    ids=str,
)
def test_chats_that_are_refused(served: Served, fields: dict[str, Any], param: str) -> None:
    code, data = post(
        served.address, "/v1/chat/completions", {"model": served.model, "messages": CHAT, **fields}
    )
    found = json.loads(data)["error"]
    assert (code, found["param"]) == (400, param), found


def test_the_clients_own_errors() -> None:
    gate = threading.Event()

    class Slow(FakeEngine):
        def _run(self, requests: Any, buffer: Any) -> Any:
            gate.wait(20)
            yield from super()._run(requests, buffer)

    engine = Slow.open("fake", vocab_size=1001, tokenizer=tiny_tokenizer(), context_length=50)
    limits = Limits(waiting_sequences=1, call_sequences=3)
    with (
        serving(engine, limits=limits, api_key="secret", body_bytes=4000) as address,
        client_of(address, "wrong") as stranger,
        client_of(address, "secret") as client,
    ):
        with pytest.raises(openai.AuthenticationError) as refused:
            stranger.models.list()
        assert (refused.value.code, refused.value.param) == ("invalid_api_key", None)
        with pytest.raises(openai.AuthenticationError):
            stranger.completions.create(model="fake", prompt="x")
        with pytest.raises(openai.NotFoundError, match="'fake'") as unknown:
            client.chat.completions.create(model="gpt-4", messages=CHAT)
        assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.NotFoundError, match="/v1/embeddings"):
            client.embeddings.create(model="fake", input="x")
        with pytest.raises(openai.BadRequestError) as long:
            client.completions.create(model="fake", prompt=[1] * 60)
        assert long.value.code == "context_length_exceeded"
        for large in ([1] * 4000, [[1]] * 4):
            with pytest.raises(openai.APIStatusError) as much:
                client.completions.create(model="fake", prompt=large)
            assert (much.value.status_code, much.value.code) == (413, "request_too_large")
        threads = []
        for _ in range(2):  # one runs, one waits
            ask = functools.partial(client.completions.create, model="fake", prompt=[1], max_tokens=2)
            threads.append(threading.Thread(target=ask))
            threads[-1].start()
            time.sleep(0.3)
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as busy:
                client.completions.create(model="fake", prompt=[1], max_tokens=2, stream=stream)
            assert busy.value.response.headers["retry-after"] == "1"
            assert busy.value.code == "rate_limit_exceeded"
        gate.set()
        for thread in threads:
            thread.join()
        assert client.completions.create(model="fake", prompt=[1], max_tokens=2).usage.completion_tokens == 2


@pytest.mark.parametrize("fault", ["hang_up", "lose_last_row", "drop_block"])
def test_rows_that_did_not_come_are_an_error(fault: str) -> None:
    engine = FakeEngine.open("fake", vocab_size=1001, tokenizer=tiny_tokenizer(), fault=fault, block_rows=2)
    with serving(engine) as address, client_of(address) as client:
        options: Any = {
            "model": "fake",
            "prompt": list(range(9)),
            "max_tokens": 4,
            "logprobs": 1,
            "echo": True,
        }
        with pytest.raises(openai.InternalServerError) as whole:
            client.completions.create(**options)
        assert whole.value.type == "server_error"
        with pytest.raises(openai.APIError):
            list(client.completions.create(**options, stream=True))
        assert health(address)["buffered_bytes"] == 0


def test_a_model_without_a_tokenizer_has_no_texts() -> None:
    with serving(fake()) as address, client_of(address) as client:
        assert client.models.list().data[0].id == "fake"
        with pytest.raises(openai.BadRequestError, match="without a tokenizer"):
            client.completions.create(model="fake", prompt=[1], logprobs=1)


def test_the_bytes_of_tokens_are_known_to_a_client_of_ours(served: Served) -> None:
    ids = range(served.engine.vocab_size)
    data = served.engine.tokenizer.token_bytes(ids)
    assert served.tokenizer.decode(list(range(4, 60))).encode() == b"".join(
        one for one in data[4:60] if one is not None
    )
    assert data[-1] is None
    assert [data[i] for i in served.tokenizer("日")["input_ids"]] != ["日".encode()]
    assert b"".join(data[i] for i in served.tokenizer("日本 x")["input_ids"]) == "日本 x".encode()
    with contextlib.closing(ls.open(served.address)) as remote:
        assert remote.tokenizer.token_bytes(ids) == data
        assert remote.tokenizer.pieces(ids) == served.engine.tokenizer.pieces(ids)


# -- lm-evaluation-harness -------------------------------------------------------------------------------

PAIRS = [
    ("The capital of France is", " Paris"),
    ("The capital", " of Japan is Tokyo."),
    ("A model reads", " tokens and gives one row"),
    ("naïve", " café 日本語"),
    ("if (x == 10)", " { return y[3]"),
]


def harness(served: Served, **options: Any) -> Any:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    return LocalCompletionsAPI(
        base_url=served.address + "/v1/completions",
        model=served.model,
        tokenizer=served.folder,
        tokenizer_backend="huggingface",
        max_length=served.engine.context_length,
        max_retries=1,
        **options,
    )


def instances(kind: str, arguments: list[Any]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=one, idx=i) for i, one in enumerate(arguments)]


def truth_of(served: Served, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    rows = served.logprobs([*context, *continuation])[len(context) - 1 : -1]
    chosen = rows[range(len(continuation)), continuation]
    return float(chosen.sum()), bool((rows.argmax(1) == continuation).all())


@pytest.mark.parametrize("options", [{}, {"batch_size": 3}, {"batch_size": 2, "num_concurrent": 2}], ids=str)
def test_the_harness_scores_continuations(served: Served, options: Any) -> None:
    model = harness(served, **options)
    likely = [*PAIRS]
    for context, _ in PAIRS[:2]:  # and some that are greedy
        ids = served.tokenizer(context)["input_ids"]
        likely.append((context, served.tokenizer.decode(served.greedy(ids, 3))))
    found = model.loglikelihood(instances("loglikelihood", likely), disable_tqdm=True)
    encoded = [model._encode_pair(*pair) for pair in likely]
    truth = [truth_of(served, *pair) for pair in encoded]
    assert np.allclose([value for value, _ in found], [value for value, _ in truth], atol=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in truth]


def test_the_harness_knows_a_greedy_continuation(served: Served) -> None:
    model = harness(served, batch_size=4)
    context = served.tokenizer("The capital")["input_ids"]
    best = served.greedy(context, 6)
    requests = [(("", ""), context, best[:n]) for n in (1, 3, 6)]
    requests.append((("", ""), context, [*best[:2], (best[2] + 1) % 700]))
    found = model._loglikelihood_tokens(requests)
    assert [greedy for _, greedy in found] == [True, True, True, False]
    for (value, _), (_, ids, continuation) in zip(found, requests, strict=True):
        assert value == pytest.approx(truth_of(served, ids, continuation)[0], abs=1e-4)


def test_the_harness_rolls_over_long_texts(served: Served) -> None:
    text = "The capital of France is Paris, and the capital of Japan is Tokyo. " * 12
    model = harness(served, batch_size=2)
    (found,) = model.loglikelihood_rolling(instances("loglikelihood_rolling", [(text,)]), disable_tqdm=True)
    from lm_eval import utils

    windows = utils.get_rolling_token_windows(
        token_list=served.tokenizer(text)["input_ids"],
        prefix_token=model.prefix_token_id,
        max_seq_len=model.max_length - 1,
        context_len=1,
    )
    pairs = [utils.make_disjoint_window(window) for window in windows]
    assert len(pairs) > 1
    assert found == pytest.approx(sum(truth_of(served, *pair)[0] for pair in pairs), abs=1e-2)


@pytest.mark.parametrize("options", [{}, {"batch_size": 3}, {"tokenized_requests": False}], ids=str)
def test_the_harness_generates(served: Served, options: Any) -> None:
    model = harness(served, **options)
    arguments = [(context, {"until": ["e", "\n\n"], "max_gen_toks": 12}) for context, _ in PAIRS]
    found = model.generate_until(instances("generate_until", arguments), disable_tqdm=True)
    for text, (context, _) in zip(found, arguments, strict=True):
        made = served.engine.generate(context, max_new_tokens=12, stop=["e", "\n\n", "<|im_end|>"])
        assert text == made.text
