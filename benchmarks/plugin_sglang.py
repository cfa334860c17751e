"""`return_logits` in SGLang against the same requests without it; ratios of interleaved rounds.

    .venv-sglang/bin/python benchmarks/plugin_sglang.py --markdown    # on the bundled model, on a CPU

What is asked in one process runs in one engine, what is asked over HTTP in one server; see `_measure` for the
rule.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import timeit
import urllib.request
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests_sglang"))

import numpy as np
from _measure import (
    MIN_PAIRS,
    RATIO_COLUMNS,
    Leg,
    Table,
    Target,
    clocked,
    machine,
    machine_table,
    ratio_row,
    rounds,
    show,
)
from cpu import bundled_model, open_sglang, served

NEW_TOKENS, PROMPT, LONG = 64, 32, 1024
GENERATE = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
SCORE = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
NEAREST_PROMPT, NEAREST_NEW = 128, 16
NEAREST_PAIRS = 3
IDLE_REQUESTS = 32


def legs(engine: Any, vocab_size: int) -> dict[str, Leg]:
    """What is compared, by name. No prompt is used twice, so that no prefix is cached."""
    random = np.random.default_rng(0)

    def asked(tokens: int, params: dict[str, Any], **options: Any) -> Callable[[], Any]:
        def run() -> Any:
            ids = random.integers(1000, 40_000, tokens).tolist()
            return engine.generate(input_ids=ids, sampling_params=params, **options)

        return run

    def nearest() -> Any:
        params = {**GENERATE, "max_new_tokens": NEAREST_NEW}
        every = dict(return_logprob=True, logprob_start_len=0, top_logprobs_num=vocab_size)
        return from_lists(asked(NEAREST_PROMPT, params, **every)()["meta_info"], vocab_size)

    runs = {
        "generation": asked(PROMPT, GENERATE),
        "generation, logits": asked(PROMPT, GENERATE, return_logits=True),
        "prompt, logprobs": asked(LONG, SCORE, return_logprob=True, logprob_start_len=0),
        "prompt, logits": asked(LONG, SCORE, return_logits=True),
        "small, logits": asked(
            NEAREST_PROMPT, {**GENERATE, "max_new_tokens": NEAREST_NEW}, return_logits=True
        ),
        "small, top_logprobs": nearest,
    }
    return {name: Leg(name, clocked(run)) for name, run in runs.items()}


def from_lists(meta_info: dict[str, Any], vocab_size: int) -> Any:
    """The array of ``top_logprobs_num=vocab_size``: rows ``[rows, vocab]`` of log-probabilities."""
    rows = [*meta_info["input_top_logprobs"][1:], *meta_info["output_top_logprobs"]]
    found = np.empty((len(rows), vocab_size), np.float32)
    for place, row in zip(found, rows, strict=True):
        for logprob, token_id, *_ in row:
            place[token_id] = logprob
    return found


def http_legs(address: str, vocab_size: int) -> dict[str, Leg]:
    """What is compared over HTTP, by name: each side ends in one array of the same rows."""
    import orjson

    from logitscope.wire.results import logits_from_json, read_results

    random = np.random.default_rng(1)

    def post(path: str, **body: Any) -> bytes:
        ids = random.integers(1000, 40_000, NEAREST_PROMPT).tolist()
        data = orjson.dumps({"input_ids": ids, **body})
        request = urllib.request.Request(f"{address}/{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            found: bytes = answer.read()
        return found

    def generated(new: int) -> Any:
        params = {**GENERATE, "max_new_tokens": new}
        answer = orjson.loads(post("generate", sampling_params=params, return_logits=True))
        return checked(np.asarray(logits_from_json(answer["meta_info"]["logits"])), new)

    def lists(new: int) -> Any:
        every = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": vocab_size}
        params = {**GENERATE, "max_new_tokens": new}
        answer = orjson.loads(post("generate", sampling_params=params, **every))
        return checked(from_lists(answer["meta_info"], vocab_size), new)

    def checked(rows: Any, new: int) -> Any:
        assert rows.shape == (NEAREST_PROMPT + new - 1, vocab_size)
        return rows

    runs = {
        "generation, logits": lambda: generated(NEAREST_NEW),
        "generation, top_logprobs": lambda: lists(NEAREST_NEW),
        "prompt, logits": lambda: checked(np.asarray(read_results(post("logits"))[0]), 1),
        "prompt, top_logprobs": lambda: lists(1),
    }
    return {name: Leg(name, clocked(run)) for name, run in runs.items()}


def measure_http(address: str, vocab_size: int) -> Table:
    """Complete logits against ``top_logprobs_num=vocab_size``, both from SGLang's own server."""
    times = rounds(list(http_legs(address, vocab_size).values()), NEAREST_PAIRS)
    rows = [
        ratio_row(
            f"{what}: times faster than `top_logprobs_num=vocab_size` and an array made of its JSON",
            times[f"{kind}, logits"],
            times[f"{kind}, top_logprobs"],
            None,
            faster=True,
        )
        for kind, what in (
            ("generation", f"`POST /generate`, {NEAREST_PROMPT} prompt tokens, {NEAREST_NEW} new ones"),
            ("prompt", f"`POST /logits`, {NEAREST_PROMPT} prompt tokens"),
        )
    ]
    return Table("Complete logits over HTTP", RATIO_COLUMNS, rows)


def idle_hooks() -> Table:
    """What a scheduler step of requests that do not ask pays, once somebody has asked before."""
    from logitscope.plugins.sglang import scheduler

    batch = SimpleNamespace(reqs=[SimpleNamespace() for _ in range(IDLE_REQUESTS)])

    class Streamer:
        def stream_output(self, reqs: Any, return_logprob: bool, skip_req: Any = None) -> None: ...

        def build_additional_customized_info(self, reqs: Any) -> dict[str, Any]:
            return {}

    streamer = scheduler._streamer(Streamer)()
    before, scheduler._place = scheduler._place, SimpleNamespace(own=True, forward=None)
    steps = {
        "forward": lambda: scheduler.forward_batch(lambda *_: None, None, batch),
        "before sampling": lambda: scheduler.before_sampling(None, batch, None, None),
        "output": lambda: streamer.stream_output(batch.reqs, False),
        "tickets": lambda: streamer.build_additional_customized_info(batch.reqs),
    }
    count = 20_000
    try:
        found = {name: min(timeit.repeat(step, number=count, repeat=3)) for name, step in steps.items()}
    finally:
        scheduler._place = before
    rows = [(name, f"{seconds / count * 1e6:.2f}") for name, seconds in found.items()]
    rows.append(("together", f"{sum(found.values()) / count * 1e6:.2f}"))
    title = f"Hooks in a step of {IDLE_REQUESTS} requests that do not ask"
    return Table(title, ("hook", "microseconds"), rows)


def measure(engine: Any, pairs: int) -> list[Table]:
    every = legs(engine, engine.tokenizer_manager.model_config.vocab_size)
    usual = [leg for name, leg in every.items() if not name.startswith("small")]
    times = rounds(usual, pairs)
    times |= rounds([leg for name, leg in every.items() if name.startswith("small")], NEAREST_PAIRS)
    rows = [
        ratio_row(
            f"{PROMPT} prompt tokens, {NEW_TOKENS} new ones, complete logits / the same without",
            times["generation, logits"],
            times["generation"],
            Target("≤", 1.05),
        ),
        ratio_row(
            f"{LONG} prompt tokens, complete logits / `return_logprob=True, logprob_start_len=0`",
            times["prompt, logits"],
            times["prompt, logprobs"],
            Target("≤", 1.05),
        ),
        ratio_row(
            f"{NEAREST_PROMPT} prompt tokens, {NEAREST_NEW} new ones: times faster than "
            "`top_logprobs_num=vocab_size` and an array made of its lists",
            times["small, logits"],
            times["small, top_logprobs"],
            None,
            faster=True,
        ),
    ]
    return [Table("`return_logits` in SGLang", RATIO_COLUMNS, rows), idle_hooks()]


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=MIN_PAIRS)
    parser.add_argument("--markdown", action="store_true", help="print what goes into docs/benchmarks.md")
    options = parser.parse_args(given)
    engine = open_sglang(bundled_model())
    try:
        tables = measure(engine, options.pairs)
        vocab_size = engine.tokenizer_manager.model_config.vocab_size
    finally:
        engine.shutdown()
    with served(bundled_model()) as (address, _):
        tables.append(measure_http(address, vocab_size))
    from importlib.metadata import version

    for table in [*tables, machine_table(machine(engine=f"sglang {version('sglang')}, float32 on cpu"))]:
        show(table, markdown=options.markdown)


if __name__ == "__main__":
    main()
