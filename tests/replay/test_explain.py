# SPDX-License-Identifier: Apache-2.0
"""One recorded step explained: the decision, the page and the figures."""

import sys
from xml.etree import ElementTree

import numpy as np
import pytest
from synthetic_recording import synthetic_recording

from benchmarks.replay import explain, plots
from benchmarks.replay.explain import explain_step, explanation_html, explanation_text
from benchmarks.replay.recording import save_recording
from benchmarks.replay.steps import best_first, target_ranks
from vllm_bastion.policy.cost.online import TableLatency
from vllm_bastion.policy.cost.store import Profile, ProfileKey, write_profile
from vllm_bastion.policy.cost.table import StepCostTable

KEY = ProfileKey("NVIDIA H200", "target0", "drafter0", "bfloat16", "BASTION", 1, "0.32.0", (1, 8))


def _profile():
    samples = [(n, c, 5 + 0.1 * n + 0.001 * c) for n in (1, 8, 32) for c in (64, 512)]
    return Profile(
        KEY, StepCostTable(samples, [(1, 0.7)], 0.1, max_rows=64, captured_sizes=(1, 8, 32))
    )


def _is_png(path):
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("step", [0, 30, 77])
def test_explained_step_agrees_with_the_replay(step):
    recording = synthetic_recording()
    latency = TableLatency(StepCostTable.linear(5.0, 0.1, max_rows=100))
    explained = explain_step(recording, step, latency, 40)
    tree = best_first(recording.topk_logprobs[step], target_ranks(recording)[step], 40)
    np.testing.assert_allclose([node.rho for node in explained.nodes], tree.rho, rtol=1e-5)
    assert len(explained.accepted) == tree.accepted(explained.num_verified)
    tokens = [node.token for node in explained.accepted]
    truth = recording.continuation(step).tolist()
    assert [*tokens, explained.bonus_token] == truth[: len(tokens) + 1]


def test_the_page_is_well_formed_and_marks_every_node():
    recording = synthetic_recording(sharpness={"easy": 6.0})
    latency = TableLatency(StepCostTable.linear(5.0, 0.3, max_rows=100))
    steps = [explain_step(recording, step, latency, 40) for step in range(60)]
    explained = max(steps, key=lambda step: len(step.accepted))
    assert explained.accepted and explained.num_verified < len(explained.nodes)
    page = explanation_html(explained, lambda token: f"<t&{token}>")
    svg = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    ns = {"s": "http://www.w3.org/2000/svg"}
    groups = svg.findall("s:g", ns)
    assert len(groups) == len(explained.nodes) + 1
    kinds = [group.get("class") for group in groups]
    assert kinds.count("accepted") == len(explained.accepted) + 1
    assert kinds.count("unverified") == len(explained.nodes) - explained.num_verified
    places = {tuple(group.find("s:rect", ns).get(k) for k in "xy") for group in groups}
    assert len(places) == len(groups), "no two boxes on one place"


def test_explanation_text_marks_the_decision():
    recording = synthetic_recording(prompts=1, length=12)
    latency = TableLatency(StepCostTable.linear(5.0, 0.1, max_rows=100))
    explained = explain_step(recording, 3, latency, 40)
    marked = [line for line in explanation_text(explained).splitlines() if "<- N*" in line]
    assert len(marked) == 1 and int(marked[0].split()[0]) == explained.num_verified


def test_explain_writes_a_page_and_a_figure(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    write_profile(_profile(), tmp_path / "a.json")
    save_recording(synthetic_recording(prompts=1, length=12), tmp_path / "r.npz")
    out = tmp_path / "out"
    arguments = [str(tmp_path / "r.npz"), "--profile", str(tmp_path / "a.json")]
    assert explain.main([*arguments, "--step", "2", "--nodes", "16", "--out", str(out)]) == 0
    assert "<- N*" in capsys.readouterr().out
    assert _is_png(out / "step-2.png") and "</svg>" in (out / "step-2.html").read_text()
    assert explain.main([*arguments, "--step", "9999"]) == 1
    assert "9999" in capsys.readouterr().err


def test_plots_close_over_one_measured_point(tmp_path):
    pytest.importorskip("matplotlib")
    profile = Profile(KEY, StepCostTable([(8, 64, 3.0)], max_rows=8))
    plots.profile_figure(profile, tmp_path / "p.png")
    assert _is_png(tmp_path / "p.png")


def test_a_missing_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeError, match=r"vllm-bastion\[bench\]"):
        plots.profile_figure(_profile(), tmp_path / "a.png")
