"""One `Logits` or `LogitsBatch` as a file: ``.npz`` or ``.safetensors``, bit for bit.

Both hold the same arrays, little-endian: ``logits``, ``positions``, ``token_ids``, ``summary.NAME``,
``hidden_states.LAYER`` and ``attentions.LAYER``. Rows of which only some columns were kept have
``kept.values`` and ``kept.ids`` in place of ``logits``, with ``kept.lengths`` when each row has its own,
and ``kept.counts`` when they were drawn. Quantized rows come as ``codes`` in place of ``logits``,
with the formula that decodes them in the metadata; hidden rows as ``hidden``, with the head as
``head.weight`` and ``head.bias``, once, and with ``residual`` where every machine is to rebuild the same
bits. In a batch each but the head's begins with the member's number,
as in ``0.logits``. The metadata is JSON: format, version, identity, stage, encoding, prompt lengths,
verifications, and dtype, shape and XXH3 checksum of each array. An ``.npz`` holds it as
``metadata.json``, and bfloat16 as ``uint16`` codes; a ``.safetensors`` holds it, with a checksum of its
own, in ``__metadata__``. Other readers of these formats can read both. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from io import BufferedReader
from os import PathLike
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from logitscope import tensors
from logitscope.encodings import (
    EncodedRows,
    ExactRows,
    HiddenRows,
    QuantizedRows,
    Residual,
    RowHead,
    encoding,
)
from logitscope.errors import (
    FileFormatError,
    IdentityMismatchError,
    MissingDependencyError,
    OptionError,
    UnsupportedError,
)
from logitscope.logits.batch import LogitsBatch
from logitscope.logits.cut import CutRows
from logitscope.logits.sequence import Logits
from logitscope.rows import Identity, Verification, Vocabulary

if TYPE_CHECKING:
    from logitscope.head import Head

FORMAT = "logitscope.logits"
FORMAT_VERSION = 1

_PIECE_BYTES = 1 << 24
_HEADER_LIMIT_BYTES = 100_000_000
_METADATA_FILE = "metadata.json"
_STORED = {
    "float64": "<f8",
    "int64": "<i8",
    "float32": "<f4",
    "int32": "<i4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "uint16": "<u2",
    "uint8": "|u1",
}
_TAGS = {
    "float64": "F64",
    "int64": "I64",
    "float32": "F32",
    "int32": "I32",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint16": "U16",
    "uint8": "U8",
}
# What the standard library and NumPy raise on bytes that are no such file.
_MALFORMED = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    RecursionError,
    NotImplementedError,
    RuntimeError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)


def save(result: Logits | LogitsBatch, path: str | PathLike[str], *, exact: bool = False) -> None:
    """Write a result to ``.npz`` or ``.safetensors``, by the suffix.

    The file appears whole or not at all; a file that was there before is replaced only then.

    Args:
        result: to write.
        path: of the file.
        exact: add to hidden rows what other machines need to rebuild the same bits as this one.

    Raises:
        OptionError: another suffix.
        UnsupportedError: an array of a dtype that the format does not know.
        OSError: the file cannot be written.
    """
    target = Path(path)
    write, _ = _handlers(target)
    members = list(result) if isinstance(result, LogitsBatch) else [result]
    arrays: dict[str, NDArray[Any]] = {}
    for i, member in enumerate(members):
        prefix = f"{i}." if isinstance(result, LogitsBatch) else ""
        arrays.update(_arrays(member, prefix))
        if isinstance(member.values, HiddenRows) and exact:
            residual = Residual.of(member.values)
            arrays |= {prefix + "residual": residual.data, prefix + "residual_ends": residual.ends}
    head = _head(members)
    if head is not None:
        arrays |= {f"head.{name}": array for name, array in head.arrays().items()}
    arrays = dict(sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize))
    metadata = _metadata(members, arrays, batch=isinstance(result, LogitsBatch))
    kind = members[0].values
    if isinstance(kind, QuantizedRows):
        metadata["decode"] = kind.encoding.formula
    if head is not None:
        metadata["head"] = {**head.facts(), "hash": head.hash}
    with atomic_write(target) as file:
        write(file, metadata, arrays)


def load(path: str | PathLike[str], *, vocabulary: Vocabulary | None = None) -> Logits | LogitsBatch:
    """Read a result that `save` wrote; every array is checked against its checksum.

    Args:
        path: a file ending in ``.npz`` or ``.safetensors``.
        vocabulary: gives the texts of tokens, which files do not hold.

    Raises:
        OptionError: another suffix.
        FileFormatError: not such a file, of a newer version, cut short, or damaged.
        OSError: the file cannot be read.
    """
    source = Path(path)
    _, read = _handlers(source)
    try:
        with source.open("rb") as file:
            metadata, arrays = read(file)
            return _result(metadata, arrays, vocabulary)
    except FileFormatError as error:
        error.where = str(source)
        raise
    except _MALFORMED as error:
        raise FileFormatError(
            "not a file that logitscope wrote, or a damaged one",
            where=str(source),
            got=f"{type(error).__name__}: {error}",
        ) from error


@contextlib.contextmanager
def atomic_write(path: str | PathLike[str]) -> Iterator[BinaryIO]:
    """A binary file that takes its name only when it is complete and on the disk; else nothing stays.

    Raises:
        OSError: it cannot be written.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- a result as metadata and arrays, and back -------------------------------------------------------------


def _head(members: list[Logits]) -> RowHead | None:
    """The head of hidden rows, the same for all members.

    Raises:
        IdentityMismatchError: members with rows of different heads.
        EncodingError: a head that was changed after its rows were made.
    """
    found = [member.values.own_head() for member in members if isinstance(member.values, HiddenRows)]
    heads = {head.hash: head for head in found}
    if len(heads) > 1:
        raise IdentityMismatchError("hidden rows of different heads", where="save", got=sorted(heads))
    return next(iter(heads.values()), None)


def _arrays(logits: Logits, prefix: str) -> dict[str, NDArray[Any]]:
    found: dict[str, NDArray[Any]] = {} if logits.values is None else _values(logits)
    found |= {"positions": logits.positions, "token_ids": logits.token_ids}
    found |= {f"summary.{name}": array for name, array in logits.summary.items()}
    found |= {f"hidden_states.{layer}": array for layer, array in logits.hidden_states.items()}
    found |= {f"attentions.{layer}": array for layer, array in logits.attentions.items()}
    return {prefix + name: array for name, array in found.items()}


def _values(logits: Logits) -> dict[str, NDArray[Any]]:
    values = logits.values
    if isinstance(values, HiddenRows):
        return {"hidden": values.stored}
    if isinstance(values, CutRows):
        return {f"kept.{name}": tensors.to_numpy(array) for name, array in values.arrays().items()}
    return {"codes": values.stored} if isinstance(values, EncodedRows) else {"logits": logits.to_numpy()}


def _metadata(members: list[Logits], arrays: dict[str, NDArray[Any]], *, batch: bool) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "batch": batch,
        "identity": dataclasses.asdict(members[0].identity),
        "stage": members[0].stage,
        "encoding": members[0].encoding,
        "best": [isinstance(member.values, CutRows) and member.values.best for member in members],
        "prompt_lengths": [member.prompt_length for member in members],
        "verifications": [
            None if member.verification is None else dataclasses.asdict(member.verification)
            for member in members
        ],
        "arrays": {name: _entry(name, array) for name, array in arrays.items()},
    }


def _entry(name: str, array: NDArray[Any]) -> dict[str, Any]:
    if array.dtype.name not in _STORED:
        raise UnsupportedError(
            "no such dtype in a file",
            where=name,
            expected=f"one of {', '.join(_STORED)}",
            got=array.dtype.name,
        )
    digest = xxhash.xxh3_64()
    for piece in _pieces(array):
        digest.update(piece)
    return {"dtype": array.dtype.name, "shape": list(array.shape), "xxh3": digest.hexdigest()}


def _result(
    metadata: dict[str, Any], arrays: dict[str, NDArray[Any]], vocabulary: Vocabulary | None
) -> Logits | LogitsBatch:
    batch = metadata["batch"]
    identity = Identity(**metadata["identity"])
    head = _loaded_head(metadata, _group(arrays, "head."))
    none: list[Any] = [None] * len(metadata["prompt_lengths"])
    verifications, best = metadata.get("verifications") or none, metadata.get("best") or none
    members = []
    for i, prompt_length in enumerate(metadata["prompt_lengths"]):
        prefix = f"{i}." if batch else ""
        own = {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}
        members.append(
            Logits(
                values=_held(own, metadata["encoding"], identity, head, best=bool(best[i])),
                positions=own["positions"],
                token_ids=own["token_ids"],
                prompt_length=prompt_length,
                identity=identity,
                summary=_group(own, "summary."),
                stage=metadata["stage"],
                encoding=metadata["encoding"],
                hidden_states={int(k): a for k, a in _group(own, "hidden_states.").items()},
                attentions={int(k): a for k, a in _group(own, "attentions.").items()},
                vocabulary=vocabulary,
                verification=None if verifications[i] is None else Verification(**verifications[i]),
            )
        )
    return LogitsBatch(members) if batch else members[0]


def _held(
    own: dict[str, NDArray[Any]], encode: str | None, identity: Identity, head: RowHead | None, *, best: bool
) -> Any:
    kept = _group(own, "kept.")
    if kept:
        return CutRows.of(dict(kept), identity.vocab_size, best=best)
    if "residual" in own:
        assert head is not None
        return ExactRows(own["hidden"], head, Residual(own["residual"], own["residual_ends"]))
    for name in ("hidden", "codes"):
        if name in own:
            return encoding(encode or "").held(own[name], identity, head)
    return own.get("logits")


def _loaded_head(metadata: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> Head | None:
    """The head of a file with hidden rows; its arrays were checked against their checksums."""
    if "head" not in metadata:
        return None
    from logitscope.head import Head

    try:
        head = Head.from_arrays(arrays, metadata["head"])
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "hidden rows need PyTorch to be read", where="load", fix="pip install 'logitscope[transformers]'"
        ) from error
    if head.hash != metadata["head"]["hash"]:
        raise FileFormatError(
            "a head that is not the one its rows were made for",
            expected=metadata["head"]["hash"],
            got=head.hash,
        )
    return head


def _group(arrays: dict[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    return {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}


def _checked(text: str | bytes, size_bytes: int) -> dict[str, Any]:
    """The metadata, once it is ours, of a version that we know, and of no more data than the file holds."""
    metadata = json.loads(text)
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise FileFormatError("not a file that logitscope wrote", expected=f"format {FORMAT}")
    if metadata["format_version"] > FORMAT_VERSION:
        raise FileFormatError(
            "written by a newer logitscope",
            expected=f"format version {FORMAT_VERSION} or older",
            got=metadata["format_version"],
            fix="Update logitscope.",
        )
    sizes = [_nbytes(entry) for entry in metadata["arrays"].values()]
    if min(sizes, default=0) < 0 or sum(sizes) > size_bytes:
        raise FileFormatError(
            "the file was cut short", expected=f"{sum(sizes):,} bytes of arrays", got=f"{size_bytes:,}"
        )
    return metadata


def _nbytes(entry: dict[str, Any]) -> int:
    count = np.dtype(_STORED[entry["dtype"]]).itemsize
    for length in entry["shape"]:
        if not isinstance(length, int) or length < 0:
            raise FileFormatError("a shape with a negative length", got=entry["shape"])
        count *= length
    return count


def _room(metadata: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """Arrays to read into; the values of an even batch lie in one block, as when they were collected."""
    entries = metadata["arrays"]
    room = {}
    values = [name for name in entries if metadata["batch"] and name.endswith(".logits")]
    forms = {(entries[name]["dtype"], tuple(entries[name]["shape"])) for name in values}
    if len(forms) == 1:
        ((dtype, shape),) = forms
        block = tensors.empty((len(values), *shape), _STORED[dtype])
        room = dict(zip(values, block, strict=True))
    for name, entry in entries.items():
        if name not in room:
            room[name] = tensors.empty(tuple(entry["shape"]), _STORED[entry["dtype"]])
    return room


def _fill(
    name: str, array: NDArray[Any], entry: dict[str, Any], read: Callable[[memoryview], int]
) -> NDArray[Any]:
    """Read an array's bytes into it, check them, and give it its dtype."""
    digest = xxhash.xxh3_64()
    for piece in _pieces(array):
        done = 0
        while done < len(piece):
            count = read(piece[done:])
            if not count:
                raise FileFormatError("the file was cut short", got=f"the end within {name}")
            done += count
        digest.update(piece)
    if digest.hexdigest() != entry["xxh3"]:
        raise FileFormatError(
            "the file is damaged",
            expected=f"checksum {entry['xxh3']} of {name}",
            got=digest.hexdigest(),
        )
    return array.view(tensors.BFLOAT16) if entry["dtype"] == "bfloat16" else array


def _pieces(array: NDArray[Any]) -> Iterator[memoryview]:
    """The array's bytes in C order, little-endian, in pieces; those of a contiguous array are its own."""
    codes = array.view(np.uint16) if array.dtype == tensors.BFLOAT16 else array
    stored = np.dtype(_STORED.get(codes.dtype.name, "<u2"))
    if codes.flags.c_contiguous and codes.dtype == stored:
        raw = codes.reshape(-1).view(np.uint8).data
        for start in range(0, len(raw), _PIECE_BYTES):
            yield raw[start : start + _PIECE_BYTES]
        return
    step = max(1, _PIECE_BYTES * len(codes) // max(codes.nbytes, 1))
    for start in range(0, len(codes), step):
        copied = np.ascontiguousarray(codes[start : start + step], dtype=stored)
        yield copied.reshape(-1).view(np.uint8).data


# -- npz ---------------------------------------------------------------------------------------------------


def _write_npz(file: BinaryIO, metadata: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(_zip_entry(_METADATA_FILE), json.dumps(metadata))
        for name, array in arrays.items():
            header = {
                "descr": _STORED[array.dtype.name],
                "fortran_order": False,
                "shape": array.shape,
            }
            with archive.open(_zip_entry(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(member, header)
                for piece in _pieces(array):
                    member.write(piece)


def _zip_entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
    entry.external_attr = 0o644 << 16
    return entry


def _read_npz(file: BufferedReader) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    size_bytes = os.fstat(file.fileno()).st_size
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > size_bytes:
                raise FileFormatError("an archive that is compressed or damaged", got=entry.filename)
        if _METADATA_FILE not in archive.namelist():
            raise FileFormatError(
                "not a file that logitscope wrote", expected=f"{_METADATA_FILE} in the archive"
            )
        metadata = _checked(archive.read(_METADATA_FILE), size_bytes)
        _check_names(
            set(archive.namelist()), {f"{name}.npy" for name in metadata["arrays"]} | {_METADATA_FILE}
        )
        arrays = {}
        for name, array in _room(metadata).items():
            with cast(BufferedReader, archive.open(f"{name}.npy")) as member:
                _check_npy_header(name, member, array)
                arrays[name] = _fill(name, array, metadata["arrays"][name], member.readinto)
                _check_at_end(member)
    return metadata, arrays


def _check_npy_header(name: str, member: IO[bytes], array: NDArray[Any]) -> None:
    np.lib.format.read_magic(member)
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(member)
    if shape != array.shape or fortran_order or dtype != array.dtype:
        raise FileFormatError(
            "an array differs from the metadata",
            expected=f"{name}: {array.dtype} {list(array.shape)}",
            got=f"{dtype} {list(shape)}",
        )


def _check_at_end(file: BufferedReader) -> None:
    if file.read(1):
        raise FileFormatError("the file is damaged", got="bytes after the last array")


def _check_names(found: set[str], expected: set[str]) -> None:
    if found != expected:
        raise FileFormatError("arrays differ from the metadata", got=", ".join(sorted(found ^ expected)))


# -- safetensors -------------------------------------------------------------------------------------------


def _write_safetensors(file: BinaryIO, metadata: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
    header = _header(json.dumps(metadata), metadata["arrays"])
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % tensors.ALIGNMENT_BYTES)
    if len(text) > _HEADER_LIMIT_BYTES:
        raise UnsupportedError(
            "too many arrays for the header of a safetensors file",
            got=f"{len(text):,} bytes",
            fix="Use .npz.",
        )
    file.write(struct.pack("<Q", len(text)))
    file.write(text)
    for array in arrays.values():
        for piece in _pieces(array):
            file.write(piece)


def _header(metadata_text: str, entries: dict[str, Any]) -> dict[str, Any]:
    """The header that belongs to the metadata: arrays without gaps, in the metadata's order."""
    header: dict[str, Any] = {
        "__metadata__": {FORMAT: metadata_text, "xxh3": xxhash.xxh3_64_hexdigest(metadata_text.encode())}
    }
    end = 0
    for name, entry in entries.items():
        start, end = end, end + _nbytes(entry)
        header[name] = {"dtype": _TAGS[entry["dtype"]], "shape": entry["shape"], "data_offsets": [start, end]}
    return header


def _read_safetensors(file: BufferedReader) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    size_bytes = os.fstat(file.fileno()).st_size
    (length,) = struct.unpack("<Q", file.read(8))
    if length > min(size_bytes - 8, _HEADER_LIMIT_BYTES):
        raise FileFormatError(
            "not a safetensors file, or cut short", expected=f"a header of {length:,} bytes"
        )
    header = json.loads(file.read(length))
    text = header.get("__metadata__", {}).get(FORMAT)
    if text is None:
        raise FileFormatError("not a file that logitscope wrote", expected=f"{FORMAT} in its metadata")
    metadata = _checked(text, size_bytes)
    if header != _header(text, metadata["arrays"]):
        raise FileFormatError("the header is damaged", got="a header that differs from the metadata")
    room = _room(metadata)
    arrays = {
        name: _fill(name, room[name], entry, file.readinto) for name, entry in metadata["arrays"].items()
    }
    _check_at_end(file)
    return metadata, arrays


def _handlers(path: Path) -> tuple[Callable[..., None], Callable[..., Any]]:
    table = {
        ".npz": (_write_npz, _read_npz),
        ".safetensors": (_write_safetensors, _read_safetensors),
    }
    if path.suffix not in table:
        raise OptionError("unknown form of file", where="path", expected=" or ".join(table), got=path.name)
    return table[path.suffix]
