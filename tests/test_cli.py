# SPDX-License-Identifier: Apache-2.0
"""The command line on stored profiles and recordings."""

import os
import subprocess
import sys
import types
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks.replay_trees import best_first, target_ranks
from tests.synthetic_recording import synthetic_recording
from vllm_bastion import cli, plots
from vllm_bastion.calibration import calibrate_and_report
from vllm_bastion.devices import DeviceSpec
from vllm_bastion.explain import explain_step, explanation_html, explanation_text
from vllm_bastion.latency import TableLatency
from vllm_bastion.profile_store import Profile, ProfileKey, write_profile
from vllm_bastion.recording import save_recording
from vllm_bastion.roofline import ModelShape, Roofline
from vllm_bastion.step_cost import StepCostTable

KEY = ProfileKey("NVIDIA H200", "target0", "drafter0", "bfloat16", "BASTION", 1, "0.32.0", (1, 8))


def _profile():
    roofline = Roofline(
        ModelShape(4, 256, 4, 2, 64, 512, 1000), DeviceSpec("test", 1e12, 1e10, "test")
    )
    samples = [
        (n, c, 2 * float(roofline.predict_ms(n, c)) + 0.5) for n in (1, 8, 32) for c in (64, 512)
    ]
    table = StepCostTable(samples, [(1, 0.7)], 0.1, max_rows=64, captured_sizes=(1, 8, 32))
    return Profile.from_measurement(KEY, table, calibrate_and_report(roofline, samples))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("VLLM_BASTION_CACHE", str(folder))
    return folder


def _is_png(path):
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_show_prints_the_measurements_and_draws_them(cache, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    write_profile(_profile(), cache / "a.json")
    assert cli.main(["show", "--png", str(tmp_path / "a.png")]) == 0
    text = capsys.readouterr().out
    assert "NVIDIA H200" in text and "RMSE on held-out points" in text and "1, 8, 32" in text
    rows = [line.split() for line in text.splitlines() if line.split()[:2] == ["32", "1"]]
    assert [row[2] for row in rows] == ["64", "512"]
    measured = {(n, c): ms for n, c, ms, _ in _profile().table.samples}
    assert float(rows[0][3]) == pytest.approx(measured[32, 64], abs=1e-3)
    assert float(rows[0][4]) == pytest.approx(measured[32, 64], rel=0.05)
    assert _is_png(tmp_path / "a.png")


def test_show_without_a_calibration(cache, capsys):
    write_profile(replace(_profile(), calibrated=None, rmse_before=None), cache / "a.json")
    assert cli.main(["show"]) == 0
    assert "RMSE" not in capsys.readouterr().out


def test_an_empty_cache_says_what_to_do(cache, capsys):
    assert cli.main(["show"]) == 1
    assert "vllm-bastion calibrate TARGET DRAFTER" in capsys.readouterr().err


def test_a_bad_profile_is_an_error_not_a_traceback(cache, tmp_path, capsys):
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    assert cli.main(["show", str(bad)]) == 1
    assert "vllm-bastion show:" in capsys.readouterr().err


def test_a_missing_matplotlib_names_the_extra(cache, tmp_path, capsys, monkeypatch):
    write_profile(_profile(), cache / "a.json")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["show", "--png", str(tmp_path / "a.png")]) == 1
    assert "vllm-bastion[bench]" in capsys.readouterr().err


def test_calibrate_hands_vllms_options_on(monkeypatch, capsys):
    calls = []

    def main(target, drafter, *, output, engine_args):
        calls.append((target, drafter, output, engine_args))
        return _profile()

    module = types.ModuleType("vllm_bastion.runner.calibrate")
    module.main = main
    package = types.ModuleType("vllm_bastion.runner")
    package.calibrate = module
    monkeypatch.setitem(sys.modules, "vllm_bastion.runner", package)
    monkeypatch.setitem(sys.modules, "vllm_bastion.runner.calibrate", module)
    assert cli.main(["calibrate", "T", "D", "--max-num-seqs", "4"]) == 0
    assert calls == [("T", "D", None, ["--max-num-seqs", "4"])]
    assert "NVIDIA H200" in capsys.readouterr().out


def test_unknown_options_of_the_other_commands_are_refused(cache, capsys):
    with pytest.raises(SystemExit):
        cli.main(["show", "--nonsense"])
    assert "--nonsense" in capsys.readouterr().err


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


def test_explain_writes_a_page_and_a_figure(cache, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    write_profile(_profile(), cache / "a.json")
    save_recording(synthetic_recording(prompts=1, length=12), tmp_path / "r.npz")
    out = tmp_path / "out"
    arguments = ["explain", str(tmp_path / "r.npz"), "--step", "2", "--nodes", "16"]
    assert cli.main([*arguments, "--out", str(out)]) == 0
    assert "<- N*" in capsys.readouterr().out
    assert _is_png(out / "step-2.png") and "</svg>" in (out / "step-2.html").read_text()
    assert cli.main(["explain", str(tmp_path / "r.npz"), "--step", "9999"]) == 1
    assert "9999" in capsys.readouterr().err


def test_nothing_here_imports_vllm():
    # the figures and the command line must work beside any vLLM, or none
    code = "import sys, vllm_bastion.cli, vllm_bastion.explain, vllm_bastion.plots\n"
    code += "assert not any(m == 'vllm' or m.startswith('vllm.') for m in sys.modules)"
    path = os.pathsep.join(filter(None, sys.path))
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": path})


def test_plots_close_over_one_measured_point(tmp_path):
    pytest.importorskip("matplotlib")
    profile = Profile(KEY, StepCostTable([(8, 64, 3.0)], max_rows=8))
    plots.profile_figure(profile, tmp_path / "p.png")
    assert _is_png(tmp_path / "p.png")
