"""The embedded engine on a GPU: right rows, ratios, memory, and no waiting for the device per row block.

    PYTHONPATH=src python benchmarks/gpu.py            # one CUDA GPU with 40 GB or more, under 8 minutes
    PYTHONPATH=src python benchmarks/gpu.py --smoke    # tiny models on the CPU: shows that the program works

Needs PyTorch, Transformers, NumPy and this checkout; the models have random weights, nothing is downloaded.
Tables are printed as they are done, by the rule in `_measure`; a failed check ends it with status 1.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
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
)
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

import logitscope as ls
from logitscope.testing import FAMILIES, Oracle, tiny_model

GB = 1e9
TOGETHER = 8
AGAINST = ("against", *RATIO_COLUMNS[1:])
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize")
EVENT_WAIT = "cudaEventSynchronize"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of a run.

    Attributes:
        device: of the models.
        config: of the Llama model with random weights.
        families: of tiny models that are checked.
        prompt: tokens of the single prompt.
        checked: tokens that are compared with float64.
        document: tokens of the long one.
        mixed: how many prompts, of how many tokens at least and at most.
        new_tokens: generated.
        pairs: rounds of each comparison.
        seconds: after which no further round begins.
    """

    device: str
    config: dict[str, int]
    families: tuple[str, ...]
    prompt: int
    checked: int
    document: int
    mixed: tuple[int, int, int]
    new_tokens: int
    pairs: int
    seconds: float


FULL = Plan(
    device="cuda",
    config=dict(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128_256,
        max_position_embeddings=8192,
    ),
    families=FAMILIES,
    prompt=1024,
    checked=256,
    document=8000,
    mixed=(64, 16, 512),
    new_tokens=64,
    pairs=MIN_PAIRS,
    seconds=400.0,
)
SMOKE = Plan(
    device="cpu",
    config=dict(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1001,
        max_position_embeddings=160,
    ),
    families=("gemma2",),
    prompt=64,
    checked=48,
    document=160,
    mixed=(TOGETHER, 4, 24),
    new_tokens=4,
    pairs=1,
    seconds=30.0,
)


class Bench:
    """A model with random weights in one dtype, its engine, and what runs on them.

    Args:
        plan: sizes.
        dtype: ``float32`` or ``bfloat16``.
        deadline: no further round begins after this ``time.monotonic()``.
    """

    def __init__(self, plan: Plan, dtype: str, deadline: float) -> None:
        self.plan, self.dtype, self.deadline = plan, dtype, deadline
        torch.manual_seed(0)
        config = AutoConfig.for_model("llama", **plan.config, tie_word_embeddings=True)
        factory: Any = AutoModelForCausalLM
        with torch.device(plan.device):
            self.model: Any = factory.from_config(config, dtype=getattr(torch, dtype)).eval()
        self.engine = self.open()
        self.vocab_size = int(config.vocab_size)

    def open(self, **options: Any) -> Any:
        """Another engine on the same model."""
        return ls.open(self.model, memory_limit_bytes=2**60, **options)

    def ids(self, tokens: int, *, seed: int = 0) -> list[int]:
        """Random ids."""
        found: list[int] = np.random.default_rng(seed).integers(0, self.vocab_size, tokens).tolist()
        return found

    def mixed(self) -> list[list[int]]:
        """Prompts of mixed lengths, drawn uniformly."""
        count, shortest, longest = self.plan.mixed
        lengths = np.random.default_rng(1).integers(shortest, longest + 1, count).tolist()
        return [self.ids(length, seed=i) for i, length in enumerate(lengths)]

    @torch.no_grad()
    def forward(self, prompts: Sequence[Sequence[int]]) -> Any:
        """``model(ids).logits`` by hand, padded on the right: ``[prompts, longest, vocab]`` on the device."""
        ids = torch.zeros(len(prompts), max(map(len, prompts)), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
            mask[row, : len(prompt)] = 1
        given = {"attention_mask": mask.to(self.plan.device)} if len(prompts) > 1 else {}
        return self.model(ids.to(self.plan.device), use_cache=False, **given).logits

    def compare(self, legs: Sequence[Leg]) -> dict[str, list[float]]:
        """Interleaved rounds of the legs."""
        return rounds(legs, self.plan.pairs, deadline=self.deadline, settle_s=0.02)

    def leg(self, name: str, run: Callable[[], Any]) -> Leg:
        """A leg whose clock stops when the device is done."""
        return Leg(name, clocked(run, finish=functools.partial(finish, self.plan.device)))


def finish(device: str) -> None:
    """Wait until the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()


# -- right rows ----------------------------------------------------------------------------------------

CHECK_COLUMNS = ("check", "found", "wanted", "verdict")


def check_row(name: str, found: str, wanted: str, good: bool) -> tuple[str, ...]:
    return (name, found, wanted, "passed" if good else "FAILED")


def rms(rows: Any, truth: Any) -> float:
    """Root of the mean squared difference from float64 rows."""
    return float(np.sqrt(np.mean((np.asarray(rows).astype(np.float64) - truth) ** 2)))


def host(rows: Any) -> Any:
    """Rows of a tensor on the host; NumPy has no bfloat16, and float32 holds all its values."""
    return rows.float().cpu().numpy()


def error_row(name: str, rows: Any, plain: float, truth: Any) -> tuple[str, ...]:
    """Whether rows are as close to float64 as those of the plain forward (which differ by rounding only)."""
    ours = rms(rows, truth)
    return check_row(name, f"{ours:.2e}", f"≤ 1.2 × {plain:.2e}, the plain forward's", ours <= 1.2 * plain)


def right_rows(bench: Bench) -> Table:
    """Rows by every way through the engine against float64, and whether their bits depend on the blocks."""
    engine, ids = bench.engine, bench.ids(bench.plan.checked)
    oracle = Oracle(bench.model)
    truth, plain = oracle(ids), host(bench.forward([ids])[0])
    error = rms(plain, truth)
    chunked = bench.open(uncached_tokens=0, chunk_tokens=len(ids) // 3 + 1)
    generated = engine.generate(ids[: len(ids) // 2], max_new_tokens=8, return_logits=True, ignore_eos=True)
    sequence = [*ids[: len(ids) // 2], *generated.token_ids.tolist()[:-1]]
    generated_truth, generated_plain = oracle(sequence), host(bench.forward([sequence])[0])
    del oracle
    check = engine.head_check
    found = f"used: {check.used}, {check.max_abs_difference:.1e} {check.reason}".strip()
    rows = [
        check_row("head against the model's own forward", found, f"used, ≤ {check.bound:.1e}", check.used),
        error_row("one forward", engine.logits(ids), error, truth),
        error_row("left on the device", host(engine.logits(ids, device="keep").values), error, truth),
        error_row("in chunks over the cache", chunked.logits(ids), error, truth),
        error_row("in a batch of mixed lengths", engine.logits([ids[:9], ids, ids[:-5]])[1], error, truth),
        error_row("generated", generated.logits, rms(generated_plain, generated_truth), generated_truth),
        *same_bits(bench, ids),
    ]
    title = f"Right rows: Llama, {bench.dtype}, {len(ids)} tokens"
    return Table(title, CHECK_COLUMNS, rows, "Root mean square difference from the same model in float64.")


def same_bits(bench: Bench, ids: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """Whether a row's bits stay when the row blocks change; demanded only where a stable block was found."""
    rows = np.asarray(bench.engine.logits(ids))
    stable = "no bit-stable block" not in str(bench.engine.identity.kernel)
    blocks = {f"blocks of {n} rows": bench.open(block_rows=n).logits(ids) for n in (7, 16, 48, 256)}
    picked = [0, 5, len(ids) - 2]
    some = bench.engine.logits(ids, select=ls.Select(positions=picked))
    for name, found, wanted in (
        *((name, found, rows) for name, found in blocks.items()),
        ("three rows alone", some, rows[picked]),
    ):
        differing = float(np.mean(np.asarray(found).view(np.uint8) != wanted.view(np.uint8)))
        text = f"{differing:.1%} of the bytes differ"
        if stable:
            yield check_row(f"bits: {name}", text, "none", differing == 0)
        else:
            yield (f"bits: {name}", text, "reported: no bit-stable block was found", "")


def right_families(plan: Plan, dtype: str) -> Table:
    """Tiny models of many families: soft-caps, logit scales, biases, learned positions, experts."""
    rows = []
    for family in plan.families:
        model: Any = tiny_model(family, dtype=dtype)
        model.to(plan.device)
        ids = np.random.default_rng(2).integers(4, model.config.vocab_size, 100).tolist()
        engine: Any = ls.open(model)
        with torch.no_grad():
            plain = host(model(torch.tensor([ids], device=plan.device), use_cache=False).logits[0])
        truth = Oracle(model)(ids)
        way = "head" if engine.head_check.used else "own forward"
        rows.append(error_row(f"{family} ({way})", engine.logits(ids), rms(plain, truth), truth))
    return Table(f"Right rows: tiny models, {dtype}", CHECK_COLUMNS, rows, "As above, 100 tokens each.")


# -- ratios --------------------------------------------------------------------------------------------


def logits_ratios(bench: Bench) -> Table:
    engine, ids = bench.engine, bench.ids(bench.plan.prompt)
    times = bench.compare(
        [
            bench.leg("host", lambda: engine.logits(ids)),
            bench.leg("plain host", lambda: bench.forward([ids]).cpu()),
            bench.leg("keep", lambda: engine.logits(ids, device="keep")),
            bench.leg("plain keep", lambda: bench.forward([ids])),
        ]
    )
    rows = [
        ratio_row("Transformers, `.logits.cpu()`", times["host"], times["plain host"], Target("≤", 1.03)),
        ratio_row(
            'Transformers, `.logits`; ours `device="keep"`',
            times["keep"],
            times["plain keep"],
            Target("≤", 1.03),
        ),
        ratio_row('ours: host against `device="keep"`', times["host"], times["keep"], None),
    ]
    return Table(f"Complete logits of 1 × {len(ids):,} tokens, {bench.dtype}", AGAINST, rows)


def batch_ratios(bench: Bench, *, keep: bool) -> Table:
    engine, prompts = bench.engine, bench.mixed()
    device = "keep" if keep else "host"

    def placed(rows: Any) -> Any:
        return rows if keep else rows.cpu()

    times = bench.compare(
        [
            bench.leg("ours", lambda: engine.logits(prompts, device=device)),
            bench.leg("padded", lambda: placed(bench.forward(prompts))),
            bench.leg("alone", lambda: [placed(bench.forward([ids])) for ids in prompts]),
        ]
    )
    padded, alone = "Transformers, one padded batch: times faster", "Transformers, one by one"
    rows = [
        ratio_row(padded, times["ours"], times["padded"], Target("≥", 1.5), faster=True),
        ratio_row(alone, times["ours"], times["alone"], Target("≤", 1.0)),
    ]
    place = "on the device" if keep else "on the host"
    total = f"{len(prompts)} prompts, {sum(map(len, prompts)):,} tokens, rows {place}"
    return Table(f"Prompts of mixed lengths, {bench.dtype}, rows {place}", AGAINST, rows, total)


def generation_ratios(bench: Bench) -> Table:
    new = bench.plan.new_tokens
    prompts = [bench.ids(32, seed=i) for i in range(TOGETHER)]

    def ours(inputs: Any, device: str) -> Any:
        return bench.engine.generate(
            inputs, max_new_tokens=new, return_logits=True, ignore_eos=True, device=device
        )

    def transformers() -> Any:
        given = torch.tensor(prompts[:1], device=bench.plan.device)
        return bench.model.generate(
            given,
            attention_mask=torch.ones_like(given),
            do_sample=False,
            max_new_tokens=new,
            min_new_tokens=new,
            output_logits=True,
            return_dict_in_generate=True,
        ).logits

    times = bench.compare(
        [
            bench.leg("keep", lambda: ours(prompts[0], "keep")),
            bench.leg("transformers", transformers),
            bench.leg("host", lambda: ours(prompts[0], "host")),
            bench.leg("transformers host", lambda: torch.cat(transformers()).cpu()),
            bench.leg("together", lambda: ours(prompts, "keep")),
        ]
    )
    hand, target = "Transformers, `generate(output_logits=True)`", Target("≤", 1.03)
    eight = f"{TOGETHER} at once: times the tokens a second of one"
    rows = [
        ratio_row(f'{hand}; ours `device="keep"`', times["keep"], times["transformers"], target),
        ratio_row(f"{hand}, copied to the host", times["host"], times["transformers host"], target),
        ratio_row(eight, times["together"], times["keep"], Target("≥", 3.0), faster=True, scale=TOGETHER),
    ]
    note = "Greedy, 32 prompt tokens; ours gives the prompt's rows as well."
    return Table(f"Generation of {new} tokens with their complete logits, {bench.dtype}", AGAINST, rows, note)


# -- memory and waiting --------------------------------------------------------------------------------


def device_memory(bench: Bench) -> Table:
    """Peak of allocated device memory over the model."""
    engine, ids, long = bench.engine, bench.ids(bench.plan.prompt), bench.ids(bench.plan.document)
    chunked = bench.open(uncached_tokens=0)
    nothing = ls.Select(vocab=None)
    cases: dict[str, Callable[[], Any]] = {
        f"complete logits of {len(ids):,} tokens, to the host": lambda: engine.logits(ids),
        "the same, Transformers": lambda: bench.forward([ids]).cpu(),
        f"summaries of {len(long):,} tokens, one forward": lambda: engine.logits(
            long, select=nothing, summary=True
        ),
        f"summaries of {len(long):,} tokens, in chunks": lambda: chunked.logits(
            long, select=nothing, summary=True
        ),
    }
    rows = []
    for name, run in cases.items():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        rows.append((name, f"{(torch.cuda.max_memory_allocated() - before) / GB:.3f} GB"))
    return Table(f"Peak device memory over the model, {bench.dtype}", ("run", "peak"), rows)


def waiting(bench: Bench, trace: pathlib.Path | None) -> Table:
    """Waits for the device in one profile with few blocks and one with many: does their number follow?"""
    ids = bench.ids(bench.plan.prompt)
    nothing = ls.Select(vocab=None)
    ways: dict[str, Callable[[Any], Any]] = {
        "rows to the host": lambda engine: engine.logits(ids),
        'rows with `device="keep"`': lambda engine: engine.logits(ids, device="keep"),
        "summaries only": lambda engine: engine.logits(ids, select=nothing, summary=True),
    }
    few, many = len(ids) // 2, 16
    rows = []
    for name, run in ways.items():
        found = [waits(functools.partial(run, bench.open(block_rows=n)), trace) for n in (few, many)]
        blocks = [-(-len(ids) // n) for n in (few, many)]
        a, b = (sum(counts[wait] for wait in WAITS) for counts in found)
        events = " and ".join(str(counts[EVENT_WAIT]) for counts in found)
        text = f"{a} with {blocks[0]} blocks, {b} with {blocks[1]}; waits for a copy: {events}"
        rows.append(check_row(name, text, "no more with more blocks", b <= a))
    note = (
        f"Calls of {' and '.join(WAITS)} in a profile. {EVENT_WAIT} waits for the copy of an earlier block "
        "that is handed on; it does not stop the device, and is only reported."
    )
    return Table(f"Waiting for the device, {bench.dtype}", CHECK_COLUMNS, rows, note)


def waits(run: Callable[[], Any], trace: pathlib.Path | None) -> collections.Counter[str]:
    """How often each runtime call happened in a run, after one run before it."""
    run()
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiled:
        run()
    if trace is not None:
        profiled.export_chrome_trace(str(trace))
    return collections.Counter({event.key: event.count for event in profiled.key_averages()})


# -- the program ---------------------------------------------------------------------------------------


def tables(plan: Plan, trace: pathlib.Path | None) -> Iterator[Table]:
    """All tables, as they are done; what may be left out for lack of time comes last."""
    deadline = time.monotonic() + plan.seconds
    for dtype in ("bfloat16", "float32"):
        yield right_families(plan, dtype)
        bench = Bench(plan, dtype, deadline)
        yield right_rows(bench)
        yield waiting(bench, trace)
        if plan.device == "cuda":
            yield device_memory(bench)
        yield logits_ratios(bench)
        yield batch_ratios(bench, keep=True)
        yield generation_ratios(bench)
        del bench
    yield batch_ratios(Bench(plan, "bfloat16", deadline), keep=False)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny models on the CPU, one pair")
    parser.add_argument(
        "--trace", type=pathlib.Path, help="write the last profile here, for chrome://tracing"
    )
    options = parser.parse_args(given)
    if not options.smoke and not torch.cuda.is_available():
        print("gpu.py: skipped, torch sees no CUDA device; --smoke runs tiny models on the CPU")
        return
    plan = SMOKE if options.smoke else FULL
    gpu = (
        "none (smoke run)" if options.smoke else f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    )
    begun = time.monotonic()
    failed = 0
    for table in tables(plan, options.trace):
        print(table.markdown(), flush=True)
        failed += sum(row[-1] == "FAILED" for row in table.rows)
    print(machine_table(machine(gpu=gpu)).markdown())
    print(f"{failed} checks failed; {time.monotonic() - begun:.0f} s")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
