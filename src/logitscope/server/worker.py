"""A server process that belongs to another process: it has some cores or a device, and ends with its owner.

    python -m logitscope.server.worker '{"model": …, "engine": …, "options": …, "cores": […]}'

It prints its address, and serves until its standard input is closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from typing import Any


def main(text: str) -> None:
    """Open the model and serve it."""
    given = json.loads(text)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's; it closes our input
    _take_cores(given["cores"])
    from logitscope.engines.registry import open_engine
    from logitscope.server.serve import serve
    from logitscope.wire.errors import error_to_json

    try:
        engine = open_engine(given["model"], engine=given["engine"], **given["options"])
    except Exception as error:  # noqa: BLE001 - the owner raises it
        _say({"error": error_to_json(error)})
        return
    threading.Thread(target=_end_with_owner, daemon=True).start()
    key = os.environ["LOGITSCOPE_WORKER_KEY"]
    serve(engine, port=0, api_key=key, ready=lambda address: _say({"address": address}))


def _take_cores(cores: list[int]) -> None:
    """Run on these cores only, with a thread for each."""
    if not cores:
        return
    os.environ["OMP_NUM_THREADS"] = str(len(cores))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    with contextlib.suppress(ModuleNotFoundError):
        import torch

        torch.set_num_threads(len(cores))


def _end_with_owner() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


def _say(found: dict[str, Any]) -> None:
    print(json.dumps(found), flush=True)  # noqa: T201 - the owner reads it


if __name__ == "__main__":
    main(sys.argv[1])
