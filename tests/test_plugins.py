"""What plugins share, without an engine: rows find their places, and what is missing or wrong is an error."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import json
import pathlib
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import VOCAB, Words, identity

import logitscope as ls
from logitscope import Select, sampling
from logitscope.errors import (
    IncompleteError,
    MissingDependencyError,
    NonFiniteError,
    OptionError,
    SelectError,
)
from logitscope.logits import Logits
from logitscope.plugins.common.check import Hook, problems, resolve
from logitscope.plugins.common.draw import Draw
from logitscope.plugins.common.options import Options, read_options
from logitscope.plugins.common.rows import RequestRows, received
from logitscope.plugins.sglang import scheduler
from logitscope.rows import SUMMARIES, Request, Sampling, row_count
from logitscope.testing import assert_same_bits
from logitscope.wire import Pool, shared

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="rows go through Linux shared memory")


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Segments of these tests lie by themselves."""
    here = tmp_path_factory.mktemp("segments")
    before, shared.folders = shared.folders, lambda: [here]
    yield here
    shared.folders = before


class Run:
    """An engine that has computed everything: ``L`` prompt tokens, ``n`` new ones, and one too many."""

    def __init__(self, length: int, new: int, options: Any = True, *, most: int | None = None) -> None:
        random = np.random.default_rng(length * 100 + new)
        self.length, self.new = length, new
        self.ids = random.integers(0, VOCAB, length + new + 1).astype(np.int32)
        self.rows = torch.from_numpy(random.normal(size=(length + new + 1, VOCAB)).astype(np.float32))
        asked = read_options(options)
        assert asked is not None
        self.pool = Pool()
        self.state = RequestRows(
            asked.request(self.ids[:length], new if most is None else most),
            self.pool,
            identity=identity(),
        )

    @property
    def generated(self) -> list[int]:
        return self.ids[self.length : self.length + self.new].tolist()

    def prompt(self, first: int, last: int) -> None:
        self.state.put_prompt(self.rows[first:last].clone(), first)

    def step(self, position: int) -> None:
        if self.state.wants(position):
            target = torch.from_numpy(self.ids[position + 1 : position + 2])
            self.state.put_generated(self.rows[position : position + 1].clone(), position, target)

    def everything(self) -> None:
        self.prompt(0, self.length)
        for position in range(self.length - 1, self.length + self.new):
            self.step(position)

    def result(self, new: int | None = None, *, ended: bool = True) -> Logits:
        generated = self.generated[: self.new if new is None else new]
        ticket = self.state.ticket(generated, ended=ended)
        assert len(json.dumps(ticket)) < 1000, "a ticket is small"
        return received(ticket, identity(), Words())


POSITIONS = st.one_of(
    st.sampled_from(["all", "prompt", "generated", "last"]),
    st.lists(st.integers(0, 6), min_size=1, max_size=4),
    st.builds(slice, st.none() | st.integers(-8, 8), st.none() | st.integers(-8, 8)),
)


@given(st.integers(1, 9), st.integers(0, 5), POSITIONS, st.integers(1, 9), st.integers(0, 9))
@settings(max_examples=200, deadline=None)
def test_every_selected_row_is_in_its_place(
    length: int, new: int, positions: Any, chunk: int, most: int
) -> None:
    select = Select(positions)
    try:
        wanted = select.rows(prompt_length=length, new_tokens=new)
        run = Run(length, new, Options(select), most=new + most if new else 0)
    except SelectError:
        return
    for first in range(0, length, chunk):
        run.prompt(first, min(first + chunk, length))
    for position in range(length - 1, length + new):
        run.step(position)
    found = run.result()
    assert found.positions.tolist() == wanted.tolist()
    assert_same_bits(np.asarray(found), run.rows[wanted].numpy())
    assert found.token_ids.tolist() == run.ids[: length + new].tolist()


@pytest.mark.parametrize("encode", ["float16", "bfloat16", None])
def test_summaries_and_encodings_are_those_of_the_rows(encode: str | None) -> None:
    run = Run(4, 3, Options(encode=encode, summary=SUMMARIES))
    run.everything()
    found = run.result()
    truth = run.rows[:6].double().numpy()
    logprobs = truth - np.log(np.exp(truth).sum(-1, keepdims=True))
    assert np.allclose(found.summary["entropy"], -(np.exp(logprobs) * logprobs).sum(-1), atol=1e-5)
    chosen = truth[np.arange(6), run.ids[1:7]]
    assert np.allclose(found.summary["target_logit"], chosen, atol=1e-6)
    assert str(np.asarray(found).dtype) == (encode or "float32")


def test_summaries_alone_take_no_room_for_values() -> None:
    run = Run(5, 0, {"select": {"vocab": None}, "summary": ["entropy"]})
    run.everything()
    assert not np.isnan(run.result().entropy()).any()


def test_rows_that_are_computed_again_after_preemption_replace_the_first_ones() -> None:
    run = Run(5, 4)
    run.prompt(0, 5)
    run.step(4)
    run.step(5)
    run.step(6)  # its token was never given out
    run.rows[6] += 1
    for position in (6, 7, 8):
        run.step(position)
    assert_same_bits(np.asarray(run.result()), run.rows[:8].numpy())


def test_a_row_for_a_token_that_was_not_given_out_is_an_error() -> None:
    run = Run(5, 4)
    run.everything()
    other = [*run.generated[:2], (run.generated[2] + 1) % VOCAB, run.generated[3]]
    with pytest.raises(IncompleteError, match="position 6: a row was made for another token"):
        run.state.ticket(other, ended=True)


def test_a_missing_row_is_an_error() -> None:
    run = Run(5, 4)
    run.prompt(0, 3)
    for position in range(4, 9):
        run.step(position)
    with pytest.raises(IncompleteError, match=r"positions \[3\].*missing.*expected 8 rows"):
        run.result()


def test_rows_that_are_not_numbers_are_an_error() -> None:
    run = Run(3, 1)
    run.rows[1, 4] = torch.nan
    run.prompt(0, 3)
    with pytest.raises(NonFiniteError):
        run.result()


def test_a_stream_gives_each_row_once() -> None:
    run = Run(5, 4)
    run.prompt(0, 5)
    run.step(4)
    run.step(5)  # one more than is given out
    first = run.result(1, ended=False)
    for position in (6, 7, 8):
        run.step(position)
    rest = run.result()
    assert first.positions.tolist() == [0, 1, 2, 3, 4]
    assert rest.positions.tolist() == [5, 6, 7]
    assert_same_bits(np.concatenate([np.asarray(first), np.asarray(rest)]), run.rows[:8].numpy())


def test_memory_comes_back(folder: pathlib.Path) -> None:
    run = Run(5, 2)
    for _ in range(5):
        fresh = Run(5, 2)
        fresh.pool = run.pool
        fresh.state._pool = run.pool
        fresh.everything()
        kept = fresh.result()
        assert_same_bits(np.asarray(kept), fresh.rows[:6].numpy())
        del kept, fresh
        gc.collect()
    dropped = Run(5, 2)
    dropped.state._pool = run.pool
    dropped.everything()
    del dropped
    gc.collect()
    assert len(run.pool) == 1
    run.pool.close()


@pytest.mark.parametrize(
    ("asked", "error", "match"),
    [
        ({"selekt": 1}, OptionError, "'selekt'"),
        ("{", OptionError, "no JSON"),
        (7, OptionError, "neither"),
        ({"encode": "q3"}, OptionError, "q3"),
        ({"encode": ["float16"]}, OptionError, "unknown encoding"),
        ({"summary": "entropy"}, OptionError, "true, false or a list"),
        ({"select": {"vocab": None}}, SelectError, "nothing is kept"),
    ],
)
def test_options_that_there_are_not_are_refused(asked: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        read_options(asked)


def test_what_goes_wrong_before_a_request_starts_is_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> None:
        raise OSError("no shared memory here")

    aborted: list[str] = []
    received = SimpleNamespace(sampling_params=SimpleNamespace(custom_params={"logitscope": True}))
    monkeypatch.setattr(scheduler, "_placed", broken)
    scheduler.create_request(lambda *_: SimpleNamespace(set_finish_with_abort=aborted.append), None, received)
    assert aborted == ["return_logits: OSError: no shared memory here"]
    received.sampling_params.custom_params = {"logitscope": False}
    assert scheduler.create_request(lambda *_: "plain", None, received) == "plain"


def test_options_travel_as_a_string() -> None:
    options = Options(Select([1, -2]), "float16", ("entropy",))
    assert read_options(options.message()) == options
    assert read_options({"select": Select("last")}) == Options(Select("last"))


def test_a_hook_that_is_not_there_is_named() -> None:
    def hook(target: str, *names: str) -> Hook:
        return Hook(target, "around", print, names, "a reason")

    assert resolve("json.decoder.JSONDecoder.decode") is json.JSONDecoder.decode
    found = problems(
        [hook("json.loads", "s"), hook("json.loads", "text"), hook("json.nothing"), hook("no.such")]
    )
    assert set(found) == {"json.loads", "json.nothing", "no.such"}
    assert "has no parameter text" in found["json.loads"]
    assert "needed for a reason" in found["no.such"]


def test_rows_and_positions_agree_with_the_contract() -> None:
    run = Run(4, 3)
    run.everything()
    found = run.result()
    assert len(found) == row_count(4, 3)
    assert len(found.generated) == 3


# -- tokens that logitscope chooses inside a foreign engine -----------------------------------------------


def _drawn(**sampling: Any) -> Request:
    ids = np.array([3, 1, 4, 1, 5], np.int32)
    return Request(ids, max_new_tokens=6, sampling=Sampling(**sampling), sample_index=2)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.9, "seed": 3},
        {"temperature": 1.5, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.4, "seed": 9},
        {"repetition_penalty": 1.7},
        {"logit_bias": {2: 3.0}},
    ],
    ids=str,
)
def test_draws_are_those_of_a_plain_loop(options: dict[str, Any]) -> None:
    request = _drawn(**options)
    rows = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    history, expected, processed = request.token_ids.tolist(), [], []
    uniforms = sampling.uniform_stream(request.sampling.seed or 0, 2)
    for row in rows.split(1):
        after = sampling.process(row, request.sampling, [torch.tensor(history)])
        drawn = None if request.sampling.greedy else torch.tensor([next(uniforms)], dtype=torch.float64)
        expected.append(int(sampling.choose(after, request.sampling, drawn)))
        history.append(expected[-1])
        processed.append(after)
    draw = Draw(request)
    found = [draw.choose(row, 4 + step) for step, row in enumerate(rows.split(1))]
    assert [int(token) for token, _ in found] == expected
    assert torch.equal(torch.cat([after for _, after in found]), torch.cat(processed))
    for step in (2, 5, 3):  # as after preemption, or ahead of the schedule
        assert int(draw.choose(rows[step : step + 1], 4 + step)[0]) == expected[step]
    draw.choose(rows[:1], 10)  # one step too many changes nothing
    draw.check()
    assert int(draw.choose(rows[3:4], 7)[0]) == expected[3]


def test_a_row_that_leaves_no_token_is_an_error() -> None:
    draw = Draw(_drawn(logit_bias=dict.fromkeys(range(VOCAB), -float("inf"))))
    draw.choose(torch.zeros(1, VOCAB), 4)
    with pytest.raises(OptionError, match=r"position 4: no token is left to choose"):
        draw.check()


def test_what_an_engine_asks_for_travels_whole() -> None:
    given = Request(
        np.array([1, 2], np.int32),
        max_new_tokens=3,
        sampling=Sampling(
            temperature=0.5, seed=2**62, logit_bias={7: -float("inf")}, stop=("a",), stop_token_ids=(3,)
        ),
        select=Select([0, -1]),
        encode="float16",
        summary=("max",),
        sample_index=4,
    )
    options = Options.of(given)
    found = read_options(options.message())
    assert found == options
    again = found.request(given.token_ids, 3)  # type: ignore[union-attr]
    for name in ("sampling", "select", "encode", "summary", "sample_index", "max_new_tokens"):
        assert getattr(again, name) == getattr(given, name), name
    tokens = Request(given.token_ids, max_new_tokens=3, select=None)
    assert Options.of(tokens).idle
    kept = dataclasses.replace(tokens, sampling=Sampling(stop_token_ids=(3,), ignore_eos=True))
    assert Options.of(kept).only_stop_ids
    assert not Options.of(kept).idle


@pytest.mark.parametrize("name", ["sampling", "processed", "only_stop_ids"])
def test_users_do_not_ask_for_what_engines_ask_for(name: str) -> None:
    with pytest.raises(OptionError, match=name):
        read_options({name: True})


def test_the_sglang_engine_says_what_is_missing() -> None:
    if importlib.util.find_spec("sglang") is not None:
        pytest.skip("SGLang is installed here")
    with pytest.raises(MissingDependencyError, match="sglang is not installed"):
        ls.open("x", engine="sglang")
