"""What makes the rows of an SGLang engine."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import xxhash

from logitscope.rows import Identity

_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
_HASHED_BYTES = 1 << 20


def identity_of(scheduler: Any, *, dtype: str) -> Identity:
    """The identity of a scheduler's model; the tokenizer's part is added where the tokenizer is."""
    args, config = scheduler.server_args, scheduler.model_config
    parallel = f", tensor parallel {args.tp_size}" if args.tp_size > 1 else ""
    return Identity(
        model=args.served_model_name or args.model_path,
        weights_hash=weights_hash(args.model_path),
        tokenizer_hash=None,
        vocab_size=config.vocab_size,
        tokenizer_size=None,
        dtype=dtype,
        engine="sglang",
        engine_version=f"sglang {version('sglang')}, torch {version('torch')}",
        device=str(args.device),
        quantization=args.quantization,
        kernel=f"{str(config.dtype).removeprefix('torch.')} model{parallel}",
        version=version("logitscope"),
    )


def weights_hash(model_path: str) -> str:
    """xxh3 over names, sizes and first MiB of a folder's weight files; of the name if it is no folder."""
    digest = xxhash.xxh3_64()
    folder = Path(model_path)
    files = sorted(file for pattern in _WEIGHTS for file in folder.glob(pattern)) if folder.is_dir() else []
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HASHED_BYTES))
    return f"files-{digest.hexdigest()}" if files else f"name-{xxhash.xxh3_64_hexdigest(model_path.encode())}"
