"""The routes of OpenAI's form: completions, chats, the model. Log-probabilities are those of raw rows."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import Any, TypeAlias

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from logitscope.errors import (
    BusyError,
    ContextLengthError,
    LogitscopeError,
    MemoryLimitError,
    ModelNotFoundError,
    OptionError,
)
from logitscope.logits import Logits
from logitscope.rows import End, Request, RowBlock, Select
from logitscope.server.answers import json_answer, json_bytes, status_of
from logitscope.server.bodies import EVENTS_TYPE, JSON_TYPE, Route
from logitscope.server.choice import Choice, Plan
from logitscope.server.native import check_json, kept_of
from logitscope.server.openai_bodies import ChatBody, CompletionBody, OpenAIBody
from logitscope.server.openai_forms import ChatForm, CompletionForm, Form
from logitscope.server.service import Service
from logitscope.server.views import covering
from logitscope.wire.results import logits_to_json

_COMPLETION_TOKENS, _CHAT_TOKENS = 16, 512
_CODES: dict[type[LogitscopeError], str] = {
    ContextLengthError: "context_length_exceeded",
    ModelNotFoundError: "model_not_found",
    MemoryLimitError: "request_too_large",
    BusyError: "rate_limit_exceeded",
}

Scoring: TypeAlias = tuple[Select, tuple[str, ...]]


class OpenAI:
    """What the routes do.

    Args:
        service: that they stand on.
    """

    def __init__(self, service: Service) -> None:
        self.service, self.engine = service, service.engine
        self._created = int(time.time())

    @property
    def routes(self) -> list[Route]:
        """All of them ask for the key."""
        both = (JSON_TYPE, EVENTS_TYPE)
        completions = functools.partial(openai_form, inputs="prompt")
        chats = functools.partial(openai_form, inputs="messages")
        return [
            Route("POST", "/v1/completions", self.completions, CompletionBody, both, completions),
            Route("POST", "/v1/chat/completions", self.chat, ChatBody, both, chats),
            Route("GET", "/v1/models", self.models, refused=openai_form),
            Route("GET", "/v1/models/{name:path}", self.model, refused=openai_form),
        ]

    async def models(self, request: HttpRequest) -> Response:
        """The model that is served."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: HttpRequest) -> Response:
        """The same by its name."""
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def completions(self, request: HttpRequest) -> Response:
        """Texts that go on as prompts do; with ``echo`` the prompts and what their rows say of them, too."""
        body = await self.service.body(request, CompletionBody)
        self._check(body, body.logprobs)
        limit = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        requests = await self._requests(body, body.prompt, limit)
        scored = None
        if body.logprobs is not None:
            positions = "generated" if not body.echo else "all" if limit else "prompt"
            scored = _scoring(positions, body.logprobs)
        prompts = self._echoed(body, requests) if body.echo else [None] * len(requests)
        plans = [
            _plan(body, one, scored, body.logprobs, text) for one, text in zip(requests, prompts, strict=True)
        ]
        return await self._answer(request, body, plans, CompletionForm(self.service.tokenizer))

    async def chat(self, request: HttpRequest) -> Response:
        """The assistant's next message."""
        body = await self.service.body(request, ChatBody)
        self._check(body, body.top_logprobs)
        limit, chat = body.max_completion_tokens or body.max_tokens, body.chat()
        requests = await self._requests(body, chat, limit or 1)
        if limit is None:
            requests = await self._requests(body, chat, self._room(requests[0]))
        scored = _scoring("generated", body.top_logprobs, "entropy", "top1_margin") if body.logprobs else None
        plans = [_plan(body, one, scored, body.top_logprobs, None) for one in requests]
        return await self._answer(request, body, plans, ChatForm(self.service.tokenizer))

    # -- what is asked ---------------------------------------------------------------------------------

    def _check(self, body: OpenAIBody, best: int | None) -> None:
        self._check_model(body.model)
        body.check()
        if (best or 0) > self.engine.vocab_size:
            name = "logprobs" if isinstance(body, CompletionBody) else "top_logprobs"
            raise OptionError(
                "more tokens than there are",
                where=name,
                expected=f"at most {self.engine.vocab_size}",
                got=best,
            )

    def _check_model(self, name: str) -> None:
        served = self.engine.identity.model
        if name != served:
            raise ModelNotFoundError(
                "another model than the one that is served",
                where="model",
                expected=repr(served),
                got=repr(name),
            )

    async def _requests(self, body: OpenAIBody, inputs: Any, max_new_tokens: int) -> list[Request]:
        """The checked requests, which keep what the client keeps."""
        found: list[Request] = await self.service.read(
            self.engine.requests,
            inputs,
            max_new_tokens=max_new_tokens,
            sampling=body.sampling(),
            n=body.n or 1,
            **kept_of(body),
        )
        check_json(found)
        return found

    def _room(self, request: Request) -> int:
        """New tokens where no number was given: what the context has room for, at most 512."""
        context = self.engine.context_length
        left = _CHAT_TOKENS if context is None else context - request.prompt_length + 1
        return max(min(left, _CHAT_TOKENS), 1)

    def _echoed(self, body: CompletionBody, requests: Sequence[Request]) -> list[str | None]:
        """The text of each request's prompt: as it was given, or that of its tokens."""
        given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        if isinstance(given[0], str):
            return [str(given[one.prompt_index]) for one in requests]
        decode = self.service.tokenizer.decode
        return [decode(one.token_ids, special=True) for one in requests]

    # -- what is answered ------------------------------------------------------------------------------

    async def _answer(
        self, request: HttpRequest, body: OpenAIBody, plans: Sequence[Plan], form: Form
    ) -> Response:
        choices = [Choice(self.engine, plan, index) for index, plan in enumerate(plans)]
        facts = {
            "id": form.prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": self.engine.identity.model,
            "system_fingerprint": self.engine.identity.weights_hash,
        }
        requests = [plan.request for plan in plans]
        if body.stream:
            options = body.stream_options
            counted = options is not None and bool(options.include_usage)
            call, queue = self.service.submitted(requests)
            items = self.service.items(call, queue)
            events = self._events(choices, items, form, facts, counted=counted)
            return self.service.closing(call, events, EVENTS_TYPE)
        kept = [plan.kept for plan in plans if plan.kept is not None]
        collector = self.service.collector(kept)

        def take(item: RowBlock | End) -> None:
            for one in choices[item.index].take(item):
                if isinstance(one, End):
                    collector.finish(one)
                else:
                    collector.add(one)

        async with contextlib.aclosing(self.service.attended(request, requests)) as items:
            async for item in items:
                await run_in_threadpool(take, item)

        def answer() -> Response:
            rows = [found.logits for found in collector.results()] if kept else [None] * len(choices)
            listed = [
                {**_facts(one), **form.whole(*one.new(), scored=one.plan.scored is not None), **_rows(found)}
                for one, found in zip(choices, rows, strict=True)
            ]
            return json_answer(
                {**facts, "object": form.whole_name, "choices": listed, "usage": _usage(choices)}
            )

        return await run_in_threadpool(answer)

    async def _events(
        self,
        choices: Sequence[Choice],
        items: AsyncGenerator[RowBlock | End, None],
        form: Form,
        facts: dict[str, Any],
        *,
        counted: bool,
    ) -> AsyncIterator[bytes]:
        """Each item as events with what is new in it; then ``[DONE]``."""
        facts = {**facts, "object": form.part_name, **({"usage": None} if counted else {})}

        def told(item: RowBlock | End) -> bytes:
            new = _news(choices[item.index], item, form)
            return b"".join(_event({**facts, "choices": [one]}) for one in new)

        for choice in choices:
            for begun in form.begin():
                yield _event({**facts, "choices": [{**_facts(choice), **begun}]})
        try:
            async with contextlib.aclosing(items):
                async for item in items:
                    yield await run_in_threadpool(told, item)
            if counted:
                yield _event({**facts, "choices": [], "usage": _usage(choices)})
        except LogitscopeError as error:
            yield _event({"error": openai_form(error, status_of(error))})
        yield b"data: [DONE]\n\n"

    def _model(self) -> dict[str, Any]:
        identity = self.engine.identity
        return {"id": identity.model, "object": "model", "created": self._created, "owned_by": "logitscope"}


def openai_form(error: LogitscopeError, status: int, *, inputs: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's form.

    Args:
        error: what is wrong.
        status: of the answer.
        inputs: what the route calls its prompts.
    """
    kind = (
        "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
    )
    code = "invalid_api_key" if status == 401 else _CODES.get(type(error))
    word = re.match(r"\w+", error.where or "")
    names = {
        "input": inputs,
        "inputs": inputs,
        "request": inputs,
        "Select": "select",
        "max_new_tokens": "max_tokens",
    }
    param = None if word is None else names.get(word[0], error.where)
    return {
        "message": str(error),
        "type": kind,
        "param": param if status in (400, 404) else None,
        "code": code,
    }


def _scoring(positions: str, best: int | None, *summary: str) -> Scoring:
    """What is kept of rows, so that they score tokens and name so many of the best."""
    if not best:
        return Select(positions, vocab=None), ("target_logprob", *summary)
    return Select(positions, top_k=best), ("target_logit", "target_logprob", *summary)


def _plan(
    body: OpenAIBody, wanted: Request, scoring: Scoring | None, best: int | None, prompt: str | None
) -> Plan:
    bare = dataclasses.replace(wanted, select=None, encode=None, summary=())
    kept = wanted if body.return_logits else None
    scored = None
    if scoring is not None:
        select, summary = scoring
        scored = dataclasses.replace(bare, select=select, summary=summary)
    views = [view for view in (scored, kept) if view is not None]
    return Plan(covering(views) if views else bare, scored, best or 0, kept, prompt)


def _news(choice: Choice, item: RowBlock | End, form: Form) -> Iterator[dict[str, Any]]:
    """Choices of chunks: new text and its tokens with the first rows, more rows by themselves, the end."""
    rows = [choice.rows(one) for one in choice.take(item) if isinstance(one, RowBlock) and len(one)]
    text, tokens = choice.new()
    facts = {"index": choice.index, "finish_reason": None}
    scored = choice.plan.scored is not None
    if text or tokens or rows:
        first = rows[0] if rows else None
        yield {**facts, **form.part(text, tokens, scored=scored and bool(tokens)), **_rows(first)}
    for more in rows[1:]:
        yield {**facts, **form.part("", [], scored=False), **_rows(more)}
    if choice.end is not None:
        yield {**_facts(choice), **form.last()}


def _facts(choice: Choice) -> dict[str, Any]:
    reason = None if choice.end is None else choice.end.finish_reason or "length"
    return {"index": choice.index, "finish_reason": reason}


def _rows(rows: Logits | None) -> dict[str, Any]:
    return {} if rows is None else {"logits": logits_to_json(rows)}


def _usage(choices: Sequence[Choice]) -> dict[str, int]:
    """Tokens: of each prompt once, and of all that was generated."""
    requests = [choice.plan.request for choice in choices]
    prompts = sum(one.prompt_length for one in requests if one.sample_index == 0)
    made = sum(len(choice.end.generated_ids) for choice in choices if choice.end is not None)
    return {"prompt_tokens": prompts, "completion_tokens": made, "total_tokens": prompts + made}


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json_bytes(content) + b"\n\n"
