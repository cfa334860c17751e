"""Row blocks between processes: every bit comes through, and what was cut or damaged is an error."""

from __future__ import annotations

import dataclasses
import gc
import io
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import DTYPES, VOCAB, identity

import logitscope as ls
from logitscope.engines.fake import FakeEngine
from logitscope.errors import (
    FileFormatError,
    IncompleteError,
    LogitscopeError,
    OptionError,
    OutOfMemoryError,
    SelectError,
)
from logitscope.logits.collect import Collector
from logitscope.rows import SUMMARIES, End, Request, RowBlock, Sampling, Select
from logitscope.testing import assert_same_bits
from logitscope.wire import (
    Pool,
    RowReader,
    RowWriter,
    Ticket,
    attach,
    owners,
    release,
    request_from_json,
    request_to_json,
    select_from_json,
    shared,
    summary_from_json,
    sweep,
    write_stream,
)
from logitscope.wire.results import blocks_of, logits_from_json, logits_to_json, read_results
from logitscope.wire.results import request_of as request_of_result

SPECIAL = np.array([np.inf, -np.inf, np.nan, -0.0, 1e-42, 3.5], np.float32)


def block_of(dtype: Any, rows: int, *, seed: int = 0, **fields: Any) -> RowBlock:
    values = np.random.default_rng(seed).choice(SPECIAL, size=(rows, VOCAB)).astype(dtype)
    return RowBlock(0, np.arange(rows, dtype=np.int64), values, **fields)


def sent(items: list[RowBlock | End], request: Request) -> bytes:
    sink = io.BytesIO()
    write_stream(sink, iter(items), identity(), [request])
    return sink.getvalue()


def request_of(rows: int, **fields: Any) -> Request:
    return Request(np.arange(rows, dtype=np.int32) % VOCAB, **fields)


END = End(0, np.empty(0, np.int32), rows=3)


@given(st.sampled_from(DTYPES), st.integers(0, 9), st.sampled_from(["raw", "processed"]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_block_comes_through_bit_for_bit(dtype: Any, rows: int, stage: Any, rich: bool) -> None:
    block = block_of(dtype, rows, stage=stage, token_ids=np.array([5, 7], np.int32))
    request = request_of(max(rows, 1))
    if rich:
        random = np.random.default_rng(1)
        block.summary = {"entropy": random.choice(SPECIAL, rows), "argmax": np.arange(rows, dtype=np.int32)}
        block.hidden_states = {3: random.choice(SPECIAL, (rows, 4)).astype(dtype)}
        block.attentions = {0: random.choice(SPECIAL, (rows, 2, 5))}
        request = dataclasses.replace(
            request, summary=("argmax", "entropy"), hidden_states=(3,), attentions=(0,)
        )
    end = End(0, np.array([5, 7], np.int32), rows, finish_reason="stop", stop="\n", text="é", seed=2**62)
    first, last = list(RowReader(sent([block, end], request)))
    assert isinstance(first, RowBlock)
    assert isinstance(last, End)
    assert first.stage == stage
    for ours, theirs in ((first, block), (last, end)):
        for field in dataclasses.fields(ours):
            a, b = getattr(ours, field.name), getattr(theirs, field.name)
            parts = zip(a.values(), b.values(), strict=True) if isinstance(a, dict) else [(a, b)]
            for x, y in parts:
                if isinstance(x, np.ndarray):
                    assert_same_bits(x, y)
                else:
                    assert x == y


def test_values_are_read_without_a_copy() -> None:
    data = sent([block_of(np.float32, 3), END], request_of(3))
    block = next(iter(RowReader(data)))
    assert isinstance(block, RowBlock)
    whole = np.frombuffer(data, np.uint8)
    assert np.shares_memory(block.values, whole)


def test_a_stream_of_an_engine_collects_to_the_same_result() -> None:
    engine = FakeEngine.open(vocab_size=101, block_rows=4)
    requests = engine.requests([[1, 2, 3, 4, 5, 6], [7, 8]], summary=True)
    sink = io.BytesIO()
    write_stream(sink, engine.stream(requests), engine.identity, requests)
    reader = RowReader(io.BytesIO(sink.getvalue()))
    assert reader.identity == engine.identity
    collector = Collector(reader.requests, identity=reader.identity)
    for item in reader:
        if isinstance(item, End):
            collector.finish(item)
        else:
            collector.add(item)
    here = engine.logits([[1, 2, 3, 4, 5, 6], [7, 8]], summary=True)
    for own, remote in zip(here, collector.results(), strict=True):
        assert remote.logits is not None
        assert_same_bits(np.asarray(remote.logits), np.asarray(own))
        assert_same_bits(remote.logits.entropy(), own.entropy())


def test_a_stream_that_was_cut_anywhere_is_an_error() -> None:
    data = sent([block_of(np.float32, 2), block_of(np.float16, 1), END], request_of(3))
    for length in range(0, len(data) - 8, 8):  # the last 8 bytes are Arrow's own end
        with pytest.raises((IncompleteError, FileFormatError)):
            list(RowReader(data[:length]))


def test_a_stream_without_its_end_is_an_error() -> None:
    sink = io.BytesIO()
    writer = RowWriter(sink, identity(), [request_of(3)])
    writer.write(block_of(np.float32, 3))
    with pytest.raises(IncompleteError, match="after 1 blocks and 0 of 1 ends: the stream was cut"):
        list(RowReader(sink.getvalue()))


def test_a_flipped_byte_of_a_row_is_found() -> None:
    block = block_of(np.float32, 3)
    data = bytearray(sent([block, END], request_of(3)))
    at = bytes(data).index(block.values.tobytes())
    for place in (at, at + 17, at + block.values.nbytes - 1):
        damaged = bytearray(data)
        damaged[place] ^= 4
        with pytest.raises(FileFormatError, match="damaged"):
            list(RowReader(bytes(damaged)))


@pytest.mark.parametrize("writable", [False, True])
def test_a_flipped_bit_anywhere_is_a_named_error_or_harmless(writable: bool) -> None:
    """Rows, and what says whose they are: requests, places, generated ids."""
    block = block_of(
        np.float16, 2, token_ids=np.array([12], np.int32), summary={"argmax": np.arange(2, dtype=np.int32)}
    )
    end = End(0, np.array([12], np.int32), rows=2, finish_reason="stop", seed=71)
    good = sent([block, end], request_of(2, summary=("argmax",)))
    random = np.random.default_rng(0)

    def read(data: bytes) -> list[Any]:
        reader = RowReader(io.BytesIO(data) if writable else data, writable=writable)
        first, last = reader
        assert isinstance(first, RowBlock)
        arrays = [first.values, first.positions, first.token_ids, *first.summary.values()]
        return [
            *(array.tobytes() for array in arrays if array is not None),
            (first.index, first.stage, list(first.summary)),
            (last.generated_ids.tolist(), last.rows, last.finish_reason, last.seed),
            [request_to_json(request) for request in reader.requests],
            reader.identity,
        ]

    truth, harmless = read(good), 0
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 1 << int(random.integers(8))
        try:
            found = read(bytes(bad))
        except LogitscopeError:
            continue
        assert found == truth, place
        harmless += 1
    assert harmless < len(good) / 2  # Arrow's padding, and columns that are only for other readers


def test_no_stream_of_ours_is_refused() -> None:
    import pyarrow as pa

    with pytest.raises(FileFormatError, match="no stream of rows"):
        RowReader(b"hello")
    sink = io.BytesIO()
    pa.ipc.new_stream(sink, pa.schema([("a", pa.int8())])).close()
    with pytest.raises(FileFormatError, match="metadata"):
        RowReader(sink.getvalue())


def test_python_objects_do_not_grow_with_the_vocabulary() -> None:
    def facts(vocab: int) -> int:
        block = RowBlock(0, np.arange(4, dtype=np.int64), np.zeros((4, vocab), np.float32))
        return len(sent([block, END], request_of(4))) - block.values.nbytes

    assert facts(100_000) - facts(1000) < 64  # lengths have more digits


# -- results -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ["all", [1, 3]])
def test_a_result_comes_through_as_json_and_as_a_stream(dtype: Any, rows: Any) -> None:
    engine = FakeEngine.open(vocab_size=VOCAB, dtype=str(dtype))
    result = engine.logits([3, 1, 4, 1, 5], select=Select(rows), summary=True)
    sink = io.BytesIO()
    write_stream(
        sink,
        blocks_of(result, 0),
        result.identity,
        [request_of_result(result, 0, Select(result.positions.tolist()))],
    )
    text = json.dumps(logits_to_json(result))
    for back in (logits_from_json(json.loads(text)), *read_results(sink.getvalue())):
        assert_same_bits(np.asarray(back), np.asarray(result))
        assert_same_bits(back.positions, result.positions)
        assert back.identity == result.identity
        for name in SUMMARIES:
            assert_same_bits(back.summary[name], result.summary[name])


@pytest.mark.parametrize(
    "change", [{"values_b64": "%"}, {"shape": [7]}, {"values_b64_dtype": "int3"}, {"identity": {}}]
)
def test_what_is_no_result_as_json_is_refused(change: dict[str, Any]) -> None:
    good = logits_to_json(FakeEngine.open(vocab_size=VOCAB).logits([3, 1]))
    with pytest.raises(FileFormatError, match="no result as JSON"):
        logits_from_json({**good, **change})


# -- requests ------------------------------------------------------------------------------------------

POSITIONS = st.one_of(
    st.sampled_from(["all", "prompt", "generated"]),
    st.lists(st.integers(0, 50), min_size=1, max_size=5),
    st.builds(slice, st.integers(0, 9), st.none() | st.integers(0, 9), st.sampled_from([None, 1, 3])),
)


@given(POSITIONS, st.sampled_from(["all", None]), st.none() | st.just("float16"), st.booleans())
def test_a_request_comes_through(positions: Any, vocab: Any, encode: Any, generates: bool) -> None:
    sampling = Sampling(temperature=0.5, seed=7, stop=("a", "b"), logit_bias={3: -float("inf")})
    request = Request(
        np.arange(60, dtype=np.int32),
        max_new_tokens=4 * generates,
        sampling=sampling if generates else Sampling(),
        select=Select(positions, vocab),
        encode=encode,
        summary=SUMMARIES,
        hidden_states=(1, 2),
        prompt_index=3,
    )
    back = request_from_json(json.loads(json.dumps(request_to_json(request))))
    for field in dataclasses.fields(Request):
        a, b = getattr(request, field.name), getattr(back, field.name)
        assert np.array_equal(a, b) if field.name == "token_ids" else a == b


@pytest.mark.parametrize(
    ("given_", "error", "match"),
    [
        ({"position": "all"}, SelectError, "unknown name.*'position'"),
        ({"positions": {"start": 1, "end": 2}}, SelectError, "'end'"),
        ("every", SelectError, "every"),
        (3.5, SelectError, "3.5"),
    ],
)
def test_a_selection_that_there_is_not_is_refused(given_: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        select_from_json(given_)


def test_summaries_are_named_or_all() -> None:
    assert summary_from_json(True) == SUMMARIES
    assert summary_from_json(False) == summary_from_json(None) == ()
    assert summary_from_json(["entropy"]) == ("entropy",)
    with pytest.raises(OptionError, match="entropy"):
        summary_from_json("entropy")
    with pytest.raises(OptionError, match="'tokens'"):
        request_from_json({"token_ids": [1], "tokens": 3})


# -- shared memory -------------------------------------------------------------------------------------

linux = pytest.mark.skipif(sys.platform != "linux", reason="segments are files in Linux shared memory")


@pytest.fixture
def here(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder of their own, so that tests that run at the same time do not see each other's segments."""
    monkeypatch.setattr(shared, "folders", lambda: [tmp_path])
    return tmp_path


@linux
def test_rows_are_read_by_another_process_and_the_segment_is_used_again(here: pathlib.Path) -> None:
    pool = Pool()
    segment = pool.take(1 << 20)
    rows = np.random.default_rng(0).normal(size=(20, 1001)).astype(np.float32)
    segment.room(64, rows.shape, rows.dtype)[...] = rows
    ticket = segment.lend(64 + rows.nbytes)
    program = f"""
import numpy as np
from logitscope.wire import Ticket, attach
array = attach({ticket!r}).array(64, {rows.shape}, np.float32)
print(array.tobytes() == np.random.default_rng(0).normal(size=(20, 1001)).astype(np.float32).tobytes())
array[0] = 1  # its own
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.strip() == "True"
    assert segment.free
    assert_same_bits(segment.room(64, rows.shape, rows.dtype), rows)
    assert pool.take(1 << 20) is segment
    assert not segment.free


@linux
def test_a_segment_is_free_only_when_the_last_array_is_gone(here: pathlib.Path) -> None:
    pool = Pool()
    segment = pool.take(4096)
    segment.room(0, (8,), np.int64)[...] = np.arange(8)
    attached = attach(segment.lend(64))
    one, two = attached.array(0, (4,), np.int64), attached.array(32, (4,), np.int64)[1:3]
    del attached, one
    gc.collect()
    assert not segment.free
    assert pool.take(4096) is not segment
    assert two.tolist() == [5, 6]
    del two
    gc.collect()
    assert segment.free


@linux
def test_results_outlive_the_pool(here: pathlib.Path) -> None:
    pool = Pool()
    segment = pool.take(4096)
    segment.room(0, (8,), np.int64)[...] = np.arange(8)
    array = attach(segment.lend(64)).array(0, (8,), np.int64)
    pool.close()
    assert not list(here.iterdir())
    assert array.tolist() == list(range(8))
    del array
    gc.collect()


@linux
def test_rows_that_come_later_keep_those_before(here: pathlib.Path) -> None:
    segment = Pool().take(40 << 20)
    first = segment.room(0, (1000,), np.float32)
    first[...] = 3
    assert segment.reserved_bytes < 40 << 20, "memory is asked for as it is used"
    segment.room(30 << 20, (1000,), np.float32)[...] = 4
    assert (first == 3).all()
    with pytest.raises(OutOfMemoryError, match="beyond the segment"):
        segment.room(40 << 20, (1,), np.float32)


@linux
def test_a_full_shared_memory_is_a_named_error_and_nothing_stays(
    here: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    pool = Pool()
    segment = pool.take(1 << 20)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutOfMemoryError, match="shared memory is full"):
        segment.room(0, (1000,), np.float32)
    with pytest.raises(OutOfMemoryError, match="no shared memory"):
        pool.take(8 << 20)
    assert len(list(here.iterdir())) == 1
    pool.close()
    assert not list(here.iterdir())


@linux
def test_the_limit_of_a_pool_holds_and_idle_segments_go(here: pathlib.Path) -> None:
    pool = Pool(limit_bytes=10 << 20, kept_bytes=0)
    segment = pool.take(8 << 20)
    segment.room(0, (8 << 20,), np.uint8)
    with pytest.raises(OutOfMemoryError, match="in use"):
        pool.take(4 << 20)
    segment.take_back()
    larger = pool.take(9 << 20)
    assert [path.name for path in here.iterdir()] == [larger.path.name]


@linux
def test_segments_of_killed_processes_are_swept_and_others_stay(here: pathlib.Path) -> None:
    program = f"""
import os, pathlib, signal
from logitscope.wire import Pool, shared
shared.folders = lambda: [pathlib.Path({str(here)!r})]
Pool().take(4096).room(0, (8,), "i8")
os.kill(os.getpid(), signal.SIGKILL)
"""
    with subprocess.Popen([sys.executable, "-c", program]) as dead:
        os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
        pool = Pool()
        mine = pool.take(4096)
        (here / "logitscope-notes.segment").touch()
        assert len(list(here.iterdir())) == 3
        assert owners() == {os.getpid(), dead.pid}
        assert len(sweep()) == 1, "also while nobody has waited for its end"
        assert {path.name for path in here.iterdir()} == {mine.path.name, "logitscope-notes.segment"}
        assert sweep() == []


@linux
@pytest.mark.parametrize("live", [False, True])
def test_a_reader_that_is_killed_gives_the_segment_back(here: pathlib.Path, live: bool) -> None:
    pool = Pool()
    segment = pool.take(4096)
    segment.room(0, (8,), np.int64)[...] = np.arange(8)
    program = f"""
import os, signal, sys
import numpy as np
from logitscope.wire import Ticket, attach
array = attach({segment.lend(64)!r}, live={live}).array(0, (8,), np.int64)
print(array.sum(), flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline().strip() == "28"
        assert not segment.free
        segment.take_back()
        assert not segment.free, "a reader has it"
        reader.communicate("\n")
    assert segment.free
    assert pool.take(4096) is segment


@linux
def test_a_segment_that_is_written_to_is_not_free(here: pathlib.Path) -> None:
    segment = Pool().take(4096)
    segment.writing = True
    segment.room(0, (8,), np.int64)
    attached = attach(segment.lend(64), live=True)
    segment.room(8, (1,), np.int64)[...] = 7
    kept = attached.array(0, (8,), np.int64)
    assert kept[1] == 7
    kept[0] = 3
    segment.room(16, (1,), np.int64)[...] = 8
    assert kept[:3].tolist() == [3, 7, 8], "on a page that the reader has written to"
    attached.done(24)
    assert segment.done_bytes == 24
    del attached, kept
    gc.collect()
    assert not segment.free
    segment.writing = False
    assert segment.free
    segment.hold()
    assert segment.done_bytes == 0


@linux
def test_free_segments_make_way_for_more(here: pathlib.Path) -> None:
    pool = Pool(limit_bytes=20 << 20, most=2)
    for _ in range(2):
        small, large = pool.take(1 << 20), pool.take(9 << 20)
        for segment in (small, large):
            segment.room(0, (segment.capacity,), np.uint8)
        with pytest.raises(OutOfMemoryError, match="all segments"):
            pool.take(1 << 20)
        large.take_back()
        other = pool.take(18 << 20)
        other.room(0, (18 << 20,), np.uint8)
        assert len(pool) == 2
        small.take_back()
        other.take_back()
    pool.close()


@linux
def test_a_ticket_that_nobody_needs_is_released(here: pathlib.Path) -> None:
    pool = Pool()
    segment = pool.take(4096)
    segment.room(0, (8,), np.int64)
    ticket = segment.lend(64)
    assert not segment.free
    release(ticket)
    assert segment.free
    with pytest.raises(FileFormatError, match="void"):
        attach(ticket)
    assert pool.take(4096) is segment
    kept = attach(segment.lend(64)).array(0, (8,), np.int64)
    release(ticket)  # of the use before: nothing happens
    assert not segment.free
    assert kept.sum() == 0


@linux
def test_a_ticket_is_good_once(here: pathlib.Path) -> None:
    segment = Pool().take(4096)
    segment.room(0, (8,), np.int64)
    ticket = segment.lend(64)
    kept = attach(ticket).array(0, (8,), np.int64)
    with pytest.raises(FileFormatError, match="once"):
        attach(ticket)
    assert kept.sum() == 0


@linux
def test_what_is_no_segment_is_refused(here: pathlib.Path) -> None:
    with pytest.raises(FileFormatError, match="gone"):
        attach(Ticket(str(here / "nothing"), 8, 0))
    (here / "text").write_bytes(b"x" * 5000)
    with pytest.raises(FileFormatError, match="no segment"):
        attach(Ticket(str(here / "text"), 8, 0))
    segment = Pool().take(4096)
    segment.room(0, (1,), np.int8)
    with pytest.raises(FileFormatError, match="too small"):
        attach(segment.lend(5000))
    with pytest.raises(FileFormatError, match="outside"):
        attach(segment.lend(64)).array(60, (2,), np.int32)


def test_the_engine_is_not_needed_for_the_wire() -> None:
    program = (
        "import sys, logitscope.wire; print('torch' in sys.modules, 'logitscope.engines' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
    assert ls.__version__
