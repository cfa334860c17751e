"""Peak memory of one case of `embedded.py`, in a process of its own: ``_peak.py CASE MODEL_FOLDER TOKENS``.

Prints one JSON object: resident bytes of the loaded model, the call's peak beyond them, the result's bytes.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import os
import pathlib
import re
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

CASES = ("logits", "transformers", "summary", "chunked")
CHUNKED: dict[str, Any] = {"uncached_tokens": 0}
UNLIMITED_BYTES = 2**60
_WARM_UP_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Peak:
    """Resident memory of this process around a call, in bytes.

    Attributes:
        loaded: just before it, after freed memory was given back to the system.
        over: the call's highest, beyond ``loaded``.
        result: of the call.
        how: what measured it.
    """

    loaded: int
    over: int
    result: int
    how: str


def peak_of(case: str, folder: str, tokens: int) -> Peak:
    """Peak of one of `CASES` on a prompt of so many tokens, after a warm-up of 16.

    ``logits``: complete rows by the engine. ``transformers``: the same by the model's own forward.
    ``summary`` and ``chunked``: summaries only, in one forward and in the engine's chunks.
    """
    run, vocab_size = _case(case, folder)
    ids = [i * 7919 % vocab_size for i in range(tokens)]
    run(ids[:_WARM_UP_TOKENS])
    return peak(lambda: run(ids))


def peak(run: Callable[[], int]) -> Peak:
    """Peak of a call that says the size of its result; by the kernel's high-water mark, or sampled."""
    gc.collect()
    _give_back_freed_memory()
    loaded = _status_bytes("VmRSS")
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    except OSError:
        return _sampled(run)
    if loaded is None:
        return _sampled(run)
    result = run()
    highest = _status_bytes("VmHWM")
    assert highest is not None
    return Peak(loaded, highest - loaded, result, "kernel's high-water mark")


def _sampled(run: Callable[[], int]) -> Peak:
    import psutil

    process = psutil.Process()
    loaded = highest = int(process.memory_info().rss)
    ended = threading.Event()

    def sample() -> None:
        nonlocal highest
        while not ended.wait(0.002):
            highest = max(highest, int(process.memory_info().rss))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        result = run()
    finally:
        ended.set()
        thread.join()
    return Peak(loaded, highest - loaded, result, "sampled every 2 ms")


def _status_bytes(name: str) -> int | None:
    try:
        status = pathlib.Path("/proc/self/status").read_text()
    except OSError:
        return None
    found = re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
    return None if found is None else int(found[1]) * 1024


def _give_back_freed_memory() -> None:
    """Memory that the allocator keeps would otherwise be used again without being seen."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def _case(case: str, folder: str) -> tuple[Callable[[Sequence[int]], int], int]:
    """What runs, which says the size of its result and keeps nothing; and the vocabulary's size."""
    if case == "transformers":
        return _transformers(folder)
    import logitscope as ls

    engine: Any = ls.open(
        folder,
        memory_limit_bytes=UNLIMITED_BYTES,
        prefix_cache_bytes=0,
        **(CHUNKED if case == "chunked" else {}),
    )
    if case == "logits":
        return lambda ids: np.asarray(engine.logits(ids)).nbytes, engine.vocab_size

    def summaries(ids: Sequence[int]) -> int:
        found = engine.logits(ids, select=ls.Select(vocab=None), summary=True)
        return sum(array.nbytes for array in found.summary.values())

    return summaries, engine.vocab_size


def _transformers(folder: str) -> tuple[Callable[[Sequence[int]], int], int]:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")

    @torch.no_grad()
    def forward(ids: Sequence[int]) -> int:
        return int(model(torch.tensor([ids]), use_cache=False).logits.nbytes)

    return forward, model.config.vocab_size


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(peak_of(sys.argv[1], sys.argv[2], int(sys.argv[3])))))
