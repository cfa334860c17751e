"""The conformance suite that every engine must pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from logitscope.testing.case import ENGINE_PROPERTY, MEASURED_PROPERTY, EngineCase
from logitscope.testing.suite_generation import FinishSuite, SampleSuite, StageSuite
from logitscope.testing.suite_rows import ExtrasSuite, RowsSuite, SelectionSuite
from logitscope.testing.suite_service import InputSuite, StreamSuite


class _Reported:
    @pytest.fixture(autouse=True)
    def _report(self, case: EngineCase, record_property: Callable[[str, object], None]) -> Iterator[None]:
        record_property(ENGINE_PROPERTY, case.name)
        yield
        for what, value in case.measured.items():
            record_property(MEASURED_PROPERTY, (what, value))


class OracleSuite(_Reported, RowsSuite):
    """The part of :class:`EngineSuite` that compares rows with the oracle, for many models of one engine."""


class EngineSuite(
    _Reported,
    RowsSuite,
    SelectionSuite,
    ExtrasSuite,
    FinishSuite,
    StageSuite,
    SampleSuite,
    InputSuite,
    StreamSuite,
):
    """Every check. A subclass gives a fixture ``case``, an :class:`EngineCase`, of class scope or wider.

    ``logitscope.testing.plugin`` prints the number of checks per case, what they measured and what was
    skipped, and fails the run when a case was selected and none of its checks ran.

    Example:
        .. code-block:: python

            class TestMyEngine(EngineSuite):
                @pytest.fixture(scope="class")
                @classmethod
                def case(cls):
                    model = tiny_model("llama")
                    engine = MyEngine.open(model, tokenizer=tiny_tokenizer())
                    return EngineCase(engine, oracle=Oracle(model), name="mine", eos_token_id=2)
    """
