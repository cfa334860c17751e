"""What may be sent to the routes of OpenAI's form; what we cannot do is known, and refused by name."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, FiniteFloat

from logitscope.errors import OptionError, UnsupportedError
from logitscope.rows import Sampling
from logitscope.server.bodies import Body, Kept


@dataclasses.dataclass(frozen=True)
class OnlyAs:
    """The values at which a field of OpenAI's that we cannot honour changes nothing, besides null."""

    values: tuple[Any, ...] = ()


Nothing: TypeAlias = Annotated[Any, OnlyAs()]
Off: TypeAlias = Annotated[Any, OnlyAs((False,))]
Zero: TypeAlias = Annotated[Any, OnlyAs((0,))]
NoneOf: TypeAlias = Annotated[Any, OnlyAs(([],))]
Ignored: TypeAlias = Annotated[Any, Field(description="Read, and not used.")]


class StreamOptions(Body):
    """What a stream holds besides what is new."""

    include_usage: bool | None = Field(default=None, description="A last chunk with the counts of tokens.")
    include_obfuscation: Off = None


class OpenAIBody(Kept):
    """What both routes take. Null is as if the field was not there."""

    model: str = Field(description="The one that is served.")
    n: int | None = Field(default=None, ge=1, le=1024)
    temperature: FiniteFloat | None = Field(
        default=None, description="1 by default, as OpenAI's; 0 is greedy."
    )
    top_p: FiniteFloat | None = None
    top_k: int | None = Field(default=None, description="0 and -1 keep all.")
    min_p: FiniteFloat | None = None
    repetition_penalty: FiniteFloat | None = None
    logit_bias: dict[int, FiniteFloat] | None = Field(
        default=None, description="Added to logits, by token id."
    )
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = Field(default=None, description="Server-sent events with what is new.")
    stream_options: StreamOptions | None = None
    return_logits: bool | None = Field(
        default=None,
        description="The rows, too, as each choice's logits; what is kept of them is said beside it.",
    )
    presence_penalty: Zero = None
    frequency_penalty: Zero = None
    user: Ignored = None
    metadata: Ignored = None

    def sampling(self) -> Sampling:
        """How tokens are chosen.

        Raises:
            OptionError: a value outside its range.
        """
        given: dict[str, Any] = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": self.logit_bias,
            "seed": self.seed,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
        }
        return Sampling(**{name: value for name, value in given.items() if value is not None})

    def check(self) -> None:
        """Refuse what we cannot honour, and fields that mean nothing without another.

        Raises:
            UnsupportedError: a field of OpenAI's is set to something that matters.
            OptionError: a field without the one that it belongs to.
        """
        _check_known(self)
        if self.stream_options is not None:
            _check_known(self.stream_options, "stream_options.")
            if not self.stream:
                raise OptionError("there is no stream", where="stream_options", fix="Add stream.")
        for name in ("select", "encode", "summary"):
            if getattr(self, name) is not None and not self.return_logits:
                raise OptionError(
                    f"{name} was given, but no logits were asked for", where=name, fix="Add return_logits."
                )


class CompletionBody(OpenAIBody):
    """Completions of prompts."""

    prompt: str | list[str] | list[int] | list[list[int]] = Field(
        description="One text or the token ids of one, or lists of either."
    )
    max_tokens: int | None = Field(
        default=None, ge=0, description="16 by default; 0 scores the prompt alone, with echo."
    )
    logprobs: int | None = Field(
        default=None,
        ge=0,
        description="Log-probabilities of the tokens, and of so many of the best in their place.",
    )
    echo: bool | None = Field(default=None, description="Begin with the prompt, and score it.")
    best_of: Any = Field(default=None, description="Only n itself.")
    suffix: Annotated[Any, OnlyAs(("",))] = None

    def check(self) -> None:
        """As for both routes; and ``best_of`` is ``n``, and no tokens are asked for only with the prompt."""
        super().check()
        if self.best_of not in (None, self.n or 1):
            raise _unsupported("best_of", f"n, {self.n or 1}", self.best_of)
        if self.max_tokens == 0 and not self.echo:
            raise OptionError(
                "nothing is asked for", where="max_tokens", expected="1 or more, or echo", got=0
            )


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a chat."""

    role: str
    content: str | list[TextPart] | None = None
    name: Ignored = None
    refusal: Nothing = None
    audio: Nothing = None
    annotations: NoneOf = None
    tool_calls: NoneOf = None
    function_call: Nothing = None


class ChatBody(OpenAIBody):
    """The next message of a chat."""

    messages: list[Message]
    max_tokens: int | None = Field(default=None, ge=1, description="The older name of max_completion_tokens.")
    max_completion_tokens: int | None = Field(
        default=None, ge=1, description="512 by default, or what the model's context has room for."
    )
    logprobs: bool | None = Field(
        default=None, description="Log-probabilities, entropy and margin of the tokens."
    )
    top_logprobs: int | None = Field(
        default=None, ge=0, description="And so many of the best in their place."
    )
    tools: NoneOf = None
    functions: NoneOf = None
    tool_choice: Annotated[Any, OnlyAs(("none", "auto"))] = None
    function_call: Annotated[Any, OnlyAs(("none", "auto"))] = None
    parallel_tool_calls: Annotated[Any, OnlyAs((False, True))] = None
    response_format: Annotated[Any, OnlyAs(({"type": "text"},))] = None
    modalities: Annotated[Any, OnlyAs((["text"],))] = None
    service_tier: Annotated[Any, OnlyAs(("auto", "default"))] = None
    store: Off = None
    audio: Nothing = None
    prediction: Nothing = None
    reasoning_effort: Nothing = None
    verbosity: Nothing = None
    web_search_options: Nothing = None
    prompt_cache_key: Ignored = None
    safety_identifier: Ignored = None

    def check(self) -> None:
        """As for both routes; and the same of messages, and that ``top_logprobs`` comes with ``logprobs``."""
        super().check()
        for i, message in enumerate(self.messages):
            _check_known(message, f"messages[{i}].")
        if self.top_logprobs is not None and not self.logprobs:
            raise OptionError("no log-probabilities are asked for", where="top_logprobs", fix="Add logprobs.")

    def chat(self) -> list[dict[str, str]]:
        """The messages with their texts in one piece."""
        return [
            {
                "role": message.role,
                "content": "".join(part.text for part in message.content)
                if isinstance(message.content, list)
                else message.content or "",
            }
            for message in self.messages
        ]


def _check_known(body: Body, where: str = "") -> None:
    for name, field in type(body).model_fields.items():
        given = getattr(body, name)
        for mark in field.metadata:
            if isinstance(mark, OnlyAs) and given is not None and given not in mark.values:
                raise _unsupported(where + name, _listed(mark.values), given)


def _unsupported(name: str, expected: str, got: Any) -> UnsupportedError:
    return UnsupportedError("not supported", where=name, expected=expected, got=repr(got)[:80])


def _listed(values: tuple[Any, ...]) -> str:
    return " or ".join(["null", *map(repr, values)])
