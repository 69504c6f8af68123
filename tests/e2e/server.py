# SPDX-License-Identifier: Apache-2.0
"""Start `vllm serve` in a process of its own, and wait until it answers."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from benchmarks import ROOT

VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
_START_S, _STOP_S = 900, 60


@dataclass(frozen=True)
class Server:
    """A running server: its address, its process group and the seconds that its start took."""

    url: str
    port: int
    group: int
    start_s: float

    def healthy(self) -> bool:
        try:
            with urlopen(f"{self.url}/health", timeout=30) as answer:
                return bool(answer.status == 200)
        except (URLError, OSError):
            return False

    def metrics(self) -> str:
        with urlopen(f"{self.url}/metrics", timeout=30) as answer:
            return str(answer.read().decode())


def values(text: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels, from the text of GET /metrics."""
    found = re.findall(rf"^vllm:{name}{{(.*)}} (\S+)$", text, re.MULTILINE)
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(float(value) for given, value in found if all(one in given for one in wanted))


@contextmanager
def serving(arguments: Sequence[str], env: dict[str, str], log: Path) -> Iterator[Server]:
    """Run `vllm serve` with `arguments` and yield the server; its output goes to `log`.

    Raises:
        RuntimeError: it ended, or did not answer within 15 minutes.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*VLLM, "serve", *arguments, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=env, cwd=ROOT, start_new_session=True
        )
    try:
        begin = time.monotonic()
        starting = Server(f"http://127.0.0.1:{port}", port, process.pid, 0.0)
        while not starting.healthy():
            if process.poll() is not None or time.monotonic() - begin > _START_S:
                tail = log.read_text(errors="replace")[-3000:]
                raise RuntimeError(f"the server did not start:\n{tail}")
            time.sleep(1)
        yield Server(starting.url, port, process.pid, time.monotonic() - begin)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
