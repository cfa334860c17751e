"""The extractor: a chunk of rows on the engine's device becomes a row block of what was asked.

Every engine calls this one. Summaries and encodings are computed on the device, before any copy; copies
to the host are asynchronous on CUDA, and a block is waited for only when it is handed on.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from logitscope.encodings import encoding, kept_format
from logitscope.errors import EncodingError, LogitscopeError, NonFiniteError
from logitscope.numerics import device as numerics
from logitscope.numerics import entries
from logitscope.rows import Buffer, Chunk, Container, Entries, Identity, Ids, Request, RowBlock, Stage

_AHEAD = 2
_T = TypeVar("_T")


@dataclasses.dataclass
class PendingBlock:
    """A block whose values may still be on their way to the host."""

    block: RowBlock
    steps: list[Callable[[], None]] = dataclasses.field(default_factory=list)

    def wait(self) -> RowBlock:
        """The block, complete and checked.

        Raises:
            NonFiniteError: the model computed NaN.
            EncodingError: a finite value does not fit the encoding.
        """
        for step in self.steps:
            step()
        self.steps.clear()
        return self.block


def in_order(items: Iterable[PendingBlock | _T], *, ahead: int = _AHEAD) -> Iterator[RowBlock | _T]:
    """Hand items on in order, keeping ``ahead`` in flight so that copies overlap with computing."""
    queue: collections.deque[PendingBlock | _T] = collections.deque()
    for item in items:
        queue.append(item)
        while len(queue) > ahead:
            yield _ready(queue.popleft())
    while queue:
        yield _ready(queue.popleft())


def _ready(item: PendingBlock | _T) -> RowBlock | _T:
    return item.wait() if isinstance(item, PendingBlock) else item


@dataclasses.dataclass
class LogitsChunk:
    """Logits ``[rows, vocab_size]`` that are there; a `logitscope.rows.Chunk`.

    Attributes:
        values: a tensor.
        positions: of the rows.
        targets: ids that they score, ``[rows]``.
        hidden_rows: the head's input for them, where it is known.
    """

    values: torch.Tensor
    positions: NDArray[np.int64]
    targets: Any
    hidden_rows: Any = None

    @property
    def device(self) -> torch.device:
        """Of the logits."""
        return self.values.device

    def logits(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """The logits."""
        return self.values if out is None else out.copy_(self.values)

    def columns(self, ids: torch.Tensor) -> torch.Tensor:
        """Some columns of them."""
        return self.values[:, ids]

    def hidden(self) -> Any:
        """The head's input."""
        return self.hidden_rows

    def non_finite(self) -> torch.Tensor:
        """Whether a row is NaN or infinite."""
        return ~(self.values.amax() < float("inf"))


class Extractor:
    """Applies one request's ``select.vocab``, ``encode`` and ``summary`` to chunks of its rows.

    Args:
        request: what was asked.
        index: the request's place in the stream.
        identity: of the engine: dtype and width of its rows and hidden rows.
        stage: of the rows.
        buffer: where values go; fresh arrays without it.
    """

    def __init__(
        self,
        request: Request,
        index: int,
        *,
        identity: Identity,
        stage: Stage = "raw",
        buffer: Buffer | None = None,
    ) -> None:
        self.request, self.index, self.stage, self.buffer = request, index, stage, buffer
        self.encoding = encoding(request.value_format(stage, identity.dtype))
        self.direct = self.encoding.name == (identity.dtype if stage == "raw" else "float32")
        self.container: Container = "none" if request.select is None else request.select.container
        self.format = kept_format(request, stage, identity)
        self.rows = 0
        self._prompt_key = xxhash.xxh3_64_intdigest(np.asarray(request.token_ids, np.int32).tobytes())
        self._ids: dict[torch.device, torch.Tensor] = {}

    def writes_directly(self, device: str) -> bool:
        """Whether logits of a device of this type are computed where they stay, without a copy."""
        dense = self.container == "dense" and self.direct
        return dense and device == "cpu" and not self.request.keep_on_device

    @property
    def multiplies_columns(self) -> bool:
        """Whether nothing but some columns of the rows is needed."""
        return self.container == "columns" and not self.request.summary

    def extract(self, chunk: Chunk, *, token_ids: Ids | None = None) -> PendingBlock:
        """Begin the block of a chunk; its rows follow those of the chunk before it.

        Args:
            chunk: rows in ascending positions.
            token_ids: generated ids that this block brings.
        """
        block = RowBlock(self.index, chunk.positions, stage=self.stage)
        if token_ids is not None:
            block.token_ids = token_ids
        pending = PendingBlock(block)
        if len(block):
            self._fill(chunk, pending)
        self.rows += len(block)
        return pending

    def _fill(self, chunk: Chunk, pending: PendingBlock) -> None:
        if self.container == "none" and not self.request.summary:
            return
        logits = self._keep(chunk, pending)
        if self.request.summary:
            logits = chunk.logits() if logits is None else logits
            targets = _int64(chunk.targets).to(chunk.device, non_blocking=True)
            for name, values in numerics.summaries(logits, targets, self.request.summary).items():
                pending.block.summary[name] = to_host(values, pending)
        bad = chunk.non_finite()
        if bad is not None:
            self._check(pending, bad, non_finite)

    def _keep(self, chunk: Chunk, pending: PendingBlock) -> torch.Tensor | None:
        """Put what is kept of the rows into the block; returns their logits where they were needed."""
        block = pending.block
        if self.container == "none":
            return None
        if self.container == "sparse":
            logits: torch.Tensor = chunk.logits()
            self._keep_entries(logits, chunk.positions, pending)
            return logits
        if self.container == "columns":
            return self._keep_columns(chunk, pending)
        if self.request.keep_on_device:
            logits = chunk.logits()
            # Always a copy: the engine uses the tensor of its logits again.
            block.values = self._encoded(logits, self._empty_like(logits), pending)
            return logits
        if self.writes_directly(chunk.device.type):
            block.values = self._array(block)
            direct: torch.Tensor = chunk.logits(out=tensor_over(block.values))
            return direct
        rows: torch.Tensor = chunk.hidden() if self.encoding.of_hidden else chunk.logits()
        self._put(rows, pending)
        return None if self.encoding.of_hidden else rows

    def _put(self, rows: torch.Tensor, pending: PendingBlock) -> None:
        """Encode rows into the block's values on the host."""
        block = pending.block
        block.values = self._array(block)
        if rows.device.type == "cpu":
            self._encoded(rows, tensor_over(block.values), pending)
        else:
            encoded = rows if self.direct else self._encoded(rows, self._empty_like(rows), pending)
            to_host(encoded, pending, block.values)

    def _keep_columns(self, chunk: Chunk, pending: PendingBlock) -> torch.Tensor | None:
        """Some columns; the others are not even multiplied where nothing else needs them."""
        ids = self._listed_ids(chunk.device)
        logits = None if self.multiplies_columns else chunk.logits()
        rows: torch.Tensor = chunk.columns(ids) if logits is None else logits[:, ids]
        if logits is None and rows.numel():
            self._check(pending, ~(rows.amax() < float("inf")), non_finite)
        if self.request.keep_on_device:
            pending.block.values = self._encoded(rows, self._empty_like(rows), pending)
        else:
            self._put(rows, pending)
        return logits

    def _keep_entries(
        self, logits: torch.Tensor, positions: NDArray[np.int64], pending: PendingBlock
    ) -> None:
        select = self.request.select
        assert select is not None
        if isinstance(select.vocab, tuple):
            found = entries.listed(logits, *self._listed_entries(positions, logits.device))
        elif select.sample is None:
            found = entries.kept(logits, select)
        else:
            numbers = entries.uniforms(self._keys(positions), select.seed, select.sample)
            found = entries.kept(logits, select, uniforms=numbers)
        values = torch.empty(
            found.values.shape, dtype=getattr(torch, self.encoding.name), device=logits.device
        )
        pending.block.entries = Entries(
            to_host(found.lengths.int(), pending),
            to_host(found.ids.int(), pending),
            to_host(self._encoded(found.values[:, None], values[:, None], pending)[:, 0], pending),
            None if found.counts is None else to_host(found.counts.int(), pending),
        )

    def _keys(self, positions: NDArray[np.int64]) -> NDArray[np.uint64]:
        """What a row's draw depends on beside the seed: prompt, sample and position."""
        facts = np.empty((len(positions), 3), np.uint64)
        facts[:, 0], facts[:, 1], facts[:, 2] = self._prompt_key, self.request.sample_index, positions
        return np.array([xxhash.xxh3_64_intdigest(row.tobytes()) for row in facts], np.uint64)

    def _listed_ids(self, device: torch.device) -> torch.Tensor:
        """The token ids that are kept of every row, int64 on the device."""
        assert self.request.select is not None
        if device not in self._ids:
            self._ids[device] = torch.tensor(self.request.select.vocab, dtype=torch.int64, device=device)
        return self._ids[device]

    def _listed_entries(
        self, positions: NDArray[np.int64], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """How many ids are kept of each of these rows, and which."""
        request = self.request
        assert request.select is not None
        wanted = request.select.rows(prompt_length=request.prompt_length, new_tokens=request.max_new_tokens)
        lists = [request.select.vocab[i] for i in np.searchsorted(wanted, positions)]
        lengths = torch.tensor([len(ids) for ids in lists], dtype=torch.int64)
        flat = torch.tensor([i for ids in lists for i in ids], dtype=torch.int64)
        return lengths.to(device), flat.to(device)

    def _empty_like(self, rows: torch.Tensor) -> torch.Tensor:
        assert self.format is not None
        dtype = getattr(torch, self.format.dtype.name)
        return torch.empty((len(rows), self.format.width), dtype=dtype, device=rows.device)

    def _encoded(self, rows: torch.Tensor, out: torch.Tensor, pending: PendingBlock) -> torch.Tensor:
        misfit = self.encoding.encode(rows, out)
        if misfit is not None:
            self._check(pending, misfit, self._misfit)
        return out

    def _array(self, block: RowBlock) -> NDArray[Any]:
        if self.buffer is not None:
            return self.buffer(self.index, self.stage, self.rows, len(block))
        assert self.format is not None
        return np.empty((len(block), self.format.width), self.format.dtype)

    def _check(
        self, pending: PendingBlock, flag: torch.Tensor, error: Callable[[str], LogitscopeError]
    ) -> None:
        found = to_host(flag.reshape(1), pending)
        positions = pending.block.positions
        where = f"request {self.index}, rows {positions[0]} … {positions[-1]}"

        def check() -> None:
            if found[0]:
                raise error(where)

        pending.steps.append(check)

    def _misfit(self, where: str) -> EncodingError:
        return EncodingError(
            f"values do not fit {self.encoding.name}",
            where=where,
            expected=self.encoding.expected,
            fix="Use encode='hidden'." if self.encoding.of_hidden else "Use encode='bfloat16' or 'float32'.",
        )


def _int64(targets: Any) -> torch.Tensor:
    """Host ids, or a tensor of them that an engine just sampled."""
    if isinstance(targets, torch.Tensor):
        return targets.to(torch.int64)
    return torch.from_numpy(targets.astype(np.int64))


def non_finite(where: str) -> NonFiniteError:
    """The error for rows that are NaN or infinite."""
    return NonFiniteError(
        "the model computed NaN or infinite values",
        where=where,
        expected="finite values",
        fix="Check the weights; float16 can overflow: open with dtype='bfloat16' or 'float32'.",
    )


def tensor_over(array: NDArray[Any]) -> torch.Tensor:
    """A tensor over the memory of an array; bfloat16 is ml_dtypes' in NumPy."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_host(values: torch.Tensor, pending: PendingBlock, out: NDArray[Any] | None = None) -> NDArray[Any]:
    """Host array of a tensor, complete when the block is waited for; on CUDA through pinned memory."""
    values = values.detach()
    name = str(values.dtype).removeprefix("torch.")
    if out is None and values.device.type == "cpu" and name != "bfloat16":
        return np.asarray(values.numpy())
    array = np.empty(values.shape, ml_dtypes.bfloat16 if name == "bfloat16" else name) if out is None else out
    if values.device.type != "cuda":
        tensor_over(array).copy_(values)
        return array
    staged = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    staged.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(values.device))

    def finish() -> None:
        copied.synchronize()
        tensor_over(array).copy_(staged)

    pending.steps.append(finish)
    return array
