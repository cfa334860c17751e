"""What is kept of a row, how large, how right and how fast, on real rows of the bundled model.

    python benchmarks/encodings_bench.py --markdown           # everything: the tables of docs/encodings.md
    python benchmarks/encodings_bench.py --only size --rows 200

Rows are those of English prose: the help texts of Python's own `pydoc_data.topics`. Ratios follow the rule in
`_measure`; run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
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
    interval,
    machine,
    machine_table,
    ratio_row,
    rounds,
    show,
)

import logitscope as ls
from logitscope.encodings import ENCODINGS, Residual
from logitscope.extract import Extractor, LogitsChunk, tensor_over
from logitscope.numerics import host
from logitscope.rows import SUMMARIES, Request, Select

TEXT_TOKENS, BLOCK, POSITIONS = 500, 256, 1024
CONTEXT, QUESTION = 2000, 48
SHORT_TEXTS, SHORT_TOKENS = 64, (16, 65)
GB = 1e9


def prose(engine: Any, tokens: int) -> list[list[int]]:
    """Token ids of English prose, in texts of at most `TEXT_TOKENS`, ``tokens`` in all."""
    from pydoc_data.topics import topics

    ids = [int(i) for name in sorted(topics) for i in engine.tokenizer.encode(topics[name])][:tokens]
    return [ids[i : i + TEXT_TOKENS] for i in range(0, len(ids), TEXT_TOKENS)]


def random_ids(random: np.random.Generator, engine: Any, count: int) -> list[int]:
    """Token ids that make no sense."""
    return [int(i) for i in random.integers(engine.vocab_size // 50, engine.vocab_size * 4 // 5, count)]


# -- size and fidelity ---------------------------------------------------------------------------------


def llama_cpp(z: Any) -> Any:
    """Decoded rows of the 16-bit form of llama.cpp's ``--kl-divergence-base``, computed by itself.

    A row's values are clamped 16 nats below its maximum and cut into 65,535 even steps.
    """
    top = z.max(axis=1, keepdims=True)
    low = np.maximum(z.min(axis=1, keepdims=True), top - 16)
    step = (top - low) / 65535
    return low + step * np.rint((np.maximum(z, low) - low) / step)


def spread(rows: Any) -> Any:
    """Cut rows with the dropped mass spread evenly over the dropped columns."""
    dense = rows.dense(np.nan).astype(np.float64)
    dropped = np.isnan(dense)
    count = np.maximum(dropped.sum(axis=1), 1)
    mass = np.maximum(rows.dropped_mass().astype(np.float64), 1e-8)  # float32 knows it no better
    rest = rows.logsumexp().astype(np.float64) + np.log(mass) - np.log(count)
    return np.where(dropped, rest[:, None], dense)


@dataclasses.dataclass
class Fidelity:
    """What one form does to many rows."""

    bytes_per_row: float
    encode_s: float = 0.0
    decode_s: float = 0.0
    kl: list[Any] = dataclasses.field(default_factory=list)
    flips: int = 0

    def add(self, truth: Any, decoded: Any) -> None:
        """Compare some rows."""
        self.kl.append(host.kl_divergence(truth, decoded))
        self.flips += int((truth.argmax(axis=1) != decoded.argmax(axis=1)).sum())


def sizes(engine: Any, count: int) -> list[Table]:
    """Bytes, KL and flips of every encoding and of some selections, over the same rows."""
    texts = prose(engine, count)
    plain = [engine.logits(text) for text in texts]
    rows = sum(len(one) for one in plain)
    row_bytes, vocab = engine.vocab_size * 4, engine.vocab_size
    found: dict[str, Fidelity] = {}
    identical, outside = True, 0
    for text, whole in zip(texts, plain, strict=True):
        truth = whole.to_numpy()
        outside += int((whole.target_rank() > 64).sum())
        for name in ENCODINGS:
            if name.startswith("hidden"):
                kept, encode_s = engine.logits(text, encode=name), 0.0
                stored_bytes = kept.values.nbytes
                begun = time.perf_counter()
                decoded = kept.to_numpy()
                decode_s = time.perf_counter() - begun
                identical &= name != "hidden" or np.array_equal(decoded, truth)
                if name == "hidden":
                    residual = Residual.of(kept.values)
                    one = found.setdefault("hidden, saved with exact=True", Fidelity(0.0))
                    one.bytes_per_row += (stored_bytes + residual.nbytes) / rows
                    one.add(truth, decoded)
            else:
                begun = time.perf_counter()
                chunk = LogitsChunk(tensor_over(truth), whole.positions, whole.targets)
                request = Request(np.asarray(text, np.int32), encode=name)
                block = Extractor(request, 0, identity=engine.identity).extract(chunk).wait()
                encode_s = time.perf_counter() - begun
                stored_bytes = block.values.nbytes
                begun = time.perf_counter()
                held = ENCODINGS[name].held(block.values, engine.identity, None)
                decoded = np.asarray(held).astype(np.float32)
                decode_s = time.perf_counter() - begun
            one = found.setdefault(name, Fidelity(stored_bytes / len(whole)))
            one.encode_s, one.decode_s = one.encode_s + encode_s, one.decode_s + decode_s
            one.add(truth, decoded)
        found.setdefault("llama.cpp's 16 bits", Fidelity(engine.vocab_size * 2 + 8)).add(
            truth, llama_cpp(truth)
        )
        cuts = {f"top_k={k}, tail spread evenly": Select(top_k=k) for k in (64, 256, 1024) if k <= vocab}
        cuts["top_p=0.999, tail spread evenly"] = Select(top_p=0.999)
        for name, select in cuts.items():
            kept = engine.logits(text, select=select)
            one = found.setdefault(name, Fidelity(0.0))
            one.bytes_per_row += kept.nbytes / rows
            one.add(truth, spread(kept))
    data = rows * row_bytes
    lines = []
    for name, one in found.items():
        kl = np.concatenate(one.kl)
        speed = [f"{data / s / GB:.2f}" if s else "" for s in (one.encode_s, one.decode_s)]
        smaller = row_bytes / one.bytes_per_row
        lines.append(
            (
                f"`{name}`",
                f"{one.bytes_per_row:,.0f}",
                f"{smaller:.1f}" if smaller < 20 else f"{smaller:.0f}",
                f"{max(kl.mean(), 0):.1e}",
                f"{max(kl.max(), 0):.1e}",
                str(one.flips),
                *speed,
            )
        )
    checks = {
        "hidden rows bit-identical to the engine's": "yes" if identical else "NO",
        "hidden, times smaller (target ≥ 80)": f"{row_bytes / found['hidden'].bytes_per_row:.1f}",
        "q16, mean KL (target ≤ 1e-8)": f"{np.concatenate(found['q16'].kl).mean():.1e}",
        "q8, bytes a value (target ≤ 1.10)": f"{found['q8'].bytes_per_row / vocab:.3f}",
        "q8, mean KL (target ≤ 3e-5)": f"{np.concatenate(found['q8'].kl).mean():.1e}",
        "q8, flips (target 0)": str(found["q8"].flips),
        "rows whose next token is not among the best 64": f"{outside / rows:.0%}",
    }
    return [
        Table(
            "Forms of a row",
            (
                "form",
                "bytes a row",
                "times smaller",
                "mean KL",
                "worst KL",
                "flips",
                "encode GB/s",
                "decode GB/s",
            ),
            lines,
            f"{rows:,} rows, vocabulary {vocab:,}, float32; KL(row ‖ decoded) in nats, in float64; "
            "flips: rows whose likeliest token changed; speeds in bytes of float32 rows, one pass.",
        ),
        Table("Targets of size and fidelity", ("", ""), list(checks.items())),
    ]


# -- the extractor -------------------------------------------------------------------------------------


def extraction(engine: Any, pairs: int) -> list[Table]:
    """Time of selections, encodings and summaries of a resident block, in multiples of a copy of it."""
    rows = torch.cat([engine.logits(text, device="keep").values for text in prose(engine, BLOCK)])[
        :BLOCK
    ].clone()
    ids = np.arange(len(rows), dtype=np.int32)
    scored = np.random.default_rng(0).integers(0, engine.vocab_size, len(rows)).astype(np.int32)
    rooms: dict[Any, Any] = {}

    def room(index: int, stage: str, first: int, count: int) -> Any:
        return rooms["now"][first : first + count]

    def extracting(request: Request) -> Callable[[], Any]:
        extractor = Extractor(request, 0, identity=engine.identity, buffer=room)
        form = extractor.format
        key = None if form is None else (form.width, form.dtype)
        if key not in rooms:
            rooms[key] = None if form is None else np.zeros((len(rows), form.width), form.dtype)

        def run() -> Any:
            rooms["now"], extractor.rows = rooms[key], 0
            return extractor.extract(LogitsChunk(rows, np.arange(len(rows)), scored)).wait()

        return run

    place = torch.zeros_like(rows)
    every = Select(vocab=None)
    runs: dict[str, tuple[Callable[[], Any], Target | None]] = {
        "copy": (lambda: place.copy_(rows), None),
        "`torch.logsumexp`": (lambda: torch.logsumexp(rows, 1), None),
        "`torch.topk(64)`": (lambda: rows.topk(64), None),
        **{
            f'`encode="{name}"`': (
                extracting(Request(ids, encode=name)),
                Target("≤", 1.5)
                if name in ("float16", "bfloat16")
                else Target("≤", 6)
                if name != "float8"
                else None,
            )
            for name in ("float16", "bfloat16", "q16", "q8", "float8")
        },
        "all summaries": (extracting(Request(ids, select=every, summary=SUMMARIES)), Target("≤", 8)),
        "`logsumexp` alone": (extracting(Request(ids, select=every, summary=("logsumexp",))), None),
        "`top_k=64`": (extracting(Request(ids, select=Select(top_k=64))), None),
        "`top_k=64` and all summaries": (
            extracting(Request(ids, select=Select(top_k=64), summary=SUMMARIES)),
            Target("≤", 12),
        ),
        "`top_p=0.9`": (extracting(Request(ids, select=Select(top_p=0.9))), None),
        "`min_p=0.05`": (extracting(Request(ids, select=Select(min_p=0.05))), None),
        "`sample=32`": (extracting(Request(ids, select=Select(sample=32))), None),
        "`vocab=[10 ids]`": (extracting(Request(ids, select=Select(vocab=list(range(10))))), None),
    }
    taken = rounds([Leg(name, clocked(run)) for name, (run, _) in runs.items()], pairs, settle_s=0.02)
    lines = []
    for name, (_, target) in runs.items():
        found = interval([a / b for a, b in zip(taken[name], taken["copy"], strict=True)])
        lines.append(
            (
                name,
                f"{1e3 * sorted(taken[name])[len(taken[name]) // 2]:.1f} ms",
                f"{found.median:.2f}",
                f"{found.low:.2f} … {found.high:.2f}",
                "" if target is None else str(target),
                "" if target is None else target.verdict(found),
            )
        )
    return [
        Table(
            "The extractor, in multiples of a copy",
            ("what", "time", "× a copy", "95 % interval", "target", "verdict"),
            lines,
            f"A resident float32 block [{len(rows)}, {engine.vocab_size}]; the copy is `copy_` into "
            "a resident buffer. Cut rows keep their logsumexp, which is in their time.",
        )
    ]


# -- the engine ----------------------------------------------------------------------------------------


def columns(engine: Any, pairs: int) -> list[Table]:
    """Ten columns of every row against the forward with the last row only."""
    random = np.random.default_rng(0)
    some = Select(vocab=list(range(10)), logsumexp=False)

    def asked(select: Select) -> Callable[[], Any]:
        return lambda: engine.logits(random_ids(random, engine, POSITIONS), select=select)

    runs = {"ids": asked(some), "last": asked(Select("last"))}
    taken = rounds([Leg(name, clocked(run)) for name, run in runs.items()], pairs)
    row = ratio_row(
        f"10 token ids of {POSITIONS} positions / the last row only",
        taken["ids"],
        taken["last"],
        Target("≤", 1.02),
    )
    return [Table("Token ids without logsumexp", RATIO_COLUMNS, [row])]


def prefixes(engine: Any, pairs: int) -> list[Table]:
    """A second question on a context that was read, and four continuations of one context."""
    random = np.random.default_rng(0)

    def ids(count: int) -> list[int]:
        return random_ids(random, engine, count)

    held: dict[str, list[int]] = {}

    def cold(**options: Any) -> Callable[[], float]:
        def seconds() -> float:
            held["context"] = ids(CONTEXT)
            prompt = held["context"] + ids(QUESTION)
            begun = time.perf_counter()
            engine.logits(prompt, **options)
            return time.perf_counter() - begun

        return seconds

    def warm(**options: Any) -> Callable[[], float]:
        def seconds() -> float:
            if "context" not in held:
                cold()()
            prompt = held["context"] + ids(QUESTION)
            begun = time.perf_counter()
            engine.logits(prompt, **options)
            return time.perf_counter() - begun

        return seconds

    def product() -> float:
        hidden = random.normal(size=(CONTEXT + QUESTION, engine.identity.hidden_size)).astype(np.float32)
        begun = time.perf_counter()
        engine.head.rows(hidden)
        return time.perf_counter() - begun

    def choices(kept: bool) -> Callable[[], float]:
        def seconds() -> float:
            before = engine.prefixes
            engine.prefixes = before if kept else None
            try:
                context = ids(CONTEXT)
                prompts = [context + ids(16) for _ in range(4)]
                begun = time.perf_counter()
                engine.logits(prompts, select=Select(slice(CONTEXT - 1, None)))
                return time.perf_counter() - begun
            finally:
                engine.prefixes = before

        return seconds

    legs = [
        Leg("cold", cold(encode="hidden")),
        Leg("warm", warm(encode="hidden")),
        Leg("warm, dense", warm()),
        Leg("product", product),
        Leg("choices, kept", choices(kept=True)),
        Leg("choices, read again", choices(kept=False)),
    ]
    taken = rounds(legs, pairs)
    question = f"{QUESTION} tokens on a context of {CONTEXT}"
    rows = [
        ratio_row(
            f"{question}, complete hidden rows: times faster than cold",
            taken["warm"],
            taken["cold"],
            Target("≥", 10),
            faster=True,
        ),
        ratio_row(
            f"{question}, dense rows / the head product alone", taken["warm, dense"], taken["product"], None
        ),
        ratio_row(
            f"four continuations of a context of {CONTEXT}: times faster than without",
            taken["choices, kept"],
            taken["choices, read again"],
            None,
            faster=True,
        ),
    ]
    return [Table("Prompts that begin as earlier ones did", RATIO_COLUMNS, rows)]


def parallel(engine: Any, model: str, pairs: int) -> list[Table]:
    """Two worker processes on the cores of this machine against this process with one thread."""
    random = np.random.default_rng(0)
    texts = [random_ids(random, engine, n) for n in random.integers(*SHORT_TOKENS, SHORT_TEXTS)]
    figures: dict[str, Any] = {"select": Select(vocab=None), "summary": True}

    def alone(**options: Any) -> Callable[[], Any]:
        def run() -> Any:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                return engine.logits(texts, **options)
            finally:
                torch.set_num_threads(threads)

        return run

    with ls.open(model, workers=2) as workers:
        legs = [
            Leg("workers", clocked(lambda: workers.logits(texts, **figures))),
            Leg("alone", clocked(alone(**figures))),
            Leg("workers, rows", clocked(lambda: workers.logits(texts))),
            Leg("alone, rows", clocked(alone())),
        ]
        taken = rounds(legs, pairs)
    rows = [
        ratio_row(
            f"summaries of {SHORT_TEXTS} texts of {SHORT_TOKENS[0]} to {SHORT_TOKENS[1]} tokens",
            taken["workers"],
            taken["alone"],
            Target("≥", 1.6),
            faster=True,
        ),
        ratio_row("the same, complete rows", taken["workers, rows"], taken["alone, rows"], None, faster=True),
    ]
    return [Table("Two workers: times faster than one process of one thread", RATIO_COLUMNS, rows)]


MEASURES: dict[str, Callable[[Any, argparse.Namespace], list[Table]]] = {
    "size": lambda engine, options: sizes(engine, options.rows),
    "extract": lambda engine, options: extraction(engine, options.pairs),
    "prefix": lambda engine, options: prefixes(engine, options.pairs),
    "columns": lambda engine, options: columns(engine, options.pairs),
    "parallel": lambda engine, options: parallel(engine, options.model, options.pairs),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--rows", type=int, default=2000, help="rows that are compared")
    parser.add_argument("--pairs", type=int, default=MIN_PAIRS)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args(arguments)
    facts = machine()
    with ls.open(options.model) as engine:
        for name in options.only:
            for table in MEASURES[name](engine, options):
                show(table, markdown=options.markdown)
    show(machine_table(facts), markdown=options.markdown)


if __name__ == "__main__":
    main()
