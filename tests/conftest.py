"""What every test runs under: fixed randomness, no network, and a count of tests per file at the end."""

from __future__ import annotations

import collections
import os
import pathlib
import signal

import pytest
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: a test never asks the hub
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

pytest_plugins = ["logitscope.testing.plugin"]

# A shell's background jobs ignore Ctrl-C, and so would the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many tests of each file passed, failed and were skipped."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            counts[pathlib.PurePath(report.nodeid.split("::")[0]).as_posix()][outcome] += 1
    if not counts:
        return
    terminalreporter.section("tests by file")
    width = max(map(len, counts))
    for file, found in sorted(counts.items()):
        parts = ", ".join(f"{found[outcome]} {outcome}" for outcome in found)
        terminalreporter.write_line(f"{file:<{width}}  {parts}")
