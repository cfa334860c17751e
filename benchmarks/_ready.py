"""A server process whose engine has its rows ready, and the same bytes on a plain TCP socket.

    python benchmarks/_ready.py ROWS VOCAB

Prints the address of the server and the port of the socket, as JSON; ends when its input is closed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from logitscope.engines.base import Capabilities, Engine
from logitscope.rows import NO_IDS, Buffer, End, Identity, Request, RowBlock, Stream
from logitscope.server.serve import serve

BLOCK_ROWS = 64


class ReadyEngine(Engine):
    """Gives the first rows of one array, whatever the prompt."""

    name = "ready"
    tokenizer = None
    capabilities = Capabilities(generate=False)
    context_length = None

    def __init__(self, rows: np.ndarray[Any, Any]) -> None:
        self.rows = rows
        self.identity = Identity(
            model="ready",
            weights_hash="none",
            tokenizer_hash=None,
            vocab_size=rows.shape[1],
            tokenizer_size=None,
            dtype=str(rows.dtype),
            engine="ready",
            engine_version="0",
            device="cpu",
        )

    @classmethod
    def open(cls, model: Any) -> Self:
        """An engine of these rows."""
        return cls(model)

    def _working_bytes(self, requests: Sequence[Request]) -> int:
        return 0

    def _run(self, requests: Sequence[Request], buffer: Buffer | None) -> Stream:
        for index, request in enumerate(requests):
            for first in range(0, request.prompt_length, BLOCK_ROWS):
                last = min(first + BLOCK_ROWS, request.prompt_length)
                values = self.rows[first:last]
                if buffer is not None:
                    place = buffer(index, "raw", first, last - first)
                    place[...] = values
                    values = place
                yield RowBlock(index, np.arange(first, last), values)
            yield End(index, NO_IDS, rows=request.prompt_length)


def send_to_all(listening: socket.socket, data: memoryview) -> None:
    """Send everything once to whoever connects and asks by one byte, as often as they ask."""
    while True:
        connection, _ = listening.accept()
        with connection:
            while connection.recv(1):
                connection.sendall(data)


def main(rows: int, vocab_size: int) -> None:
    made = np.random.default_rng(0).standard_normal((rows, vocab_size), np.float32)
    listening = socket.create_server(("127.0.0.1", 0))
    data = memoryview(made).cast("B")
    threading.Thread(target=send_to_all, args=(listening, data), daemon=True).start()

    def ended() -> None:
        sys.stdin.buffer.read()
        os.kill(os.getpid(), signal.SIGTERM)

    def ready(address: str) -> None:
        print(json.dumps({"address": address, "port": listening.getsockname()[1]}), flush=True)
        threading.Thread(target=ended, daemon=True).start()

    serve(ReadyEngine.open(made), port=0, ready=ready)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
