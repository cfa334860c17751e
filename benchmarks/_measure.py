"""What the benchmarks share: interleaved rounds, paired ratios with their interval, tables, the machine.

The rule for every figure: at least 15 interleaved pairs, the median of the paired ratios with its 95 %
interval, and "reached" if the interval's lower end meets the target. A figure whose whole interval meets it
is marked so, because for a "≤" target the lower end is the lenient one.
"""

from __future__ import annotations

import dataclasses
import datetime
import gc
import math
import os
import pathlib
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

MIN_PAIRS = 15
SETTLE_S = 0.2
"""Pause before a leg, so that the threads of the one before stop spinning."""


# -- interleaved timing --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Leg:
    """One side of a comparison.

    Attributes:
        name: what it is called in `rounds`' result.
        seconds: runs it once and says how long it took; see `clocked`.
        cost: expected, in any unit that all legs share.
    """

    name: str
    seconds: Callable[[], float]
    cost: float = 1.0


def clocked(run: Callable[[], Any], *, finish: Callable[[], None] | None = None) -> Callable[[], float]:
    """A leg's ``seconds``: the clock stops when the result is there; it is freed off the clock.

    Args:
        run: makes the result.
        finish: waits until an asynchronous device is done; it is on the clock.
    """

    def seconds() -> float:
        begun = time.perf_counter()
        result = run()
        if finish is not None:
            finish()
        taken = time.perf_counter() - begun
        del result
        return taken

    return seconds


def rounds(
    legs: Sequence[Leg],
    count: int,
    *,
    warm_up: bool = True,
    done: Callable[[float], None] | None = None,
    deadline: float = math.inf,
    settle_s: float = SETTLE_S,
) -> dict[str, list[float]]:
    """Seconds of every leg in ``count`` rounds, interleaved: A B C, C B A, A B C, …

    Args:
        legs: run once a round each.
        count: rounds.
        warm_up: run each leg once before, off the record.
        done: called with a leg's cost whenever it ran.
        deadline: no further round begins after this ``time.monotonic()``.
        settle_s: pause before each leg.
    """
    taken: dict[str, list[float]] = {leg.name: [] for leg in legs}
    for number in range(-1 if warm_up else 0, count):
        if number > 0 and time.monotonic() > deadline:
            break
        for leg in legs if number % 2 == 0 else legs[::-1]:
            gc.collect()
            time.sleep(settle_s)
            seconds = leg.seconds()
            if number >= 0:
                taken[leg.name].append(seconds)
            if done is not None:
                done(leg.cost)
    return taken


# -- ratios and verdicts -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Interval:
    """Median of paired ratios, with the ends of an interval that covers it with 95 % or more."""

    median: float
    low: float
    high: float
    pairs: int


def interval(ratios: Sequence[float]) -> Interval:
    """Median and its order-statistics interval: no assumption about the distribution.

    The interval runs from the k-th smallest to the k-th largest ratio, with the largest k that keeps 95 %.
    Under 6 pairs no such k exists: then it is the whole range.

    Example:
        >>> interval([1.0, 5.0, 2.0, 4.0, 3.0, 6.0])
        Interval(median=3.5, low=1.0, high=6.0, pairs=6)
    """
    ordered, n = sorted(ratios), len(ratios)
    k, outside = 0, 0.5**n
    while outside <= 0.025:
        k += 1
        outside += math.comb(n, k) * 0.5**n
    k = max(k, 1)
    return Interval(statistics.median(ordered), ordered[k - 1], ordered[n - k], n)


@dataclasses.dataclass(frozen=True)
class Target:
    """What a figure is to meet."""

    sense: Literal["≤", "≥"]
    value: float

    def meets(self, figure: float) -> bool:
        """Whether a single figure is on the right side."""
        return figure <= self.value if self.sense == "≤" else figure >= self.value

    def verdict(self, found: Interval) -> str:
        """By the rule at the top of this module; none under 15 pairs."""
        if found.pairs < MIN_PAIRS:
            return f"no verdict under {MIN_PAIRS} pairs"
        if not self.meets(found.low):
            return "missed"
        return "reached, whole interval" if self.meets(found.high) else "reached, not the whole interval"

    def __str__(self) -> str:
        return f"{self.sense} {self.value:g}"


# -- tables --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of texts; ``note`` says how it was measured."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""

    def markdown(self) -> str:
        """The table as Markdown, with its title as a heading."""
        lines = [f"### {self.title}", "", *([self.note, ""] if self.note else [])]
        lines += [
            " | ".join(["", *cells, ""]).strip() for cells in (self.columns, ["---"] * len(self.columns))
        ]
        lines += [" | ".join(["", *row, ""]).strip() for row in self.rows]
        return "\n".join([*lines, ""])


RATIO_COLUMNS = ("measurement", "ours", "other", "ratio", "95 % interval", "pairs", "target", "verdict")


def ratio_row(
    name: str,
    ours: Sequence[float],
    other: Sequence[float],
    target: Target | None,
    *,
    faster: bool = False,
    scale: float = 1.0,
) -> tuple[str, ...]:
    """A row of `RATIO_COLUMNS`; times in seconds.

    Args:
        faster: the ratio says how many times faster ours is, not how much longer it takes.
        scale: multiplies the ratio (of work, where ours does another amount).
    """
    pairs = zip(other, ours, strict=True) if faster else zip(ours, other, strict=True)
    found = interval([scale * a / b for a, b in pairs])
    return (
        name,
        f"{statistics.median(ours):.3g} s",
        f"{statistics.median(other):.3g} s",
        f"{found.median:.3f}",
        f"{found.low:.3f} … {found.high:.3f}",
        str(found.pairs),
        "reported" if target is None else str(target),
        "" if target is None else target.verdict(found),
    )


# -- the machine ---------------------------------------------------------------------------------------


def machine(**more: str) -> dict[str, str]:
    """What the figures depend on: processor, memory, versions, load, date."""
    import psutil
    import torch

    mkl = re.search(r"Math Kernel Library Version (\S+)", torch.__config__.show())
    facts = {
        "processor": f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "kernels": f"{torch.backends.cpu.get_cpu_capability()}, MKL {mkl[1] if mkl else 'none'}",
        "memory": f"{psutil.virtual_memory().total / 1e9:.0f} GB",
        "load at the start": f"{psutil.getloadavg()[0]:.1f} (last minute; other programs disturb)",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "versions": ", ".join(
            f"{name} {_version(name)}" for name in ("logitscope", "torch", "transformers", "numpy")
        ),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    return {**facts, **more}


def machine_table(facts: Mapping[str, str]) -> Table:
    """The machine as a table."""
    return Table("Machine", ("", ""), list(facts.items()))


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*: (.+)$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        import importlib

        return str(importlib.import_module(package).__version__)


# -- on the terminal -----------------------------------------------------------------------------------


def show(table: Table, *, markdown: bool = False) -> None:
    """Print a table for people, which needs Rich, or as Markdown."""
    if markdown:
        print(table.markdown())
        return
    from rich.console import Console
    from rich.table import Table as RichTable

    shown = RichTable(*table.columns, title=table.title, caption=table.note, title_justify="left")
    for row in table.rows:
        shown.add_row(*row)
    Console().print(shown)


@contextmanager
def progress(seconds: float) -> Iterator[Callable[[float], None]]:
    """A bar on stderr that is advanced by expected seconds; needs Rich."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("measuring"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=seconds)
        yield lambda advance: bar.advance(task, advance)
