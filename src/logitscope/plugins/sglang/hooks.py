"""The hooks of the plugin, in one table; tried on SGLang 0.5.23."""

from __future__ import annotations

import functools

from logitscope.errors import MissingDependencyError, UnsupportedError
from logitscope.plugins.common.check import Hook, problems
from logitscope.plugins.sglang import frontend, http, scheduler

TRIED_VERSIONS = ("0.5.23",)
_ROOT = "sglang.srt."

HOOKS = (
    Hook(
        f"{_ROOT}managers.scheduler.Scheduler._create_generation_req",
        "around",
        scheduler.create_request,
        ("self", "recv_req"),
        "seeing what a request asks for",
    ),
    Hook(
        f"{_ROOT}managers.tp_worker.TpModelWorker.forward_batch_generation",
        "around",
        scheduler.forward_batch,
        ("self", "batch"),
        "rows of generated tokens",
    ),
    Hook(
        f"{_ROOT}layers.logprob_processor.InputLogprobProcessor.forward",
        "around",
        scheduler.prompt_rows,
        ("get_logits_fn", "token_to_seq_idx"),
        "rows of the prompt",
    ),
    Hook(
        f"{_ROOT}beam_search.logits_capture.capture_pre_sample_logits",
        "after",
        scheduler.before_sampling,
        ("batch", "forward_batch", "logits_output"),
        "raw rows of generated tokens",
    ),
    Hook(
        f"{_ROOT}managers.scheduler.Scheduler.get_output_streamer_class",
        "around",
        scheduler.output_streamer_class,
        ("self",),
        "handing rows over",
    ),
    Hook(
        f"{_ROOT}managers.scheduler.Scheduler.send_abort_output",
        "around",
        scheduler.abort_output,
        ("self", "abort_req", "req"),
        "giving back rows of requests that are aborted in their prompt",
    ),
    Hook(
        f"{_ROOT}managers.tokenizer_manager.TokenizerManager.update_request_meta_info",
        "around",
        frontend.receive,
        ("self", "meta_info", "state", "customized_info", "index", "finish_reason"),
        "receiving rows",
    ),
    Hook(
        f"{_ROOT}managers.tokenizer_manager.TokenizerManager._handle_batch_output",
        "around",
        frontend.batch_output,
        ("self", "recv_obj"),
        "giving back rows of aborted requests",
    ),
    Hook(
        f"{_ROOT}entrypoints.engine.Engine._launch_subprocesses",
        "around",
        frontend.launched,
        ("server_args",),
        "SGLang's HTTP server",
    ),
    Hook(
        f"{_ROOT}entrypoints.engine.Engine.shutdown",
        "around",
        frontend.shutdown,
        ("self",),
        "leaving nothing in shared memory",
    ),
    Hook(
        f"{_ROOT}entrypoints.engine.Engine.generate",
        "around",
        frontend.generate,
        ("prompt", "sampling_params", "input_ids", "stream"),
        "Engine.generate(return_logits=…)",
    ),
    Hook(
        f"{_ROOT}entrypoints.engine.Engine.async_generate",
        "around",
        frontend.async_generate,
        ("prompt", "sampling_params", "input_ids", "stream"),
        "Engine.async_generate(return_logits=…)",
    ),
    Hook(
        f"{_ROOT}entrypoints.openai.serving_base.OpenAIServingBase.handle_request",
        "around",
        http.openai,
        ("self", "request", "raw_request"),
        "seeing what a request to an OpenAI route asks for",
    ),
    Hook(
        f"{_ROOT}entrypoints.openai.serving_completions.OpenAIServingCompletion._build_completion_response",
        "around",
        http.openai_answer,
        ("self", "request", "ret", "created"),
        "rows in answers of POST /v1/completions",
    ),
    Hook(
        f"{_ROOT}entrypoints.openai.serving_chat.OpenAIServingChat._build_chat_response",
        "around",
        http.openai_answer,
        ("self", "request", "ret", "created"),
        "rows in answers of POST /v1/chat/completions",
    ),
)


def register_all() -> None:
    """Register the table with SGLang, and give its engine the method `frontend.logits`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    kinds = {"around": HookType.AROUND, "after": HookType.AFTER}
    for hook in HOOKS:
        HookRegistry.register(hook.target, hook.run, kinds[hook.kind])
    frontend.extend_engine()


@functools.cache
def check() -> None:
    """Look once whether every hook is there and was applied.

    Raises:
        UnsupportedError: one is not; the message names it.
    """
    found = faults()
    if found:
        target, problem = next(iter(found.items()))
        raise UnsupportedError(
            f"this SGLang lacks what logitscope hooks into: {target}: {problem}",
            where="return_logits",
            expected=f"SGLang {', '.join(TRIED_VERSIONS)}",
            got=f"SGLang {_version()}",
            fix="Requests without return_logits work as ever. Run `logitscope doctor sglang`.",
        )


def faults() -> dict[str, str]:
    """Hooks that cannot work in this process, by target, with the reason."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    found = problems(HOOKS)
    applied = HookRegistry._patched
    idle = {hook.target: "was not applied" for hook in HOOKS if hook.target not in applied}
    return {**idle, **found}


def examine() -> dict[str, str]:
    """State of every hook by target, ``"ok"`` or what is wrong, after loading the plugins as SGLang does.

    Raises:
        MissingDependencyError: SGLang is not installed.
    """
    try:
        from sglang.srt.plugins import load_plugins
    except ModuleNotFoundError as error:
        if error.name != "sglang":
            raise
        raise MissingDependencyError("sglang is not installed", fix="pip install sglang==0.5.23") from error
    load_plugins()
    found = faults()
    return {hook.target: found.get(hook.target, "ok") for hook in HOOKS}


def _version() -> str:
    from importlib.metadata import version

    return version("sglang")
