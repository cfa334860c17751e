"""The embedded engine on a real model, against Transformers by hand and CTranslate2.

    python benchmarks/embedded.py                    # everything, on the bundled model
    python benchmarks/embedded.py --only logits batch --pairs 31 --markdown
    python benchmarks/embedded.py --ctranslate2 ct2/bin/python      # see ctranslate2_side.py

Prints ratios, by the rule in `_measure`. Times are wall-clock; run it on a machine that does nothing else.
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

import _measure as measure
import numpy as np
from _measure import Leg, Table, Target, clocked

HERE = pathlib.Path(__file__).resolve().parent
MB = 1e6
UNLIMITED_BYTES = 2**60
CHUNKED = {"uncached_tokens": 0, "chunk_tokens": 1024}
LOAD_WEIGHT = 3000.0
"""A fresh process that loads the model costs about as much as a forward of so many tokens."""
STEP_WEIGHT = {"transformers": 22.0, "ours": 22.0, "eight": 40.0, "ctranslate2": 12.0}
"""A decoding step costs about as much as a forward of so many tokens."""


class OtherSide:
    """CTranslate2 in a process of its own: `ctranslate2_side.py`.

    Args:
        python: the interpreter of its environment.
        folder: of the model.
        threads: of one product.
    """

    def __init__(self, python: str, folder: str, threads: int) -> None:
        command = [python, str(HERE / "ctranslate2_side.py"), folder, str(threads)]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}  # it has its own packages
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.versions = str(self._read()["versions"])

    def seconds(self, token_ids: Sequence[int], new_tokens: int = 0, save: str | None = None) -> float:
        """Time of one request, taken there."""
        assert self._process.stdin is not None
        request = {"token_ids": list(token_ids), "new_tokens": new_tokens, "save": save}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return float(self._read()["seconds"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"ctranslate2_side.py ended with exit status {self._process.wait()}; see above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclasses.dataclass
class Bench:
    """What every section works on.

    Attributes:
        engine: the embedded engine, as `logitscope.open` gives it.
        folder: where its model was loaded from.
        pairs: rounds of each comparison.
        prompts: of the mixed batch, a round.
        other: CTranslate2, or None.
        advance: is told the weight of what ran.
    """

    engine: Any
    folder: str
    pairs: int
    prompts: int
    other: OtherSide | None = None
    advance: Callable[[float], None] = lambda weight: None

    def fit(self, tokens: int) -> int:
        """So many tokens, or as many as the model reads."""
        return min(tokens, self.engine.context_length or tokens)

    def document(self, tokens: int) -> list[int]:
        """Ids of a long English text, exactly so many: the licence, repeated."""
        text = (HERE.parent / "LICENSE").read_text(encoding="utf-8")
        ids = self.engine.tokenizer.encode(text).tolist()
        return list(itertools.islice(itertools.cycle(ids), self.fit(tokens)))

    def rounds(
        self, legs: Sequence[Leg], *, count: int | None = None, warm_up: bool = True
    ) -> dict[str, list[float]]:
        """Interleaved rounds of the legs."""
        return measure.rounds(legs, count or self.pairs, warm_up=warm_up, done=self.advance)

    def weight(self, legs: Sequence[Leg], *, count: int | None = None, warm_up: bool = True) -> float:
        """Expected cost of `rounds`, in tokens."""
        return sum(leg.weight for leg in legs) * ((count or self.pairs) + warm_up)


@dataclasses.dataclass(frozen=True)
class Section:
    """One part of the benchmark: its expected cost in tokens of a forward, and how to run it."""

    weight: float
    run: Callable[[], Table]


def forward(model: Any, token_ids: Sequence[int], **options: Any) -> Any:
    """``model(ids).logits`` by hand, ``[1, L, vocab]``."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([list(token_ids)]), **options).logits


# -- complete logits of one prompt ---------------------------------------------------------------------


def logits_section(bench: Bench) -> Section:
    engine, ids = bench.engine, bench.document(1024)
    legs = [
        Leg("ours", clocked(lambda: engine.logits(ids)), len(ids)),
        Leg("uncached", clocked(lambda: forward(engine.model, ids, use_cache=False)), len(ids)),
        Leg("default", clocked(lambda: forward(engine.model, ids)), len(ids)),
    ]
    if bench.other is not None:
        legs.append(Leg("ctranslate2", lambda: other_seconds(bench, ids), len(ids)))

    def run() -> Table:
        times = bench.rounds(legs)
        rows = [
            measure.ratio_row(
                "Transformers, `use_cache=False`", times["ours"], times["uncached"], Target("≤", 1.03)
            ),
            measure.ratio_row(
                "Transformers, `model(ids)`", times["ours"], times["default"], Target("≤", 1.03)
            ),
        ]
        if bench.other is not None:
            rows.append(
                measure.ratio_row(
                    "CTranslate2, `forward_batch`", times["ours"], times["ctranslate2"], Target("≤", 1.05)
                )
            )
        title = f"Complete float32 logits of 1 × {len(ids):,} tokens"
        return Table(title, ("against", *measure.RATIO_COLUMNS[1:]), rows, agreement(bench))

    return Section(bench.weight(legs), run)


def other_seconds(bench: Bench, ids: Sequence[int], new_tokens: int = 0) -> float:
    assert bench.other is not None
    return bench.other.seconds(ids, new_tokens)


def agreement(bench: Bench) -> str:
    """What was compared is the same: worst differences over the rows of 64 tokens."""
    ids = bench.document(64)
    ours = np.asarray(bench.engine.logits(ids))
    plain = float(np.abs(ours - forward(bench.engine.model, ids, use_cache=False)[0].numpy()).max())
    note = f"Worst difference over 64 rows: {plain:.1e} from Transformers"
    if bench.other is None:
        return f"{note}. CTranslate2 was not measured: no `--ctranslate2 PYTHON` was given."
    with tempfile.TemporaryDirectory() as folder:
        file = str(pathlib.Path(folder, "rows.npy"))
        bench.other.seconds(ids, save=file)
        return f"{note}, {float(np.abs(ours - np.load(file)).max()):.1e} from CTranslate2."


# -- memory --------------------------------------------------------------------------------------------

LONG = 8000


def memory_section(bench: Bench) -> Section:
    from logitscope.engines.transformers.cache import bytes_per_token

    long, short = bench.fit(LONG), bench.fit(1024)
    cache = bytes_per_token(bench.engine.model.config, 4) * long / MB
    cases = [
        ("ours", f"complete logits of {short:,} tokens", short, Target("≤", 150)),
        ("plain", f"the same, Transformers `use_cache=False`: {short:,} tokens", short, None),
        ("summary", f"summaries of {long:,} tokens, one forward", long, Target("≤", 450)),
        (
            "chunked",
            f"summaries of {long:,} tokens, chunks of 1,024 (KV cache {cache:.0f} MB)",
            long,
            Target("≤", round(cache + 150)),
        ),
    ]

    def run() -> Table:
        rows = []
        for name, label, tokens, target in cases:
            rows.append((label, *peak_cells(fresh_peak(bench, name, tokens), target)))
            bench.advance(tokens + LOAD_WEIGHT)
        columns = (
            "measurement",
            "loaded",
            "peak over it",
            "result",
            "beyond the result",
            "target",
            "verdict",
        )
        note = "MB (10⁶ bytes), each in a fresh process, over the loaded model after a warm-up of 16 tokens."
        return Table("Peak memory", columns, rows, note)

    return Section(sum(tokens + LOAD_WEIGHT for _, _, tokens, _ in cases), run)


def peak_cells(found: dict[str, Any], target: Target | None) -> tuple[str, ...]:
    beyond = (found["over"] - found["result"]) / MB
    sizes = tuple(f"{size / MB:.0f}" for size in (found["before"], found["over"], found["result"]))
    if target is None:
        return (*sizes, f"{beyond:.0f}", "compared", "")
    return (*sizes, f"{beyond:.0f}", str(target), "reached" if target.meets(beyond) else "missed")


def fresh_peak(bench: Bench, name: str, tokens: int) -> dict[str, Any]:
    """`peak_of` in a process of its own."""
    command = [sys.executable, str(HERE / "embedded.py"), "--model", bench.folder]
    done = subprocess.run(
        [*command, "--peak", name, str(tokens)], stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def peak_of(name: str, folder: str, tokens: int) -> dict[str, Any]:
    """Peak memory of one case over the loaded model, and the size of its result, in bytes.

    Args:
        name: ``ours``, ``plain``, ``summary`` or ``chunked``.
        folder: of the model.
        tokens: of the prompt.
    """
    run, vocab_size = peak_case(name, folder)
    ids = [i * 7919 % vocab_size for i in range(tokens)]
    run(ids[:16])
    size, peak = measure.peak(lambda: run(ids))
    return {**dataclasses.asdict(peak), "result": size}


def peak_case(name: str, folder: str) -> tuple[Callable[[Sequence[int]], int], int]:
    """What runs, which says the size of its result and keeps nothing; and the vocabulary's size."""
    if name == "plain":
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        return lambda ids: int(forward(model, ids, use_cache=False).nbytes), model.config.vocab_size
    engine = open_engine(folder, **(CHUNKED if name == "chunked" else {}))
    if name == "ours":
        return lambda ids: int(np.asarray(engine.logits(list(ids))).nbytes), engine.vocab_size
    return lambda ids: sum(
        array.nbytes for array in summaries(engine, ids).summary.values()
    ), engine.vocab_size


# -- growth --------------------------------------------------------------------------------------------


def growth_section(bench: Bench) -> Section:
    engine = bench.engine
    chunked = open_engine(engine.model, tokenizer=engine.tokenizer.wrapped, **CHUNKED)
    lengths = sorted({bench.fit(n) for n in (1024, 2048, 4096, LONG)})
    documents = {n: bench.document(n) for n in lengths}
    legs = [
        Leg(f"{name} {n}", clocked(functools.partial(summaries, side, documents[n])), n * (1 + n / 8192))
        for n in lengths
        for name, side in (("whole", engine), ("chunked", chunked))
    ]
    count = max(1, bench.pairs // 5)

    def run() -> Table:
        times = bench.rounds(legs, count=count, warm_up=False)
        per_token = {
            name: 1e3 * statistics.median(taken) / int(name.split()[1]) for name, taken in times.items()
        }
        rows = [
            (
                f"{n:,}",
                *(
                    f"{per_token[f'{name} {n}']:.3f} ({per_token[f'{name} {n}'] / per_token[f'{name} {lengths[0]}']:.2f} ×)"
                    for name in ("whole", "chunked")
                ),
            )
            for n in lengths
        ]
        note = f"Summaries only, milliseconds a token, median of {count} (× the shortest document)."
        return Table("Time as a document grows", ("tokens", "one forward", "chunks of 1,024"), rows, note)

    return Section(bench.weight(legs, count=count, warm_up=False), run)


# -- a mixed batch -------------------------------------------------------------------------------------

MIXED = 64


def batch_section(bench: Bench) -> Section:
    """Each round takes every n-th of the 64 prompts, sorted by length, so that all rounds are alike."""
    engine, model = bench.engine, bench.engine.model
    prompts = sorted(mixed_prompts(bench), key=len)
    parts = MIXED // bench.prompts
    slices = [prompts[first::parts] for first in range(parts)]
    real = sum(map(len, prompts)) // parts
    cells = max(map(len, prompts)) * bench.prompts

    def leg(name: str, run: Callable[[list[list[int]]], Any], weight: float) -> Leg:
        turn = itertools.cycle(slices)  # every leg runs once a round, so all legs get the same prompts
        return Leg(name, lambda: clocked(functools.partial(run, next(turn)))(), weight)

    legs = [
        leg("ours", engine.logits, real),
        leg("padded", functools.partial(padded_forward, model), cells),
        leg("alone", lambda part: [forward(model, ids, use_cache=False) for ids in part], real),
    ]

    def run() -> Table:
        times = bench.rounds(legs, warm_up=False)
        rows = [
            measure.ratio_row(
                "one padded Transformers batch: times faster",
                times["ours"],
                times["padded"],
                Target("≥", 1.5),
                faster=True,
            ),
            measure.ratio_row("one by one, Transformers", times["ours"], times["alone"], Target("≤", 1.0)),
        ]
        shortest, longest = len(prompts[0]), len(prompts[-1])
        note = (
            f"{bench.prompts} prompts a round, of {MIXED} prompts of {shortest} to {longest} tokens ({sum(map(len, prompts)):,}). "
            f"All sides give complete float32 rows and hold them together ({real * row_bytes(bench) / 1e9:.1f} GB; the padded "
            f"batch {cells * row_bytes(bench) / 1e9:.1f} GB); they are freed off the clock. Transformers runs with `use_cache=False`."
        )
        return Table("Prompts of mixed lengths", ("against", *measure.RATIO_COLUMNS[1:]), rows, note)

    return Section(bench.weight(legs, warm_up=False), run)


def mixed_prompts(bench: Bench) -> list[list[int]]:
    """64 stretches of the document, 16 to 512 tokens, uniformly drawn with a fixed seed."""
    random = np.random.default_rng(0)
    lengths = random.integers(16, bench.fit(512) + 1, MIXED)
    document = bench.document(1024) * 2
    return [
        document[start : start + n] for start, n in zip(random.integers(0, 512, MIXED), lengths, strict=True)
    ]


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


def row_bytes(bench: Bench) -> int:
    return 4 * int(bench.engine.vocab_size)


# -- generation ----------------------------------------------------------------------------------------

NEW_TOKENS = 64
TOGETHER = 8


def generation_section(bench: Bench) -> Section:
    engine, model = bench.engine, bench.engine.model
    document = bench.document(32 * TOGETHER)
    prompts = [document[32 * i :][:32] or document[:32] for i in range(TOGETHER)]

    def ours(inputs: Any) -> Any:
        return engine.generate(inputs, max_new_tokens=NEW_TOKENS, return_logits=True, ignore_eos=True)

    legs = [
        Leg("ours", clocked(lambda: ours(prompts[0])), NEW_TOKENS * STEP_WEIGHT["ours"]),
        Leg(
            "transformers",
            clocked(lambda: generated(model, prompts[0])),
            NEW_TOKENS * STEP_WEIGHT["transformers"],
        ),
        Leg("eight", clocked(lambda: ours(prompts)), NEW_TOKENS * STEP_WEIGHT["eight"]),
    ]
    if bench.other is not None:
        weight = NEW_TOKENS * STEP_WEIGHT["ctranslate2"]
        legs.append(Leg("ctranslate2", lambda: other_seconds(bench, prompts[0], NEW_TOKENS), weight))

    def run() -> Table:
        times = bench.rounds(legs)
        rows = [
            measure.ratio_row(
                "Transformers, `generate(output_logits=True)`",
                times["ours"],
                times["transformers"],
                Target("≤", 1.03),
            ),
            measure.ratio_row(
                f"{TOGETHER} prompts at once against one: times the tokens per second",
                times["eight"],
                times["ours"],
                Target("≥", 3),
                faster=True,
                scale=TOGETHER,
            ),
        ]
        if bench.other is not None:
            rows.append(
                measure.ratio_row(
                    "CTranslate2, `generate_batch(return_logits_vocab=True)`",
                    times["ours"],
                    times["ctranslate2"],
                    None,
                )
            )
        same = (
            generated(model, prompts[0]).sequences[0, -NEW_TOKENS:].tolist()
            == ours(prompts[0]).token_ids.tolist()
        )
        note = (
            f"Greedy, {len(prompts[0])} prompt tokens. Ours also gives the prompt's rows, the others only the generated ones. "
            f"Ours and Transformers chose {'the same' if same else 'different'} tokens."
        )
        return Table(
            f"Generation of {NEW_TOKENS} tokens with their logits",
            ("against", *measure.RATIO_COLUMNS[1:]),
            rows,
            note,
        )

    return Section(bench.weight(legs), run)


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

IMPORTS = {
    "`import logitscope`": "import logitscope",
    "`from logitscope import Logits, Request, Select`": "from logitscope import Logits, Request, Select",
}
FRESH = 11


def import_section(bench: Bench) -> Section:
    count = min(FRESH, bench.pairs)

    def run() -> Table:
        rows = []
        for label, code in IMPORTS.items():
            found = [fresh_import(code) for _ in range(count)]
            bench.advance(count * 100.0)
            seconds, torch = [s for s, _ in found], any(loaded for _, loaded in found)
            target = Target("≤", 0.3)
            reached = target.meets(statistics.median(seconds)) and not torch
            rows.append(
                (
                    label,
                    f"{min(seconds):.3f} s",
                    f"{statistics.median(seconds):.3f} s",
                    "imported" if torch else "not imported",
                    str(target),
                    "reached" if reached else "missed",
                )
            )
        columns = ("code", "fastest", "median", "torch", "target", "verdict")
        return Table("Import", columns, rows, f"{count} fresh processes each, interpreter start not counted.")

    return Section(count * 100.0 * len(IMPORTS), run)


def fresh_import(code: str) -> tuple[float, bool]:
    """Seconds of an import in a fresh process, and whether it brought PyTorch along."""
    program = f"import sys, time; t = time.perf_counter(); {code}; print(time.perf_counter() - t, 'torch' in sys.modules)"
    seconds, torch = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.split()
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
    """The embedded engine without its memory limit, which is not what is measured."""
    import logitscope

    return logitscope.open(model, memory_limit_bytes=UNLIMITED_BYTES, **options)


def summaries(engine: Any, ids: Sequence[int]) -> Any:
    """Only the summaries of a document's rows; no values."""
    from logitscope import Select

    return engine.logits(list(ids), select=Select(vocab=None), summary=True)


def run(bench: Bench, names: Sequence[str]) -> list[Table]:
    """The tables of the named sections, with the machine's last."""
    sections = [SECTIONS[name](bench) for name in names]
    weight = sum(section.weight for section in sections)
    per_token = seconds_per_token(bench)
    print(f"about {weight * per_token / 60:.0f} minutes", file=sys.stderr)
    facts = measure.machine(
        model=repr(bench.engine), other=bench.other.versions if bench.other else "no CTranslate2"
    )
    tables = []
    with measure.progress(weight) as advance:
        bench.advance = advance
        for section in sections:
            tables.append(section.run())
    return [*tables, measure.machine_table(facts)]


def seconds_per_token(bench: Bench) -> float:
    """Of complete logits of a short prompt, for the estimate."""
    ids = bench.document(256)
    leg = clocked(lambda: bench.engine.logits(ids))
    return min(leg() for _ in range(2)) / len(ids)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="name or folder (the bundled model)")
    parser.add_argument(
        "--pairs", type=int, default=measure.MIN_PAIRS, help="rounds of each comparison (%(default)s)"
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
        help="of the 64 mixed prompts, in one round (%(default)s; 64 takes four times as long)",
    )
    parser.add_argument("--ctranslate2", metavar="PYTHON", help="interpreter that has CTranslate2")
    parser.add_argument("--markdown", action="store_true", help="print the tables of docs/benchmarks.md")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)  # this program's own fresh processes
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(given)
    if options.peak:
        name, tokens = options.peak
        print(json.dumps(peak_of(name, options.model, int(tokens))))
        return
    import torch

    engine = open_engine(options.model)
    folder = str(engine.model.config._name_or_path)
    other = None
    if options.ctranslate2:
        other = OtherSide(options.ctranslate2, folder, torch.get_num_threads())
    try:
        tables = run(Bench(engine, folder, options.pairs, options.prompts, other), options.only)
    finally:
        if other is not None:
            other.close()
    for table in tables:
        print(table.markdown()) if options.markdown else measure.show(table)


if __name__ == "__main__":
    main()
