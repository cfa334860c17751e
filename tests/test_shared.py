"""Rows of a server on this host through shared memory: nothing is copied, and nothing stays behind."""

from __future__ import annotations

import contextlib
import gc
import json
import pathlib
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from test_server import fake, health, post, serving, until

import logitscope as ls
from logitscope.engines.fake import FakeEngine, fake_rows
from logitscope.errors import (
    ConnectionFailedError,
    FileFormatError,
    UnsupportedError,
)
from logitscope.logits import LogitsBatch
from logitscope.rows import RowBlock, Select
from logitscope.server.runner import Limits
from logitscope.wire import Pool, shared

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="rows go through Linux shared memory")

VOCAB = 5000
ALL = Limits(lent_bytes=1)
IDS = list(range(40))


def left() -> list[str]:
    """What lies in shared memory and is ours."""
    return [path.name for folder in shared.folders() for path in folder.glob("logitscope-*")]


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test has a folder of its own for segments, which is empty at the end."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(shared, "folders", lambda: [folder])
    yield
    gc.collect()
    assert left() == []


@contextlib.contextmanager
def opened(address: str, **options: Any) -> Iterator[Any]:
    with contextlib.closing(ls.open(address, **{"shared_memory": True, **options})) as engine:
        yield engine


def segment_of(array: np.ndarray[Any, Any]) -> str:
    """The segment that an array lies in; empty where it lies in none."""
    at = array.ctypes.data
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(bound, 16) for bound in line.split()[0].split("-"))
        if first <= at < last:
            return line.split()[5] if ".segment" in line else ""
    return ""


def used() -> int:
    """Segments that are not free, by their state in the file and their lock."""
    return sum(not _free(path) for folder in shared.folders() for path in folder.glob("*.segment"))


def _free(path: pathlib.Path) -> bool:
    with path.open("r+b") as file:
        state = shared._STATE.unpack(file.read(shared._STATE.size))[2]
        return state == shared._FREE or (state == shared._READ and shared._lock(file.fileno()))


# -- values --------------------------------------------------------------------------------------------


def test_values_are_where_the_server_wrote_them() -> None:
    with serving(fake(vocab_size=VOCAB), limits=ALL) as address, opened(address) as engine:
        rows = engine.logits(IDS)
        assert segment_of(rows.values)
        assert np.array_equal(rows.to_numpy(), fake_rows(IDS, VOCAB))
        assert rows.values.flags.writeable
        assert rows.values.ctypes.data % 64 == 0
        assert health(address)["segments"] == 1
        plain = engine.logits(IDS, encode="float16", summary=True)
        assert segment_of(plain.values)
        assert np.array_equal(plain.argmax(), fake_rows(IDS, VOCAB).argmax(1))
    assert np.array_equal(rows.to_numpy(), fake_rows(IDS, VOCAB)), "the server is gone"
    rows.values[...] = 1


def test_blocks_of_a_stream_are_views_and_later_rows_are_seen() -> None:
    """Rows that come after the client has written to the page they begin on."""
    engine = fake(vocab_size=301, block_rows=3)
    with serving(engine, limits=ALL) as address, opened(address) as client:
        found = []
        for item in client.stream(client.requests([IDS])):
            if isinstance(item, RowBlock):
                assert segment_of(item.values)
                found.append(item.values.copy())
                item.values[...] = np.nan
        assert np.array_equal(np.concatenate(found), fake_rows(IDS, 301))


def test_a_batch_of_equal_lengths_is_one_block() -> None:
    prompts = [[i, *IDS] for i in range(5)]
    with serving(fake(vocab_size=VOCAB), limits=ALL) as address, opened(address) as engine:
        batch = engine.logits(prompts)
        assert isinstance(batch, LogitsBatch)
        dense = batch.to_numpy()
        assert segment_of(dense)
        assert np.shares_memory(dense, batch[0].values)
        assert np.array_equal(dense, np.stack([fake_rows(ids, VOCAB) for ids in prompts]))
        assert health(address)["segments"] == 1
        other = engine.logits([IDS, IDS[:7], IDS[:30]])
        for one, length in zip(other, (40, 7, 30), strict=True):
            assert np.array_equal(one.values, fake_rows(IDS[:length], VOCAB))
        assert len({segment_of(one.values) for one in other}) == 3


def test_generations_with_processed_rows() -> None:
    options = dict(
        max_new_tokens=9, temperature=0.8, seed=3, n=2, return_logits=True, processed=True, ignore_eos=True
    )
    local = fake(vocab_size=VOCAB).generate(IDS, **options)
    with serving(fake(vocab_size=VOCAB), limits=ALL) as address, opened(address) as engine:
        for ours, theirs in zip(local, engine.generate(IDS, **options), strict=True):
            for name in ("logits", "processed"):
                one, other = getattr(ours, name), getattr(theirs, name)
                assert segment_of(other.values)
                assert np.array_equal(one.values, other.values)


def test_what_is_small_or_ragged_goes_with_the_stream() -> None:
    with serving(fake(vocab_size=VOCAB)) as address, opened(address) as engine:
        assert not segment_of(engine.logits([1, 2]).values)
        assert engine.logits(IDS, select=Select(top_k=4)).values.lengths.tolist() == [4] * 40
        assert engine.logits(IDS, select=Select(vocab=None), summary=True).values is None
        assert health(address)["segments"] == 0
        ids = list(range(60))  # 1.2 MB
        assert segment_of(engine.logits(ids).values)


def test_the_first_rows_come_before_the_last_are_computed() -> None:
    gate = threading.Event()

    class Waiting(FakeEngine):
        def _run(self, requests: Any, buffer: Any) -> Any:
            for number, item in enumerate(super()._run(requests, buffer)):
                if number == 3:
                    assert gate.wait(20)
                yield item

    with serving(Waiting.open("fake", vocab_size=VOCAB), limits=ALL) as address, opened(address) as engine:
        stream = engine.stream(engine.requests([IDS]))
        first = next(stream)
        assert segment_of(first.values)
        gate.set()
        values = [first.values, *(item.values for item in stream if isinstance(item, RowBlock))]
        assert np.array_equal(np.concatenate(values), fake_rows(IDS, VOCAB))


def test_an_engine_error_comes_through() -> None:
    with (
        serving(fake(vocab_size=VOCAB, fault="swap_blocks"), limits=ALL) as address,
        opened(address) as client,
    ):
        with pytest.raises(ls.errors.IncompleteError):
            client.logits(IDS)
        until(lambda: used() == 0)


# -- memory that comes back ----------------------------------------------------------------------------


def test_fifty_calls_use_one_segment() -> None:
    with serving(fake(vocab_size=VOCAB), limits=ALL) as address, opened(address) as engine:
        for n in range(50):
            rows = engine.logits([n, *IDS])
            assert np.array_equal(rows.values, fake_rows([n, *IDS], VOCAB))
            del rows
        assert health(address)["segments"] == 1
        bytes_before = health(address)["segments_bytes"]
        held = [engine.logits([n, *IDS]) for n in range(3)]
        assert health(address)["segments"] == 3
        for n, rows in enumerate(held):
            assert np.array_equal(rows.values, fake_rows([n, *IDS], VOCAB))
        last = held[0].values[5:9]
        held.clear()
        del rows
        assert used() == 1, "one is left, of which a view is held"
        assert np.array_equal(last, fake_rows([0, *IDS], VOCAB)[5:9])
        assert health(address)["segments_bytes"] == 3 * bytes_before


def test_an_abort_in_mid_stream_gives_the_memory_back() -> None:
    engine = fake(vocab_size=20_000, block_rows=4)
    limits = Limits(lent_bytes=1, shared_bytes=1 << 20, ahead_bytes=1 << 20)
    with serving(engine, limits=limits) as address, opened(address) as client:
        for _ in range(3):
            stream = client.stream(client.requests([list(range(3000))]))
            block = next(stream)
            stream.close()
            until(lambda: health(address)["buffered_bytes"] == 0)
            assert np.array_equal(block.values, fake_rows([0, 1, 2, 3], 20_000)), "it is the consumer's own"
            assert used() == 1
            del block
            until(lambda: used() == 0)
        assert health(address)["segments"] == 1
        assert np.array_equal(client.logits(IDS).values, fake_rows(IDS, 20_000))


def test_a_client_that_does_not_read_holds_the_engine() -> None:
    engine = fake(vocab_size=20_000, block_rows=4)
    limits = Limits(lent_bytes=1, shared_bytes=1 << 20, ahead_bytes=1 << 20)
    with serving(engine, limits=limits) as address, opened(address) as client:
        ids = list(range(400))  # 32 MB
        stream = client.stream(client.requests([ids]))
        found = [next(stream).values[:1].copy()]
        time.sleep(0.5)
        assert health(address)["segments_bytes"] < 10 * 2**20, "it runs ahead of its client"
        found += [item.values[:1].copy() for item in stream if isinstance(item, RowBlock)]
        assert np.array_equal(np.concatenate(found), fake_rows(ids, 20_000)[::4])


def test_a_full_pool_means_http() -> None:
    limits = Limits(lent_bytes=1, segments_bytes=1_000_000)  # one sequence has 800,000
    with serving(fake(vocab_size=VOCAB), limits=limits) as address, opened(address) as engine:
        held = [engine.logits([n, *IDS[1:]]) for n in range(3)]
        assert [bool(segment_of(rows.values)) for rows in held] == [True, False, False]
        for n, rows in enumerate(held):
            assert np.array_equal(rows.values, fake_rows([n, *IDS[1:]], VOCAB))
        held.clear()
        del rows
        assert segment_of(engine.logits(IDS).values)
        assert health(address)["segments_bytes"] <= 1_000_000


def test_memory_that_ends_in_the_middle_of_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows before stay where they are at the server, and the result has them all."""
    reserve, count = shared.Segment._reserve, iter(range(100))

    def full(self: Any, last: int) -> None:
        if next(count) > 2:
            raise ls.errors.OutOfMemoryError("shared memory is full")
        reserve(self, last)

    monkeypatch.setattr(shared.Segment, "_reserve", full)
    with serving(fake(vocab_size=VOCAB), limits=ALL) as address, opened(address) as engine:
        rows = engine.logits(IDS)
        assert not segment_of(rows.values)
        assert np.array_equal(rows.values, fake_rows(IDS, VOCAB))
        assert health(address)["segments"] == 1
        until(lambda: used() == 0)


def test_two_clients_at_once() -> None:
    failures: list[Any] = []
    with serving(fake(vocab_size=VOCAB), limits=ALL) as address:

        def ask(seed: int) -> None:
            random = np.random.default_rng(seed)
            try:
                with opened(address) as engine:
                    for _ in range(15):
                        prompts = [random.integers(0, VOCAB, n).tolist() for n in random.integers(1, 60, 3)]
                        for found, ids in zip(engine.logits(prompts), prompts, strict=True):
                            assert np.array_equal(found.values, fake_rows(ids, VOCAB))
                            assert segment_of(found.values)
            except BaseException as error:  # noqa: BLE001 - told below
                failures.append(error)

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        until(lambda: used() == 0)


def test_segments_that_others_removed_are_made_anew() -> None:
    with serving(fake(vocab_size=VOCAB), limits=ALL) as address, opened(address) as engine:
        engine.logits(IDS)
        for path in shared.folders()[0].glob("*.segment"):
            path.unlink()
        assert np.array_equal(engine.logits(IDS).values, fake_rows(IDS, VOCAB))
        assert health(address)["segments"] == 1


# -- who is on this host -------------------------------------------------------------------------------


def test_a_wrong_secret_is_refused() -> None:
    with serving(fake(), limits=ALL) as address:
        body = {"requests": [{"token_ids": [1]}]}
        for wrong in ("", "00" * 32, "é"):
            code, data = post(address, "/rows", body, **{shared.PROOF_HEADER: wrong})
            assert (code, json.loads(data)["error"]["where"]) == (400, shared.PROOF_HEADER)
        assert post(address, "/rows", body)[0] == 200
        assert health(address)["segments"] == 0
    with serving(fake(), limits=ALL, shared_memory=False) as address:
        assert post(address, "/rows", body, **{shared.PROOF_HEADER: "00" * 32})[0] == 400


def test_a_client_with_another_view_of_the_host_uses_http(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(fake(vocab_size=VOCAB), limits=ALL) as address:
        with opened(address, shared_memory=False) as engine:
            assert not segment_of(engine.logits(IDS).values)
        with monkeypatch.context() as patch:
            patch.setattr("logitscope.engines.remote.shown_proof", lambda path: None)
            with opened(address, shared_memory=None) as engine:
                assert not segment_of(engine.logits(IDS).values)
            with pytest.raises(UnsupportedError, match="this host"):
                ls.open(address, shared_memory=True)
        assert health(address)["segments"] == 0
    with serving(fake(), shared_memory=False) as address:
        with pytest.raises(UnsupportedError, match="gives none"):
            ls.open(address, shared_memory=True)
        with opened(address, shared_memory=None) as engine:
            assert engine.logits([1]).shape == (1, 301)


def test_only_a_proof_is_read(tmp_path: pathlib.Path) -> None:
    proof = shared.Proof()
    assert proof.path.stat().st_mode & 0o777 == 0o600
    assert proof.holds(str(shared.shown_proof(str(proof.path))))
    assert shared.shown_proof(str(proof.path) + "x") is None
    elsewhere = tmp_path / proof.path.name
    elsewhere.write_bytes(b"x" * 32)
    assert shared.shown_proof(str(elsewhere)) is None
    short = proof.path.with_name(shared.own_name("0" * 16, "proof"))
    short.write_bytes(b"x" * 5)
    assert shared.shown_proof(str(short)) is None
    short.unlink()
    short.symlink_to(elsewhere)
    assert shared.shown_proof(str(short)) is None
    short.unlink()
    segment = Pool().take(4096)
    assert shared.shown_proof(str(segment.path)) is None
    segment.remove()
    proof.remove()
    assert shared.shown_proof(str(proof.path)) is None


def test_a_server_that_was_started_again() -> None:
    """A client's old secret is no error: it proves itself to the new server."""
    with serving(fake(vocab_size=VOCAB), limits=ALL) as address:
        engine = ls.open(address)
    port = int(address.rsplit(":", 1)[1])
    with serving(fake(vocab_size=VOCAB), limits=ALL, port=port), contextlib.closing(engine):
        rows = engine.logits(IDS)
        assert segment_of(rows.values)
        assert np.array_equal(rows.values, fake_rows(IDS, VOCAB))


def test_a_stream_that_names_other_files_is_refused(tmp_path: pathlib.Path) -> None:
    from logitscope.wire.loans import Borrowed

    text = tmp_path / "text"
    text.write_bytes(b"x" * 10_000)
    block = RowBlock(0, np.arange(2))
    facts = {"ticket": [str(text), 80, 0], "dtype": "float32", "shape": [2, 10], "room": [0, 2], "first": 0}
    with pytest.raises(FileFormatError, match="no segment of shared memory"):
        Borrowed().fill(block, facts)
    pool = Pool()
    for change in ({"first": 1}, {"first": -1}, {"room": [0, 3]}, {"shape": [2, 11]}, {"room": [1, 2]}):
        segment = pool.take(80)
        segment.room(0, (80,), np.uint8)
        ticket = segment.lend(80)
        named = [ticket.path, ticket.size, ticket.use]
        with pytest.raises(FileFormatError):
            Borrowed().fill(block, {**facts, "ticket": named, **change})
    pool.close()


# -- processes that are killed -------------------------------------------------------------------------


@contextlib.contextmanager
def python(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs a program over the segments' folder of this test."""
    head = f"""
        import json, os, pathlib, sys, time
        from logitscope.wire import shared
        shared.folders = lambda: [pathlib.Path({str(shared.folders()[0])!r})]
    """
    command = [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(program), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


CLIENT = """
    import logitscope as ls
    engine = ls.open(sys.argv[1], shared_memory=True)
    if sys.argv[2] == "whole":
        rows = engine.logits(list(range(40)))
        print(rows.values.sum(), flush=True)
    else:
        stream = engine.stream(engine.requests([list(range(3000))]))
        block = next(stream)
        print(block.values.sum(), flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["whole", "stream"])
def test_a_client_that_is_killed_gives_everything_back(kind: str) -> None:
    limits = Limits(lent_bytes=1, shared_bytes=1 << 20, ahead_bytes=1 << 20)
    with serving(fake(vocab_size=VOCAB, block_rows=4), limits=limits) as address:
        for _ in range(3):
            with python(CLIENT, address, kind) as process:
                assert float(line(process)) != 0
                assert used() == 1
                process.kill()
                process.wait()
                until(lambda: used() == 0, 1)
        until(lambda: health(address)["buffered_bytes"] == 0)
        assert health(address)["segments"] == 1
        with opened(address) as engine:
            assert np.array_equal(engine.logits(IDS).values, fake_rows(IDS, VOCAB))


def test_a_connection_that_ends_before_the_client_attached() -> None:
    import http.client

    limits = Limits(lent_bytes=1, shared_bytes=1 << 20, ahead_bytes=1 << 20)
    with serving(fake(vocab_size=VOCAB, block_rows=4), limits=limits) as address:
        proof = shared.shown_proof(json.loads(_get(address, "/info"))["shared_memory"])
        assert proof is not None
        for tokens in (40, 3000):
            body = json.dumps({"requests": [{"token_ids": [1] * tokens}]})
            connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=30)
            headers = {"Content-Type": "application/json", shared.PROOF_HEADER: proof}
            connection.request("POST", "/rows", body, headers)
            assert connection.getresponse().read(200)
            until(lambda: used() == 1)
            time.sleep(0.2)
            assert used() == 1, "the client may still come"
            connection.close()
            until(lambda: used() == 0, 1)
        assert health(address)["segments"] <= 2


def _get(address: str, path: str) -> bytes:
    import urllib.request

    with urllib.request.urlopen(address + path, timeout=30) as answer:
        return bytes(answer.read())


def test_a_server_that_is_killed_leaves_its_clients_their_arrays() -> None:
    program = f"""
        from logitscope.engines.fake import FakeEngine
        from logitscope.server.runner import Limits
        from logitscope.server.serve import serve
        engine = FakeEngine.open("fake", vocab_size={VOCAB})
        serve(engine, port=0, limits=Limits(lent_bytes=1), ready=lambda a: print(a, flush=True))
    """
    with python(program) as process:
        address = line(process)
        until(lambda: _answers(address))
        with opened(address) as engine:
            rows = engine.logits(IDS)
            stream = engine.stream(engine.requests([[1] * 20_000]))
            block = next(stream)
            process.kill()
            process.wait()
            with pytest.raises((ConnectionFailedError, FileFormatError)):
                for _ in stream:
                    pass
        assert segment_of(rows.values)
        assert np.array_equal(rows.values, fake_rows(IDS, VOCAB))
        assert np.array_equal(block.values, fake_rows([1] * len(block), VOCAB))
        assert len(left()) >= 2
    with serving(fake(), limits=ALL):  # which sweeps
        assert [name.rsplit(".", 1)[1] for name in left()] == ["proof"]
    assert np.array_equal(rows.values, fake_rows(IDS, VOCAB))


def _answers(address: str) -> bool:
    try:
        return health(address)["status"] == "ok"  # type: ignore[no-any-return]
    except OSError:
        return False


def test_a_child_of_the_client_keeps_what_it_sees() -> None:
    """A process that was forked has the arrays, too: the segment is not used again before it ends."""
    program = """
        import logitscope as ls
        engine = ls.open(sys.argv[1], shared_memory=True)
        rows = engine.logits(list(range(40))).values
        if not os.fork():
            sys.stdin.readline()
            print(rows.sum(), flush=True)
            os._exit(0)
        print(rows.sum(), flush=True)
        del rows
        print("gone", flush=True)
        sys.stdin.close()
        os.wait()
    """
    with (
        serving(fake(vocab_size=VOCAB), limits=ALL) as address,
        python(program, address) as process,
        opened(address) as engine,
    ):
        before = line(process)
        assert line(process) == "gone"
        other = engine.logits([7, *IDS])
        assert health(address)["segments"] == 2
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert line(process) == before
        process.wait(30)
        del other
        until(lambda: used() == 0)


def test_the_exit_of_a_server_removes_everything() -> None:
    with serving(fake(vocab_size=VOCAB), limits=ALL) as address, opened(address) as engine:
        held = engine.logits(IDS)
        assert len(left()) == 2
    assert left() == []
    assert np.array_equal(held.values, fake_rows(IDS, VOCAB))
