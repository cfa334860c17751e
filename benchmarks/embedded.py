"""The embedded engine on a real model, against Transformers by hand and CTranslate2.

    python benchmarks/embedded.py                    # everything, on the bundled model
    python benchmarks/embedded.py --only logits batch --pairs 31 --markdown
    python benchmarks/embedded.py --ctranslate2 ct2/bin/python      # see ctranslate2_side.py

Prints ratios, by the rule in `_measure`. Times are wall-clock: run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

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
    progress,
    ratio_row,
    rounds,
    show,
)
from _peak import CHUNKED, UNLIMITED_BYTES

HERE = pathlib.Path(__file__).resolve().parent
MB, GB = 1e6, 1e9
LONG, PROMPT, MIXED, MIXED_TOKENS = 8000, 1024, 64, (16, 512)
NEW_TOKENS, GENERATE_FROM, TOGETHER = 64, 32, 8
FRESH_IMPORTS, FRESH_PEAKS = 11, 3
AGAINST = ("against", *RATIO_COLUMNS[1:])

# For the estimate: what costs about as much as a forward of so many tokens.
LOAD, STEP, STEP_OF_EIGHT, STEP_OF_CTRANSLATE2, IMPORT = 3000.0, 22.0, 40.0, 12.0, 100.0


class CTranslate2:
    """CTranslate2 in a process of its own: `ctranslate2_side.py`.

    Args:
        python: the interpreter of its environment.
        folder: of the Transformers model.
        threads: of one product.

    Attributes:
        versions: its libraries.
    """

    def __init__(self, python: str, folder: str, threads: int) -> None:
        command = [python, str(HERE / "ctranslate2_side.py"), folder, str(threads)]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}  # it has its own packages
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.versions = str(self._read()["versions"])

    def seconds(self, token_ids: Sequence[int], *, new_tokens: int = 0, save: str | None = None) -> float:
        """Time of one request, taken over there."""
        assert self._process.stdin is not None
        request = {"token_ids": list(token_ids), "new_tokens": new_tokens, "save": save}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return float(self._read()["seconds"])

    def close(self) -> None:
        """End the process."""
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            status = self._process.returncode
            raise SystemExit(f"ctranslate2_side.py ended with status {status}; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclasses.dataclass
class Bench:
    """What every section works on.

    Attributes:
        engine: the embedded engine.
        folder: where its model was loaded from.
        pairs: rounds of each comparison.
        prompts: of the 64 mixed ones, in one round.
        other: CTranslate2, or None.
        advance: is told the cost of what ran.
    """

    engine: Any
    folder: str
    pairs: int
    prompts: int
    other: CTranslate2 | None = None
    advance: Callable[[float], None] = lambda cost: None

    def fit(self, tokens: int) -> int:
        """So many tokens, or as many as the model reads."""
        return min(tokens, self.engine.context_length or tokens)

    def document(self, tokens: int) -> list[int]:
        """Ids of an English text of so many tokens, or as many as the model reads: the licence, repeated."""
        text = (HERE.parent / "LICENSE").read_text(encoding="utf-8")
        ids = self.engine.tokenizer.encode(text).tolist()
        return list(itertools.islice(itertools.cycle(ids), self.fit(tokens)))


@dataclasses.dataclass(frozen=True)
class Section:
    """One part of the benchmark.

    Attributes:
        cost: expected, in tokens of a forward.
        run: measures it.
    """

    cost: float
    run: Callable[[], Table]


def compared(
    bench: Bench,
    legs: Sequence[Leg],
    table: Callable[[dict[str, list[float]]], Table],
    *,
    count: int | None = None,
    warm_up: bool = True,
) -> Section:
    """A section that runs legs in interleaved rounds and makes a table of their times."""
    turns = bench.pairs if count is None else count

    def run() -> Table:
        return table(rounds(legs, turns, warm_up=warm_up, done=bench.advance))

    return Section(sum(leg.cost for leg in legs) * (turns + warm_up), run)


def forward(model: Any, token_ids: Sequence[int], **options: Any) -> Any:
    """``model(ids).logits`` by hand, ``[1, L, vocab]``."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([list(token_ids)]), **options).logits


# -- complete logits of one prompt ---------------------------------------------------------------------


def logits_section(bench: Bench) -> Section:
    engine, ids, other = bench.engine, bench.document(PROMPT), bench.other
    legs = [
        Leg("ours", clocked(lambda: engine.logits(ids)), len(ids)),
        Leg("uncached", clocked(lambda: forward(engine.model, ids, use_cache=False)), len(ids)),
        Leg("default", clocked(lambda: forward(engine.model, ids)), len(ids)),
    ]
    if other is not None:
        legs.append(Leg("ctranslate2", lambda: other.seconds(ids), len(ids)))

    def table(times: dict[str, list[float]]) -> Table:
        sides = [
            ("Transformers, `model(ids, use_cache=False)`", "uncached", Target("≤", 1.03)),
            ("Transformers, `model(ids)`", "default", Target("≤", 1.03)),
            ("CTranslate2, `forward_batch`", "ctranslate2", Target("≤", 1.05)),
        ]
        rows = [ratio_row(name, times["ours"], times[leg], t) for name, leg, t in sides if leg in times]
        return Table(f"Complete float32 logits of 1 × {len(ids):,} tokens", AGAINST, rows, agreement(bench))

    return compared(bench, legs, table)


def agreement(bench: Bench) -> str:
    """That the sides compute the same: worst differences over the rows of 64 tokens."""
    ids = bench.document(64)
    ours = np.asarray(bench.engine.logits(ids))
    plain = forward(bench.engine.model, ids, use_cache=False)[0].numpy()
    note = f"Worst difference over {len(ids)} rows: {np.abs(ours - plain).max():.1e} from Transformers"
    if bench.other is None:
        return f"{note}. CTranslate2 was not measured: no `--ctranslate2 PYTHON` was given."
    with tempfile.TemporaryDirectory() as folder:
        file = str(pathlib.Path(folder, "rows.npy"))
        bench.other.seconds(ids, save=file)
        return f"{note}, {np.abs(ours - np.load(file)).max():.1e} from CTranslate2."


# -- memory --------------------------------------------------------------------------------------------


def memory_section(bench: Bench) -> Section:
    from logitscope.engines.transformers.cache import bytes_per_token

    long, short = bench.fit(LONG), bench.fit(PROMPT)
    cache = bytes_per_token(bench.engine.model.config, 4) * long / MB
    chunk = bench.engine.settings.chunk_tokens
    cases = [
        ("logits", f"complete logits of {short:,} tokens", short, Target("≤", 150)),
        ("transformers", "the same, Transformers `use_cache=False`", short, None),
        ("summary", f"summaries of {long:,} tokens, one forward", long, Target("≤", 450)),
        (
            "chunked",
            f"summaries of {long:,} tokens, chunks of {chunk}",
            long,
            Target("≤", round(cache + 150)),
        ),
    ]

    times = min(FRESH_PEAKS, bench.pairs)
    columns = ("measurement", "loaded", "peak over it", "result", "beyond the result", "target", "verdict")

    def run() -> Table:
        rows = []
        for case, label, tokens, target in cases:
            found = []
            for _ in range(times):
                found.append(fresh_peak(bench.folder, case, tokens))
                bench.advance(tokens + LOAD)
            rows.append((label, *peak_cells(max(found, key=lambda peak: peak["over"]), target)))
        note = (
            f"MB (10⁶ bytes), the worst of {times} fresh processes; over the loaded model after a warm-up "
            "of 16 tokens. What the engine loads includes its packed head. "
            f"The KV cache of {long:,} tokens is {cache:.0f} MB."
        )
        return Table("Peak memory", columns, rows, note)

    return Section(times * sum(tokens + LOAD for _, _, tokens, _ in cases), run)


def peak_cells(found: dict[str, Any], target: Target | None) -> tuple[str, ...]:
    beyond = (found["over"] - found["result"]) / MB
    sizes = tuple(f"{found[name] / MB:.0f}" for name in ("loaded", "over", "result"))
    if target is None:
        return (*sizes, f"{beyond:.0f}", "reported", "")
    return (*sizes, f"{beyond:.0f}", str(target), "reached" if target.meets(beyond) else "missed")


def fresh_peak(folder: str, case: str, tokens: int) -> dict[str, Any]:
    """`_peak.peak_of` in a process of its own."""
    command = [sys.executable, str(HERE / "_peak.py"), case, folder, str(tokens)]
    environment = {**os.environ, "TQDM_DISABLE": "1"}  # one progress bar is enough
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# -- growth --------------------------------------------------------------------------------------------


def growth_section(bench: Bench) -> Section:
    engine = bench.engine
    sides = {
        "one forward": engine,
        f"chunks of {engine.settings.chunk_tokens}": open_engine(
            engine.model, tokenizer=engine.tokenizer.wrapped, **CHUNKED
        ),
    }
    lengths = sorted({bench.fit(n) for n in (1024, 2048, 4096, LONG)})
    legs = [
        Leg(f"{name} {n}", clocked(functools.partial(summaries, side, bench.document(n))), n * (1 + n / 8192))
        for n in lengths
        for name, side in sides.items()
    ]
    count = max(1, bench.pairs // 5)

    def table(times: dict[str, list[float]]) -> Table:
        def cell(name: str, n: int) -> str:
            own, first = (statistics.median(times[f"{name} {m}"]) / m for m in (n, lengths[0]))
            return f"{1e3 * own:.3f} ({own / first:.2f} ×)"

        rows = [(f"{n:,}", *(cell(name, n) for name in sides)) for n in lengths]
        note = f"Summaries only: milliseconds a token, median of {count}, and times the shortest document's."
        return Table("Time as a document grows", ("tokens", *sides), rows, note)

    return compared(bench, legs, table, count=count, warm_up=False)


def summaries(engine: Any, ids: Sequence[int]) -> Any:
    from logitscope import Select

    return engine.logits(ids, select=Select(vocab=None), summary=True)


# -- prompts of mixed lengths --------------------------------------------------------------------------


def batch_section(bench: Bench) -> Section:
    engine, model = bench.engine, bench.engine.model
    prompts = sorted(mixed_prompts(bench), key=len)
    parts = MIXED // bench.prompts
    slices = [prompts[first::parts] for first in range(parts)]  # all with about the same lengths
    real, cells = sum(map(len, prompts)) // parts, len(prompts[-1]) * bench.prompts

    def leg(name: str, run: Callable[[list[list[int]]], Any], cost: float) -> Leg:
        turn = itertools.cycle(slices)  # each leg runs once a round, so all see the same prompts
        return Leg(name, lambda: clocked(functools.partial(run, next(turn)))(), cost)

    legs = [
        leg("ours", engine.logits, real),
        leg("padded", functools.partial(padded_forward, model), cells),
        leg("alone", lambda part: [forward(model, ids, use_cache=False) for ids in part], real),
    ]

    def table(times: dict[str, list[float]]) -> Table:
        padded, alone = "Transformers, one padded batch: times faster", "Transformers, one by one"
        rows = [
            ratio_row(padded, times["ours"], times["padded"], Target("≥", 1.5), faster=True),
            ratio_row(alone, times["ours"], times["alone"], Target("≤", 1.0)),
        ]
        width = 4 * int(engine.vocab_size) / GB
        note = (
            f"{bench.prompts} prompts a round, of {MIXED} of {len(prompts[0])} to {len(prompts[-1])} tokens "
            f"({sum(map(len, prompts)):,} in all). Each side gives complete float32 rows and holds them "
            f"together: {real * width:.2f} GB, the padded batch {cells * width:.2f} GB; they are freed off "
            "the clock. "
            "Transformers runs with `use_cache=False`."
        )
        return Table("Prompts of mixed lengths", AGAINST, rows, note)

    return compared(bench, legs, table, warm_up=False)


def mixed_prompts(bench: Bench) -> list[list[int]]:
    """64 stretches of a text, of 16 to 512 tokens, drawn uniformly with a fixed seed."""
    random = np.random.default_rng(0)
    shortest, longest = map(bench.fit, MIXED_TOKENS)
    lengths = random.integers(shortest, longest + 1, MIXED).tolist()
    document = bench.document(PROMPT)
    starts = random.integers(0, len(document), MIXED).tolist()
    return [(document * 2)[start : start + n] for start, n in zip(starts, lengths, strict=True)]


def padded_forward(model: Any, prompts: Sequence[Sequence[int]]) -> Any:
    """Logits ``[prompts, longest, vocab]`` of one batch, padded on the right, with its attention mask."""
    import torch

    ids = torch.zeros(len(prompts), max(map(len, prompts)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
        mask[row, : len(prompt)] = 1
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits


# -- generation ----------------------------------------------------------------------------------------


def generation_section(bench: Bench) -> Section:
    model, other = bench.engine.model, bench.other
    document = bench.document(GENERATE_FROM * TOGETHER) * TOGETHER
    prompts = [document[GENERATE_FROM * i :][:GENERATE_FROM] for i in range(TOGETHER)]
    one = prompts[0]

    def ours(inputs: Any) -> Any:
        return bench.engine.generate(inputs, max_new_tokens=NEW_TOKENS, return_logits=True, ignore_eos=True)

    legs = [
        Leg("ours", clocked(lambda: ours(one)), NEW_TOKENS * STEP),
        Leg("transformers", clocked(lambda: generated(model, one)), NEW_TOKENS * STEP),
        Leg("together", clocked(lambda: ours(prompts)), NEW_TOKENS * STEP_OF_EIGHT),
    ]
    if other is not None:
        cost = NEW_TOKENS * STEP_OF_CTRANSLATE2
        legs.append(Leg("ctranslate2", lambda: other.seconds(one, new_tokens=NEW_TOKENS), cost))

    def table(times: dict[str, list[float]]) -> Table:
        hand, eight = (
            "Transformers, `generate(output_logits=True)`",
            f"{TOGETHER} at once: times the tokens a second of one",
        )
        side = "CTranslate2, `generate_batch(return_logits_vocab=True)`"
        rows = [
            ratio_row(hand, times["ours"], times["transformers"], Target("≤", 1.03)),
            ratio_row(eight, times["together"], times["ours"], Target("≥", 3.0), faster=True, scale=TOGETHER),
        ]
        if other is not None:
            rows.append(ratio_row(side, times["ours"], times["ctranslate2"], None))
        chosen = generated(model, one).sequences[0, -NEW_TOKENS:].tolist()
        same = "the same" if ours(one).token_ids.tolist() == chosen else "different"
        note = (
            f"Greedy, {len(one)} prompt tokens. Ours gives the prompt's rows as well, the others only the "
            f"generated ones. Ours and Transformers chose {same} tokens."
        )
        return Table(f"Generation of {NEW_TOKENS} tokens with their complete logits", AGAINST, rows, note)

    return compared(bench, legs, table)


def generated(model: Any, ids: Sequence[int]) -> Any:
    """Transformers' own generation, with ``.logits``: one ``[1, vocab]`` a token."""
    import torch

    given = torch.tensor([list(ids)])
    return model.generate(
        given,
        attention_mask=torch.ones_like(given),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
    )


# -- import --------------------------------------------------------------------------------------------


def import_section(bench: Bench) -> Section:
    codes = ("import logitscope", "from logitscope import Logits, Request, Select")
    count = min(FRESH_IMPORTS, bench.pairs)

    def run() -> Table:
        rows = []
        for code in codes:
            found = [fresh_import(code) for _ in range(count)]
            bench.advance(count * IMPORT)
            rows.append((f"`{code}`", *import_cells(found)))
        note = f"{count} fresh processes each; the start of Python is not counted."
        return Table("Import", ("code", "fastest", "median", "torch", "target", "verdict"), rows, note)

    return Section(count * IMPORT * len(codes), run)


def import_cells(found: Sequence[tuple[float, bool]]) -> tuple[str, ...]:
    seconds, torch = [s for s, _ in found], any(loaded for _, loaded in found)
    target, median = Target("≤", 0.3), statistics.median(seconds)
    reached = target.meets(median) and not torch
    return (
        f"{min(seconds):.3f} s",
        f"{median:.3f} s",
        "imported" if torch else "not imported",
        f"{target} s, no torch",
        "reached" if reached else "missed",
    )


def fresh_import(code: str) -> tuple[float, bool]:
    """Seconds of an import in a fresh process, and whether it brought PyTorch along."""
    program = f"""
import sys, time
begun = time.perf_counter()
{code}
print(time.perf_counter() - begun, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    seconds, torch = done.stdout.split()
    return float(seconds), torch == "True"


# -- the program ---------------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[Bench], Section]] = {
    "logits": logits_section,
    "memory": memory_section,
    "growth": growth_section,
    "batch": batch_section,
    "generation": generation_section,
    "import": import_section,
}


def open_engine(model: Any, **options: Any) -> Any:
    """The embedded engine without its memory limit and earlier prompts, which are not what is measured."""
    import logitscope

    return logitscope.open(model, memory_limit_bytes=UNLIMITED_BYTES, prefix_cache_bytes=0, **options)


def measure(bench: Bench, names: Sequence[str]) -> list[Table]:
    """The tables of the named sections, and the machine's."""
    sections = [SECTIONS[name](bench) for name in names]
    facts = machine(
        engine=f"{bench.engine!r}, {bench.engine.identity.kernel}",
        peer=bench.other.versions if bench.other else "none",
    )
    cost = sum(section.cost for section in sections)
    print(f"about {max(cost * seconds_per_token(bench) / 60, 1):.0f} min", file=sys.stderr)
    with progress(cost) as bench.advance:
        tables = [section.run() for section in sections]
    return [*tables, machine_table(facts)]


def seconds_per_token(bench: Bench) -> float:
    """Of complete logits of a short prompt, for the estimate."""
    ids = bench.document(256)
    seconds = clocked(lambda: bench.engine.logits(ids))
    return min(seconds() for _ in range(2)) / len(ids)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="name or folder (default: the bundled model)")
    parser.add_argument(
        "--pairs", type=int, default=MIN_PAIRS, help="rounds of each comparison (default: %(default)s)"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=SECTIONS,
        default=list(SECTIONS),
        metavar="NAME",
        help=f"of {', '.join(SECTIONS)}",
    )
    parser.add_argument(
        "--prompts",
        type=int,
        choices=(8, 16, 32, 64),
        default=16,
        help="of the 64 mixed prompts, in one round (default: %(default)s; 64 takes four times as long)",
    )
    parser.add_argument(
        "--ctranslate2", metavar="PYTHON", help="interpreter of an environment with CTranslate2"
    )
    parser.add_argument("--markdown", action="store_true", help="print what goes into docs/benchmarks.md")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(given)
    import torch

    engine = open_engine(options.model)
    folder = str(engine.model.config._name_or_path)
    python = options.ctranslate2
    other = CTranslate2(python, folder, torch.get_num_threads()) if python else None
    try:
        tables = measure(Bench(engine, folder, options.pairs, options.prompts, other), options.only)
    finally:
        if other is not None:
            other.close()
    for table in tables:
        show(table, markdown=options.markdown)


if __name__ == "__main__":
    main()
