# SPDX-License-Identifier: Apache-2.0
"""`vllm-bastion page`: what it reads from metrics, and what it says where there are none."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import prometheus_client
import pytest

from tests.telemetry.registries import registered
from vllm_bastion.page import html, make_server, snapshot
from vllm_bastion.telemetry.counts import Counts, StepRecord, add

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
RECORDS = [
    StepRecord("tree", "fastest", 2, 2, 12, 4, 5.0, 6.0, [6, 4, 2, 2, 1, 1]),
    StepRecord("plain", 'a "reason"} \\ x', 1),
]


def metrics(*engines: str) -> str:
    """The text of /metrics, as if each engine had made all steps."""
    registry, own = registered({i: [f"m{i}", name] for i, name in enumerate(engines)})
    for i in range(len(engines)):
        sums = Counts()
        for record in RECORDS:
            add(sums, record)
        own.observe(sums, None if i == 1 else 1.0 + i, i)  # one has not measured its gain
    return prometheus_client.generate_latest(registry).decode() + "".join(
        f'vllm:spec_decode_num_drafts_total{{engine="{name}"}} 2\n'
        f'vllm:spec_decode_num_draft_tokens_total{{engine="{name}"}} 12\n'
        + "".join(
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="{name}",position="{at}"}}'
            f" {count}\n"
            for at, count in ((10, 0), (2, 1), (0, 2), (1, 1))
        )
        for name in engines
    )


@pytest.mark.parametrize("engines", [("0",), ("0", "1", "2")])
def test_a_snapshot_adds_engines_up(engines: tuple[str, ...]) -> None:
    n = len(engines)
    other = "vllm:num_requests_running 3.0\nvllm:generation_tokens_total 7\npython_info 1.0\n"
    found = snapshot(metrics(*engines) + other)
    assert found.pop("seconds") > 0
    assert sorted(found.pop("steps")) == [
        ["plain", 'a "reason"} \\ x', n], ["tree", "fastest", n]
    ]  # fmt: skip
    assert found == {
        "model": ", ".join(f"m{i}" for i in range(n)), "running": 3, "tokens": 7, "trees": 2 * n,
        "nodes": 12 * n, "accepted": 4 * n, "request_steps": 3 * n, "expected": 5 * n,
        "accepted_by_depth": [2 * n, n, n, 0],
        "nodes_by_source": {"drafter": 6 * n, "lookup": 4 * n, "both": 2 * n},
        "accepted_by_source": {"drafter": 2 * n, "lookup": n, "both": n},
        "gain": 1.0 if n == 1 else 2.0, "times": [["tree", n, 6 * n]],
    }  # fmt: skip


def test_an_engine_that_has_decoded_nothing() -> None:
    found = snapshot(prometheus_client.generate_latest(registered({0: ["m", "0"]})[0]).decode())
    assert (found["trees"], found["steps"], found["gain"]) == (0, [], None)


@contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[str]:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@contextmanager
def server_of(text: str | None) -> Iterator[str]:
    """A server with this text at /metrics; None without such a path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/metrics" and text is not None
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write((text or "").encode())

        def log_message(self, *_: Any) -> None:
            pass

    with running(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as url:
        yield url


def shown(text: str | None) -> dict[str, Any]:
    """What a page is given of such a server."""
    with server_of(text) as url:
        return data(url)


def data(url: str) -> dict[str, Any]:
    with running(make_server(url)) as page, urlopen(f"{page}/data") as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found


def test_the_page_gets_what_the_server_has() -> None:
    assert shown(metrics("0"))["trees"] == 2


def test_a_server_without_our_metrics_is_named_in_one_sentence() -> None:
    assert 'no metrics of method "bastion"' in shown("vllm:num_requests_running 3.0\n")["error"]
    assert "/metrics gives no answer (HTTP Error 404" in shown(None)["error"]
    said = data("http://127.0.0.1:1")["error"]
    assert "http://127.0.0.1:1/metrics gives no answer" in said and "start the server" in said


def test_the_page_needs_nothing_from_elsewhere() -> None:
    with running(make_server("http://127.0.0.1:1")) as page:
        with urlopen(f"{page}/") as answer:
            assert answer.read().decode() == html()
        with pytest.raises(HTTPError):
            urlopen(f"{page}/metrics")
    hosts = html().replace("http://www.w3.org/2000/svg", "")
    assert "://" not in hosts and "innerHTML" not in hosts and "eval(" not in hosts


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: chromium)")
def test_a_browser_draws_what_the_server_has() -> None:
    with server_of(metrics("0")) as server, running(make_server(server)) as page:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
        command = [str(CHROMIUM), *flags, "--virtual-time-budget=5000", "--dump-dom", page]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert re.search(r'data-fact="trees"[^>]*>.*?<b>2</b>', done.stdout), done.stdout
    assert "live, " in done.stdout and "<rect" in done.stdout and "fastest" in done.stdout
    assert "Uncaught" not in done.stderr


@pytest.mark.parametrize("url", ["localhost:8000", "file:///etc/passwd", "http://"])
def test_an_address_is_one_of_a_server(url: str) -> None:
    with pytest.raises(ValueError, match="no address of a server"):
        make_server(url)
