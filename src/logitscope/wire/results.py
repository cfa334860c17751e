"""Whole results between processes: as JSON, and collected from a stream."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from logitscope.encodings import EncodedRows, HiddenRows, RowHead, dtype_of, encoding
from logitscope.errors import FileFormatError, UnsupportedError
from logitscope.logits import Logits
from logitscope.logits.collect import Collector
from logitscope.rows import SUMMARY_DTYPES, End, Identity, Request, RowBlock, Select, Vocabulary
from logitscope.wire.stream import RowReader

_BLOCK_ROWS = 256


def logits_to_json(result: Logits) -> dict[str, Any]:
    """A result as an object that ``json`` takes: arrays are base64 of their little-endian bytes.

    Each array ``NAME`` comes as ``NAME_b64`` with ``NAME_b64_dtype``; ``shape`` is that of the values. NaN
    and infinities come through bit for bit.

    Raises:
        UnsupportedError: hidden rows, which are nothing without their head.
    """
    _refuse_hidden(result)
    values = result.values
    stored = values.stored if isinstance(values, EncodedRows) else values
    arrays = {} if stored is None else {"values": np.asarray(stored)}
    arrays |= {f"summary.{name}": array for name, array in result.summary.items()}
    return {
        "shape": [len(result), 0] if stored is None else list(stored.shape),
        "positions": result.positions.tolist(),
        "token_ids": result.token_ids.tolist(),
        "prompt_length": result.prompt_length,
        "encoding": result.encoding,
        "identity": dataclasses.asdict(result.identity),
        **{f"{name}_b64": _base64(array) for name, array in arrays.items()},
        **{f"{name}_b64_dtype": str(array.dtype) for name, array in arrays.items()},
    }


def _base64(array: NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(array).view(np.uint8).data).decode()


def logits_from_json(given: Mapping[str, Any], *, vocabulary: Vocabulary | None = None) -> Logits:
    """The result that `logits_to_json` wrote.

    Raises:
        FileFormatError: it is not such an object.
    """
    try:
        arrays = {
            name.removesuffix("_b64"): np.frombuffer(
                base64.b64decode(text, validate=True), dtype_of(given[f"{name}_dtype"])
            ).copy()
            for name, text in given.items()
            if name.endswith("_b64")
        }
        stored: NDArray[Any] | None = arrays.pop("values", None)
        identity = Identity(**given["identity"])
        values: Any = None
        if stored is not None:
            kind = encoding(given["encoding"] or identity.dtype)
            values = kind.held(stored.reshape(given["shape"]), identity, None)
        return Logits(
            values=values,
            positions=np.asarray(given["positions"], np.int64),
            token_ids=np.asarray(given["token_ids"], np.int32),
            prompt_length=given["prompt_length"],
            identity=identity,
            summary={
                name: arrays[f"summary.{name}"] for name in SUMMARY_DTYPES if f"summary.{name}" in arrays
            },
            encoding=given["encoding"],
            vocabulary=vocabulary,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError("no result as JSON", got=f"{type(error).__name__}: {error}") from error


def request_of(result: Logits, index: int) -> Request:
    """The request that a scored result answers, for the head of a stream."""
    return Request(
        result.token_ids,
        select=Select(result.positions.tolist(), "all" if result.values is not None else None),
        encode=result.encoding,
        summary=tuple(result.summary),
        prompt_index=index,
    )


def blocks_of(result: Logits, index: int) -> Iterator[RowBlock | End]:
    """A scored result as blocks and an end.

    Raises:
        UnsupportedError: hidden rows, which are nothing without their head.
    """
    _refuse_hidden(result)
    values = result.values
    stored = values.stored if isinstance(values, EncodedRows) else values
    for first in range(0, len(result), _BLOCK_ROWS):
        rows = slice(first, first + _BLOCK_ROWS)
        yield RowBlock(
            index,
            result.positions[rows],
            None if stored is None else stored[rows],
            {name: array[rows] for name, array in result.summary.items()},
        )
    yield End(index, np.empty(0, np.int32), rows=len(result))


def _refuse_hidden(result: Logits) -> None:
    if isinstance(result.values, HiddenRows):
        raise UnsupportedError(
            f"{result.encoding} rows are not sent without their head in this version",
            where="encode",
            fix="Use encode='float16' or 'bfloat16', or select fewer rows.",
        )


def read_results(
    source: Any, *, vocabulary: Vocabulary | None = None, head: RowHead | None = None
) -> list[Logits]:
    """Every result of a stream, complete, in the order of its requests.

    Args:
        source: a binary file, such as the body of an answer, or bytes.
        vocabulary: gives the texts of tokens.
        head: rebuilds rows of a hidden form.

    Raises:
        FileFormatError, IncompleteError: it is no such stream, damaged, or cut.
    """
    reader = RowReader(source)
    collector = Collector(reader.requests, identity=reader.identity, vocabulary=vocabulary, head=head)
    for item in reader:
        if isinstance(item, End):
            collector.finish(item)
        else:
            collector.add(item)
    return [found.logits for found in collector.results() if found.logits is not None]
