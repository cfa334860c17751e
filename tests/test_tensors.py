"""Hand-over to other libraries: same bits, same memory where promised, and alive as long as it is held."""

from __future__ import annotations

import gc
import pathlib
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hypothesis.extra.numpy as arrays
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from samples import DTYPES, make_logits, random_values

from logitscope import tensors
from logitscope.errors import MissingDependencyError, OutOfMemoryError

LIBRARIES = ["torch", "jax", "tensorflow"]
HAND_OVER = {"torch": tensors.to_torch, "jax": tensors.to_jax, "tensorflow": tensors.to_tensorflow}


def aligned(dtype: Any, shape: tuple[int, ...] = (6, 8), offset_bytes: int = 0) -> NDArray[Any]:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = tensors.empty((size + offset_bytes,), np.uint8)
    array: NDArray[Any] = raw[offset_bytes:].view(dtype).reshape(shape)
    array[...] = random_values(shape[0], vocab=shape[1]).astype(dtype)
    return array


def hand_over(library: str, values: Any) -> Any:
    pytest.importorskip(library)
    return HAND_OVER[library](values)


def address(tensor: Any) -> int:
    """Where a library's tensor lies."""
    if hasattr(tensor, "data_ptr"):
        return int(tensor.data_ptr())
    if hasattr(tensor, "unsafe_buffer_pointer"):
        return int(tensor.unsafe_buffer_pointer())
    torch = pytest.importorskip("torch")
    return int(torch.from_dlpack(tensor).data_ptr())


def bits(values: Any) -> bytes:
    if type(values).__module__.startswith("tensorflow"):
        values = values.numpy()
    array = tensors.to_numpy(values)
    return array.tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("library", LIBRARIES)
def test_memory_is_shared_and_bits_are_equal(library: str, dtype: Any) -> None:
    array = aligned(dtype)
    tensor = hand_over(library, array)
    assert str(dtype) in str(tensor.dtype)
    assert tuple(tensor.shape) == array.shape
    assert bits(tensor) == array.tobytes()
    assert address(tensor) == array.ctypes.data


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("form", ["unaligned", "strided", "read-only", "reversed", "empty"])
def test_what_cannot_be_shared_is_copied(library: str, dtype: Any, form: str) -> None:
    array = {
        "unaligned": aligned(dtype, offset_bytes=4),
        "strided": aligned(dtype)[:, 1:5],
        "read-only": aligned(dtype),
        "reversed": aligned(dtype)[::-1],
        "empty": aligned(dtype)[:0],
    }[form]
    array.flags.writeable = form != "read-only"
    tensor = hand_over(library, array)
    assert tuple(tensor.shape) == array.shape
    assert bits(tensor) == array.tobytes()
    if form in ("read-only", "reversed"):
        assert address(tensor) != array.ctypes.data


def test_tensorflow_computes_on_rows_that_are_not_aligned() -> None:
    tensorflow = pytest.importorskip("tensorflow")
    array = aligned(np.float32, (6, 13))[1:]
    tensor = tensors.to_tensorflow(array)
    np.testing.assert_allclose(
        tensorflow.reduce_sum(tensor[1:, 3:], 1).numpy(), array[1:, 3:].sum(1), rtol=1e-5
    )


def test_torch_does_not_write_into_a_read_only_array() -> None:
    pytest.importorskip("torch")
    array = aligned(np.float32)
    before = array.copy()
    array.flags.writeable = False
    tensors.to_torch(array).zero_()
    np.testing.assert_array_equal(array, before)


@pytest.mark.parametrize("library", LIBRARIES)
def test_foreign_byte_order_keeps_the_values(library: str) -> None:
    array = aligned(np.float32)
    assert bits(hand_over(library, array.astype(">f4"))) == array.astype("<f4").tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_tensor_keeps_the_buffer_alive(library: str, dtype: Any) -> None:
    logits = make_logits(400, 0, dtype, vocab=512, values=aligned(dtype, (400, 512)))
    before = logits.to_numpy().tobytes()
    tensor = hand_over(library, logits.values)
    del logits
    gc.collect()
    poison = [np.full((400, 512), 7, dtype) for _ in range(8)]
    assert bits(tensor) == before
    del poison


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_torch_tensor_goes_to_numpy_by_its_memory(dtype: Any) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.randn(4, 6).to(getattr(torch, dtype.name)).requires_grad_()
    array = tensors.to_numpy(tensor)
    assert array.dtype == dtype
    assert array.ctypes.data == tensor.data_ptr()
    assert tensors.to_torch(tensor) is tensor
    assert bits(tensors.to_torch(array)) == array.tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("library", ["jax", "tensorflow"])
def test_a_torch_tensor_goes_to_others_by_its_memory(library: str, dtype: Any) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.randn(64, 64).to(getattr(torch, dtype.name))
    other = hand_over(library, tensor)
    assert address(other) == tensor.data_ptr()
    assert bits(other) == bits(tensor)


@given(arrays.arrays(np.uint16, arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)))
def test_every_bfloat16_pattern_survives_every_shape(codes: NDArray[np.uint16]) -> None:
    pytest.importorskip("torch")
    array = codes.view(ml_dtypes.bfloat16)
    there = tensors.to_torch(array)
    assert there.shape == array.shape
    assert tensors.to_numpy(there).tobytes() == codes.tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("max_version", [None, (1, 0)])
def test_dlpack_shares_memory(dtype: Any, max_version: tuple[int, int] | None) -> None:
    torch = pytest.importorskip("torch")
    array = aligned(dtype)
    tensor = torch.utils.dlpack.from_dlpack(tensors.dlpack(array, max_version=max_version))
    assert tensor.dtype == getattr(torch, dtype.name)
    assert tensor.data_ptr() == array.ctypes.data
    assert bits(tensor) == array.tobytes()


def test_dlpack_of_a_tensor_and_the_device() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    assert torch.utils.dlpack.from_dlpack(tensors.dlpack(tensor)).data_ptr() == tensor.data_ptr()
    assert tensors.dlpack_device(tensor) == tensors.dlpack_device(aligned(np.float32)) == (1, 0)
    assert tensors.dlpack_device(aligned(ml_dtypes.bfloat16)) == (1, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dlpack_copies_only_when_asked(dtype: Any) -> None:
    torch = pytest.importorskip("torch")
    array = aligned(dtype)
    copied = torch.utils.dlpack.from_dlpack(tensors.dlpack(array, max_version=(1, 0), copy=True))
    assert copied.data_ptr() != array.ctypes.data
    assert bits(copied) == array.tobytes()
    array.flags.writeable = False
    with pytest.raises(BufferError):
        tensors.dlpack(array)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrow_shares_memory(dtype: Any) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    array = aligned(dtype)
    field, lists = tensors.to_arrow(array, "logits")
    assert lists.flatten().buffers()[1].address == array.ctypes.data
    assert field.metadata == {b"dtype": dtype.name.encode()}
    assert field.type == lists.type
    assert lists.type.list_size == array.shape[1]
    assert len(lists) == len(array)
    if dtype == ml_dtypes.bfloat16:
        assert lists.type.value_type == pyarrow.uint16()
    assert lists.flatten().to_numpy().tobytes() == array.tobytes()


@given(st.tuples(st.integers(0, 5), st.integers(0, 70)), st.sampled_from(DTYPES))
def test_fresh_arrays_lie_where_every_library_can_share_them(shape: tuple[int, int], dtype: Any) -> None:
    array = tensors.empty(shape, dtype)
    assert array.shape == shape
    assert array.dtype == dtype
    assert not array.size or array.ctypes.data % 64 == 0
    assert array.flags.c_contiguous
    assert array.flags.writeable


@pytest.mark.parametrize("size", [2**50, 2**62, 2**70])
def test_an_array_that_is_too_large_is_a_named_error(size: int) -> None:
    with pytest.raises(OutOfMemoryError, match=f"float32.*got {4 * size:,} bytes") as found:
        tensors.empty((1, size), np.float32)
    assert isinstance(found.value, MemoryError)


def test_a_large_array_is_zero_cost_until_it_is_touched_and_shared_by_every_library() -> None:
    array = tensors.empty((2**12, 2**20), np.float32)  # 17 GB, of which one row is written
    array[7] = 1
    assert array.ctypes.data % 64 == 0
    assert array.flags.writeable
    assert tensors.to_torch(array)[7].sum() == 2**20


@pytest.mark.parametrize("library", [*LIBRARIES, "pyarrow"])
def test_a_missing_library_is_named(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    convert: Any = {**HAND_OVER, "pyarrow": lambda values: tensors.to_arrow(values, "logits")}[library]
    with pytest.raises(MissingDependencyError, match=f"{library} is not installed.*pip install {library}"):
        convert(aligned(np.float32))


def test_a_broken_library_says_so_itself(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_broken_library.py").write_text("import a_part_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_part_that_is_missing") as caught:
        tensors.require("a_broken_library")
    assert not isinstance(caught.value, MissingDependencyError)


# -- memory that is used again -----------------------------------------------------------------------------


def test_large_memory_is_used_again_and_only_when_nothing_sees_it() -> None:
    size = 8 * 2**20
    one = tensors.empty((size,), np.uint8)
    one[:] = 7
    address, part = one.ctypes.data, one[3:5]
    assert address % (2 * 2**20) == 0
    del one
    other = tensors.empty((size,), np.uint8)
    assert other.ctypes.data != address
    other[:] = 8
    assert part.tolist() == [7, 7]
    del part
    again = tensors.empty((size // 4,), np.float32)
    assert again.ctypes.data == address
    again[:] = 0
    assert (other == 8).all()


def test_kept_memory_is_bounded_and_given_up_for_what_is_larger() -> None:
    pages = tensors._Pages(kept_bytes=32 * 2**20)
    arrays = [pages.array(size * 2**20) for size in (8, 8, 8, 8, 40)]
    del arrays
    gc.collect()
    assert 0 < sum(map(len, pages._free)) <= 32 * 2**20
    kept = len(pages._free)
    small = pages.array(2 * 2**20)
    assert len(pages._free) == kept, "memory that is much too large is left for others"
    del small


def test_memory_is_used_again_by_many_threads() -> None:
    def work(seed: int) -> None:
        for i in range(30):
            array = tensors.empty((5 * 2**20 + seed,), np.uint8)
            array[::4096] = seed
            assert (array[::4096] == seed).all(), i

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
