# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` in a process of its own: started until it answers, and asked."""

from __future__ import annotations

import json
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
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from benchmarks import ROOT
from tests.e2e.engines import TARGET

VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
_FORK = "from tests.e2e import offline; offline.fork(); import vllm.entrypoints.cli.main as cli"
FORKING_VLLM = [sys.executable, "-c", f"{_FORK}; cli.main()"]
_START_S, _STOP_S = 900, 60


@dataclass(frozen=True)
class Server:
    """A running server and its requests."""

    url: str

    def get(self, path: str) -> str:
        with urlopen(self.url + path, timeout=60) as answer:
            return answer.read().decode()

    def healthy(self) -> bool:
        try:
            self.get("/health")
        except OSError:
            return False
        return True

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        return json.loads(self._open(path, body).read())

    def refusal(self, path: str, **body: Any) -> str:
        with pytest.raises(HTTPError) as refused:
            self.post(path, **body)
        assert refused.value.code == 400
        return json.loads(refused.value.read())["error"]["message"]

    def stream(self, path: str, **body: Any) -> Iterator[dict[str, Any]]:
        with self._open(path, {**body, "stream": True}) as lines:
            for line in lines:
                text = line.decode().strip()
                if text.startswith("data: ") and text != "data: [DONE]":
                    yield json.loads(text.removeprefix("data: "))

    def _open(self, path: str, body: dict[str, Any]) -> Any:
        data = json.dumps({"model": TARGET, **body}).encode()
        request = Request(self.url + path, data, {"Content-Type": "application/json"})
        return urlopen(request, timeout=600)

    def counters(self) -> dict[str, float]:
        """The spec_decode counters of /metrics, per position `.._per_pos/i`; and plain steps."""
        text = self.get("/metrics")
        out = {"plain_steps": values(text, "bastion_steps_total", kind="plain")}
        found = re.findall(r"^vllm:spec_decode_num_(\w+)_total{(.*)} (\S+)$", text, re.MULTILINE)
        for name, labels, value in found:
            position = re.search(r'position="(\d+)"', labels)
            out[name + (f"/{position[1]}" if position else "")] = float(value)
        return out


def values(text: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels, from the text of GET /metrics."""
    found = re.findall(rf"^vllm:{name}{{(.*)}} (\S+)$", text, re.MULTILINE)
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(float(value) for given, value in found if all(one in given for one in wanted))


@contextmanager
def serving(
    arguments: Sequence[str], env: dict[str, str], log: Path, vllm: Sequence[str] = VLLM
) -> Iterator[Server]:
    """Run `vllm serve` with `arguments` and yield the server; its output goes to `log`.

    Raises:
        RuntimeError: it ended, or did not answer within 15 minutes.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*vllm, "serve", *arguments, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=env, cwd=ROOT, start_new_session=True
        )
    try:
        begin = time.monotonic()
        server = Server(f"http://127.0.0.1:{port}")
        while not server.healthy():
            if process.poll() is not None or time.monotonic() - begin > _START_S:
                tail = log.read_text(errors="replace")[-3000:]
                raise RuntimeError(f"the server did not start:\n{tail}")
            time.sleep(1)
        yield server
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
