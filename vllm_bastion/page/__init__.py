# SPDX-License-Identifier: Apache-2.0
"""`vllm-bastion page [URL]`: a live page of a server's metrics, served to this machine alone."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from contextlib import suppress
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from itertools import chain
from math import isnan
from typing import Any
from urllib.request import urlopen

DEFAULT_URL = "http://localhost:8000"
_TIMEOUT_S = 10.0
_SAMPLE = re.compile(r"^vllm:(\w+)(?:\{(.*)\})? (\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def serve(url: str, port: int = 0) -> int:
    """Serve the page until the user ends it; returns the exit status.

    Args:
        url: of the server whose metrics are shown.
        port: of the page; 0 takes a free one.

    Raises:
        ValueError: `url` is no address of a server.
        OSError: the port is in use.
    """
    with make_server(url, port) as server:
        print(f"http://localhost:{server.server_port} shows {url}; Ctrl+C ends it", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


def make_server(url: str, port: int = 0) -> ThreadingHTTPServer:
    """The server of `serve`, which listens once it is made."""
    if not re.match(r"https?://[^/]", url):
        raise ValueError(f'"{url}" is no address of a server: give one such as {DEFAULT_URL}')

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/":
                self._answer(200, "text/html", html())
            elif self.path == "/data":
                self._answer(200, "application/json", json.dumps(_data(url.rstrip("/"))))
            else:
                self._answer(404, "text/plain", "there is only / here")

        def _answer(self, status: int, media_type: str, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{media_type}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Write no line for each poll."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


@cache
def html() -> str:
    """The page, which asks `/data` once a second."""
    return files("vllm_bastion.page").joinpath("page.html").read_text(encoding="utf-8")


def _data(url: str) -> dict[str, Any]:
    try:
        with urlopen(f"{url}/metrics", timeout=_TIMEOUT_S) as answer:
            text = answer.read().decode()
    except (OSError, ValueError) as error:
        sentence = "start the server, or name another one: vllm-bastion page URL"
        return {"error": f"{url}/metrics gives no answer ({error}); {sentence}"}
    if "vllm:bastion_" in text:
        return snapshot(text)
    reasons = "it decodes with another method, or without metrics (VLLM_BASTION_TELEMETRY=0)"
    return {"error": f'{url} has no metrics of method "bastion": {reasons}'}


def snapshot(text: str) -> dict[str, Any]:
    """What the page shows of `/metrics`: counters summed over engines, and the mean gain."""
    # name -> labels but the engine's -> a value for each engine
    found: dict[str, dict[tuple[str, ...], list[float]]] = defaultdict(lambda: defaultdict(list))
    models = set()
    for name, written, value in _SAMPLE.findall(text):
        labels = {label: json.loads(f'"{text}"') for label, text in _LABEL.findall(written)}
        models.add(labels.pop("model_name", ""))
        labels.pop("engine", None)
        found[name][tuple(labels.values())].append(float(value))

    def by_labels(name: str) -> dict[tuple[str, ...], float]:
        return {labels: sum(values) for labels, values in found[name].items()}

    def total(name: str) -> float:
        return sum(map(sum, found[name].values()))

    depths = by_labels("spec_decode_num_accepted_tokens_per_pos_total")
    step_ms, gains = (
        by_labels("bastion_step_ms_total"),
        chain(*found["bastion_measured_gain"].values()),
    )
    known = [gain for gain in gains if not isnan(gain)]
    return {
        "seconds": time.time(),
        "model": ", ".join(sorted(models - {""})),
        "running": total("num_requests_running"),
        "tokens": total("generation_tokens_total"),
        "steps": [[*labels, count] for labels, count in by_labels("bastion_steps_total").items()],
        "trees": total("spec_decode_num_drafts_total"),
        "nodes": total("spec_decode_num_draft_tokens_total"),
        "accepted": total("bastion_accepted_tokens_total"),
        "request_steps": total("bastion_request_steps_total"),
        "expected": total("bastion_expected_tokens_total"),
        "accepted_by_depth": [depths[key] for key in sorted(depths, key=lambda key: int(key[0]))],
        "nodes_by_source": {k: n for (k,), n in by_labels("bastion_nodes_by_source_total").items()},
        "accepted_by_source": {
            k: n for (k,), n in by_labels("bastion_accepted_by_source_total").items()
        },
        "gain": sum(known) / len(known) if known else None,
        "times": [
            [kind, count, step_ms[(kind,)]]
            for (kind,), count in by_labels("bastion_timed_steps_total").items()
        ],
    }
