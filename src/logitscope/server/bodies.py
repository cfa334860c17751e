"""What may be sent to the routes: the forms of their bodies, from which the OpenAPI pages are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator
from starlette.requests import Request as HttpRequest

from logitscope.rows import SUMMARIES, Select
from logitscope.server.answers import Refused, own_form

JSON_TYPE = "application/json"
EVENTS_TYPE = "text/event-stream"

_SELECT = (
    "Which rows and columns to keep: a name of positions, a list of positions, or an object with "
    f"{', '.join(field.name for field in dataclasses.fields(Select))}."
)
_SUMMARY = f"Per-row summaries over the full vocabulary: true for all, or names of {', '.join(SUMMARIES)}."
_ENCODE = "How rows are kept: float32, bfloat16, float16, q16, q8, float8, hidden; null is the model's dtype."


class Body(BaseModel):
    """JSON of which every name is known and every type is meant."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Prompts(Body):
    """One kind of prompts."""

    text: str | list[str] | None = Field(default=None, description="One text, or a list.")
    input_ids: list[int] | list[list[int]] | None = Field(
        default=None, description="Token ids of one prompt, or lists."
    )
    messages: list[dict[str, Any]] | list[list[dict[str, Any]]] | None = Field(
        default=None, description="One chat, or a list: messages with role and content."
    )


class Kept(Body):
    """What is kept of the rows."""

    select: Any = Field(default=None, description=_SELECT)
    encode: str | None = Field(default=None, description=_ENCODE)
    summary: bool | list[str] | None = Field(default=None, description=_SUMMARY)


class LogitsBody(Prompts, Kept):
    """Rows ``0 … L-1`` of prompts."""

    format: Literal["arrow", "json"] | None = Field(
        default=None,
        description="An Arrow stream, or JSON; null is what Accept or encoding_format says, else arrow.",
    )
    encoding_format: Literal["base64", "float"] | None = Field(
        default=None, description="Of arrays in JSON: base64 of little-endian bytes, or lists of numbers."
    )


class SamplingBody(Body):
    """How tokens are chosen, in SGLang's words."""

    max_new_tokens: int = Field(default=128, ge=1)
    n: int = Field(default=1, ge=1, le=1024)
    temperature: float = 0.0
    top_k: int = Field(default=0, description="0 and -1 keep all.")
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = Field(default_factory=dict)
    sampling_seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _no_bias(cls, given: Any) -> Any:
        return {} if given is None else given


class GenerateBody(Prompts):
    """Generations in SGLang's form."""

    sampling_params: SamplingBody = Field(default_factory=lambda: SamplingBody())
    return_logits: bool | Kept | None = Field(
        default=None, description="The rows, too: all, or what is kept of them."
    )
    stream: bool = Field(default=False, description="Server-sent events with what is new.")
    encoding_format: Literal["base64", "float"] | None = None

    @field_validator("sampling_params", mode="before")
    @classmethod
    def _no_params(cls, given: Any) -> Any:
        return {} if given is None else given


class RowsBody(Body):
    """Requests as the wire writes them."""

    requests: list[dict[str, Any]]


class TokenizeBody(Body):
    """A text, or a chat."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    generate: bool = Field(default=False, description="Whether an assistant's last message is left open.")
    assistant: bool = Field(
        default=False,
        description="Of a chat: also first and last + 1 of the tokens of its assistant's messages.",
    )
    special: bool = Field(
        default=True, description="With the special tokens that the tokenizer adds by itself."
    )


class DetokenizeBody(Body):
    """Ids of a run of tokens."""

    token_ids: list[int]
    special: bool = Field(default=False, description="Show special tokens.")


@dataclasses.dataclass(frozen=True)
class Route:
    """One route: where it is, what answers, the form of its body, its answer's media types, its errors."""

    method: str
    path: str
    handler: Callable[[HttpRequest], Any]
    body: type[Body] | None = None
    gives: tuple[str, ...] = (JSON_TYPE,)
    refused: Refused = own_form


def openapi_body(kind: type[BaseModel]) -> dict[str, Any]:
    """What FastAPI is told of a body that the route reads itself."""
    reference = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}
