"""Files: every bit comes back, every damage is seen, and a failed write leaves what was there."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import io
import json
import os
import pathlib
import pickle
import struct
import subprocess
import sys
import tempfile
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from typing import Any

import hypothesis.extra.numpy as arrays
import ml_dtypes
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import DTYPES, VOCAB, Words, identity, make_logits, random_values

from logitscope.errors import FileFormatError, OptionError, UnsupportedError
from logitscope.logits import Logits, LogitsBatch, load, save
from logitscope.logits.files import atomic_write
from logitscope.rows import SUMMARIES

SUFFIXES = [".npz", ".safetensors"]
SPECIAL = {
    "float32": (
        np.uint32,
        [0x7FC01234, 0xFF812345, 0x7F800000, 0xFF800000, 0x80000000, 0x00000001, 0x007FFFFF],
    ),
    "float16": (np.uint16, [0x7E12, 0xFD01, 0x7C00, 0xFC00, 0x8000, 0x0001, 0x03FF]),
    "bfloat16": (np.uint16, [0x7FC3, 0xFF81, 0x7F80, 0xFF80, 0x8000, 0x0001, 0x007F]),
}


def full(dtype: Any = np.float32, **changes: Any) -> Logits:
    """A result that holds one of everything."""
    logits = make_logits(4, 2, dtype)
    extras = {
        "summary": logits.summaries(),
        "hidden_states": {0: random_values(5, ml_dtypes.bfloat16, vocab=3), 11: random_values(5, vocab=3)},
        "attentions": {2: random_values(5, np.float16, vocab=10).reshape(5, 2, 5)},
        "stage": "processed",
        "encoding": np.dtype(dtype).name,
        "identity": identity(quantization="4 bit", tokenizer_hash=None),
    }
    return dataclasses.replace(logits, **{**extras, **changes})


def assert_equal(a: Logits | LogitsBatch, b: Logits | LogitsBatch) -> None:
    assert type(a) is type(b)
    for one, other in zip(*[[r] if isinstance(r, Logits) else list(r) for r in (a, b)], strict=True):
        for field in dataclasses.fields(Logits):
            x, y = getattr(one, field.name), getattr(other, field.name)
            if field.name == "vocabulary":
                continue
            if isinstance(x, np.ndarray):
                x, y = {"": x}, {"": y}
            if not isinstance(x, dict):
                assert x == y, field.name
                continue
            assert set(x) == set(y), field.name
            for name in x:
                assert x[name].dtype == y[name].dtype, (field.name, name)
                assert x[name].shape == y[name].shape, (field.name, name)
                assert x[name].tobytes() == y[name].tobytes(), (field.name, name)


@pytest.fixture(params=SUFFIXES)
def path(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / f"result{request.param}"


# -- every bit comes back ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_of_everything(path: pathlib.Path, dtype: Any) -> None:
    logits = full(dtype)
    logits.save(path)
    words = Words()
    found = load(path, vocabulary=words)
    assert_equal(found, logits)
    assert isinstance(found, Logits)
    assert found.vocabulary is words


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values(path: pathlib.Path, dtype: Any) -> None:
    """NaN payloads, infinities, -0.0 and subnormals."""
    codes, patterns = SPECIAL[dtype.name]
    values = np.resize(np.array(patterns, codes), (5, VOCAB)).view(dtype)
    logits = make_logits(
        4, 2, values=values, summary={"max": np.array([np.nan, np.inf, -0.0, 1e-42, 0], "f4")}
    )
    logits.save(path)
    assert_equal(load(path), logits)


@pytest.mark.parametrize("suffix", SUFFIXES)
@given(
    data=st.data(), dtype=st.sampled_from(DTYPES), lengths=st.lists(st.integers(1, 4), min_size=0, max_size=3)
)
@settings(max_examples=40)
def test_every_pattern_of_bits(suffix: str, data: st.DataObject, dtype: Any, lengths: list[int]) -> None:
    def drawn(length: int) -> Logits:
        codes = data.draw(arrays.arrays(f"u{dtype.itemsize}", (length, VOCAB)))
        return make_logits(length, 0, values=codes.view(dtype))

    result = LogitsBatch([drawn(n) for n in lengths]) if lengths else drawn(2)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, f"x{suffix}")
        save(result, path)
        assert_equal(load(path), result)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_ragged_batch(path: pathlib.Path, dtype: Any) -> None:
    batch = LogitsBatch([make_logits(n, m, dtype, seed=n) for n, m in ((4, 2), (1, 0), (3, 5))])
    batch.save(path)
    assert_equal(load(path), batch)


def test_a_batch_of_eleven_keeps_its_order(path: pathlib.Path) -> None:
    batch = LogitsBatch([make_logits(2, 0, seed=i) for i in range(11)])
    batch.save(path)
    assert_equal(load(path), batch)


def test_an_even_batch_is_one_block_again(path: pathlib.Path) -> None:
    LogitsBatch([make_logits(3, 0, ml_dtypes.bfloat16, seed=i) for i in range(3)]).save(path)
    batch = load(path)
    assert batch.to_numpy().ctypes.data == batch[0].values.ctypes.data


@pytest.mark.parametrize("part", ["generated", "reversed", "columns", "empty", "summaries"])
def test_parts_and_views(path: pathlib.Path, part: str) -> None:
    whole = full()
    logits = {
        "generated": whole.generated,
        "reversed": whole[::-1],
        "columns": dataclasses.replace(whole, values=random_values(5, vocab=2 * VOCAB)[:, ::2]),
        "empty": whole[:0],
        "summaries": dataclasses.replace(whole, values=None),
    }[part]
    logits.save(path)
    assert_equal(load(path), logits)


def test_foreign_byte_order_and_device_rows(path: pathlib.Path) -> None:
    torch = pytest.importorskip("torch")
    logits = make_logits(4, 2)
    dataclasses.replace(logits, values=logits.values.astype(">f4")).save(path)
    assert_equal(load(path), logits)
    dataclasses.replace(logits, values=torch.from_numpy(logits.values)).save(path)
    assert_equal(load(path), logits)


def test_other_readers_can_read_them(tmp_path: pathlib.Path) -> None:
    logits = full(ml_dtypes.bfloat16)
    logits.save(tmp_path / "x.npz")
    with np.load(tmp_path / "x.npz", allow_pickle=False) as archive:
        np.testing.assert_array_equal(archive["logits"], logits.values.view(np.uint16))
        np.testing.assert_array_equal(archive["summary.entropy"], logits.entropy())
        assert json.loads(archive["metadata.json"])["arrays"]["logits"]["dtype"] == "bfloat16"
    safetensors = pytest.importorskip("safetensors.torch")
    logits.save(tmp_path / "x.safetensors")
    tensors = safetensors.load_file(tmp_path / "x.safetensors")
    assert tensors["logits"].equal(logits.to_torch())
    assert set(tensors) == {
        "logits",
        "positions",
        "token_ids",
        "hidden_states.0",
        "hidden_states.11",
        "attentions.2",
        *[f"summary.{name}" for name in SUMMARIES],
    }


def test_the_data_of_a_safetensors_file_is_aligned(tmp_path: pathlib.Path) -> None:
    full().save(tmp_path / "x.safetensors")
    raw = (tmp_path / "x.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    assert (8 + length) % 64 == 0
    for name, entry in json.loads(raw[8 : 8 + length]).items():
        if name != "__metadata__":
            size = {"F32": 4, "I32": 4, "I64": 8, "F16": 2, "BF16": 2}[entry["dtype"]]
            assert entry["data_offsets"][0] % size == 0, name


def test_equal_results_give_equal_files(path: pathlib.Path) -> None:
    full().save(path)
    first = path.read_bytes()
    full().save(path)
    assert path.read_bytes() == first


def test_large_arrays_are_written_without_a_second_copy(path: pathlib.Path) -> None:
    values = np.zeros((32, 1_000_000), np.float32)
    logits = make_logits(32, 0, vocab=1_000_000, values=values, token_ids=np.zeros(32, np.int32))
    for result in (logits, logits[::-1], LogitsBatch([logits])):
        tracemalloc.start()
        save(result, path)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 40_000_000  # two pieces of 16 MiB, of 128 MB


# -- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x.npy", "x", "x.NPZ.txt"])
def test_other_suffixes(tmp_path: pathlib.Path, name: str) -> None:
    with pytest.raises(OptionError, match=r"\.npz or \.safetensors"):
        make_logits().save(tmp_path / name)
    with pytest.raises(OptionError, match=r"\.npz or \.safetensors"):
        load(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_other_dtypes(path: pathlib.Path) -> None:
    with pytest.raises(UnsupportedError, match=r"hidden_states\.0"):
        make_logits(4, 2, hidden_states={0: np.zeros((5, 2), np.complex64)}).save(path)
    assert not list(path.parent.iterdir())


def test_no_such_file(path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(path)


class Unsafe:
    """What must not happen when a file is read."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, ("it-was-unpickled",)


def foreign_files() -> dict[str, bytes]:
    npz, objects = io.BytesIO(), io.BytesIO()
    np.savez(npz, logits=np.zeros(3))
    np.savez(objects, logits=np.array([Unsafe()], dtype=object))
    header = json.dumps({"logits": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return {
        "nothing": b"",
        "text": b"position,token\n0,The\n",
        "zeros": bytes(4096),
        "a pickle": pickle.dumps(Unsafe()),
        "another npz": npz.getvalue(),
        "an npz of objects": objects.getvalue(),
        "another safetensors": struct.pack("<Q", len(header)) + header + bytes(4),
        "a list": struct.pack("<Q", 2) + b"[]",
        "a huge header": struct.pack("<Q", 2**63) + b"{}",
        "deep": struct.pack("<Q", 20_000) + b"[" * 20_000,
        "metadata of another kind": struct.pack("<Q", 19) + b'{"__metadata__": 3}',
    }


@pytest.mark.parametrize("name", foreign_files())
def test_foreign_files(path: pathlib.Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(foreign_files()[name])
    monkeypatch.chdir(path.parent)
    with pytest.raises(FileFormatError, match=path.name):
        load(path)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def rewritten(path: pathlib.Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a file's metadata as a forger would: with checksums of the metadata that are right again."""
    if path.suffix == ".npz":
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        metadata = json.loads(members["metadata.json"])
        change(metadata)
        members["metadata.json"] = json.dumps(metadata).encode()
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in members.items():
                archive.writestr(name, data)
        return
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    metadata = json.loads(header["__metadata__"]["logitscope.logits"])
    change(metadata)
    text = json.dumps(metadata)
    header["__metadata__"] = {"logitscope.logits": text, "xxh3": xxhash.xxh3_64_hexdigest(text.encode())}
    for name, entry in metadata["arrays"].items() if isinstance(metadata.get("arrays"), dict) else ():
        if name in header:
            header[name]["shape"] = entry["shape"]
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def test_a_file_of_a_newer_version(path: pathlib.Path) -> None:
    make_logits().save(path)
    rewritten(path, lambda metadata: metadata.update(format_version=2, shards=[]))
    with pytest.raises(FileFormatError, match=r"written by a newer logitscope.*got 2\. Update logitscope"):
        load(path)


def set_in(*keys: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(metadata: dict[str, Any]) -> None:
        for key in keys[:-1]:
            metadata = metadata[key]
        metadata[keys[-1]] = to

    return change


@pytest.mark.parametrize(
    "change",
    [
        set_in("format", to="logitscope.store"),
        set_in("format_version", to="1"),
        set_in("identity", to={"model": "tiny"}),
        set_in("identity", to=None),
        set_in("identity", "vocab_size", to=VOCAB + 1),
        set_in("identity", "shell", to="rm"),
        set_in("prompt_lengths", to=[99]),
        set_in("prompt_lengths", to=3),
        set_in("prompt_lengths", to=["4"]),
        set_in("batch", to=True),
        set_in("arrays", to=[]),
        set_in("arrays", to={}),
        set_in("arrays", "logits", "dtype", to="float16"),
        set_in("arrays", "logits", "dtype", to="object"),
        set_in("arrays", "logits", "shape", to=[-1, VOCAB]),
        set_in("arrays", "logits", "shape", to=[2**40, 2**40]),
        set_in("arrays", "logits", "shape", to=[VOCAB, 7]),
        set_in("arrays", "logits", "shape", to="77"),
        set_in("arrays", "logits", "xxh3", to="0" * 16),
        set_in("arrays", "more", to={"dtype": "int32", "shape": [0], "xxh3": "0"}),
    ],
)
def test_forged_metadata(path: pathlib.Path, change: Callable[[dict[str, Any]], None]) -> None:
    make_logits(5, 3).save(path)
    assert isinstance(load(path), Logits)
    rewritten(path, change)
    with pytest.raises(FileFormatError, match=path.name):
        load(path)


def test_a_file_cut_short_anywhere(path: pathlib.Path) -> None:
    full().save(path)
    whole = path.read_bytes()
    for length in {*range(0, len(whole), 61), *range(len(whole) - 40, len(whole)), *range(80)}:
        path.write_bytes(whole[:length])
        with pytest.raises(FileFormatError, match=path.name):
            load(path)


def test_bytes_after_the_end(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.safetensors"
    full().save(path)
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(FileFormatError, match=path.name):
        load(path)


@functools.cache
def saved(suffix: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, f"x{suffix}")
        full().save(path)
        return path.read_bytes()


def load_flipped(suffix: str, data: st.DataObject) -> Logits | LogitsBatch:
    raw = bytearray(saved(suffix))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, f"x{suffix}")
        path.write_bytes(raw)
        return load(path)


@given(data=st.data())
@settings(max_examples=300)
def test_a_flipped_bit_is_seen(data: st.DataObject) -> None:
    with pytest.raises(FileFormatError, match=r"x\.safetensors"):
        load_flipped(".safetensors", data)


@given(data=st.data())
@settings(max_examples=300)
def test_a_flipped_bit_of_an_archive_changes_nothing_or_is_seen(data: st.DataObject) -> None:
    """Some bits no reader needs, as the time of a file in the archive."""
    with contextlib.suppress(FileFormatError):
        assert_equal(load_flipped(".npz", data), full())


@pytest.mark.parametrize("name", ["logits", "positions", "token_ids", "summary.entropy", "hidden_states.0"])
def test_the_damaged_array_is_named(tmp_path: pathlib.Path, name: str) -> None:
    path = tmp_path / "x.safetensors"
    full().save(path)
    raw = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", raw[:8])
    start, end = json.loads(raw[8 : 8 + length])[name]["data_offsets"]
    raw[8 + length + (start + end) // 2] ^= 16
    path.write_bytes(raw)
    with pytest.raises(
        FileFormatError, match=f"x.safetensors: the file is damaged; expected checksum .* of {name}"
    ):
        load(path)


# -- a failed write ----------------------------------------------------------------------------------------


class FailingFile(io.BufferedWriter):
    """A file whose write fails after so many bytes."""

    left = 0
    error: type[BaseException] = OSError

    def write(self, data: Any) -> int:
        self.left -= memoryview(data).nbytes
        if self.left < 0:
            raise self.error(errno.ENOSPC, "No space left on device")
        return super().write(data)


def fail_after(monkeypatch: pytest.MonkeyPatch, count: int, error: type[BaseException]) -> None:
    original = pathlib.Path.open

    def opened(self: pathlib.Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if "x" not in mode:
            return original(self, mode, *args, **options)
        file = FailingFile(io.FileIO(self, mode))
        file.left, file.error = count, error
        return file

    monkeypatch.setattr(pathlib.Path, "open", opened)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("before", ["a file", "nothing"])
@pytest.mark.parametrize("count", [0, 7, 8, 100, 1500, 2000, 3000])
def test_a_write_that_fails_leaves_what_was_there(
    path: pathlib.Path, count: int, before: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = make_logits(2, 0)
    if before == "a file":
        old.save(path)
    fail_after(monkeypatch, count, error)
    with pytest.raises(error):
        full().save(path)
    monkeypatch.undo()
    assert [p.name for p in path.parent.iterdir()] == ([path.name] if before == "a file" else [])
    if before == "a file":
        assert_equal(load(path), old)
    full().save(path)
    assert_equal(load(path), full())


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_failing_to_sync_or_to_rename(path: pathlib.Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old = make_logits(2, 0)
    old.save(path)

    def full_disk(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, step, full_disk)
    monkeypatch.setattr(pathlib.Path, "replace", full_disk if step == "replace" else pathlib.Path.replace)
    with pytest.raises(OSError, match="No space left"):
        full().save(path)
    monkeypatch.undo()
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert_equal(load(path), old)


def test_the_system_refusing_to_write_more(path: pathlib.Path) -> None:
    """A real short write: the system's own limit on the size of a file."""
    old = make_logits(2, 0)
    old.save(path)
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    logits = make_logits(40, 0, vocab=1000)
    for limit in (1, 1000, 50_000, 150_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                logits.save(path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert [p.name for p in path.parent.iterdir()] == [path.name]
        assert_equal(load(path), old)


def test_a_file_appears_only_when_it_is_complete(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "page.html"
    with atomic_write(path) as file:
        file.write(b"half")
        assert not path.exists()
        file.write(b"whole")
    assert path.read_bytes() == b"halfwhole"
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_a_folder_that_does_not_exist(path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError):
        make_logits().save(path.parent / "missing" / path.name)


SAVE_FOREVER = """
import sys
sys.path[:0] = sys.argv[2:]
from samples import make_logits
big, small = make_logits(200, 0, vocab=2000), make_logits(3, 0)
while True:
    big.save(sys.argv[1])
    print("saved", flush=True)
    small.save(sys.argv[1])
"""


def test_a_process_killed_while_it_writes_leaves_a_whole_file(path: pathlib.Path) -> None:
    for delay_s in (0.0, 0.002, 0.007, 0.02):
        arguments = [sys.executable, "-c", SAVE_FOREVER, str(path), *sys.path]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"saved\n"
            time.sleep(delay_s)
            process.kill()
        found = load(path)
        assert_equal(found, make_logits(200, 0, vocab=2000) if len(found) == 200 else make_logits(3, 0))
