# SPDX-License-Identifier: Apache-2.0
"""The dashboard, the alert rules and the documentation name the metrics that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from registries import registered

from vllm_bastion.telemetry.counts import Counts, StepRecord, add

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "dashboards" / "bastion.json"
ALERTS = ROOT / "dashboards" / "alerts.yaml"


@pytest.fixture(scope="module")
def labels_of() -> dict[str, set[str]]:
    """Labels of every sample that a server shows."""
    registry, metrics = registered({0: ["tiny", "0"]})
    sums = Counts()
    add(sums, StepRecord("tree", "fastest", 1, [8], [3], 1.0, 1.0, [5, 2, 1, 1, 1, 1]))
    metrics.observe(sums, 1.0, 0)
    own = {"model_name", "engine"}
    out = {
        "vllm:spec_decode_num_drafts_total": own,
        "vllm:spec_decode_num_draft_tokens_total": own,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total": own | {"position"},
    }
    for family in registry.collect():
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                out.setdefault(sample.name, set()).update(sample.labels)
    return out


def check(expression: str, labels_of: dict[str, set[str]]) -> None:
    names = re.findall(r"vllm:\w+", expression)
    assert names, expression
    for name in names:
        assert name in labels_of, name
    for name, selected in re.findall(r"(vllm:\w+)\{([^}]*)\}", expression):
        used = set(re.findall(r"(\w+)\s*[=!]~?=?", re.sub(r'"[^"]*"', "", selected)))
        assert used <= labels_of[name], (name, used)
    for grouped in re.findall(r"\bby \(([^)]*)\)", expression):
        known = set.union(*(labels_of[name] for name in names))
        assert {label.strip() for label in grouped.split(",")} <= known


def test_every_panel_shows_metrics_that_exist(labels_of: dict[str, set[str]]) -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len(panels) > 8
    for panel in panels:
        for target in panel["targets"]:
            check(target["expr"], labels_of)
    shown = " ".join(target["expr"] for panel in panels for target in panel["targets"])
    missing = [name for name in labels_of if name not in shown]
    assert not missing


def test_every_alert_uses_metrics_that_exist(labels_of: dict[str, set[str]]) -> None:
    rules = [r for group in yaml.safe_load(ALERTS.read_text())["groups"] for r in group["rules"]]
    assert {rule["alert"] for rule in rules} >= {"BastionNoGain", "BastionDrafterDoesNotFit"}
    for rule in rules:
        check(rule["expr"], labels_of)


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


@pytest.mark.skipif(not shutil.which("promtool"), reason="Debian's package prometheus has it")
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


def test_the_documentation_lists_every_metric(labels_of: dict[str, set[str]]) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    for name in labels_of:
        assert name.removeprefix("vllm:").removeprefix("bastion_") in text, name
