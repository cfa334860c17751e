"""Whole results between processes: as JSON, and collected from a stream."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from logitscope.encodings import EncodedRows, HiddenRows, RowHead, dtype_of, encoding
from logitscope.errors import FileFormatError, UnsupportedError
from logitscope.logits import Logits
from logitscope.logits.collect import Collector, row_blocks
from logitscope.logits.cut import CutRows
from logitscope.rows import SUMMARY_DTYPES, End, Identity, Request, RowBlock, Select, Vocabulary
from logitscope.wire.stream import RowReader

ArrayForm: TypeAlias = Literal["base64", "float"]
"""How arrays are written in JSON."""

_NON_FINITE: dict[str, Any] = {"NaN": np.isnan, "Infinity": np.isposinf, "-Infinity": np.isneginf}


def logits_to_json(result: Logits, *, form: ArrayForm = "base64") -> dict[str, Any]:
    """A result as an object that ``json`` takes: arrays are base64 of their little-endian bytes, or numbers.

    Each array ``NAME`` comes as ``NAME_b64`` with ``NAME_b64_dtype``; ``shape`` is that of the values. NaN
    and infinities come through bit for bit. As numbers it comes as an array ``NAME``, which ``orjson`` writes
    as nested lists, with ``NAME_dtype``; each number reads as the same value again. What is not finite is
    null there, and ``NAME_nonfinite`` has its places in the flattened array under ``NaN``, ``Infinity`` and
    ``-Infinity``. Codes of an encoding are given as the values that they stand for. Of rows of which only
    some columns were kept, ``kept.ids`` are the token ids, and ``kept.lengths`` how many of them each row
    has, where they have columns of their own.

    Raises:
        UnsupportedError: hidden rows, which are nothing without their head.
    """
    _refuse_hidden(result)
    values = result.values
    arrays: dict[str, NDArray[Any]] = {}
    if isinstance(values, CutRows):
        arrays = {"values" if n == "values" else f"kept.{n}": a for n, a in values.arrays().items()}
    elif values is not None:
        stored = form == "base64" and isinstance(values, EncodedRows)
        arrays = {"values": np.asarray(values.stored if stored else values)}
    shape = list(arrays["values"].shape) if arrays else [len(result), 0]
    arrays |= {f"summary.{name}": array for name, array in result.summary.items()}
    return {
        "shape": shape,
        **({"best": values.best} if isinstance(values, CutRows) else {}),
        "positions": result.positions.tolist(),
        "token_ids": result.token_ids.tolist(),
        "prompt_length": result.prompt_length,
        "encoding": None if form == "float" and isinstance(values, EncodedRows) else result.encoding,
        "identity": dataclasses.asdict(result.identity),
        **_arrays_to_json(arrays, form),
    }


def _arrays_to_json(arrays: Mapping[str, NDArray[Any]], form: ArrayForm) -> dict[str, Any]:
    if form == "base64":
        found: dict[str, Any] = {f"{name}_b64": _base64(array) for name, array in arrays.items()}
        return found | {f"{name}_b64_dtype": str(array.dtype) for name, array in arrays.items()}
    found = {}
    for name, array in arrays.items():
        plain = array if array.dtype in (np.float32, np.int32) else array.astype(np.float32)
        found |= {name: np.ascontiguousarray(plain), f"{name}_dtype": str(array.dtype)}
        if plain.dtype.kind == "f" and not np.isfinite(plain).all():
            flat = plain.reshape(-1)
            places = {word: np.flatnonzero(is_it(flat)) for word, is_it in _NON_FINITE.items()}
            found[f"{name}_nonfinite"] = {word: where for word, where in places.items() if where.size}
    return found


def _arrays_from_json(given: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Arrays by name, flat, of either form."""
    arrays: dict[str, NDArray[Any]] = {}
    for key, dtype in given.items():
        if not key.endswith("_dtype"):
            continue
        name, kind = key.removesuffix("_dtype"), dtype_of(dtype)
        if name.endswith("_b64"):
            data = base64.b64decode(given[name], validate=True)
            arrays[name.removesuffix("_b64")] = np.frombuffer(data, kind).copy()
            continue
        flat = np.asarray(given[name], np.float32 if kind.kind not in "iu" else kind).reshape(-1)
        for word, places in given.get(f"{name}_nonfinite", {}).items():
            flat[np.asarray(places, np.int64)] = float(word)
        arrays[name] = flat.astype(kind)
    return arrays


def _base64(array: NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(array).view(np.uint8).data).decode()


def logits_from_json(given: Mapping[str, Any], *, vocabulary: Vocabulary | None = None) -> Logits:
    """The result that `logits_to_json` wrote.

    Raises:
        FileFormatError: it is not such an object.
    """
    try:
        arrays = _arrays_from_json(given)
        stored: NDArray[Any] | None = arrays.pop("values", None)
        identity = Identity(**given["identity"])
        values: Any = None
        kept = {n: arrays[f"kept.{n}"] for n in ("lengths", "ids", "counts") if f"kept.{n}" in arrays}
        if stored is not None and kept:
            kept["values"] = stored.reshape(given["shape"])
            values = CutRows.of(kept, identity.vocab_size, best=given["best"])
        elif stored is not None:
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


def request_of(result: Logits, index: int, select: Select) -> Request:
    """The request that a scored result answers, for the head of a stream.

    Args:
        result: with all rows that were selected.
        index: its place in the stream.
        select: what was asked.
    """
    return Request(
        result.token_ids,
        select=select,
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
    yield from row_blocks(result, index)
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
