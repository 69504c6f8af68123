# SPDX-License-Identifier: Apache-2.0
"""The dashboard, the alert rules and the documentation name the metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from registries import registered

from vllm_bastion.telemetry.record import StepRecord, StepTime, Totals

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "dashboards" / "bastion.json"
ALERTS = ROOT / "dashboards" / "alerts.yaml"


@pytest.fixture(scope="module")
def labels_of() -> dict[str, set[str]]:
    """Labels of every sample that a server shows."""
    registry, metrics = registered({0: ["tiny", "0"]})
    sums = Totals()
    now = {"tree": 1.0, "rows": 1.0, "gain": 1.0, "profile_time": 1.0}
    times = [StepTime("tree", 9, 1.0, 1.0)]
    sums.add(StepRecord("tree", "pays", 1, 9, [8], [3], 1.0, 1.0, 1.0, 1.0, times, now))
    metrics.observe(sums, 0)
    out: dict[str, set[str]] = {}
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
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 8
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for target in panel["targets"]:
            check(target["expr"], labels_of)
    shown = " ".join(target["expr"] for panel in panels for target in panel["targets"])
    # The histogram's parts count as one.
    missing = [name for name in labels_of if name not in shown]
    assert not missing
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert {"DS_PROMETHEUS", "model_name", "engine"} == variables


def test_every_alert_uses_metrics_that_exist(labels_of: dict[str, set[str]]) -> None:
    rules = [r for group in yaml.safe_load(ALERTS.read_text())["groups"] for r in group["rules"]]
    assert {rule["alert"] for rule in rules} >= {"BastionNoGain", "BastionDrafterDoesNotFit"}
    for rule in rules:
        check(rule["expr"], labels_of)


def test_the_documentation_lists_every_metric(labels_of: dict[str, set[str]]) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    for name in labels_of:
        short = re.sub(r"_(bucket|sum|count)$", "", name.removeprefix("vllm:bastion_"))
        assert short in text or f"..._{short}" in text, name
