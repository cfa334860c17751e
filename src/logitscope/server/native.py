"""The routes of our own form: rows as an Arrow stream or as JSON, generations, tokenizer, head."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from logitscope.engines.results import Generation
from logitscope.errors import InputError, LogitscopeError, OptionError, UnsupportedError
from logitscope.logits.collect import block_logits
from logitscope.rows import HIDDEN_FORMS, End, Request, RowBlock, Sampling
from logitscope.server.answers import ClosingResponse, json_answer, json_bytes
from logitscope.server.bodies import (
    EVENTS_TYPE,
    JSON_TYPE,
    DetokenizeBody,
    GenerateBody,
    Kept,
    LogitsBody,
    Prompts,
    Route,
    RowsBody,
    SamplingBody,
    TokenizeBody,
)
from logitscope.server.service import Service
from logitscope.server.text import TextSoFar
from logitscope.wire import MEDIA_TYPE, request_from_json, select_from_json, summary_from_json
from logitscope.wire.errors import error_to_json
from logitscope.wire.results import ArrayForm, logits_to_json
from logitscope.wire.shared import PROOF_HEADER

HEAD_TYPE = "application/octet-stream"


class Native:
    """What the routes do."""

    def __init__(self, service: Service) -> None:
        self.service, self.engine = service, service.engine

    @property
    def routes(self) -> list[Route]:
        """All of them that ask for the key."""
        return [
            Route("GET", "/info", self.info),
            Route("POST", "/rows", self.rows, RowsBody, (MEDIA_TYPE,)),
            Route("POST", "/logits", self.logits, LogitsBody, (MEDIA_TYPE, JSON_TYPE)),
            Route("POST", "/generate", self.generate, GenerateBody, (JSON_TYPE, EVENTS_TYPE, MEDIA_TYPE)),
            Route("POST", "/tokenize", self.tokenize, TokenizeBody),
            Route("POST", "/detokenize", self.detokenize, DetokenizeBody),
            Route("GET", "/vocabulary", self.vocabulary),
            Route("GET", "/heads/{name}", self.head, gives=(HEAD_TYPE,)),
        ]

    async def health(self, request: HttpRequest) -> Response:
        """Whether it lives, and how much it has to do."""
        runner, lender = self.service.runner, self.service.lender
        return JSONResponse(
            {
                "status": "ok",
                "waiting_sequences": runner.waiting_sequences,
                "buffered_bytes": runner.buffered_bytes,
                "served_sequences": runner.served,
                "refused_calls": runner.refused,
                "segments": 0 if lender is None else len(lender.pool),
                "segments_bytes": 0 if lender is None else lender.pool.reserved_bytes,
            }
        )

    async def info(self, request: HttpRequest) -> Response:
        """What a client must know of the engine."""
        engine = self.engine
        tokenizer = engine.tokenizer
        return JSONResponse(
            {
                "server": "logitscope",
                "identity": dataclasses.asdict(engine.identity),
                "capabilities": dataclasses.asdict(engine.capabilities),
                "context_length": engine.context_length,
                "shared_memory": None if self.service.lender is None else self.service.lender.proof_path,
                "head": None if engine.head is None or not engine.capabilities.hidden else engine.head.hash,
                "tokenizer": None
                if tokenizer is None
                else {
                    "size": len(tokenizer),
                    "hash": tokenizer.hash,
                    "eos_token_id": tokenizer.eos_token_id,
                    "special_ids": sorted(tokenizer.special_ids),
                    "has_chats": tokenizer.has_chats,
                },
            }
        )

    async def rows(self, request: HttpRequest) -> Response:
        """Requests of the wire, answered with their blocks and ends."""
        body = await self.service.body(request, RowsBody)
        requests = [request_from_json(one) for one in body.requests]
        return self.service.stream(requests, proof=request.headers.get(PROOF_HEADER))

    async def logits(self, request: HttpRequest) -> Response:
        """Rows ``0 … L-1`` of prompts."""
        body = await self.service.body(request, LogitsBody)
        inputs, single = inputs_of(body)
        requests = await self.service.read(self.engine.requests, inputs, **kept_of(body))
        if not _as_json(request, body.format, body.encoding_format):
            return self.service.stream(requests)
        check_json(requests)
        found = await self.service.collected(request, requests)
        form = body.encoding_format or "base64"

        def answer() -> Response:
            listed = [logits_to_json(one.logits, form=form) for one in found if one.logits is not None]
            return json_answer({"logits": listed[0] if single else listed})

        return await run_in_threadpool(answer)

    async def generate(self, request: HttpRequest) -> Response:
        """Generations in SGLang's form, with their rows where they are asked for."""
        body = await self.service.body(request, GenerateBody)
        inputs, single = inputs_of(body)
        params = body.sampling_params
        kept = body.return_logits if isinstance(body.return_logits, Kept) else Kept()
        requests = await self.service.read(
            self.engine.requests,
            inputs,
            max_new_tokens=params.max_new_tokens,
            sampling=_sampling(params),
            n=params.n,
            **kept_of(kept),
        )
        if not body.return_logits:
            requests = [dataclasses.replace(one, select=None, summary=(), encode=None) for one in requests]
        if not body.stream and _wants(request, MEDIA_TYPE):
            return self.service.stream(requests)
        check_json(requests)
        form = body.encoding_format or "base64"
        if body.stream:
            return ClosingResponse(self._events(requests, form), media_type=EVENTS_TYPE)
        found = await self.service.collected(request, requests)

        def answer() -> Response:
            made = [Generation.of(r, one) for r, one in zip(requests, found, strict=True)]
            answers = [_answer(one, form) for one in made]
            return json_answer(answers[0] if single and params.n == 1 else answers)

        return await run_in_threadpool(answer)

    async def tokenize(self, request: HttpRequest) -> Response:
        """Ids of texts or of a chat."""
        body = await self.service.body(request, TokenizeBody)
        tokenizer = self.service.tokenizer
        if body.messages is not None:
            if not body.messages:
                raise InputError("no chat", where="messages", expected="a list of messages")
            return JSONResponse(await self.service.read(_chat, tokenizer, body))
        if body.text is None:
            raise OptionError("no text", where="text", expected="a string")
        ids = await self.service.read(tokenizer.encode if body.special else tokenizer.text_ids, body.text)
        return JSONResponse({"token_ids": [int(i) for i in ids]})

    async def detokenize(self, request: HttpRequest) -> Response:
        """Text of ids."""
        body = await self.service.body(request, DetokenizeBody)
        outside = [i for i in body.token_ids if not 0 <= i < self.engine.vocab_size]
        if outside:
            raise InputError(
                "id outside the vocabulary",
                where="token_ids",
                expected=f"0 … {self.engine.vocab_size - 1}",
                got=outside[0],
            )
        return JSONResponse({"text": self.service.tokenizer.decode(body.token_ids, special=body.special)})

    async def vocabulary(self, request: HttpRequest) -> Response:
        """Text of every id by itself, and the bytes of those whose bytes are not that text."""
        tokenizer, every = self.service.tokenizer, range(self.engine.vocab_size)

        def answer() -> Response:
            pieces, data = tokenizer.pieces(every), tokenizer.token_bytes(every)
            others = {
                str(i): None if found is None else found.hex()
                for i, (piece, found) in enumerate(zip(pieces, data, strict=True))
                if found != piece.encode()
            }
            return json_answer({"pieces": pieces, "bytes": others})

        return await run_in_threadpool(answer)

    async def head(self, request: HttpRequest) -> Response:
        """The head that hidden rows are rebuilt with, as a safetensors file."""
        head = self.engine.head
        name = request.path_params["name"]
        if head is None or not self.engine.capabilities.hidden or head.hash != name:
            raise HTTPException(404, "no such head")
        return Response(await run_in_threadpool(head_file, head), media_type=HEAD_TYPE)

    async def _events(self, requests: Sequence[Request], form: ArrayForm) -> AsyncIterator[bytes]:
        """Each block as an event with the text so far; then ``[DONE]``."""
        call, queue = self.service.submitted(requests)
        parts = [_Part(self.service, one) for one in call.requests]
        try:
            async with contextlib.aclosing(self.service.items(call, queue)) as items:
                async for item in items:
                    yield _event({**parts[item.index].taken(item, form), "index": item.index})
        except LogitscopeError as error:
            yield _event({"error": error_to_json(error)})
        yield b"data: [DONE]\n\n"


class _Part:
    """One sequence of a stream of events: what was said of it so far."""

    def __init__(self, service: Service, request: Request) -> None:
        self.service, self.request = service, request
        self.ids: list[int] = []
        tokenizer = service.engine.tokenizer
        self.text = None if tokenizer is None else TextSoFar(tokenizer, request.sampling.stop)

    def taken(self, item: RowBlock | End, form: ArrayForm) -> dict[str, Any]:
        """What an item brings, as SGLang says it: text and ids are all so far, rows are the new ones."""
        if isinstance(item, End):
            return {
                "text": item.text,
                "output_ids": item.generated_ids.tolist(),
                "meta_info": _meta(self.request, len(item.generated_ids), item),
            }
        self.ids += item.token_ids.tolist()
        if self.text is not None:
            self.text.add(item.token_ids.tolist())
        meta = _meta(self.request, len(self.ids), None)
        if len(item):
            engine = self.service.engine
            seen = np.concatenate([self.request.token_ids, np.asarray(self.ids, np.int32)])
            rows = block_logits(
                item, self.request, seen, identity=engine.identity, vocabulary=engine.tokenizer
            )
            meta["logits"] = logits_to_json(rows, form=form)
        return {
            "text": None if self.text is None else self.text.sent,
            "output_ids": list(self.ids),
            "meta_info": meta,
        }


def _chat(tokenizer: Any, body: TokenizeBody) -> dict[str, Any]:
    ids = tokenizer.encode_chat(body.messages, generate=body.generate)
    spans = {"assistant_tokens": tokenizer.assistant_tokens(body.messages, ids)} if body.assistant else {}
    return {"token_ids": ids.tolist(), **spans}


def inputs_of(body: Prompts) -> tuple[Any, bool]:
    """The prompts of a call, and whether it is one that is no list."""
    given = [name for name in Prompts.model_fields if getattr(body, name) is not None]
    if len(given) != 1:
        raise OptionError(
            "one kind of prompts",
            where="body",
            expected="one of text, input_ids, messages",
            got=" and ".join(given) or "none",
        )
    inputs = getattr(body, given[0])
    if given[0] == "text":
        return inputs, isinstance(inputs, str)
    return inputs, not inputs or not isinstance(inputs[0], list)


def kept_of(body: Kept) -> dict[str, Any]:
    """What is kept, as `Engine.requests` takes it."""
    return {
        "select": None if body.select is None else select_from_json(body.select),
        "encode": body.encode,
        "summary": summary_from_json(body.summary),
    }


def check_json(requests: Sequence[Request]) -> None:
    """Refuse rows that JSON cannot carry.

    Raises:
        UnsupportedError: hidden rows.
    """
    if any(request.encode in HIDDEN_FORMS and request.select is not None for request in requests):
        raise UnsupportedError(
            "hidden rows are not given as JSON", where="encode", fix="Ask for the Arrow stream."
        )


def head_file(head: Any) -> bytes:
    """A head as the bytes of a safetensors file, its facts in the metadata."""
    from safetensors.numpy import save

    from logitscope import tensors

    arrays = {
        name: array.view(np.uint16) if array.dtype == tensors.BFLOAT16 else np.ascontiguousarray(array)
        for name, array in head.arrays().items()
    }
    dtypes = {name: array.dtype.name for name, array in head.arrays().items()}
    facts = {"facts": json.dumps(head.facts()), "dtypes": json.dumps(dtypes), "hash": head.hash}
    return bytes(save(arrays, metadata=facts))


def _as_json(request: HttpRequest, form: str | None, encoding_format: str | None) -> bool:
    """Whether rows are to come as JSON: by the body, else by what the client accepts."""
    if form is not None:
        return form == "json"
    return encoding_format is not None or (_wants(request, JSON_TYPE) and not _wants(request, MEDIA_TYPE))


def _wants(request: HttpRequest, media_type: str) -> bool:
    """Whether a media type is named in the Accept header."""
    return media_type in request.headers.get("accept", "")


def _sampling(body: SamplingBody) -> Sampling:
    return Sampling(
        temperature=body.temperature,
        top_k=max(body.top_k, 0) if body.top_k == -1 else body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        logit_bias=body.logit_bias,
        seed=body.sampling_seed,
        stop=body.stop or (),  # type: ignore[arg-type]
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
    )


def _meta(request: Request, new_tokens: int, end: End | None) -> dict[str, Any]:
    reason = None if end is None else {"type": end.finish_reason, "matched": end.stop}
    return {
        "finish_reason": reason,
        "prompt_tokens": request.prompt_length,
        "completion_tokens": new_tokens,
        **({} if end is None else {"seed": end.seed}),
    }


def _answer(generation: Generation, form: ArrayForm) -> dict[str, Any]:
    rows = {} if generation.logits is None else {"logits": logits_to_json(generation.logits, form=form)}
    return {
        "text": generation.text,
        "output_ids": generation.token_ids.tolist(),
        "meta_info": {
            "finish_reason": {"type": generation.finish_reason, "matched": generation.stop},
            "prompt_tokens": len(generation.prompt_token_ids),
            "completion_tokens": len(generation.token_ids),
            "seed": generation.seed,
            **rows,
        },
    }


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + json_bytes(content) + b"\n\n"
