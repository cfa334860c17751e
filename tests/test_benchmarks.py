"""The benchmarks run, on tiny models with one pair, and their arithmetic is right."""

from __future__ import annotations

import importlib
import json
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    """Scripts import their neighbours, as they do when Python starts them."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`_measure`, without the pauses and collections that only a quiet clock needs."""
    module = importlib.import_module("_measure")
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(module.gc, "collect", lambda: 0)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    from logitscope.testing import save_tiny

    return str(save_tiny(tmp_path_factory.mktemp("model")))


@pytest.fixture
def embedded(measure: Any) -> Any:
    return importlib.import_module("embedded")


# -- arithmetic ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pairs", "k"), [(6, 1), (8, 1), (9, 2), (15, 4), (25, 8), (31, 10)])
def test_interval_is_the_narrowest_between_order_statistics_that_covers_95_percent(
    measure: Any, pairs: int, k: int
) -> None:
    ratios = np.random.default_rng(pairs).permutation(np.arange(1.0, pairs + 1)).tolist()
    found = measure.interval(ratios)
    assert (found.low, found.high, found.pairs) == (k, pairs + 1 - k, pairs)
    assert found.median == statistics.median(ratios)
    assert covered(pairs, k) >= 0.95 > covered(pairs, k + 1)


def covered(n: int, k: int) -> float:
    """Probability that the median lies between the k-th smallest and the k-th largest of n values."""
    return sum(math.comb(n, i) for i in range(k, n - k + 1)) / 2.0**n


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=40))
def test_interval_holds_its_median(ratios: list[float]) -> None:
    found = importlib.import_module("_measure").interval(ratios)
    assert min(ratios) <= found.low <= found.median <= found.high <= max(ratios)


@pytest.mark.parametrize(
    ("sense", "low", "high", "verdict"),
    [
        ("≤", 0.9, 1.0, "reached, whole interval"),
        ("≤", 1.0, 1.1, "reached, not the whole interval"),
        ("≤", 1.1, 1.2, "missed"),
        ("≥", 1.1, 1.2, "reached, whole interval"),
        ("≥", 1.0, 1.2, "missed"),
    ],
)
def test_reached_when_the_lower_end_meets_the_target(
    measure: Any, sense: str, low: float, high: float, verdict: str
) -> None:
    target = measure.Target(sense, 1.05)
    assert target.verdict(measure.Interval((low + high) / 2, low, high, 15)) == verdict
    assert target.verdict(measure.Interval((low + high) / 2, low, high, 14)) == "no verdict under 15 pairs"


def test_ratios_are_paired_and_scaled(measure: Any) -> None:
    ours, other = [1.0, 2.0, 4.0], [2.0, 4.0, 2.0]
    slower = measure.ratio_row("a", ours, other, measure.Target("≤", 1.0))
    assert slower[:6] == ("a", "2 s", "2 s", "0.500", "0.500 … 2.000", "3")
    faster = measure.ratio_row("b", ours, other, None, faster=True, scale=8)
    assert faster[3:] == ("16.000", "4.000 … 16.000", "3", "reported", "")


def test_rounds_interleave_in_alternating_order(measure: Any) -> None:
    ran: list[str] = []
    costs: list[float] = []

    def leg(name: str, taken: float) -> Any:
        def seconds() -> float:
            ran.append(name)
            return taken

        return measure.Leg(name, seconds, cost=taken)

    times = measure.rounds([leg("a", 1.0), leg("b", 2.0), leg("c", 3.0)], 3, done=costs.append)
    assert "".join(ran) == "cba" + "abc" + "cba" + "abc"
    assert times == {"a": [1.0] * 3, "b": [2.0] * 3, "c": [3.0] * 3}
    assert sum(costs) == 4 * 6.0


def test_rounds_stop_at_the_deadline_after_one(measure: Any) -> None:
    leg = measure.Leg("a", lambda: 1.0)
    assert measure.rounds([leg], 9, warm_up=False, deadline=time.monotonic() - 1) == {"a": [1.0]}


def test_results_are_freed_off_the_clock(measure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Result:
        def __del__(self) -> None:
            events.append("freed")

    def clock() -> float:
        events.append("clock")
        return float(len(events))

    monkeypatch.setattr(measure.time, "perf_counter", clock)
    seconds = measure.clocked(Result, finish=lambda: events.append("finished"))()
    assert events == ["clock", "finished", "clock", "freed"]
    assert seconds == 2.0


def test_tables_are_markdown(measure: Any) -> None:
    table = measure.Table("T", ("a", "b"), [("1", "2")], "Note.")
    assert table.markdown() == "### T\n\nNote.\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n"


# -- memory --------------------------------------------------------------------------------------------


def allocate() -> int:
    array = np.ones(64 * 2**20, np.uint8)
    time.sleep(0.05)
    return array.nbytes


def test_peak_sees_memory_that_is_gone_afterwards() -> None:
    found = importlib.import_module("_peak").peak(allocate)
    assert found.result == 64 * 2**20
    assert found.result * 0.95 <= found.over <= found.result * 1.5


def test_peak_is_sampled_where_the_kernel_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = importlib.import_module("_peak")
    monkeypatch.setattr(peak, "_status_bytes", lambda name: None)
    found = peak.peak(allocate)
    assert found.how == "sampled every 2 ms"
    assert found.result * 0.95 <= found.over <= found.result * 1.5


@pytest.mark.parametrize("case", ["logits", "transformers", "summary", "chunked"])
def test_peak_cases_run_and_say_the_size_of_their_result(case: str, folder: str) -> None:
    found = importlib.import_module("_peak").peak_of(case, folder, 150)
    row = 4 * 1001 if case in ("logits", "transformers") else 9 * 4
    assert found.result == 150 * row


def test_a_fresh_process_measures_memory(embedded: Any, folder: str) -> None:
    found = embedded.fresh_peak(folder, "summary", 20)
    assert found["result"] == 20 * 9 * 4
    assert found["loaded"] > 50e6  # PyTorch alone is more


def test_memory_verdicts_leave_out_the_result(embedded: Any) -> None:
    found = {"loaded": 9e8, "over": 350e6, "result": 201e6, "how": ""}
    assert embedded.peak_cells(found, embedded.Target("≤", 150)) == (
        "900",
        "350",
        "201",
        "149",
        "≤ 150",
        "reached",
    )
    assert embedded.peak_cells(found, embedded.Target("≤", 148))[-1] == "missed"


# -- the programs --------------------------------------------------------------------------------------


def test_embedded_benchmark_runs_on_a_tiny_model(
    embedded: Any, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = ["logits", "growth", "batch", "generation", "import"]
    embedded.main(["--model", folder, "--pairs", "1", "--markdown", "--only", *sections])
    printed = capsys.readouterr()
    titles = [line.removeprefix("### ") for line in printed.out.splitlines() if line.startswith("###")]
    assert titles == [
        "Complete float32 logits of 1 × 160 tokens",
        "Time as a document grows",
        "Prompts of mixed lengths",
        "Generation of 64 tokens with their complete logits",
        "Import",
        "Machine",
    ]
    assert printed.out.count("no verdict under 15 pairs") == 6
    assert "Ours and Transformers chose the same tokens." in printed.out
    assert "CTranslate2 was not measured" in printed.out
    assert " min\n" in printed.err


def test_memory_section_covers_every_case(
    embedded: Any, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fresh(where: str, case: str, tokens: int) -> dict[str, float]:
        asked.append((where, case, tokens))
        return {"loaded": 1e9, "over": 500e6, "result": 1e6}

    monkeypatch.setattr(embedded, "fresh_peak", fresh)
    engine = embedded.open_engine(folder)
    table = embedded.memory_section(embedded.Bench(engine, folder, pairs=1, prompts=8)).run()
    assert asked == [(folder, case, 160) for case in importlib.import_module("_peak").CASES]
    assert [row[-1] for row in table.rows] == ["missed", "", "missed", "missed"]


def test_an_interpreter_without_ctranslate2_ends_with_a_line(
    embedded: Any, folder: str, tmp_path: pathlib.Path
) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nraise SystemExit(3)\n")
    script.chmod(0o755)
    with pytest.raises(SystemExit, match="status 3"):
        embedded.CTranslate2(str(script), folder, 1)


def test_ctranslate2_answers_are_read_one_a_line(embedded: Any, folder: str, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "python"
    script.write_text(
        f"""#!{sys.executable}
import json, sys
print(json.dumps({{"versions": "v " + sys.argv[3]}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    print(json.dumps({{"seconds": len(request["token_ids"]) + request["new_tokens"]}}), flush=True)
"""
    )
    script.chmod(0o755)
    other = embedded.CTranslate2(str(script), folder, 2)
    assert other.versions == "v 2"
    assert [other.seconds([1, 2, 3]), other.seconds([1], new_tokens=4)] == [3.0, 5.0]
    other.close()


def test_gpu_benchmark_runs_on_the_cpu(measure: Any, capsys: pytest.CaptureFixture[str]) -> None:
    gpu = importlib.import_module("gpu")
    gpu.main(["--smoke"])
    out = capsys.readouterr().out
    begun = [line.split(":")[0].split(",")[0] for line in out.splitlines() if line.startswith("###")]
    each = [
        "### Right rows",
        "### Right rows",
        "### Waiting for the device",
        "### Complete logits of 1 × 64 tokens",
        "### Prompts of mixed lengths",
        "### Generation of 4 tokens with their complete logits",
    ]
    assert begun == [*each, *each, "### Prompts of mixed lengths", "### Machine"]
    assert "0 checks failed" in out
    assert out.count("passed") >= 20


def test_gpu_benchmark_says_that_it_skips(
    measure: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = importlib.import_module("gpu")
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    gpu.main([])
    assert capsys.readouterr().out.startswith("gpu.py: skipped, torch sees no CUDA device")


def test_gpu_checks_fail_on_wrong_rows_and_the_program_with_them(
    measure: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = importlib.import_module("gpu")
    truth = np.zeros((3, 5))
    assert gpu.error_row("same", truth + 1e-3, 1e-3, truth)[-1] == "passed"
    wrong = gpu.error_row("shifted", truth + 2e-3, 1e-3, truth)
    assert wrong[-1] == "FAILED"
    table = gpu.Table("T", gpu.CHECK_COLUMNS, [wrong])
    monkeypatch.setattr(gpu, "tables", lambda plan, trace: iter([table]))
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--smoke"])
    assert ended.value.code == 1
    assert "1 checks failed" in capsys.readouterr().out


def test_gpu_profile_counts_calls(measure: Any, tmp_path: pathlib.Path) -> None:
    gpu = importlib.import_module("gpu")
    a = gpu.torch.ones(2, 2)
    trace = tmp_path / "trace.json"
    counts = gpu.waits(lambda: [a @ a for _ in range(3)], trace)
    assert counts["aten::mm"] == 3
    assert json.loads(trace.read_text())["traceEvents"]


def test_encodings_benchmark_runs(
    measure: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: Any
) -> None:
    from logitscope.testing import save_tiny

    module = importlib.import_module("encodings_bench")
    for name, value in (
        ("TEXT_TOKENS", 30),
        ("BLOCK", 20),
        ("POSITIONS", 40),
        ("CONTEXT", 90),
        ("QUESTION", 5),
    ):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "SHORT_TEXTS", 4)
    module.main([str(save_tiny(tmp_path)), "--rows", "60", "--pairs", "1", "--markdown"])
    shown = capsys.readouterr().out
    assert "| hidden rows bit-identical to the engine's | yes |" in shown
    assert shown.count("\n### ") >= 6
    assert "nan" not in shown.lower()


def test_server_benchmark_runs(
    measure: Any, folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = importlib.import_module("server_bench")
    small = {
        "ROWS": 16,
        "VOCAB": 20_000,
        "CLIENTS": 2,
        "TEXTS": 2,
        "TEXT_TOKENS": 8,
        "SHORTS": 2,
        "LONG_NEW_TOKENS": 140,
        "FLAT_CALLS": 40,
        "FLAT_EVERY": 5,
        "WARM_UP_S": 0.0,
    }
    for name, value in small.items():
        monkeypatch.setattr(server, name, value)
    server.main(["--model", folder, "--pairs", "1", "--markdown"])
    shown = capsys.readouterr().out
    for title in ("into an array of another", "End to end", "Many clients", "beside a long", "Memory of the"):
        assert title in shown
    assert "Errors: 0." in shown
