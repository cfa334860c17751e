"""A server process of a model that reads every prompt anew: says its address, ends when its input is closed.

python benchmarks/_serving.py MODEL
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

import logitscope as ls
from logitscope.server.serve import serve


def main(model: str) -> None:
    def ended() -> None:
        sys.stdin.buffer.read()
        os.kill(os.getpid(), signal.SIGTERM)

    def ready(address: str) -> None:
        print(json.dumps({"address": address}), flush=True)
        threading.Thread(target=ended, daemon=True).start()

    serve(ls.open(model, prefix_cache_bytes=0), port=0, ready=ready)


if __name__ == "__main__":
    main(sys.argv[1])
