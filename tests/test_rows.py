"""Alignment arithmetic, against the contract's own words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitscope.errors import InputError, OptionError, SelectError
from logitscope.rows import NO_IDS, Request, Sampling, Select, kinds, row_count, targets

LENGTHS = st.integers(1, 12)
NEW = st.integers(0, 8)


@given(length=LENGTHS, new=NEW)
def test_rows_of_a_sequence(length: int, new: int) -> None:
    every = Select().rows(prompt_length=length, new_tokens=new)
    assert every.tolist() == list(range(length if new == 0 else length + new - 1))
    assert len(every) == row_count(length, new)
    generated = Select("generated").rows(prompt_length=length, new_tokens=new)
    assert len(generated) == new
    prompt = Select("prompt").rows(prompt_length=length, new_tokens=new)
    assert prompt.tolist() == list(range(length - 1))
    named = kinds(every, prompt_length=length, new_tokens=new)
    assert named.count("prompt") == length - 1
    assert named.count("generated") == new
    assert named.count("next") == (new == 0)


@given(length=LENGTHS, new=NEW)
def test_a_row_scores_the_token_after_it(length: int, new: int) -> None:
    ids = np.arange(100, 100 + length + new, dtype=np.int32)
    every = Select().rows(prompt_length=length, new_tokens=new)
    scored = targets(ids, every)
    assert scored.dtype == np.int32
    for position, target in zip(every, scored, strict=True):
        assert target == (ids[position + 1] if position + 1 < len(ids) else -1)
    assert (scored == -1).sum() == (new == 0)


BOUNDS = st.none() | st.integers(-15, 15)
STEPS = st.none() | st.integers(-4, 4).filter(bool)


@given(length=LENGTHS, new=NEW, start=BOUNDS, stop=BOUNDS, step=STEPS)
def test_slices_are_pythons(length: int, new: int, start: Any, stop: Any, step: Any) -> None:
    chosen = Select(slice(start, stop, step))
    found = chosen.rows(prompt_length=length, new_tokens=new).tolist()
    assert found == sorted(range(row_count(length, new))[slice(start, stop, step)])
    if not chosen.from_the_end:
        # Then a longer generation keeps the same rows of the front.
        longer = chosen.rows(prompt_length=length, new_tokens=new + 3).tolist()
        assert [p for p in longer if p < row_count(length, new)] == found


@given(length=LENGTHS, new=NEW, data=st.data())
def test_lists_are_sets_of_positions(length: int, new: int, data: st.DataObject) -> None:
    count = row_count(length, new)
    wanted = data.draw(st.lists(st.integers(-count, count - 1), min_size=1, max_size=6))
    found = Select(wanted).rows(prompt_length=length, new_tokens=new).tolist()
    assert found == sorted({p % count for p in wanted})
    assert Select(wanted).from_the_end == any(p < 0 for p in wanted)


def test_a_listed_position_that_is_not_there() -> None:
    with pytest.raises(SelectError, match="got 3"):
        Select([0, 3]).rows(prompt_length=3, new_tokens=0)
    early = Select([0, 9]).rows(prompt_length=3, new_tokens=2, ended_early=True)
    assert early.tolist() == [0]


@pytest.mark.parametrize(
    "positions", ["everything", [], [[1]], [1.5], "1,2", slice("a", None), slice(0, 3, 0), [True], 3]
)
def test_no_such_positions(positions: Any) -> None:
    with pytest.raises(SelectError):
        Select(positions)


def test_no_such_columns() -> None:
    with pytest.raises(SelectError, match="vocab"):
        Select(vocab="some")
    with pytest.raises(SelectError, match="nothing is kept"):
        Request(NO_IDS, select=Select(vocab=None))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": float("inf")},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 1.0},
        {"repetition_penalty": 0.0},
        {"seed": -1},
        {"stop": [""]},
        {"stop": [3]},
        {"stop": 3},
    ],
)
def test_values_outside_their_range(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        Sampling(**options)


def test_unknown_summary_and_negative_length() -> None:
    with pytest.raises(OptionError, match="entropie"):
        Request(NO_IDS, summary=("entropie",))
    with pytest.raises(OptionError, match="max_new_tokens"):
        Request(NO_IDS, max_new_tokens=-1)
    with pytest.raises(InputError, match="only for generated"):
        Request(NO_IDS, processed=True)


@pytest.mark.parametrize("select", ["last", b"x", 3, slice(2)])
def test_what_is_no_selection_is_refused_by_name(select: Any) -> None:
    with pytest.raises(SelectError, match=r"select: no selection; expected a Select.*got"):
        Request(np.arange(3, dtype=np.int32), select=select)
