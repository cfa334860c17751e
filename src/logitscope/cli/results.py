"""Results for people and for programs: the table, JSON lines, the HTML page, the array file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from logitscope.engines.results import Generation
from logitscope.logits import Logits, LogitsBatch
from logitscope.logits.cut import CutRows
from logitscope.logits.files import atomic_write
from logitscope.logits.view import mean_nll, pieces, visible
from logitscope.rows import SUMMARIES

JSON_SUMMARIES = ("target_logprob", "target_rank", "entropy")


def show(console: Console, logits: Logits, *, top: int) -> None:
    """One sequence: what it is, the table, and the means."""
    identity = logits.identity
    quantization = f" ({identity.quantization})" if identity.quantization else ""
    console.print(Text(f"model   {identity.model}, {identity.dtype}{quantization}, {identity.device}"))
    console.print(Text(f"logits  {shape_text(logits)}"))
    console.print(logits.table(top=top))
    for name, part in (("prompt", logits.prompt), ("generated", logits.generated)):
        nll = mean_nll(part)
        if nll is not None:
            error = "" if math.isnan(nll.standard_error) else f" ± {nll.standard_error:.3f}"
            mean = f"mean -log p {nll.mean:.3f}{error} nats (standard error, n = {nll.n:,})"
            console.print(Text(f"{name} tokens: {mean}, perplexity {nll.perplexity:,.2f}"))


def show_generation(console: Console, generation: Generation, *, top: int) -> None:
    """One generation: its text, then as `show`."""
    if generation.text is not None:
        console.print(Text(f"text    {visible(generation.text, space=' ')}"))
    ending = f"{len(generation.token_ids)} tokens, finish_reason {generation.finish_reason}"
    seed = "" if generation.seed is None else f", seed {generation.seed}"
    console.print(Text(f"ended   {ending}{seed}"))
    show(console, logits_of(generation), top=top)


def shape_text(logits: Logits) -> str:
    """Such as ``[20, 49152] float32, raw``."""
    values = "only summaries" if logits.values is None else dtype_name(logits)
    if isinstance(logits.values, CutRows):
        values = f"{int(logits.values.lengths.sum()):,} entries in {values}"
    return f"{list(logits.shape)} {values}, {logits.stage}"


def dtype_name(logits: Logits) -> str:
    """Such as ``float32``, whatever library holds the values."""
    return str(logits.dtype).removeprefix("torch.")


def logits_of(generation: Generation) -> Logits:
    """The rows of a generation that was run with them."""
    assert generation.logits is not None
    return generation.logits


def write_html(path: Path, members: Sequence[Logits]) -> None:
    """One page with all sequences."""
    from logitscope.logits.html import html_page

    with atomic_write(path) as file:
        file.write(html_page(members).encode())


def write_arrays(path: Path, members: Sequence[Logits], *, single: bool) -> None:
    """A `Logits` file for a single result, else a `LogitsBatch` file."""
    (members[0] if single else LogitsBatch(members)).save(path)


def document(logits: Logits, *, top: int, every_summary: bool) -> dict[str, Any]:
    """One sequence as JSON: tokens, positions, summaries and the best tokens; never full rows."""
    identity = logits.identity
    names = SUMMARIES if every_summary else JSON_SUMMARIES
    had = [name for name in names if name in logits.available]
    found: dict[str, Any] = {
        "model": identity.model,
        "quantization": identity.quantization,
        "engine": identity.engine,
        "model_dtype": identity.dtype,
        "dtype": None if logits.values is None else dtype_name(logits),
        "stage": logits.stage,
        "shape": list(logits.shape),
        "prompt_length": logits.prompt_length,
        "token_ids": logits.token_ids.tolist(),
        "tokens": None if logits.vocabulary is None else pieces(logits, logits.token_ids),
        "positions": logits.positions.tolist(),
        "kinds": logits.kinds,
        "targets": logits.targets.tolist(),
        "summary": {name: numbers(array) for name, array in logits.summaries(had).items()},
    }
    shown = min(top, logits.best_known)
    if shown and len(logits):
        best = logits.top_k(shown)
        flat = pieces(logits, best.token_ids.reshape(-1))
        k = best.token_ids.shape[1]
        found["top_k"] = {
            "token_ids": best.token_ids.tolist(),
            "tokens": [flat[i : i + k] for i in range(0, len(flat), k)],
            "logprobs": [numbers(row) for row in best.logprobs],
        }
    return found


def generation_document(generation: Generation, *, top: int, every_summary: bool) -> dict[str, Any]:
    """One generation as JSON: its text and ending, then as `document`."""
    return {
        "prompt_index": generation.prompt_index,
        "sample_index": generation.sample_index,
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        "stop": generation.stop,
        "seed": generation.seed,
        **document(logits_of(generation), top=top, every_summary=every_summary),
    }


def json_line(found: dict[str, Any]) -> str:
    """One line of ASCII JSON."""
    return json.dumps(found, allow_nan=False)


def numbers(array: NDArray[Any]) -> list[int | float | str]:
    """Numbers as JSON holds them: float32 in its shortest form; NaN and infinities as strings.

    Example:
        >>> numbers(np.array([0.1, np.nan, -np.inf], np.float32))
        [0.1, 'NaN', '-Infinity']
    """
    if np.issubdtype(array.dtype, np.integer):
        return list(map(int, array))
    return [_number(float(str(value))) for value in array]


def _number(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value
