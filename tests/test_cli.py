# SPDX-License-Identifier: Apache-2.0
"""The command line on stored profiles."""

import os
import subprocess
import sys
import types
from dataclasses import replace

import pytest

from vllm_bastion import __version__, cli
from vllm_bastion.cli.curves import curves
from vllm_bastion.policy.cost.devices import DeviceSpec
from vllm_bastion.policy.cost.paper import ModelShape, Roofline, calibrate_and_report
from vllm_bastion.policy.cost.store import Profile, ProfileKey, write_profile
from vllm_bastion.policy.cost.table import StepCostTable

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
    """A cache folder with one profile."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("VLLM_BASTION_CACHE", str(folder))
    write_profile(_profile(), folder / "a.json")
    return folder


def test_show_prints_the_measurements(cache, capsys):
    assert cli.main(["show"]) == 0
    assert "measured ms" not in capsys.readouterr().out
    assert cli.main(["show", "--table"]) == 0
    text = capsys.readouterr().out
    assert "NVIDIA H200" in text and "RMSE on held-out points" in text and "1, 8, 32" in text
    rows = [line.split() for line in text.splitlines() if line.split()[:2] == ["32", "1"]]
    assert [row[2] for row in rows] == ["64", "512"]
    measured = {(n, c): ms for n, c, ms, _ in _profile().table.samples}
    assert float(rows[0][3]) == pytest.approx(measured[32, 64], abs=1e-3)
    assert float(rows[0][4]) == pytest.approx(measured[32, 64], rel=0.05)


def test_show_without_a_calibration(cache, capsys):
    write_profile(replace(_profile(), calibrated=None, rmse_before=None), cache / "a.json")
    assert cli.main(["show"]) == 0
    assert "RMSE" not in capsys.readouterr().out


def test_curves_follow_from_the_table():
    table = StepCostTable.linear(2.0, 0.5, max_rows=64, drafter_ms=1.0, aux_ms=0.25)
    (curve,) = curves(table).curves
    assert (curve.reqs, curve.nodes) == (1, (0, 1, 3, 7, 15, 31, 63))
    assert curve.cost_ms == pytest.approx([2.0 + 0.5 * (1 + n) + 1.25 for n in curve.nodes])
    assert curve.plain_ms == pytest.approx(2.0 + 0.5 + 0.25)
    # as many tokens in the time as plain steps emit, one of which every step emits by itself
    tokens = [1 + accepted for accepted in curve.break_even]
    assert tokens == pytest.approx([ms / curve.plain_ms for ms in curve.cost_ms])


def test_curves_of_the_measured_batches_at_a_context():
    samples = [(rows, c, 1 + rows + c / 100, reqs)
               for reqs in (1, 4) for rows in (4, 8, 32) for c in (0, 100, 200)]  # fmt: skip
    drawn = curves(StepCostTable(samples, max_rows=64), 200)
    assert [curve.reqs for curve in drawn.curves] == [1, 4]
    assert drawn.curves[1].nodes == (0, 1, 3, 7)
    short = curves(StepCostTable(samples, max_rows=64)).curves
    longer = [(c.cost_ms[-1], s.cost_ms[-1]) for c, s in zip(drawn.curves, short)]
    assert all(here > before for here, before in longer)
    with pytest.raises(ValueError, match="--context must be a number of at least 0"):
        curves(StepCostTable(samples, max_rows=64), -1)


def test_show_draws_both_figures(cache, capsys):
    assert cli.main(["show", "--context", "300"]) == 0
    text = capsys.readouterr().out
    assert "context 300" in text and "Break-even" in text and "● 1 request (plain" in text
    chart = text[text.index("C(N)") : text.index("Break-even")].splitlines()
    marks = [(line.index("●"), -row) for row, line in enumerate(chart) if "●" in line]
    assert len(marks) > 1 and marks == sorted(marks, reverse=True), "the cost rises with N"
    assert chart[-2].split()[:2] == ["0", "1"] and chart[-2].split()[-1] == "N"


def test_show_writes_a_png(cache, tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    assert cli.main(["show", "--png", str(tmp_path / "c.png")]) == 0
    picture = imread(tmp_path / "c.png")
    assert picture.shape[1] > 2 * picture.shape[0] and picture[..., :3].std() > 0.05


def test_show_begins_with_the_conclusion(cache, capsys):
    samples = [(rows, 0, 10.0 if rows <= 64 else 30.0) for rows in (1, 8, 16, 32, 64, 128)]
    profile = Profile(KEY, StepCostTable(samples, max_rows=128), names=("Qwen3-8B", "its DFlash"))
    write_profile(profile, cache / "a.json")
    assert cli.main(["show"]) == 0
    first, second, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("Up to about 63 nodes cost less than 10% here")
    assert second == "Target Qwen3-8B, drafter its DFlash." and "Doubtful" not in "".join(rest)


def test_show_flags_times_that_contradict_each_other(cache, capsys):
    samples = [(1, 0, 9.0), (16, 0, 299.0), (32, 0, 11.0), (64, 0, 13.0)]
    write_profile(Profile(KEY, StepCostTable(samples, max_rows=64), load=0.5), cache / "a.json")
    assert cli.main(["show", "--table"]) == 0
    text = capsys.readouterr().out
    assert "Doubtful: 16 rows took 299 ms, but 32 rows took 11; 11 ms are used" in text
    assert "(1 more, see --table). Measure again" in text
    assert "doubtful: other processes used 50% of the CPUs meanwhile" in text
    assert [line.split()[0] for line in text.splitlines() if line.endswith("doubtful")] == ["16"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--context", "-1"], "--context must be a number"),
        (["--png", "no/such/folder/c.png"], "--png: there is no folder no/such/folder"),
        (["--png", "."], "--png: . is a folder"),
    ],
)
def test_show_checks_its_arguments_first(cache, tmp_path, monkeypatch, capsys, options, reason):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["show", *options]) == 1
    captured = capsys.readouterr()
    assert not captured.out and reason in captured.err
    assert sorted(tmp_path.rglob("*")) == before, "no folder is made"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["calibrate", "T", "D", "--out", "no/folder/p.json"], "--out: there is no folder"),
        (["page", "localhost:8000"], '"localhost:8000" is no address of a server'),
    ],
)
def test_arguments_are_checked_before_an_engine_starts(
    tmp_path, monkeypatch, capsys, command, reason
):
    monkeypatch.chdir(tmp_path)
    assert cli.main(command) == 1
    assert reason in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_png_without_matplotlib_names_the_extra(cache, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert cli.main(["show", "--png", str(tmp_path / "c.png")]) == 1
    assert "pip install 'vllm-bastion[figures]'" in capsys.readouterr().err


def test_an_empty_cache_says_what_to_do(cache, capsys):
    (cache / "a.json").unlink()
    assert cli.main(["show"]) == 1
    assert "vllm-bastion calibrate TARGET DRAFTER" in capsys.readouterr().err


def test_a_bad_profile_is_an_error_not_a_traceback(cache, tmp_path, capsys):
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    assert cli.main(["show", str(bad)]) == 1
    assert "vllm-bastion show:" in capsys.readouterr().err


def test_calibrate_hands_vllms_options_on(tmp_path, monkeypatch, capsys):
    calls = []

    def calibrate(target, drafter, output, options):
        calls.append((target, drafter, output, options))
        return _profile(), tmp_path / "p.json"

    refused = []
    report = types.SimpleNamespace(text=lambda: "trees      N 63", refusal=None)
    checking = types.ModuleType("vllm_bastion.cli.check")
    checking.check = lambda *_: refused[0] if refused else report
    monkeypatch.setitem(sys.modules, "vllm_bastion.cli.check", checking)
    module = types.ModuleType("vllm_bastion.cli.calibrate")
    module.calibrate = calibrate
    monkeypatch.setitem(sys.modules, "vllm_bastion.cli.calibrate", module)
    assert cli.main(["calibrate", "T", "D", "--max-num-seqs", "4"]) == 0
    assert calls == [("T", "D", None, ["--max-num-seqs", "4"])]
    text = capsys.readouterr().out
    assert text.startswith("trees      N 63\n") and text.endswith(
        f"Profile: {tmp_path / 'p.json'}\n"
    )
    # What check refuses starts no engine.
    refused.append(types.SimpleNamespace(text=lambda: "refused    why", refusal="why"))
    assert cli.main(["calibrate", "T", "D"]) == 1
    assert len(calls) == 1 and capsys.readouterr().out == "refused    why\n"


def test_calibrate_names_a_folder_that_is_not_there(capsys):
    assert cli.main(["calibrate", "/nope", "D"]) == 1
    assert capsys.readouterr().err == (
        "vllm-bastion calibrate: the target cannot be read: there is no folder /nope: give a "
        "model's folder or its Hugging Face name\n"
    )
    assert cli.main(["calibrate", "T", "./models/nope"]) == 1
    assert "drafter cannot be read: there is no folder ./models/nope" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "missing"), [("calibrate", "torch"), ("check", "vllm")])
def test_without_torch_or_vllm_there_is_one_sentence(command, missing):
    code = f"import sys; sys.modules[{missing!r}] = None; from vllm_bastion.cli import main; "
    code += f"raise SystemExit(main([{command!r}, 'T', 'D']))"
    done = _python("-c", code)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"vllm-bastion {command}: vLLM cannot be imported here (")


def test_the_module_is_the_command():
    done = _python("-m", "vllm_bastion", "--version")
    assert (done.returncode, done.stdout) == (0, f"vllm-bastion {__version__}\n")


def _python(*arguments):
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
