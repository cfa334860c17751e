"""Hooks in SGLang's scheduler process: rows leave the device here, selected and encoded.

Source of every name: SGLang 0.5.23. A request that asks carries its `RequestRows` as ``req.logitscope``.
Prompt rows are read where SGLang computes prompt log-probabilities, which the plugin switches on for it; the
row that scores a sampled token is copied just before the sampler changes it, and kept once the token is
known.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from logitscope.errors import RowsError, UnsupportedError
from logitscope.plugins.common.draw import Draw
from logitscope.plugins.common.heads import CapturedHead
from logitscope.plugins.common.options import KEY, read_options
from logitscope.plugins.common.rows import RequestRows
from logitscope.plugins.sglang.head import capture_mode, find_head
from logitscope.plugins.sglang.identity import identity_of
from logitscope.rows import HIDDEN_FORMS, Identity, Request
from logitscope.wire import Pool, sweep

_DTYPE = "float32"  # SGLang's logits are, whatever the model's dtype


@dataclasses.dataclass
class _Place:
    """What the plugin holds in a scheduler process.

    Attributes:
        own: whether rows are kept here: every rank of a tensor-parallel engine sees them, one keeps them.
        pool: of shared memory.
        identity: what makes the rows.
        head: this rank's part of the head, or why there are no hidden rows.
        forward: the forward that is running for requests that ask.
    """

    own: bool
    pool: Pool
    identity: Identity
    head: CapturedHead | str
    forward: _Forward | None = None


_place: _Place | None = None


@dataclasses.dataclass
class _Asked:
    """What a request of SGLang carries as ``req.logitscope``.

    Attributes:
        rows: that are kept.
        draw: chooses its tokens; None leaves that to SGLang.
        processed: the rows that were drawn from, when asked.
        warning: what the user is told beside the rows.
        silent: whether only the plugin asked for log-probabilities.
    """

    rows: RequestRows
    draw: Draw | None = None
    processed: RequestRows | None = None
    warning: str | None = None
    silent: bool = False

    def guarded(self, step: Callable[..., None], *args: Any) -> None:
        """What goes wrong with a request's rows is its own error, and not the end of SGLang's loop."""
        if self.rows.error is not None:
            return
        try:
            step(*args)
        except Exception as error:  # noqa: BLE001 - whatever it is, other requests go on
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """There will be no rows."""
        self.drop()
        self.rows.fail(error)

    def drop(self) -> None:
        """Give back what was taken."""
        self.rows.drop()
        if self.processed is not None:
            self.processed.drop()


@dataclasses.dataclass
class _Sampled:
    """The row that scores a token which is not known yet, and what goes with it."""

    place: int
    asked: _Asked
    position: int
    row: Any = None
    hidden: Any = None
    processed: Any = None

    def known(self, token_id: Any) -> None:
        """Keep the row; the id is a tensor ``[1]``."""
        rows, processed = self.asked.rows, self.asked.processed
        if rows.wants(self.position):
            rows.put_generated(self.row, self.position, token_id, self.hidden)
        if processed is not None and processed.wants(self.position):
            processed.put_generated(self.processed, self.position, token_id)


@dataclasses.dataclass
class _Forward:
    """One forward: whose rows are wanted, and the rows that wait for their sampled tokens."""

    batch: Any
    asking: list[tuple[int, _Asked]]
    own: bool
    read: dict[int, int] = dataclasses.field(default_factory=dict)
    sampled: list[_Sampled] = dataclasses.field(default_factory=list)

    def prompt(self, logits: Any, hidden: Any, owners: Sequence[int]) -> None:
        """Rows ``[rows, vocab]`` that score prompt tokens, and the head's input for them.

        ``owners`` are places in the batch, ascending.
        """
        asking, first = dict(self.asking), 0
        while self.own and first < len(owners):
            owner = owners[first]
            last = first + owners[first:].count(owner)
            done = self.read.get(owner, 0)
            self.read[owner] = done + last - first
            if owner in asking:
                start = min(self.batch.extend_logprob_start_lens[owner], self.batch.extend_lens[owner] - 1)
                position = self.batch.prefix_lens[owner] + start + done
                put = asking[owner].rows.put_prompt
                asking[owner].guarded(put, logits[first:last], position, hidden[first:last])
            first = last

    @property
    def hidden(self) -> bool:
        """Whether somebody asks for hidden rows."""
        return any(asked.rows.head is not None for _, asked in self.asking)

    def before_sampling(self, forward_batch: Any, logits: Any, hidden: Any) -> None:
        """Copy the rows that score the next tokens, and choose tokens: the sampler works in place."""
        extend = forward_batch.forward_mode.is_extend()
        chosen = []
        for i, asked in self.asking:
            rows = asked.rows
            rows.last = self.batch.prefix_lens[i] + self.batch.extend_lens[i] - 1 if extend else rows.last + 1
            kept = self.own and rows.wants(rows.last)
            if rows.error is None and (kept or (asked.draw and rows.generates(rows.last))):
                chosen.append(_Sampled(i, asked, rows.last))
        if not chosen:
            return
        places = [sampled.place for sampled in chosen]
        copy = logits[places]  # an index makes a copy
        for n, sampled in enumerate(chosen):
            sampled.row = copy[n : n + 1]
        if self.own and self.hidden and hidden is not None:
            if len(hidden) != len(logits):  # every token's, because another request or the server asks so
                places = [sum(self.batch.extend_lens[: i + 1]) - 1 for i in places]
            for sampled, row in zip(chosen, hidden[places].split(1), strict=True):
                sampled.hidden = row
        for sampled in chosen:
            if sampled.asked.draw is not None:
                sampled.asked.guarded(_choose, sampled, logits)
        self.sampled = chosen if self.own else []

    def sampled_now(self, token_ids: Any) -> None:
        """The tokens ``[batch]`` are known."""
        for sampled in self.sampled:
            sampled.asked.guarded(sampled.known, token_ids[sampled.place : sampled.place + 1])
        self.sampled = []


def _choose(sampled: _Sampled, logits: Any) -> None:
    """Choose a token and leave the sampler no other."""
    assert sampled.asked.draw is not None
    chosen, sampled.processed = sampled.asked.draw.choose(sampled.row, sampled.position)
    row = logits[sampled.place]
    row.fill_(-float("inf"))
    row.scatter_(0, chosen.clamp(min=0), 0.0)


# -- hooks ---------------------------------------------------------------------------------------------


def create_request(original: Callable[..., Any], self: Any, recv_req: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``Scheduler._create_generation_req``: see what is asked, and switch on what it needs."""
    params = recv_req.sampling_params
    custom = params.custom_params
    message = custom.get(KEY) if isinstance(custom, dict) else None
    if message is None or message is False:
        return original(self, recv_req, *args, **kwargs)
    try:
        place = _placed(self)
        _refuse(self, recv_req)
        options = read_options(message)
        assert options is not None
        most = self.max_req_len - len(recv_req.input_ids) - 1
        new = most if params.max_new_tokens is None else min(params.max_new_tokens, most)
        asked = _asked(place, options.request(recv_req.input_ids, max(new, 0)), recv_req.rid)
        if options.sampling is not None:
            asked.draw = Draw(asked.rows.request)
    except Exception as error:  # noqa: BLE001 - SGLang ends with what is raised here
        req = original(self, recv_req, *args, **kwargs)
        req.set_finish_with_abort(f"return_logits: {type(error).__name__}: {error}")
        return req
    silent = not kwargs["return_logprob"]
    first = asked.rows.first_prompt_row
    if first is not None:
        start = recv_req.logprob_start_len
        kwargs["return_logprob"] = recv_req.return_logprob = True
        recv_req.logprob_start_len = first if silent or start < 0 else min(first, start)
        asked.silent = silent
    req = original(self, recv_req, *args, **kwargs)
    req.logitscope = asked
    if options.only_stop_ids:
        req.eos_token_ids = None
        req.tokenizer = None if req.tokenizer is None else _Endless(req.tokenizer)
    return req


class _Endless:
    """A tokenizer that names no end of sequence: SGLang's ``ignore_eos`` ignores stop ids, too."""

    eos_token_id = None
    additional_stop_token_ids = None

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def _asked(place: _Place, request: Request, rid: str) -> _Asked:
    if request.select is not None:
        request.select.check_columns(place.identity.vocab_size, request.max_rows)
    request, head, why = _with_head(place, request, rid)
    rows = RequestRows(request, place.pool, identity=place.identity, head=head)
    processed = None
    if request.processed and request.select is not None:
        processed = RequestRows(request, place.pool, identity=place.identity, stage="processed")
    return _Asked(rows, processed=processed, warning=why)


def _with_head(place: _Place, request: Request, rid: str) -> tuple[Request, CapturedHead | None, str | None]:
    """The head for a request of hidden rows; or the request for plain ones, and why."""
    if request.encode not in HIDDEN_FORMS or request.select is None or request.select.vocab is None:
        return request, None, None
    if isinstance(place.head, str):
        return dataclasses.replace(request, encode=None), None, place.head
    place.head.write(rid)
    return request, place.head, None


def forward_batch(original: Callable[..., Any], self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``TpModelWorker.forward_batch_generation``: rows are read while it runs, tokens after it."""
    place = _place
    if place is None or batch is None:
        return original(self, batch, *args, **kwargs)
    asking = [(i, req.logitscope) for i, req in enumerate(batch.reqs) if hasattr(req, "logitscope")]
    if not asking:
        return original(self, batch, *args, **kwargs)
    forward = place.forward = _Forward(batch, asking, place.own)
    if forward.hidden:
        kwargs["capture_hidden_mode"] = capture_mode(batch, kwargs.get("capture_hidden_mode"))
    try:
        result = original(self, batch, *args, **kwargs)
    finally:
        place.forward = None
    delayed = result.delay_sample_func
    if delayed is None:
        forward.sampled_now(result.next_token_ids)
    else:

        @functools.wraps(delayed)
        def sample() -> Any:
            sampled = delayed()
            forward.sampled_now(sampled.next_token_ids)
            return sampled

        result.delay_sample_func = sample
    return result


def prompt_rows(
    original: Callable[..., Any],
    self: Any,
    *args: Any,
    token_to_seq_idx: list[int],
    get_logits_fn: Callable[..., Any],
    **kwargs: Any,
) -> Any:
    """Around ``InputLogprobProcessor.forward``: read each chunk of rows as it is made."""
    forward = _running()
    read = get_logits_fn
    if forward is not None:
        done = 0

        def read(states: Any, *more: Any, **options: Any) -> Any:
            nonlocal done
            logits = get_logits_fn(states, *more, **options)
            forward.prompt(logits, states, token_to_seq_idx[done : done + len(states)])
            done += len(states)
            return logits

    return original(self, *args, token_to_seq_idx=token_to_seq_idx, get_logits_fn=read, **kwargs)


def before_sampling(result: Any, batch: Any, forward_batch: Any, logits_output: Any) -> None:
    """After ``capture_pre_sample_logits``: the last moment before the sampler."""
    forward = _running()
    if forward is not None and logits_output is not None and logits_output.next_token_logits is not None:
        forward.before_sampling(forward_batch, logits_output.next_token_logits, logits_output.hidden_states)


def output_streamer_class(original: Callable[..., Any], self: Any) -> Any:
    """Around ``Scheduler.get_output_streamer_class``: tickets ride on what is sent to the user's process."""
    base = original(self)
    return base if getattr(self, "rust_server", None) is not None else _streamer(base)


@functools.cache
def _streamer(base: type) -> type:
    class LogitsStreamer(base):  # type: ignore[misc]
        __slots__ = ()
        has_additional_customized_info = True

        def stream_output(self, reqs: Any, return_logprob: bool, skip_req: Any = None) -> None:
            for req in reqs:
                asked = getattr(req, "logitscope", None)
                if asked is not None and asked.silent:
                    _silence(req)
            super().stream_output(reqs, return_logprob, skip_req)

        def build_additional_customized_info(self, reqs: Any) -> dict[str, list[Any]]:
            info: dict[str, list[Any]] = super().build_additional_customized_info(reqs)
            if any(hasattr(req, "logitscope") for req in reqs):
                info[KEY] = [_ticket(req) for req in reqs]
            return info

    return LogitsStreamer


def abort_output(
    original: Callable[..., Any], self: Any, abort_req: Any, req: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around ``Scheduler.send_abort_output``: what is aborted in its prompt has no last output."""
    asked: _Asked | None = getattr(req, "logitscope", None)
    if asked is not None:
        asked.fail(RowsError("SGLang ended the request"))
    return original(self, abort_req, req, *args, **kwargs)


def _ticket(req: Any) -> dict[str, Any] | None:
    """What a request's user gets now: rows, an error, or nothing yet."""
    asked: _Asked | None = getattr(req, "logitscope", None)
    place = _place
    if asked is None or place is None or not place.own:
        return None
    ended = req.finished()
    if ended and req.finished_reason.to_json()["type"] == "abort":
        asked.drop()
        return None
    if not (ended or req.stream):
        return None
    ticket: dict[str, Any] = {}
    asked.guarded(_fill, ticket, asked, req, ended)
    if asked.rows.error is not None:
        return {"error": asked.rows.error}
    if not ticket:
        return None
    return {**ticket, "identity": dataclasses.asdict(place.identity), "warning": asked.warning}


def _fill(ticket: dict[str, Any], asked: _Asked, req: Any, ended: bool) -> None:
    new = list(req.output_ids_through_stop) if asked.rows.request.max_new_tokens else []
    if asked.draw is not None:
        asked.draw.check()
    if asked.rows.request.select is not None:
        ticket.update(asked.rows.ticket(new, ended=ended))
    if asked.processed is not None:
        ticket["processed"] = asked.processed.ticket(new, ended=ended)


def _silence(req: Any) -> None:
    """Log-probabilities that only the plugin switched on do not cross to the user's process."""
    req.input_logprob_sent = True
    logprob = req.logprob
    for name in ("token_logprobs", "top_logprobs", "token_ids_logprobs"):
        for part in ("val", "idx"):
            getattr(logprob, f"output_{name}_{part}").clear()


def _running() -> _Forward | None:
    place = _place
    return None if place is None else place.forward


def _placed(scheduler: Any) -> _Place:
    global _place
    if _place is None:
        from sglang.srt.runtime_context import get_parallel

        from logitscope.plugins.sglang.hooks import check

        check()
        sweep()
        identity = identity_of(scheduler, dtype=_DTYPE)
        head = find_head(scheduler, rows_dtype=_DTYPE)
        if isinstance(head, CapturedHead):
            identity = dataclasses.replace(
                identity,
                hidden_size=head.weight.shape[1],
                hidden_dtype=str(head.weight.dtype).removeprefix("torch."),
            )
        _place = _Place(get_parallel().attn_tp_rank == 0, Pool(), identity, head)
    return _place


def _refuse(scheduler: Any, recv_req: Any) -> None:
    """What this version cannot do, by name."""
    args = scheduler.server_args
    refused = {
        "pipeline parallelism": args.pp_size > 1,
        "data-parallel attention": bool(getattr(args, "enable_dp_attention", False)),
        "speculative decoding": not scheduler.spec_algorithm.is_none(),
        "prefill/decode disaggregation": args.disaggregation_mode != "null",
        "an engine on several hosts": args.nnodes > 1,
        "several tokenizer workers": args.tokenizer_worker_num > 1,
        "SGLang's Rust server": getattr(scheduler, "rust_server", None) is not None,
        "beam search": (getattr(recv_req.sampling_params, "beam_width", None) or 1) > 1,
        "diffusion language models": scheduler.dllm_config is not None,
        "input embeddings": recv_req.input_embeds is not None,
        "multi-item scoring": recv_req.multi_item_delimiter_indices is not None,
        "sessions": recv_req.session_params is not None,
    }
    for name, present in refused.items():
        if present:
            raise UnsupportedError(f"no complete logits with {name} in this version", where="SGLang")
