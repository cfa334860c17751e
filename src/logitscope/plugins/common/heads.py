"""The head of a foreign engine: proved row by row where it is, and gathered once where rows are rebuilt.

Each rank writes its part of the weights to a file; whoever reads the first hidden rows puts the parts
together, and compares a few rebuilt rows with the engine's own in every column. Before that, every hidden
row is compared in some columns when it is captured.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from logitscope.encodings import DTYPES
from logitscope.errors import EncodingError, FileFormatError
from logitscope.head import Head, Transform, host_array, transform, transform_scale
from logitscope.wire import own_name

_TRIED_COLUMNS = 16
_PROOF_ROWS = 4
_PROOF = "proof"
_SAMPLED_VALUES = 1024
_ROUNDING = 2.0**-11  # of float16, relative


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Rebuilt rows beside the engine's own; scalars on the engine's device.

    Attributes:
        difference: the worst one.
        bound: the largest that was allowed.
        excess: the worst difference beyond its bound; positive or NaN is a violation.
    """

    difference: Any
    bound: Any
    excess: Any


class CapturedHead:
    """A rank's part of the head of an engine.

    Args:
        weight: tensor ``[columns, hidden_size]`` on the engine's device, without padding.
        first: the first of its columns in the whole head.
        transforms: what the engine does to the product, in order.
        rank: of this part.
        ranks: that have one.
        rows_dtype: name of the dtype of the engine's rows.

    Attributes:
        token: under which the newest state of the weights was written; None before.
        serial: counts the states.
        columns: in which every row is compared.
    """

    def __init__(
        self,
        weight: Any,
        first: int,
        *,
        transforms: tuple[Transform, ...],
        rank: int,
        ranks: int,
        rows_dtype: str,
    ) -> None:
        self.weight, self.first, self.transforms = weight, first, transforms
        self.rank, self.ranks, self.rows_dtype = rank, ranks, rows_dtype
        self.token: str | None = None
        self.serial = 0
        self.columns: list[int] = []
        self._state = b""
        self._proved = False
        self._files: list[Path] = []

    def write(self, token: str) -> None:
        """Write this part to its file, under the token, if the weights are new or were changed.

        Every rank is called with the same tokens in the same order.
        """
        state = self._sample()
        if self.token is None or state != self._state:
            self._drop_files()
            self.token, self._state, self._proved = token, state, False
            self.serial += 1
            self._try_columns()
            self._write(token, str(self.rank), weight=self.weight)

    def compare(self, hidden: Any, logits: Any, *, rounded: bool = False) -> Comparison:
        """Compare rows ``[rows, hidden_size]`` times some columns with the engine's ``[rows, vocab]``.

        The bound is that of rounding the product once to the weight's dtype, and of adding in another order;
        with ``rounded``, that of float16 hidden rows besides.
        """
        if not self._proved and self.token is not None and self.rank == 0:
            some = slice(0, _PROOF_ROWS)
            self._write(self.token, _PROOF, hidden=hidden[some], logits=logits[some])
            self._proved = True
        own = logits[:, self.columns].float()
        kept = hidden.half() if rounded else hidden
        wide = kept.to(self.weight.dtype).float()
        rebuilt = transform(wide @ self._tried.t(), self.transforms)
        reach = wide.norm(dim=1, keepdim=True) * self._norms * transform_scale(self.transforms)
        bound = _bound(reach, own, self._unit) + (_ROUNDING * reach if rounded else 0.0)
        difference = (rebuilt - own).abs()
        return Comparison(difference.amax(), bound.amax(), (difference - bound).amax())

    def _try_columns(self) -> None:
        chosen = np.unique(np.linspace(0, len(self.weight) - 1, _TRIED_COLUMNS).astype(np.int64)).tolist()
        self.columns = [self.first + i for i in chosen]
        self._tried = self.weight[chosen].detach().float()
        self._norms = self._tried.norm(dim=1)
        self._unit = _unit(str(self.weight.dtype).removeprefix("torch."))

    def _sample(self) -> bytes:
        flat = self.weight.detach().reshape(-1)
        sample = flat[:: max(flat.numel() // _SAMPLED_VALUES, 1)].float().cpu().numpy()
        return bytes(sample.tobytes())

    def _write(self, token: str, part: str, **tensors: Any) -> None:
        path = Path(tempfile.gettempdir()) / own_name(_name(token, part), "head")
        facts = {
            "first": self.first,
            "ranks": self.ranks,
            "transforms": [list(transform) for transform in self.transforms],
            "rows_dtype": self.rows_dtype,
        }
        with path.open("wb") as file:
            self._files.append(path)
            _save(file, facts, {name: host_array(tensor) for name, tensor in tensors.items()})

    def _drop_files(self) -> None:
        for path in self._files:
            path.unlink(missing_ok=True)
        self._files.clear()


def gathered(token: str, vocab_size: int) -> Head:
    """The whole head of the parts that were written under a token; the parts are removed.

    Raises:
        FileFormatError: a part is missing, or the parts do not fit together.
        EncodingError: rows that are rebuilt differ from the engine's own.
    """
    facts, first = _load(token, "0")
    parts = [(facts["first"], first["weight"])]
    for rank in range(1, facts["ranks"]):
        other, arrays = _load(token, str(rank))
        parts.append((other["first"], arrays["weight"]))
    head = Head.from_arrays({"weight": _whole(parts, vocab_size)}, facts)
    _, proof = _load(token, _PROOF)
    rebuilt, own = head.rows(proof["hidden"]).astype(np.float32), proof["logits"].astype(np.float32)
    norms = np.linalg.norm(proof["hidden"].astype(np.float32), axis=1, keepdims=True)
    reach = norms * float(head.weight.float().norm(dim=1).max()) * transform_scale(head.transforms)
    bound = _bound(reach, np.abs(own), _unit(first["weight"].dtype.name))
    worst = np.abs(rebuilt - own) - bound
    if rebuilt.shape != own.shape or not (worst <= 0).all():
        raise EncodingError(
            "rows that the gathered head gives are not the engine's own",
            where="hidden rows",
            expected=f"a difference of at most {bound.max():.2g}",
            got=f"{np.abs(rebuilt - own).max():.2g}",
            fix="Ask for plain rows: encode='float16' or 'float32'.",
        )
    for path in _paths(token, [_PROOF, *map(str, range(facts["ranks"]))]):
        path.unlink(missing_ok=True)
    return head


def _whole(parts: Sequence[tuple[int, NDArray[Any]]], vocab_size: int) -> NDArray[Any]:
    """The parts in the order of their columns, which must be all of them, once."""
    ordered = sorted(parts, key=lambda part: part[0])
    expected = 0
    for first, weight in ordered:
        if first != expected:
            break
        expected += len(weight)
    else:
        if expected == vocab_size:
            return ordered[0][1] if len(ordered) == 1 else np.concatenate([w for _, w in ordered])
    raise FileFormatError(
        "the parts of the head do not make a whole",
        expected=f"{vocab_size} columns",
        got=[(first, len(weight)) for first, weight in ordered],
    )


def _unit(dtype: str) -> float:
    """Unit in the last place at 1."""
    return {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]


def _bound(reach: Any, own: Any, unit: float) -> Any:
    return (2.0**-18 + unit / 4) * reach + 4 * unit * abs(own)


# -- files -----------------------------------------------------------------------------------------------


def _name(token: str, part: str) -> str:
    return xxhash.xxh3_64_hexdigest(f"{token} {part}".encode())


def _paths(token: str, parts: Sequence[str]) -> Iterator[Path]:
    for part in parts:
        yield from Path(tempfile.gettempdir()).glob(f"logitscope-*-{_name(token, part)}.head")


def _save(file: Any, facts: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
    dtypes = {name: array.dtype.name for name, array in arrays.items()}
    np.save(file, np.frombuffer(json.dumps({**facts, "dtypes": dtypes}).encode(), np.uint8))
    for array in arrays.values():
        np.save(file, array.view(np.uint16) if array.dtype == DTYPES["bfloat16"] else array)


def _load(token: str, part: str) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    path = next(_paths(token, [part]), None)
    if path is None:
        raise FileFormatError(
            "a part of the head is gone", where=f"part {part}", fix="The engine has ended. Start it again."
        )
    with path.open("rb") as file:
        facts = json.loads(np.load(file).tobytes())
        arrays = {name: np.load(file).view(DTYPES[dtype]) for name, dtype in facts["dtypes"].items()}
    return facts, arrays
