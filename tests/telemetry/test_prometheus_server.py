# SPDX-License-Identifier: Apache-2.0
"""The dashboard's queries and the alert rules in a real Prometheus, where one is installed.

Debian's package `prometheus` has both programs; `PATH` must name their folder.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import prometheus_client
import pytest
import yaml
from registries import registered

from vllm_bastion.telemetry.record import StepRecord, Totals

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "dashboards" / "alerts.yaml"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("prometheus") and shutil.which("promtool")),
        reason="needs Prometheus: install Debian's package prometheus",
    ),
]


def series(name: str, step: float, **labels: str) -> dict[str, str]:
    """A counter that grows by `step` a minute for two hours."""
    text = ", ".join(f'{key}="{value}"' for key, value in labels.items())
    return {
        "series": f'vllm:bastion_{name}{{model_name="m", engine="0", {text}}}',
        "values": f"0+{step}x120",
    }


def alerts_after_two_hours(tmp_path: Path, given: list[dict[str, str]]) -> set[str]:
    """Alerts that fire, as promtool finds them."""
    fired = set()
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    for name in (rule["alert"] for rule in rules):
        test = {
            "rule_files": [str(ALERTS)],
            "evaluation_interval": "1m",
            "tests": [
                {
                    "interval": "1m",
                    "input_series": given,
                    "alert_rule_test": [{"eval_time": "120m", "alertname": name}],
                }
            ],
        }
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(test))
        # No alerts are expected, so the test fails where one fires.
        done = subprocess.run(
            ["promtool", "test", "rules", str(file)], capture_output=True, text=True
        )
        if done.returncode:
            assert f'alertname="{name}"' in done.stdout + done.stderr, done.stderr
            fired.add(name)
    return fired


def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    def engine(gain: float, accepted: float) -> list[dict[str, str]]:
        return [
            {**series("measured_gain", 0), "values": f"NaN {gain}x119"},
            series("steps_total", 100, kind="tree", reason="fastest"),
            series("nodes_verified_count", 100),
            series("accepted_tokens_total", 100 * accepted),
        ]

    assert alerts_after_two_hours(tmp_path, engine(2.0, 3.0)) == set()
    assert alerts_after_two_hours(tmp_path, engine(1.0, 3.0)) == {"BastionNoGain"}
    assert alerts_after_two_hours(tmp_path, engine(2.0, 0.01)) == {"BastionDrafterDoesNotFit"}
    assert alerts_after_two_hours(tmp_path, engine(float("nan"), 3.0)) == set()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def prometheus(folder: Path, scraped: int) -> Iterator[Callable[[str], list[Any]]]:
    """A Prometheus that reads a port every second; asks it for a query's result."""
    port = free_port()
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [
            {"job_name": "vllm", "static_configs": [{"targets": [f"127.0.0.1:{scraped}"]}]}
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)

    def query(expression: str) -> list[Any]:
        address = f"http://127.0.0.1:{port}/api/v1/query?{urlencode({'query': expression})}"
        with urlopen(address, timeout=10) as answer:
            return json.load(answer)["data"]["result"]

    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                if len(query("up")) == 1:
                    break
            except OSError:
                pass
            assert process.poll() is None and time.monotonic() < deadline, (
                folder / "log"
            ).read_text()
            time.sleep(0.2)
        yield query
    finally:
        process.terminate()
        process.wait()


def test_every_query_of_the_dashboard_finds_something(tmp_path: Path) -> None:
    registry, metrics = registered({0: ["tiny", "0"]})

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # Its own server writes "vllm_" where an older Prometheus prefers OpenMetrics.
            self.send_response(200)
            self.send_header("Content-Type", prometheus_client.CONTENT_TYPE_PLAIN_0_0_4)
            self.end_headers()
            self.wfile.write(prometheus_client.generate_latest(registry))

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    stop = threading.Event()

    def work() -> None:
        trees = StepRecord("tree", "fastest", 1, [8], [3], 4.0, 6.0, [5, 2, 1, 1, 1, 1])
        while not stop.wait(0.1):
            sums = Totals(gain=2.0)
            sums.add([trees, StepRecord("plain", "exploration", 1)])
            metrics.observe(sums, 0)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        with prometheus(tmp_path, server.server_port) as query:
            time.sleep(8)
            found = {}
            panels = json.loads((ROOT / "dashboards" / "bastion.json").read_text())["panels"]
            for panel in panels:
                for target in panel["targets"]:
                    expression = target["expr"].replace("$__rate_interval", "5s")
                    expression = expression.replace("$model_name", ".*").replace("$engine", ".*")
                    result = query(expression)
                    assert result, expression
                    found.setdefault(panel["title"], float(result[0]["value"][1]))
            assert found["Measured gain over plain decoding"] == 2.0
            assert found["Accepted tokens per tree"] == pytest.approx(3.0)
            assert found["Nodes per tree"] == pytest.approx(8.0)
            assert found["Steps by kind"] == pytest.approx(0.5)
            assert found["Accepted over expected tokens"] == pytest.approx(0.75)
            assert found["Step time by kind"] == pytest.approx(6.0)
            assert found["Tokens per step and request"] == pytest.approx(2.5)
            assert len(query('{__name__=~"vllm:bastion.*"}')) > 20
    finally:
        stop.set()
        worker.join()
        server.shutdown()
        thread.join()
