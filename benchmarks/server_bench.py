"""`logitscope serve` and its client: against a plain TCP socket, against the same engine in one process.

    python benchmarks/server_bench.py --markdown           # everything; what goes into docs/benchmarks.md
    python benchmarks/server_bench.py --only transport end_to_end

Server and client are two processes on this machine. Prints ratios, by the rule in `_measure`. Run it on a
machine that does nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
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
    ratio_row,
    rounds,
    show,
)

import logitscope as ls
from logitscope.wire.results import logits_from_json

HERE = pathlib.Path(__file__).resolve().parent
ROWS, VOCAB = 1024, 49_152
JSON_ROWS = 16
CLIENTS, TEXTS, TEXT_TOKENS = 32, 20, 64
SHORT_TOKENS, SHORTS, LONG_NEW_TOKENS = 32, 20, 512
FLAT_CALLS, FLAT_ABORTS, FLAT_EVERY = 2000, 5, 50
PIECE_BYTES = 1 << 20
WARM_UP_S = 0.5


@contextlib.contextmanager
def process(*command: str) -> Iterator[Any]:
    """A Python process that ends when its input is closed, and the JSON line that it says first."""
    with subprocess.Popen(
        [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as started:
        assert started.stdin is not None
        assert started.stdout is not None
        try:
            yield json.loads(started.stdout.readline()) | {"pid": started.pid}
        finally:
            started.stdin.close()


@contextlib.contextmanager
def served(model: str) -> Iterator[Any]:
    """A server of a model that reads every prompt anew."""
    with process(str(HERE / "_serving.py"), model) as found:
        yield found


def tokens(random: np.random.Generator, engine: Any, count: int) -> list[int]:
    """A prompt that was not asked before."""
    found: list[int] = random.integers(4, engine.vocab_size, count).tolist()
    return found


# -- ready rows ----------------------------------------------------------------------------------------


def transport(model: str, pairs: int) -> list[Table]:
    """Ready rows into an array: over HTTP, shared memory, JSON, and the same bytes over a plain socket."""
    with process(str(HERE / "_ready.py"), str(ROWS), str(VOCAB)) as found, contextlib.ExitStack() as stack:
        over_http = stack.enter_context(ls.open(found["address"], shared_memory=False))
        over_memory = stack.enter_context(ls.open(found["address"], shared_memory=True))
        plain = stack.enter_context(socket.create_connection(("127.0.0.1", found["port"])))
        room = memoryview(np.zeros(ROWS * VOCAB * 4, np.uint8))

        def copied() -> None:
            plain.sendall(b"x")
            done = 0
            while done < len(room):
                done += plain.recv_into(room[done : done + PIECE_BYTES])

        def rows(engine: Any) -> Callable[[], Any]:
            return lambda: engine.logits([1] * ROWS).values

        def as_json(form: str) -> Any:
            body = {"input_ids": [1] * JSON_ROWS, "encoding_format": form}
            request = urllib.request.Request(
                found["address"] + "/logits", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request) as answer:
                return logits_from_json(json.loads(answer.read())["logits"]).values

        legs = {
            "TCP": copied,
            "HTTP": rows(over_http),
            "shared memory": rows(over_memory),
            "base64 in JSON": lambda: as_json("base64"),
            "numbers in JSON": lambda: as_json("float"),
        }
        times = rounds([Leg(name, clocked(run)) for name, run in legs.items()], pairs)
    size = ROWS * VOCAB * 4
    bytes_of = {name: size * (JSON_ROWS / ROWS if "JSON" in name else 1) for name in legs}
    targets = {"HTTP": Target("≥", 0.7), "shared memory": Target("≥", 2)}
    compared = [
        ratio_row(
            f"{name}: throughput / that of a plain TCP socket",
            times[name],
            times["TCP"],
            targets.get(name),
            faster=True,
            scale=bytes_of[name] / size,
        )
        for name in legs
        if name != "TCP"
    ]
    speeds = [
        (name, f"{bytes_of[name] / 1e6:.1f} MB", f"{bytes_of[name] / statistics.median(taken) / 1e9:.3g}")
        for name, taken in times.items()
    ]
    title = f"{ROWS:,} × {VOCAB:,} ready float32 rows, from one process into an array of another"
    note = "The socket copies into memory that is there already; ours ends in a new, checked `Logits`."
    return [
        Table(title, RATIO_COLUMNS, compared, note),
        Table("The same in GB/s", ("way", "of values", "GB/s"), speeds),
    ]


# -- a real model --------------------------------------------------------------------------------------


def end_to_end(model: str, pairs: int) -> list[Table]:
    """Complete logits of a prompt, from a server and in this process."""
    random = np.random.default_rng(0)
    local = ls.open(model, prefix_cache_bytes=0)

    def run(engine: Any) -> Callable[[], Any]:
        return lambda: engine.logits(tokens(random, local, ROWS))

    with served(model) as found, contextlib.ExitStack() as stack:
        over_http = stack.enter_context(ls.open(found["address"], shared_memory=False))
        over_memory = stack.enter_context(ls.open(found["address"], shared_memory=True))
        engines = {"in process": local, "HTTP": over_http, "shared memory": over_memory}
        times = rounds([Leg(name, clocked(run(engine))) for name, engine in engines.items()], pairs)
        early = []
        for _ in range(3):
            begun = time.perf_counter()
            stream = over_http.stream(over_http.requests([tokens(random, local, 4 * ROWS)]))
            next(stream)
            first = time.perf_counter() - begun
            for _ in stream:
                pass
            early.append(first / (time.perf_counter() - begun))
    rows = [
        ratio_row(
            f"{ROWS:,} tokens, complete logits over {name} / in this process",
            times[name],
            times["in process"],
            Target("≤", limit),
        )
        for name, limit in (("HTTP", 1.10), ("shared memory", 1.03))
    ]
    note = (
        f"Of {4 * ROWS:,} tokens, the first rows are with the client after "
        f"{100 * statistics.median(early):.0f} % of the time that all take."
    )
    return [Table("End to end", RATIO_COLUMNS, rows, note)]


def clients(model: str, pairs: int) -> list[Table]:
    """Many clients that ask for summaries of short texts, and one offline call over the same texts."""
    random = np.random.default_rng(1)
    local = ls.open(model, prefix_cache_bytes=0)
    texts = [[tokens(random, local, TEXT_TOKENS) for _ in range(TEXTS)] for _ in range(CLIENTS)]
    kept = {"select": ls.Select(vocab=None), "summary": True}
    waits: list[float] = []
    errors: list[BaseException] = []
    with served(model) as found, contextlib.ExitStack() as stack:
        engines = [stack.enter_context(ls.open(found["address"])) for _ in range(CLIENTS)]

        def ask(engine: Any, own: Sequence[Any]) -> None:
            for text in own:
                begun = time.perf_counter()
                try:
                    engine.logits(text, **kept)
                except BaseException as error:  # noqa: BLE001 - counted
                    errors.append(error)
                waits.append(time.perf_counter() - begun)

        def together() -> None:
            threads = [threading.Thread(target=ask, args=each) for each in zip(engines, texts, strict=True)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        def offline() -> Any:
            return local.logits([text for own in texts for text in own], **kept)

        times = rounds([Leg("clients", clocked(together)), Leg("offline", clocked(offline))], pairs)
    row = ratio_row(
        f"{CLIENTS} clients, {TEXTS} texts of {TEXT_TOKENS} tokens each, one after another: throughput / "
        "that of one offline call",
        times["clients"],
        times["offline"],
        Target("≥", 0.85),
        faster=True,
    )
    p50, p99 = np.percentile(waits, [50, 99])
    note = f"Latency of a request: median {p50:.2f} s, p99 {p99:.2f} s. Errors: {len(errors)}."
    return [Table("Many clients", RATIO_COLUMNS, [row], note)]


def waiting(model: str, pairs: int) -> list[Table]:
    """Short texts while a long generation runs, and without it."""
    random = np.random.default_rng(2)
    alone, beside = [], []
    with served(model) as found, ls.open(found["address"]) as engine, ls.open(found["address"]) as other:

        def shorts() -> list[float]:
            taken = []
            for _ in range(SHORTS):
                ids = tokens(random, engine, SHORT_TOKENS)
                begun = time.perf_counter()
                engine.logits(ids, select=ls.Select(vocab=None), summary=True)
                taken.append(time.perf_counter() - begun)
            return taken

        shorts()
        for _ in range(min(pairs, 5)):
            alone.append(float(np.percentile(shorts(), 99)))
            prompt = tokens(random, engine, 16)
            long = threading.Thread(
                target=lambda prompt=prompt: other.generate(
                    prompt, max_new_tokens=LONG_NEW_TOKENS, ignore_eos=True
                )
            )
            long.start()
            time.sleep(WARM_UP_S)
            taken = shorts()
            assert long.is_alive(), "the generation ended before the texts"
            beside.append(float(np.percentile(taken, 99)))
            long.join()
    row = ratio_row(
        f"p99 of {SHORTS} texts of {SHORT_TOKENS} tokens beside a generation of {LONG_NEW_TOKENS} / alone",
        beside,
        alone,
        Target("≤", 3),
    )
    return [Table("Short texts beside a long generation", RATIO_COLUMNS, [row])]


def memory(model: str, pairs: int) -> list[Table]:
    """Memory of the server over many calls, of which one in five is left in the middle."""
    import psutil

    random = np.random.default_rng(3)
    seen: list[tuple[int, float]] = []
    with served(model) as found, ls.open(found["address"], shared_memory=False) as engine:
        server = psutil.Process(found["pid"])
        for number in range(FLAT_CALLS):
            ids = tokens(random, engine, int(random.integers(4, 24)))
            if number % FLAT_ABORTS == 0:
                stream = engine.stream(engine.requests([ids * 6]))
                next(stream)
                stream.close()
            else:
                engine.logits(ids)
            if number % FLAT_EVERY == 0:
                seen.append((number, server.memory_info().rss / 1e6))
    later = [(number, size) for number, size in seen if number >= FLAT_CALLS // 4]
    slope = np.polyfit([n for n, _ in later], [size for _, size in later], 1)[0] * 1000
    rows = [
        (
            f"{FLAT_CALLS:,} calls, one in {FLAT_ABORTS} left in the middle",
            f"{later[0][1]:.0f} MB",
            f"{later[-1][1]:.0f} MB",
            f"{slope:+.1f} MB",
        )
    ]
    columns = ("", f"after {later[0][0]} calls", f"after {later[-1][0]} calls", "slope in 1,000 calls")
    return [Table("Memory of the server", columns, rows)]


PARTS = {
    "transport": transport,
    "end_to_end": end_to_end,
    "clients": clients,
    "waiting": waiting,
    "memory": memory,
}


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--pairs", type=int, default=MIN_PAIRS)
    parser.add_argument("--markdown", action="store_true", help="print what goes into docs/benchmarks.md")
    options = parser.parse_args(given)
    for name in options.only:
        for table in PARTS[name](options.model, options.pairs):
            show(table, markdown=options.markdown)
    show(machine_table(machine()), markdown=options.markdown)


if __name__ == "__main__":
    main()
