"""The head: hidden rows times the output embedding, and the model's own final transformations.

Libraries multiply few rows by other kernels than many, or odd numbers by others than even ones, and then
the same row has other bits. The **canonical product** uses a few sizes only (1024, 512, 256, 64 and 16 rows),
the last one padded with zeros, so that a row's bits do not depend on block size or order. Whether the
sizes agree is a matter of library, processor and dtype, so it is tried when the head is made; a size that
disagrees with the largest is not used.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import nn

from logitscope.encodings import DTYPES
from logitscope.extract import tensor_over

Transform: TypeAlias = tuple[Literal["multiply", "divide", "softcap"], float]

_SIZES = (1024, 512, 256, 64, 16)
_PRODUCT_BYTES = 256 * 2**20
# A packed product makes its own array, which is then copied: this many rows stay small, and cost per row
# what a plain product of 256 costs, which packs the whole weight each time.
_PACKED_ROWS, _PLAIN_FROM = 64, 512
_WIDE_COLUMNS = 8192
_TRIED_ROWS = (1, 2, 3, 7, 16, 53, 64)
_CONFIG_TRANSFORMS: tuple[tuple[str, Literal["multiply", "divide", "softcap"]], ...] = (
    ("logit_scale", "multiply"),
    ("lm_head_multiplier", "multiply"),
    ("logits_scaling", "divide"),
    ("final_logit_softcapping", "softcap"),
)


def final_transforms(config: Any) -> tuple[Transform, ...]:
    """What a model's config says is done to the logits after the head; verified before it is used."""
    found = ((kind, getattr(config, name, None)) for name, kind in _CONFIG_TRANSFORMS)
    return tuple((kind, float(value)) for kind, value in found if value is not None)


def transform(logits: torch.Tensor, transforms: Sequence[Transform]) -> torch.Tensor:
    """Apply final transformations to logits, in place."""
    for kind, value in transforms:
        if kind == "multiply":
            logits.mul_(value)
        elif kind == "divide":
            logits.div_(value)
        else:
            logits.div_(value).tanh_().mul_(value)
    return logits


def transform_scale(transforms: Sequence[Transform]) -> float:
    """By how much final transformations may enlarge a difference."""
    scale = 1.0
    for kind, value in transforms:
        scale *= {"multiply": abs(value), "divide": 1 / abs(value), "softcap": 1.0}[kind]
    return scale


class Head:
    """Applies a model's head to hidden rows, canonically.

    Args:
        module: the model's output embedding (a linear layer, or any module that acts as one).
        transforms: the model's own final transformations, in order.
        vocab_size: columns of a row; further rows of the head's weight are never multiplied.
        dtype: of hidden rows and of the product.
        rows_dtype: of the logits that `rows` gives, in which the transformations are made; None is ``dtype``.

    Attributes:
        sizes: rows of a product, largest first, whose rows have the same bits; empty when the module is
            no plain linear layer, which is then called as it is.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        transforms: tuple[Transform, ...],
        vocab_size: int,
        dtype: torch.dtype,
        rows_dtype: torch.dtype | None = None,
    ) -> None:
        self.module, self.transforms, self.vocab_size, self.dtype = module, transforms, vocab_size, dtype
        self.rows_dtype = DTYPES[_name(rows_dtype or dtype)]
        weight: Any = getattr(module, "weight", None)
        self.plain = _is_linear(module) and not _hooked(module) and weight.device.type != "meta"
        self.device = _where(module, weight)
        self._packed: torch.Tensor | None = None
        self._hash: tuple[tuple[int, ...], str] = ((), "")
        self.sizes = self._find_sizes() if self.plain else ()

    @property
    def weight(self) -> torch.Tensor:
        """``[vocab_size, hidden_size]``."""
        assert isinstance(self.module, nn.Linear)
        return self.module.weight[: self.vocab_size]

    @property
    def bias(self) -> torch.Tensor | None:
        """``[vocab_size]``, or None."""
        assert isinstance(self.module, nn.Linear)
        bias: torch.Tensor | None = self.module.bias
        return None if bias is None else bias[: self.vocab_size]

    def project(self, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Logits ``[rows, vocab_size]`` of hidden rows ``[rows, hidden_size]``.

        Args:
            hidden: input of the head, after the final norm.
            out: contiguous, on `device`, where the logits are written.
        """
        self._multiplied(hidden.to(self.device), out)
        return transform(out, self.transforms)

    @torch.no_grad()
    def rows(self, hidden: NDArray[Any], ids: NDArray[Any] | None = None) -> NDArray[Any]:
        """Logits ``[rows, vocab_size]`` of host hidden rows ``[rows, hidden_size]``, on the host.

        The bits are those of `project`, on one machine and library, when nothing was rounded. With ``ids``
        only those columns are multiplied, ``[rows, len(ids)]``, by another product: last bits may differ.
        """
        if ids is not None:
            part = tensor_over(np.array(hidden)).to(self.device, self.dtype)
            return host_array(self.columns(part, torch.from_numpy(np.asarray(ids, np.int64))))
        out = np.empty((len(hidden), self.vocab_size), self.rows_dtype)
        places = tensor_over(out)
        step = self.sizes[0] if self.sizes else _SIZES[-1]
        for a in range(0, len(hidden), step):
            # A copy: PyTorch has no read-only tensors, and hidden rows are small.
            part = tensor_over(np.array(hidden[a : a + step])).to(self.device, self.dtype)
            place = places[a : a + step]
            if place.dtype == self.dtype and self.device.type == "cpu":
                self.project(part, place)
                continue
            product = self.empty(len(part))
            self._multiplied(part, product)
            place.copy_(transform(product.to(place.dtype), self.transforms))
        return out

    @torch.no_grad()
    def wide_rows(self, hidden: NDArray[Any], shift: int = 0) -> NDArray[np.float64]:
        """Logits ``[rows, vocab_size]`` from a product in float64, before they are rounded to their dtype.

        Where rows are wider than the product, it is rounded to its own dtype as in `rows`.

        Args:
            hidden: host rows ``[rows, hidden_size]``.
            shift: -1 or 1 for the least or the most that the sum may be, in whatever order it is taken.
        """
        part = tensor_over(np.array(hidden)).to(self.device, self.dtype).double()
        weight, bias = self.weight, self.bias
        # A sum of n products is off by less than n units in the last place times the norms of both.
        unit = 4 * part.shape[1] * torch.finfo(torch.float64).eps
        reach = shift * unit * part.norm(dim=1, keepdim=True)
        out = torch.empty(len(part), self.vocab_size, dtype=torch.float64)
        for a in range(0, self.vocab_size, _WIDE_COLUMNS):
            columns = weight[a : a + _WIDE_COLUMNS].double()
            product = part @ columns.t() + reach * columns.norm(dim=1)
            if bias is not None:
                product += bias[a : a + _WIDE_COLUMNS].double()
            out[:, a : a + _WIDE_COLUMNS] = product.cpu()
        if self.rows_dtype != DTYPES[_name(self.dtype)]:
            out = out.to(self.dtype).double()
        transform(out, self.transforms)
        found: NDArray[np.float64] = (out + shift * 1e-14 * out.abs()).numpy()
        return found

    def rounding_bound(self, hidden: torch.Tensor, dtype: torch.dtype) -> float:
        """Bound of the difference that rounding hidden rows to a dtype makes to their logits.

        A product of a rounded row differs by at most half a unit in the last place times the norms of the row
        and of the weight's column (Cauchy-Schwarz); transformations scale it or make it smaller.
        """
        half_unit = torch.finfo(dtype).eps / 2
        norms = float(hidden.float().norm(dim=1).max()) * float(self.weight.float().norm(dim=1).max())
        return (half_unit + 64 * torch.finfo(self.dtype).eps) * norms * transform_scale(self.transforms)

    @torch.no_grad()
    def columns(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Logits ``[rows, ids]`` of some columns of hidden rows ``[rows, hidden_size]``.

        Only those are multiplied, by another product than `project`: last bits may differ.
        """
        part, chosen = hidden.to(self.device), ids.to(self.device)
        if not self.plain:
            product = self.module(part)[:, : self.vocab_size][:, chosen]
        else:
            bias = None if self.bias is None else self.bias[chosen]
            product = nn.functional.linear(part, self.weight[chosen], bias)
        return transform(product.to(getattr(torch, self.rows_dtype.name)), self.transforms)

    @property
    def state(self) -> tuple[int, ...]:
        """Changes when a weight is replaced or written to."""
        found = []
        for parameter in self.module.parameters():
            version = 0 if parameter.is_inference() else parameter._version
            found += [parameter.data_ptr(), version]
        return tuple(found)

    @property
    def hash(self) -> str:
        """XXH3 over weight, bias, transformations and dtypes."""
        if self._hash[0] != self.state:
            self._hash = (self.state, self._digest())
        return self._hash[1]

    def _digest(self) -> str:
        digest = xxhash.xxh3_64(json.dumps(self.facts(), sort_keys=True).encode())
        for array in self.arrays().values():
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return digest.hexdigest()

    def arrays(self) -> dict[str, NDArray[Any]]:
        """``weight`` ``[vocab_size, hidden_size]`` and, where there is one, ``bias``, on the host."""
        parts = {"weight": self.weight, "bias": self.bias}
        return {name: host_array(part) for name, part in parts.items() if part is not None}

    def facts(self) -> dict[str, Any]:
        """What `from_arrays` needs beside the arrays, for JSON."""
        return {
            "transforms": [list(transform) for transform in self.transforms],
            "rows_dtype": self.rows_dtype.name,
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> Head:
        """The head of `arrays` and `facts`; it computes on the CPU, over the same memory where it can be."""
        weight = _parameter(arrays["weight"])
        module = nn.Linear(weight.shape[1], weight.shape[0], bias="bias" in arrays, device="meta")
        module.weight = weight
        if "bias" in arrays:
            module.bias = _parameter(arrays["bias"])
        return cls(
            module,
            transforms=tuple((kind, float(value)) for kind, value in facts["transforms"]),
            vocab_size=weight.shape[0],
            dtype=weight.dtype,
            rows_dtype=getattr(torch, facts["rows_dtype"]),
        )

    def empty(self, rows: int) -> torch.Tensor:
        """Room for the logits of so many rows."""
        return torch.empty(rows, self.vocab_size, dtype=self.dtype, device=self.device)

    @property
    def kernel(self) -> str:
        """Library and processor whose products are bit-stable, and in what blocks."""
        library = (
            f"{self.device.type} {torch.backends.cpu.get_cpu_capability()}"
            if self.device.type == "cpu"
            else (torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type)
        )
        sizes = ", ".join(str(size) for size in self.sizes) or "any number of"
        return f"torch {torch.__version__}, {library}, products of {sizes} rows"

    @property
    def packed(self) -> bool:
        """Whether products of few rows cost no more per row than larger ones; see `pack`."""
        return self._packed is not None

    @torch.no_grad()
    def pack(self) -> bool:
        """Keep a second, packed copy of the weight for rows that fill no size (CPU, float32, MKL).

        Packed products have the bits of the canonical one and pack no weight again; without the copy small
        products are padded with zeros. Returns whether it was done.
        """
        if self.packed:
            return True
        if not (self.plain and self._packable()):
            return False
        packed = torch.ops.mkl._mkl_reorder_linear_weight(self.weight.detach(), self._packed_rows)
        self._packed = packed
        if not self._packed_is_canonical():
            self._packed = None
        return self.packed

    def all_finite(self) -> bool:
        """Whether every weight is finite; then finite hidden rows cannot give NaN."""
        parts = self.module.parameters()
        return all(
            bool(p.isfinite().all()) for p in parts if p.is_floating_point() and p.device.type != "meta"
        )

    # -- products --------------------------------------------------------------------------------------

    def _multiplied(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        if self.plain:
            self._product(hidden, out)
        else:
            out.copy_(self.module(hidden)[:, : self.vocab_size])

    def _product(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        sizes = [size for size in self.sizes if size >= (_PLAIN_FROM if self.packed else 0)]
        first = 0
        for size in sizes:
            while len(hidden) - first >= size:
                self._multiply(hidden[first : first + size], out[first : first + size])
                first += size
        step = self._packed_rows if self.packed else self.sizes[-1]
        for a in range(first, len(hidden), step):
            out[a : a + step].copy_(self._small(hidden[a : a + step]))

    def _small(self, hidden: torch.Tensor) -> torch.Tensor:
        """Product of few rows: at most `_packed_rows`, or as many as the smallest size."""
        rows = len(hidden)
        if self._packed is not None:
            product: torch.Tensor = torch.ops.mkl._mkl_linear(
                hidden, self._packed, self.weight, self.bias, rows
            )
            return product
        padded = hidden.new_zeros(self.sizes[-1], hidden.shape[1])
        padded[:rows] = hidden
        return self._plain_product(padded)[:rows]

    def _multiply(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        if self.bias is None:
            torch.mm(hidden, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, hidden, self.weight.t(), out=out)

    # -- bit stability ---------------------------------------------------------------------------------

    @torch.no_grad()
    def _find_sizes(self) -> tuple[int, ...]:
        """The largest size whose product is no waste of memory, and the smaller ones that agree with it."""
        row_bytes = self.vocab_size * self.dtype.itemsize
        sizes = [size for size in _SIZES if size * row_bytes <= _PRODUCT_BYTES] or [_SIZES[-1]]
        hidden = self._probe(sizes[0])
        large = self._plain_product(hidden)
        return tuple(s for s in sizes if _same_bits(self._plain_product(hidden[:s]), large[:s]))

    def _plain_product(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self.empty(len(hidden))
        self._multiply(hidden, out)
        return out

    def _packable(self) -> bool:
        return (
            self.device.type == "cpu"
            and self.dtype == torch.float32
            and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
            and hasattr(torch.ops.mkl, "_mkl_reorder_linear_weight")
        )

    @property
    def _packed_rows(self) -> int:
        return min(_PACKED_ROWS, self.sizes[0])

    def _packed_is_canonical(self) -> bool:
        """Whether it has the canonical bits, tried with few, odd and many rows."""
        most = self._packed_rows
        hidden = self._probe(min(size for size in self.sizes if size >= most))
        canonical = self._plain_product(hidden)
        tried = [n for n in _TRIED_ROWS if n <= most]
        return all(_same_bits(self._small(hidden[:n]), canonical[:n]) for n in tried)

    def _probe(self, rows: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(rows, self.weight.shape[1], generator=generator).to(self.device, self.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def host_array(tensor: torch.Tensor) -> NDArray[Any]:
    """A tensor as a host array, bfloat16 as the ml_dtypes one; shared on a CPU."""
    host = tensor.detach().cpu()
    if host.dtype == torch.bfloat16:
        return host.view(torch.int16).numpy().view(DTYPES["bfloat16"])
    return np.asarray(host.numpy())


def _parameter(array: NDArray[Any]) -> nn.Parameter:
    return nn.Parameter(tensor_over(array), requires_grad=False)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Also where they are NaN."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _where(module: nn.Module, weight: torch.Tensor | None) -> torch.device:
    """Device of the product; Accelerate's hook knows it when the weight itself is offloaded."""
    hook = getattr(module, "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    if device is not None:
        return torch.device(device)
    return torch.device("cpu") if weight is None else weight.device


def _is_linear(module: object) -> bool:
    return type(module) is nn.Linear


def _hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or hasattr(module, "_hf_hook")
        or hasattr(module, "parametrizations")
    )


@dataclasses.dataclass(frozen=True)
class HeadCheck:
    """How the head compared with the model's own forward, when the model was opened.

    Attributes:
        used: whether rows are made from hidden rows by the head; False: by the model's own forward.
        identical: whether all bits agreed.
        max_abs_difference: the worst one found.
        bound: what was allowed.
        reason: why the model's own forward is used, in words.
    """

    used: bool
    identical: bool = False
    max_abs_difference: float = float("nan")
    bound: float = 0.0
    reason: str = ""


def compare_head(rebuilt: torch.Tensor, own: torch.Tensor) -> HeadCheck:
    """Compare rows ``[rows, vocab_size]`` of the head with those of the model's own forward.

    The bound is 32 units in the last place at the largest logit: products of other shapes differ by that.
    """
    if rebuilt.shape != own.shape:
        return HeadCheck(
            False, reason=f"the model gives rows of {own.shape[-1]} columns, its head {rebuilt.shape[-1]}"
        )
    truth = own.cpu().double()
    difference = float((rebuilt.cpu().double() - truth).abs().max())
    bound = 32 * torch.finfo(own.dtype).eps * max(float(truth.abs().max()), 1e-6)
    if not difference <= bound:
        return HeadCheck(
            False, False, difference, bound, "the model does more to its logits than its head and config say"
        )
    return HeadCheck(True, torch.equal(rebuilt, own), difference, bound)
