"""pytest plugin: how many checks of the conformance suite ran on each engine.

Put ``pytest_plugins = ["logitscope.testing.plugin"]`` in the top ``conftest.py``. A class of checks that was
selected and of which none ran fails the run: an engine that was not tested must not look tested.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

import pytest

pytest.register_assert_rewrite(
    "logitscope.testing.asserts",
    "logitscope.testing.case",
    "logitscope.testing.suite_generation",
    "logitscope.testing.suite_rows",
    "logitscope.testing.suite_service",
)


@dataclasses.dataclass
class _Tally:
    """What became of one case's checks."""

    passed: int = 0
    failed: int = 0
    skipped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    measured: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def ran(self) -> int:
        """Checks that came to a result."""
        return self.passed + self.failed


class SuiteReport:
    """Counts the suite's checks while pytest runs them."""

    def __init__(self) -> None:
        self.classes: dict[str, str] = {}
        self.ran: set[str] = set()
        self.tallies: dict[str, _Tally] = collections.defaultdict(_Tally)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note which tests are checks of the suite."""
        from logitscope.testing.suite import EngineSuite, OracleSuite

        for item in session.items:
            found = getattr(item, "cls", None)
            if found is not None and issubclass(found, EngineSuite | OracleSuite):
                self.classes[item.nodeid] = found.__name__

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count one check."""
        if report.nodeid not in self.classes:
            return
        from logitscope.testing.case import ENGINE_PROPERTY

        properties = dict(report.user_properties)
        name = str(properties.get(ENGINE_PROPERTY, self.classes[report.nodeid]))
        tally = self.tallies[name]
        if report.when == "call" and not report.skipped:
            self.ran.add(self.classes[report.nodeid])
            tally.passed += report.passed
            tally.failed += report.failed
        elif report.skipped:
            tally.skipped[_reason(report)] += 1
        elif report.failed:
            tally.failed += 1
        if report.when == "teardown":
            self._measure(tally, report.user_properties)

    def _measure(self, tally: _Tally, properties: Iterable[tuple[str, object]]) -> None:
        from logitscope.testing.case import MEASURED_PROPERTY

        for key, value in properties:
            if key == MEASURED_PROPERTY and isinstance(value, tuple):
                what, number = value
                tally.measured[what] = max(number, tally.measured.get(what, number))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the run when an engine was selected and not checked."""
        if (
            self.unchecked
            and session.exitstatus == pytest.ExitCode.OK
            and not session.config.option.collectonly
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @property
    def unchecked(self) -> list[str]:
        """Classes of which checks were selected and none ran."""
        return sorted(set(self.classes.values()) - self.ran)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print a line per engine, then what was measured and skipped."""
        if not self.tallies:
            return
        terminalreporter.section("EngineSuite")
        for name, tally in sorted(self.tallies.items()):
            failed = f", {tally.failed} failed" if tally.failed else ""
            skipped = f", {tally.skipped.total()} skipped" if tally.skipped else ""
            terminalreporter.write_line(f"EngineSuite: {tally.ran} checks on {name}{failed}{skipped}")
            for reason, count in sorted(tally.skipped.items()):
                terminalreporter.write_line(f"    skipped {count}: {reason}")
            for what, value in sorted(tally.measured.items()):
                terminalreporter.write_line(f"    {what}: {value:.3g}")
        for name in self.unchecked:
            terminalreporter.write_line(
                f"EngineSuite: {name} was selected, and none of its checks ran", red=True
            )


def _reason(report: pytest.TestReport) -> str:
    found = report.longrepr
    return str(found[2]).removeprefix("Skipped: ") if isinstance(found, tuple) else str(found)


def pytest_configure(config: pytest.Config) -> None:
    """Register the report."""
    config.pluginmanager.register(SuiteReport(), "logitscope-engine-suite")
