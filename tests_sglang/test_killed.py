"""SGLang's HTTP server, killed while it works: what its users see, and what is left in shared memory."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import subprocess
import urllib.request
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from cpu import served

from logitscope.wire import sweep

BODY = {
    "text": "Once upon a time",
    "sampling_params": {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True},
    "return_logits": True,
    "stream": True,
}


def scheduler_of(server: subprocess.Popen[bytes]) -> psutil.Process:
    (found,) = [p for p in psutil.Process(server.pid).children() if "scheduler" in "".join(p.cmdline())]
    return found


@pytest.mark.parametrize("victim", ["scheduler", "server"])
def test_a_killed_process_leaves_nothing_after_the_next_sweep(
    victim: str, smollm2: str, segments: Callable[[], Any], used: Callable[[], Any], until: Any
) -> None:
    sweep()
    before = segments()
    with served(smollm2) as (address, server):
        scheduler = scheduler_of(server)
        processes = [scheduler, *psutil.Process(server.pid).children()]
        asked = urllib.request.Request(
            f"{address}/generate", json.dumps(BODY).encode(), {"Content-Type": "application/json"}
        )
        with contextlib.closing(urllib.request.urlopen(asked, timeout=60)) as stream:
            assert b"values_b64" in stream.readline()
            assert used()
            (scheduler if victim == "scheduler" else server).send_signal(signal.SIGKILL)
            with pytest.raises((OSError, http.client.HTTPException)):
                stream.read()
        assert server.wait(60) != 0
        assert not until(lambda: [p for p in processes if p.is_running()], lambda alive: not alive)
    sweep()
    assert segments() == before
