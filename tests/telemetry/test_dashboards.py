# SPDX-License-Identifier: Apache-2.0
"""The dashboard, the alert rules and the documentation name the metrics that exist."""

from __future__ import annotations

import json
import re
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
    add(sums, StepRecord("tree", "fastest", 1, 1, 8, 3, 1.0, 1.0, [5, 2, 1, 1, 1, 1]))
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


def test_the_documentation_lists_every_metric(labels_of: dict[str, set[str]]) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    for name in labels_of:
        assert name.removeprefix("vllm:").removeprefix("bastion_") in text, name
