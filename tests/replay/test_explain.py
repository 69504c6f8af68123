# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.replay.explain`: the decision, the tree and the figure of one recorded step."""

import sys

import numpy as np
import pytest
from synthetic_recording import synthetic_recording

from benchmarks.figures import new_figure
from benchmarks.replay import explain
from benchmarks.replay.explain import explain_step, explanation_text
from benchmarks.replay.recording import save_recording
from benchmarks.replay.steps import best_first, target_ranks
from vllm_bastion.policy.cost.paper import CurveLatency
from vllm_bastion.policy.cost.store import Profile, ProfileKey, write_profile
from vllm_bastion.policy.cost.table import StepCostTable

KEY = ProfileKey("NVIDIA H200", "target0", "drafter0", "bfloat16", "BASTION", 1, "0.32.0", (1, 8))


def _profile():
    samples = [(n, c, 5 + 0.1 * n + 0.001 * c) for n in (1, 8, 32) for c in (64, 512)]
    return Profile(
        KEY, StepCostTable(samples, [(1, 0.7)], 0.1, max_rows=64, captured_sizes=(1, 8, 32))
    )


@pytest.mark.parametrize("step", [0, 30, 77])
def test_explained_step_agrees_with_the_replay(step):
    recording = synthetic_recording()
    latency = CurveLatency(StepCostTable.linear(5.0, 0.1, max_rows=100))
    explained = explain_step(recording, step, latency, 40)
    tree = best_first(recording.topk_logprobs[step], target_ranks(recording)[step], 40)
    np.testing.assert_allclose(explained.tree.log_rho[0].exp(), tree.rho, rtol=1e-5)
    assert len(explained.accepted) == tree.accepted(explained.num_verified)
    tokens = explained.accepted
    truth = recording.continuation(step).tolist()
    assert [*tokens, explained.bonus_token] == truth[: len(tokens) + 1]


def test_the_drawing_marks_the_accepted_path():
    recording = synthetic_recording(sharpness={"easy": 6.0})
    latency = CurveLatency(StepCostTable.linear(5.0, 0.3, max_rows=100))
    steps = [explain_step(recording, step, latency, 40) for step in range(60)]
    explained = max(steps, key=lambda step: len(step.accepted))
    assert explained.accepted and explained.num_verified < int(explained.tree.num_nodes[0])
    text = explanation_text(explained, lambda token: f"<{token}>")
    drawn = [line for line in text.splitlines() if "●" in line or "○" in line]
    accepted = [f"<{explained.root_token}>", *(f"<{token}>" for token in explained.accepted)]
    marked = " ".join(line for line in drawn if "●" in line)
    assert [word for word in marked.split() if word.startswith("<")] == accepted
    assert sum(line.count("<") for line in drawn) == explained.num_verified + 1


def test_explanation_text_marks_the_decision():
    recording = synthetic_recording(prompts=1, length=12)
    latency = CurveLatency(StepCostTable.linear(5.0, 0.1, max_rows=100))
    explained = explain_step(recording, 3, latency, 40)
    marked = [line for line in explanation_text(explained).splitlines() if "<- N*" in line]
    assert len(marked) == 1 and int(marked[0].split()[0]) == explained.num_verified


def test_explain_prints_the_decision_and_writes_a_figure(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    write_profile(_profile(), tmp_path / "a.json")
    save_recording(synthetic_recording(prompts=1, length=12), tmp_path / "r.npz")
    out = tmp_path / "out"
    arguments = [str(tmp_path / "r.npz"), "--profile", str(tmp_path / "a.json")]
    assert explain.main([*arguments, "--step", "2", "--nodes", "16", "--out", str(out)]) == 0
    assert "<- N*" in capsys.readouterr().out
    assert (out / "step-2.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert explain.main([*arguments, "--step", "9999"]) == 1
    assert "9999" in capsys.readouterr().err


def test_a_missing_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeError, match=r"vllm-bastion\[bench\]"):
        new_figure(1, 1, width=1.0, height=1.0)
