"""A stream of row blocks as an Arrow IPC stream: one record batch a block, one end a request, one at last.

The schema's metadata holds format, version, identity and requests as JSON. A block's columns are
``request``, ``processed``, ``position``, the summaries, ``values`` and the extras; what has a variable
width or a dtype that Arrow lacks is bytes, one little-endian row each, whose dtype and shape are in the
batch's metadata beside a checksum. Entries of rows that have columns of their own are ``entries.ids``,
``entries.values`` and, where they were drawn, ``entries.counts``, with as many as each row has. The last
batch counts blocks and requests: without it the stream was cut, and reading raises.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from logitscope import tensors
from logitscope.encodings import dtype_of
from logitscope.errors import FileFormatError, IncompleteError, LogitscopeError, UnsupportedError
from logitscope.rows import (
    SUMMARIES,
    SUMMARY_DTYPES,
    End,
    Entries,
    Identity,
    Request,
    RowBlock,
    Stream,
    Verification,
)
from logitscope.wire.errors import error_from_json, error_to_json
from logitscope.wire.loans import Borrowed, Loan, loan_facts
from logitscope.wire.requests import request_from_json, request_to_json

FORMAT = "logitscope.rows"
FORMAT_VERSION = 1
MEDIA_TYPE = "application/vnd.apache.arrow.stream"

_KEY, _CHECK = b"logitscope", b"logitscope.xxh3"
_EXTRAS = ("hidden_states", "attentions")
_ENTRIES = "entries"
_PIECE_BYTES = 1 << 20
_SUMMARY_TYPES = {
    name: pa.int32() if SUMMARY_DTYPES[name] is np.int32 else pa.float32() for name in SUMMARIES
}


class RowWriter:
    """Writes blocks and ends into a binary sink; `close` writes the end without which nothing counts.

    Args:
        sink: anything with ``write``.
        identity: what made the rows.
        requests: that are answered.
        loan: says where a block's values lie in shared memory; they are not written then.
    """

    def __init__(
        self,
        sink: BinaryIO,
        identity: Identity,
        requests: Sequence[Request],
        *,
        loan: Callable[[RowBlock], Loan | None] | None = None,
    ) -> None:
        self._loan = loan
        self._schema = _schema(identity, requests)
        self._writer = pa.ipc.new_stream(sink, self._schema)
        self._blocks, self._ends = 0, 0

    def write(self, item: RowBlock | End) -> None:
        """Write the next block or end.

        Raises:
            UnsupportedError: rows that stay on a device.
        """
        if isinstance(item, End):
            fields = dataclasses.asdict(item) | {"generated_ids": item.generated_ids.tolist()}
            self._empty({"kind": "end", "end": fields})
            self._ends += 1
        else:
            self._block(item)
            self._blocks += 1

    def fail(self, error: BaseException) -> None:
        """Write why there will be no more, and end the stream: reading raises it."""
        self._empty({"kind": "error", "error": error_to_json(error)})
        self._writer.close()

    def close(self) -> None:
        """Write the end of the stream."""
        self._empty({"kind": "complete", "blocks": self._blocks, "ends": self._ends})
        self._writer.close()

    def _block(self, block: RowBlock) -> None:
        columns: dict[str, Any] = {
            "request": pa.array(np.full(len(block), block.index, np.int32)),
            "processed": pa.array(np.full(len(block), block.stage == "processed")),
            "position": pa.array(block.positions),
            **{name: pa.array(array) for name, array in block.summary.items()},
        }
        loan = None if self._loan is None else self._loan(block)
        shared = None if loan is None else loan_facts(block, loan)
        if shared is not None:
            block = dataclasses.replace(block, values=None)
        parts = _parts(block)
        widths = {name: np.full(len(block), array[:1].nbytes) for name, array in parts.items()}
        own: dict[str, NDArray[Any]] = {}
        if block.entries is not None:
            own = _entry_parts(block.entries)
            widths |= {name: block.entries.lengths * array.itemsize for name, array in own.items()}
        parts |= own
        columns |= {name: _byte_rows(array, widths[name]) for name, array in parts.items()}
        rows = len(block)
        arrays = [
            columns[field.name] if field.name in columns else pa.nulls(rows, field.type)
            for field in self._schema
        ]
        facts = {
            "kind": "rows",
            "request": block.index,
            "stage": block.stage,
            "token_ids": block.token_ids.tolist(),
            "summary": list(block.summary),
            "parts": {
                name: [str(array.dtype), None if name in own else list(array.shape[1:])]
                for name, array in parts.items()
            },
            **({} if shared is None else {"shared": shared}),
            "xxh3": _checksum(block),
        }
        batch = pa.record_batch(arrays, schema=self._schema)
        self._writer.write_batch(batch, custom_metadata=_metadata(facts))

    def _empty(self, facts: dict[str, Any]) -> None:
        batch = pa.record_batch([pa.nulls(0, f.type) for f in self._schema], schema=self._schema)
        self._writer.write_batch(batch, custom_metadata=_metadata(facts))


def write_stream(sink: BinaryIO, stream: Stream, identity: Identity, requests: Sequence[Request]) -> None:
    """Write all of a stream, its end included."""
    writer = RowWriter(sink, identity, requests)
    for item in stream:
        writer.write(item)
    writer.close()


class RowReader:
    """Reads what `RowWriter` wrote; iterating gives the same blocks and ends.

    Values are views of the received buffers, and read-only unless ``writable``.

    Args:
        source: a binary file, or bytes.
        writable: whether blocks may be written to; the source is then a file with ``readinto``, read into
            fresh memory.
        shared: whether values may lie in shared memory; they are views of it then.

    Attributes:
        identity: what made the rows.
        requests: that are answered.

    Raises:
        FileFormatError: not such a stream, of a newer version, or damaged.
        IncompleteError: while iterating: it was cut.
    """

    def __init__(self, source: Any, *, writable: bool = False, shared: bool = False) -> None:
        self._writable = writable
        self._borrowed = Borrowed() if shared else None
        with _named_errors():
            self._reader = pa.ipc.open_stream(_OwnMemory(source) if writable else source)
            facts = _facts(self._reader.schema.metadata)
            if facts["format"] != FORMAT or facts["version"] > FORMAT_VERSION:
                raise FileFormatError(
                    "a stream of another format or a newer version",
                    expected=f"{FORMAT} up to {FORMAT_VERSION}",
                    got=f"{facts['format']} {facts['version']}",
                    fix="Use a newer logitscope.",
                )
            self.identity = Identity(**facts["identity"])
            self.requests = [request_from_json(request) for request in facts["requests"]]

    def __iter__(self) -> Stream:
        blocks = ends = 0
        while True:
            with _named_errors():
                found = self._next()
                if found is None:
                    raise IncompleteError(
                        "the stream was cut",
                        where=f"after {blocks} blocks and {ends} of {len(self.requests)} ends",
                        expected="an end of the stream",
                    )
                batch, facts = found
                if facts["kind"] == "error":
                    raise error_from_json(facts["error"])
                if facts["kind"] == "complete":
                    if (blocks, ends) != (facts["blocks"], facts["ends"]):
                        raise IncompleteError(
                            "parts of the stream are missing",
                            expected=f"{facts['blocks']} blocks and {facts['ends']} ends",
                            got=f"{blocks} and {ends}",
                        )
                    return
                item = _end(facts["end"]) if facts["kind"] == "end" else self._block(batch, facts)
            blocks, ends = blocks + isinstance(item, RowBlock), ends + isinstance(item, End)
            yield item
            if self._borrowed is not None:
                self._borrowed.taken(item)

    def _block(self, batch: Any, facts: dict[str, Any]) -> RowBlock:
        block = _block(batch, facts, writable=self._writable)
        if "shared" in facts:
            if self._borrowed is None:
                raise FileFormatError(
                    "values lie in another process's memory", expected="values in the stream"
                )
            self._borrowed.fill(block, facts["shared"])
        return block

    def _next(self) -> tuple[Any, dict[str, Any]] | None:
        try:
            batch, metadata = self._reader.read_next_batch_with_custom_metadata()
        except StopIteration:
            return None
        batch.validate()  # that buffers are as long as they must be: Arrow reads beyond them otherwise
        return batch, _facts(metadata)


class _OwnMemory:
    """A file that Arrow reads into memory which may be written to later."""

    closed = False

    def __init__(self, file: Any) -> None:
        self._file = file

    def readable(self) -> bool:
        """Always."""
        return True

    def read(self, size: int = -1) -> bytes:
        """At most so many bytes."""
        return bytes(self._file.read(None if size < 0 else size))

    def read_buffer(self, size: int) -> Any:
        """So many bytes, or those that are left, as an Arrow buffer of their own."""
        room = tensors.empty((size,), np.uint8)
        view, done = room.data, 0
        while done < size:
            count = self._file.readinto(view[done : done + _PIECE_BYTES])
            if not count:
                break
            done += count
        return pa.py_buffer(room[:done])

    def close(self) -> None:
        """Nothing: the file is its owner's."""


def _schema(identity: Identity, requests: Sequence[Request]) -> Any:
    wanted = {name for request in requests for name in request.summary}
    extras = [
        f"{kind}.{layer}"
        for kind in _EXTRAS
        for layer in sorted({layer for request in requests for layer in getattr(request, kind)})
    ]
    selects = [request.select for request in requests if request.select is not None]
    sparse = [select for select in selects if select.container == "sparse"]
    kept = ["ids", "values"] if sparse else []
    kept += ["counts"] if any(select.sample is not None for select in sparse) else []
    kept = [f"{_ENTRIES}.{name}" for name in kept]
    fields = [
        pa.field("request", pa.int32()),
        pa.field("processed", pa.bool_()),
        pa.field("position", pa.int64()),
        *(pa.field(name, _SUMMARY_TYPES[name]) for name in SUMMARIES if name in wanted),
        *(pa.field(name, pa.large_binary()) for name in ("values", *kept, *extras)),
    ]
    facts = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "identity": dataclasses.asdict(identity),
        "requests": [request_to_json(request) for request in requests],
    }
    return pa.schema(fields, metadata=_metadata(facts))


def _metadata(facts: dict[str, Any]) -> dict[bytes, bytes]:
    """What Arrow carries of ours beside columns, with its checksum."""
    data = json.dumps(facts).encode()
    return {_KEY: data, _CHECK: xxhash.xxh3_64_hexdigest(data).encode()}


def _facts(metadata: Mapping[bytes, bytes] | None) -> dict[str, Any]:
    if metadata is None or _KEY not in metadata:
        raise FileFormatError("no stream of rows", expected=f"Arrow metadata {_KEY.decode()!r}")
    data = metadata[_KEY]
    if metadata.get(_CHECK) != xxhash.xxh3_64_hexdigest(data).encode():
        raise FileFormatError("the metadata is damaged", expected="its checksum")
    found: dict[str, Any] = json.loads(data)
    return found


def _parts(block: RowBlock) -> dict[str, NDArray[Any]]:
    """What travels as bytes, by column."""
    parts: dict[str, Any] = {} if block.values is None else {"values": block.values}
    for kind in _EXTRAS:
        parts |= {f"{kind}.{layer}": array for layer, array in getattr(block, kind).items()}
    for name, array in parts.items():
        if not isinstance(array, np.ndarray):
            raise UnsupportedError(
                "rows that stay on a device cannot be sent", where=name, got=type(array).__name__
            )
    return {name: np.ascontiguousarray(array) for name, array in parts.items()}


def _entry_parts(entries: Entries) -> dict[str, NDArray[Any]]:
    """What travels as bytes of entries, by column."""
    return {
        f"{_ENTRIES}.{name}": np.ascontiguousarray(array)
        for name, array in entries.arrays().items()
        if name != "lengths"
    }


def _byte_rows(array: NDArray[Any], widths: NDArray[np.int64]) -> Any:
    """Rows of so many bytes of an array, as Arrow bytes over the same memory."""
    rows = len(widths)
    offsets = np.concatenate([[0], np.cumsum(widths, dtype=np.int64)])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(array.reshape(-1).view(np.uint8))]
    return pa.Array.from_buffers(pa.large_binary(), rows, buffers)


def _rows_of(column: Any, dtype: str, shape: Sequence[int], *, writable: bool) -> NDArray[Any]:
    kind, (lengths, found) = dtype_of(dtype), _bytes_of(column, writable=writable)
    width = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    if (lengths != width).any():
        raise FileFormatError("rows of another width", expected=f"{width:,} bytes")
    return found.view(kind).reshape(len(column), *shape)


def _bytes_of(column: Any, *, writable: bool) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Bytes of each row, and all of them."""
    _, offsets, data = column.buffers()
    if not len(column):
        return np.empty(0, np.int64), np.empty(0, np.uint8)
    places = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
    if data is None or not data.size:
        return np.diff(places), np.empty(0, np.uint8)
    memory = data
    if writable:
        memory = (ctypes.c_uint8 * data.size).from_address(data.address)
        memory.owner = data  # which keeps it alive
    return np.diff(places), np.frombuffer(memory, np.uint8)[places[0] : places[-1]]


def _entries_of(batch: Any, parts: dict[str, Any], *, writable: bool) -> Entries | None:
    """The entries of a batch's rows; None where it has none."""
    found: dict[str, NDArray[Any]] = {}
    for name, (dtype, shape) in parts.items():
        if shape is None:
            sizes, data = _bytes_of(batch.column(name), writable=writable)
            kind = dtype_of(dtype)
            lengths = (sizes // kind.itemsize).astype(np.int32)
            if not np.array_equal(found.setdefault("lengths", lengths), lengths):
                raise FileFormatError("entries of other numbers", where=name)
            found[name.partition(".")[2]] = data.view(kind)
    return Entries(**found) if found else None


def _block(batch: Any, facts: dict[str, Any], *, writable: bool) -> RowBlock:
    block = RowBlock(
        facts["request"],
        batch.column("position").to_numpy(zero_copy_only=False).astype(np.int64, copy=False),
        stage=facts["stage"],
        token_ids=np.asarray(facts["token_ids"], np.int32),
        summary={
            name: batch.column(name).to_numpy(zero_copy_only=False).astype(SUMMARY_DTYPES[name], copy=False)
            for name in facts["summary"]
        },
    )
    block.entries = _entries_of(batch, facts["parts"], writable=writable)
    for name, (dtype, shape) in facts["parts"].items():
        if shape is None:
            continue
        array = _rows_of(batch.column(name), dtype, shape, writable=writable)
        kind, _, layer = name.partition(".")
        if layer:
            getattr(block, kind)[int(layer)] = array
        else:
            block.values = array
    if _checksum(block) != facts["xxh3"]:
        raise FileFormatError("a block is damaged", where=f"request {block.index}", expected="its checksum")
    return block


def _end(fields: dict[str, Any]) -> End:
    verification = fields.get("verification")
    return End(
        **fields
        | {
            "generated_ids": np.asarray(fields["generated_ids"], np.int32),
            "verification": None if verification is None else Verification(**verification),
        }
    )


def _checksum(block: RowBlock) -> str:
    """XXH3 over positions, token ids, summaries and the bytes of every part."""
    digest = xxhash.xxh3_64()
    arrays = [block.positions, block.token_ids, *block.summary.values(), *_parts(block).values()]
    arrays += [] if block.entries is None else list(block.entries.arrays().values())
    for array in arrays:
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


@contextlib.contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except LogitscopeError:
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileFormatError(
            "no stream of rows, or a damaged one", got=f"{type(error).__name__}: {error}"
        ) from error
