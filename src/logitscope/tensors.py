"""Hand-over of one host array or torch tensor to NumPy, PyTorch, JAX, TensorFlow, DLPack and Arrow.

Memory is shared, bfloat16 included, unless this table says copy:

=============  ==============================================================================
NumPy          a tensor on an accelerator is copied to the host
PyTorch        copy of a read-only array (PyTorch has no read-only tensors), of one with
               negative strides or foreign byte order
JAX            copy unless contiguous, writable, and at an address that is a multiple of 64
TensorFlow     as JAX: TensorFlow ends the process when it meets an unaligned tensor
DLPack         never a copy (unless the consumer asks for one); else BufferError
Arrow          copy unless contiguous
=============  ==============================================================================

A tensor handed over keeps the buffer alive. JAX and TensorFlow take their arrays for constant: after a
hand-over to them, do not write to the values. Libraries are imported by the function for that library.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import mmap
import sys
import weakref
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from logitscope.errors import MissingDependencyError, OutOfMemoryError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ALIGNMENT_BYTES = 64
"""What JAX and TensorFlow want of an address to share it."""

# From this size on arrays lie on huge pages: writing 200 MB into a new one takes 25 ms and not 105 as with
# ordinary ones. Memory that a virtual machine must first get from its host takes 300 to 650 ms, so what was
# used once is kept for the next array.
_MAPPED_BYTES = 4 * 2**20
_HUGE_PAGE_BYTES = 2 * 2**20
_KEPT_BYTES = 256 * 2**20
_DLPACK_BFLOAT16 = 4
_VERSIONED = b"dltensor_versioned"
_UNVERSIONED = b"dltensor"
# Source: DLPack 1.0, dlpack.h: DLTensor is {data, device, ndim, dtype.code, ...}; DLManagedTensor begins
# with it, DLManagedTensorVersioned has {version, manager_ctx, deleter, flags} before it.
_CODE_OFFSET = {_UNVERSIONED: 20, _VERSIONED: 32 + 20}


def empty(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """An uninitialized array ``shape`` at an address that every library can share.

    Raises:
        OutOfMemoryError: the system does not give so much.
    """
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    try:
        if sys.platform == "linux" and size >= _MAPPED_BYTES:
            return _pages.array(size).view(kind).reshape(shape)
        raw = np.empty(size + ALIGNMENT_BYTES, np.uint8)
    except (OSError, OverflowError, ValueError, MemoryError) as error:
        raise OutOfMemoryError(
            "the system does not give the memory for an array",
            where=f"{list(shape)} {kind}",
            got=f"{size:,} bytes asked",
        ) from error
    start = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[start : start + size].view(kind).reshape(shape)


class _Pages:
    """Large memory, used again when the last array over it is gone; so much of it is kept."""

    def __init__(self, kept_bytes: int) -> None:
        self.kept_bytes = kept_bytes
        self._free: list[mmap.mmap] = []

    def array(self, size: int) -> NDArray[np.uint8]:
        """Uninitialized bytes, at the beginning of a huge page."""
        pages = self._taken(size)
        owner = (ctypes.c_uint8 * len(pages)).from_buffer(pages)
        weakref.finalize(owner, self._give, pages).atexit = False
        start = -ctypes.addressof(owner) % _HUGE_PAGE_BYTES
        return np.frombuffer(memoryview(owner), np.uint8, size, start)

    def _taken(self, size: int) -> mmap.mmap:
        needed = size + _HUGE_PAGE_BYTES
        for pages in sorted(self._free, key=len):
            if needed <= len(pages) <= 2 * needed:
                with contextlib.suppress(ValueError):  # another thread was faster
                    self._free.remove(pages)
                    return pages
        try:
            pages = self._new(needed)
        except OSError:
            self._free.clear()
            pages = self._new(needed)
        return pages

    def _new(self, size: int) -> mmap.mmap:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
        return pages

    def _give(self, pages: mmap.mmap) -> None:
        """Keep the newest; runs wherever an array goes, so it takes no lock."""
        if len(pages) > self.kept_bytes:
            return
        self._free.append(pages)
        while sum(map(len, tuple(self._free))) > self.kept_bytes:
            self._free.pop(0)


_pages = _Pages(_KEPT_BYTES)


def is_torch(values: object) -> bool:
    """Whether it is a torch tensor; torch is not imported for the question."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(values, torch.Tensor)


def require(module: str, package: str | None = None) -> Any:
    """The imported optional module.

    Raises:
        MissingDependencyError: its library is not installed. A library that is installed but lacks a
            part of its own raises its own error.
    """
    library = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != library:
            raise
        raise MissingDependencyError(
            f"{library} is not installed", fix=f"Run: pip install {package or library}"
        ) from None


def to_numpy(values: Any) -> NDArray[Any]:
    """The values as a host array of the same dtype; shared unless they lie on an accelerator."""
    if not is_torch(values):
        return np.asarray(values)
    torch = require("torch")
    host = values.detach().cpu()
    if host.dtype == torch.bfloat16:
        return host.view(torch.int16).numpy().view(BFLOAT16)  # type: ignore[no-any-return]
    return host.numpy()  # type: ignore[no-any-return]


def to_torch(values: Any) -> Any:
    """The values as a torch tensor of the same dtype; a tensor comes back as it is, on its device.

    Raises:
        MissingDependencyError: PyTorch is not installed.
    """
    torch = require("torch")
    if is_torch(values):
        return values
    array = values
    if not array.flags.writeable or min(array.strides, default=0) < 0 or not array.dtype.isnative:
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_jax(values: Any) -> Any:
    """The values as a JAX array of the same dtype.

    Raises:
        MissingDependencyError: JAX is not installed.
    """
    jax = require("jax")
    if is_torch(values) and values.is_cuda and jax.default_backend() == "gpu":
        return jax.numpy.from_dlpack(values.detach().contiguous())
    return jax.numpy.from_dlpack(_Exporter(_shareable(to_numpy(values))))


def to_tensorflow(values: Any) -> Any:
    """The values as a TensorFlow tensor of the same dtype.

    Raises:
        MissingDependencyError: TensorFlow is not installed.
    """
    tensorflow = require("tensorflow")
    from_dlpack = tensorflow.experimental.dlpack.from_dlpack
    if is_torch(values) and values.is_cuda and tensorflow.config.list_physical_devices("GPU"):
        return from_dlpack(dlpack(values.detach().contiguous()))
    return from_dlpack(dlpack(_shareable(to_numpy(values))))


def to_arrow(values: Any, name: str) -> tuple[Any, Any]:
    """A pyarrow field and its array: FixedSizeList over the rows of ``[rows, vocab]``.

    Arrow has no bfloat16: those are ``uint16`` codes, and the field's metadata says
    ``{"dtype": "bfloat16"}``.

    Raises:
        MissingDependencyError: pyarrow is not installed.
    """
    pyarrow = require("pyarrow")
    rows = np.ascontiguousarray(to_numpy(values))
    codes = rows.view(np.uint16) if rows.dtype == BFLOAT16 else rows
    item = pyarrow.from_numpy_dtype(codes.dtype)
    buffer = pyarrow.py_buffer(codes.reshape(-1).view(np.uint8))
    flat = pyarrow.Array.from_buffers(item, codes.size, [None, buffer])
    kind = pyarrow.list_(pyarrow.field("item", item, nullable=False), rows.shape[1])
    lists = pyarrow.FixedSizeListArray.from_arrays(flat, type=kind)
    return pyarrow.field(name, kind, nullable=False, metadata={"dtype": rows.dtype.name}), lists


def lists_to_arrow(entries: Any) -> dict[str, Any]:
    """Entries of rows as Arrow lists, one a row: ``kept_ids``, ``logits``, and ``counts`` where drawn."""
    pyarrow = require("pyarrow")
    offsets = pyarrow.array(np.concatenate([[0], np.cumsum(entries.lengths)]).astype(np.int32))
    values = entries.values
    values = values.astype(np.float32) if values.dtype == BFLOAT16 else values
    columns = {"kept_ids": entries.ids, "logits": values, "counts": entries.counts}
    return {
        name: pyarrow.ListArray.from_arrays(offsets, pyarrow.array(array))
        for name, array in columns.items()
        if array is not None
    }


def dlpack(
    values: Any,
    *,
    stream: Any = None,
    max_version: tuple[int, int] | None = None,
    dl_device: tuple[int, int] | None = None,
    copy: bool | None = None,
) -> Any:
    """A DLPack capsule over the values; arguments as in the array API's ``__dlpack__``.

    Raises:
        BufferError: the consumer's wishes cannot be met (a copy forbidden, a read-only array for a
            consumer that knows no such flag).
    """
    if is_torch(values):
        tensor = values.detach()
        return tensor.__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)
    if values.dtype != BFLOAT16:
        return values.__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)
    codes = values.view(np.uint16)
    capsule = codes.__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)
    return _named_bfloat16(capsule)


def dlpack_device(values: Any) -> tuple[int, int]:
    """Kind and number of the device that holds the values, in DLPack's numbers (1 is the CPU)."""
    kind, number = values.__dlpack_device__()
    return int(kind), int(number)


class _Exporter:
    """An array as an object with the DLPack protocol; NumPy's own refuses bfloat16."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        return dlpack(self._array, stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack_device(self._array)


def _shareable(array: NDArray[Any]) -> NDArray[Any]:
    flags = array.flags
    aligned = array.ctypes.data % ALIGNMENT_BYTES == 0
    if aligned and flags.c_contiguous and flags.writeable and array.dtype.isnative:
        return array
    copied = empty(array.shape, array.dtype.newbyteorder("="))
    copied[...] = array
    return copied


def _named_bfloat16(capsule: Any) -> Any:
    """The same capsule of 16-bit unsigned integers, its type code changed to bfloat16."""
    api = ctypes.pythonapi
    api.PyCapsule_IsValid.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    name = _VERSIONED if api.PyCapsule_IsValid(capsule, _VERSIONED) else _UNVERSIONED
    address = api.PyCapsule_GetPointer(capsule, name)
    ctypes.c_uint8.from_address(address + _CODE_OFFSET[name]).value = _DLPACK_BFLOAT16
    return capsule
