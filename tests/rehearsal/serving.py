# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` on the fake GPU: it starts, says that it is well, shows its metrics and stops.

Without numbers, so that nothing is completed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.rehearsal.cases import TINY

_TIMEOUT_S = 400
_SPECULATIVE = """{{
  "method": "bastion", "model": "{drafter}", "num_speculative_tokens": 31
}}"""
_COMPILATION = '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}'


def _get(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return str(answer.read().decode())
    except (urllib.error.URLError, OSError):
        return None


def check(log: Path) -> list[str]:
    """One line for everything that went wrong."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(str(Path(sys.executable).with_name("vllm")), "serve", str(TINY / "target")),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float16"),
        *("--max-model-len", "512", "--max-num-seqs", "4", "--max-num-batched-tokens", "256"),
        *("--gpu-memory-utilization", "0.02", "--compilation-config", _COMPILATION),
        *("--speculative-config", _SPECULATIVE.format(drafter=TINY / "drafter")),
    ]
    variables = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    begin, url = time.perf_counter(), f"http://127.0.0.1:{port}"
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=variables)
        try:
            while _get(f"{url}/health") is None:
                if server.poll() is not None or time.perf_counter() - begin > _TIMEOUT_S:
                    return [f"vllm serve did not start:\n{log.read_text()[-3000:]}"]
                time.sleep(1)
            metrics = _get(f"{url}/metrics") or ""
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                status = server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
                status = server.wait()
    print(f"vllm serve: {time.perf_counter() - begin:.0f} s", flush=True)
    found = [line for line in log.read_text().splitlines() if "FAULT" in line]
    if "vllm:spec_decode_num_drafts" not in metrics:
        found.append("vllm serve shows no metrics of speculative decoding")
    if status not in (0, -signal.SIGTERM):
        found.append(f"vllm serve ended with status {status}")
    return found
