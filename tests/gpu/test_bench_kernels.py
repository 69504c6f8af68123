# SPDX-License-Identifier: Apache-2.0
"""The kernel benchmark: no timing without a check, verdicts, and files of interrupted runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from bastion_kernels import accept_path
from benchmarks import provenance as origin
from benchmarks.gpu import bench_kernels, device
from benchmarks.gpu.attention_case import in_turn, random_trees
from benchmarks.gpu.bench_kernels import Report, line, main, run_timings
from benchmarks.gpu.cases import cases
from benchmarks.gpu.device import gpu_provenance
from benchmarks.gpu.harness import (
    FA3,
    OF_COPY,
    US,
    WARM_UP_S,
    Bar,
    Call,
    Case,
    Ceilings,
    Entry,
    Rival,
    Row,
    Timing,
    quantiles,
    run_entry,
    warm_up,
)
from benchmarks.gpu.shapes import QWEN3_8B, TINY

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "benchmarks" / "gpu" / "bench_kernels.py")
CEILINGS = Ceilings(copy=4000.0, matmul=800.0)


def passes() -> None:
    pass


def fails() -> None:
    raise AssertionError("rows\ndiffer")


def taking(microseconds: float) -> Call:
    """A call that `timer` reports as taking this long."""

    def call() -> float:
        return microseconds

    return call


def timer(calls: Sequence[Call], replays: int) -> Timing:
    median = float(calls[0]())  # type: ignore[arg-type]
    return Timing(median, median - 1, median + 1, sm_mhz=1980)


def never(calls: Sequence[Call], replays: int) -> Timing:
    raise AssertionError("timed")


def entry(bar: Bar | None = None, check: Call = passes, rivals: Sequence[Rival] = ()) -> Entry:
    """A case of 20 us per call that moves 20 MB."""
    case = Case(check, [taking(20.0)], 20_000_000, 1_600_000_000, rivals=rivals)
    return Entry("walk", "walk", lambda: case, bar)


def rival(name: str, microseconds: float, check: Call = passes) -> Rival:
    return Rival(name, lambda: ([taking(microseconds)], check))


def test_a_case_whose_check_fails_is_not_timed() -> None:
    row = run_entry(entry(check=fails), CEILINGS, 10, never)
    assert row.timing is None and row.failed == "check"
    assert row.error == "AssertionError: rows differ"
    assert "CHECK FAILED, not timed: AssertionError: rows differ" in line(row)
    assert "timing" not in row.as_json() and "fails" in row.as_json()["traceback"]


def test_a_case_that_cannot_be_built_or_timed_is_reported_and_stops_nothing() -> None:
    def explodes() -> Case:
        raise MemoryError("out of memory")

    row = run_entry(Entry("walk", "walk", explodes), CEILINGS, 10, never)
    assert "BUILD FAILED, not timed: MemoryError: out of memory" in line(row)
    row = run_entry(entry(), CEILINGS, 10, never)
    assert "TIMING FAILED, not timed: AssertionError: timed" in line(row)


def test_rates_are_fractions_of_the_machines_ceilings() -> None:
    row = run_entry(entry(), CEILINGS, 10, timer)
    assert row.gb_per_s == pytest.approx(1000)  # 20 MB in 20 us
    assert row.tflop_per_s == pytest.approx(80)
    assert row.fraction == pytest.approx(0.25)  # a quarter of the copy, a tenth of the product
    assert " 1980" in line(row) and row.verdict == ""


@pytest.mark.parametrize(
    ("bar", "ratio"),
    [
        (Bar(US, 40.0), 0.5),
        (Bar(OF_COPY, 0.5), 2.0),  # a quarter measured, half required
        (Bar(FA3, 1.25), 1.0),  # 20 us against 16
        (Bar(FA3, 1.15), 1.25 / 1.15),
    ],
)
def test_a_bar_is_met_at_a_ratio_of_one(bar: Bar, ratio: float) -> None:
    row = run_entry(entry(bar, rivals=[rival("theirs", 16.0)]), CEILINGS, 10, timer)
    assert row.bar_ratio == pytest.approx(ratio)
    assert row.verdict == ("met" if ratio <= 1 else "MISSED")
    assert line(row).endswith(f"{ratio:.2f} {row.verdict}")
    assert json.loads(json.dumps(row.as_json()))["judge_timing"]["sm_mhz"] == 1980


def test_without_flash_attention_3_its_bar_is_not_judged() -> None:
    row = run_entry(entry(Bar(FA3, 1.15)), CEILINGS, 10, timer)
    assert row.bar_ratio is None and row.verdict == "no FA3 here: not judged"
    assert line(row).endswith("bar 1.15 x FlashAttention 3: no FA3 here: not judged")
    wrong = rival("FA3", 1.0, check=fails)
    row = run_entry(entry(Bar(FA3, 1.15), rivals=[wrong]), CEILINGS, 10, timer)
    assert row.judge == "" and row.verdict == "FA3 failed here: not judged"
    assert row.rivals == [{"name": "FA3", "error": "AssertionError: rows differ"}]


def test_the_fastest_flash_attention_3_judges_the_bar() -> None:
    rivals = [rival("A3", 19.0), rival("B3", 18.0), rival("C3", 1.0, check=fails)]
    row = run_entry(entry(Bar(FA3, 1.15), rivals=rivals), CEILINGS, 10, timer)
    assert (row.judge, row.verdict) == ("B3", "met")
    assert "  1.11x B3 (18.0 us)" in line(row)
    assert [told["timing"].median for told in row.rivals if "timing" in told] == [19.0, 18.0]


def test_the_length_of_the_warm_up_does_not_depend_on_the_run() -> None:
    now, runs = 0.0, 0

    def run() -> None:
        nonlocal now, runs
        now, runs = now + 0.001, runs + 1

    assert warm_up(run, passes, lambda: now) == pytest.approx(0.001)
    assert now >= WARM_UP_S >= 0.3 and runs > 250


def test_quantiles_of_known_samples() -> None:
    assert quantiles([float(x) for x in range(11)]) == Timing(5.0, 2.0, 8.0)
    assert quantiles([3.0]) == Timing(3.0, 3.0, 3.0)


def test_quick_has_exactly_the_cases_with_a_bar() -> None:
    quick, full = cases(QWEN3_8B, "cuda", quick=True), cases(QWEN3_8B, "cuda")
    assert [e.name for e in quick] == [e.name for e in full if e.bar]
    assert len({e.name for e in full}) == len(full)
    bars = {e.name: e.bar for e in quick}
    for top_k in (16, 32):
        assert bars[f"draft all R=1 N=64 K={top_k}"] == Bar(US, 60.0)
        assert bars[f"draft all R=1 N=256 K={top_k}"] == Bar(US, 150.0)
    assert bars["walk R=1 N=64"] == Bar(US, 15.0)
    assert bars["compact 9-token path, 36 layers, R=1"] == Bar(US, 15.0)
    assert bars["compact 9-token path, 36 layers, R=64"] == Bar(OF_COPY, 0.6)
    for context in (1024, 8192, 32768):
        for reqs in (1, 8):
            assert bars[f"attention R={reqs} N=64 context={context}"] == Bar(FA3, 1.15)
    assert len(bars) == 13


def test_a_graph_has_several_calls_over_different_data() -> None:
    assert min(QWEN3_8B.least_calls, QWEN3_8B.repeats) >= 5
    assert in_turn(["a", "b"], 5) == ["a", "b", "a", "b", "a"]  # type: ignore[list-item]
    assert len(in_turn([passes] * 7, 5)) == 7
    for made in cases(TINY, "cpu"):
        if made.op in ("attention", "compact"):
            case = made.make()
            assert len(set(case.calls)) >= 2 and case.memory.startswith("cold: ")


def test_random_trees_have_parents_before_children() -> None:
    parents, sees = random_trees(3, 9, torch.Generator().manual_seed(0))
    assert (parents <= torch.arange(9)).all() and (parents >= 0).all()
    depth = sees.sum(2)  # a node sees what its parent sees, and itself
    assert (depth[:, 1:] == depth.gather(1, parents) + 1).all()
    assert not sees.triu(1).any()


def test_an_interrupted_run_leaves_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut() -> Case:
        raise KeyboardInterrupt

    planned = [entry(Bar(US, 1.0), check=fails), Entry("walk", "next", cut)]
    monkeypatch.setattr(bench_kernels, "cases", lambda *_: planned)
    monkeypatch.setattr(bench_kernels, "measure_ceilings", lambda _: CEILINGS)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    with pytest.raises(KeyboardInterrupt):
        run_timings((), 10, False, tmp_path / "new" / "out.json")
    found = json.loads((tmp_path / "new" / "out.json").read_text())
    assert found["complete"] is False and found["planned"] == 2
    assert [row["failed"] for row in found["rows"]] == ["check"]
    assert found["ceilings"]["copy_gb_per_s"] == 4000.0
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out.json"]


def test_a_report_is_complete_after_its_last_row_and_counts_verdicts(tmp_path: Path) -> None:
    report = Report(tmp_path / "out.json", CEILINGS, 2)
    for bar in (Bar(US, 30.0), Bar(FA3, 1.15)):
        report.add(run_entry(entry(bar), CEILINGS, 10, timer))
    assert json.loads((tmp_path / "out.json").read_text())["complete"] is True
    assert report.summary() == "bars: 1 met, 1 no FA3 here: not judged"
    report.add(Row("x", failed="check"))
    assert report.summary().endswith("; 1 FAILED")


def test_provenance_has_versions_and_command() -> None:
    found = gpu_provenance()
    assert found["torch"] == torch.__version__
    assert found["argv"] == sys.argv
    assert {"gpu", "driver", "triton", "vllm", "commit", "changed", "time"} <= found.keys()
    assert {"sm_mhz_max", "l2_bytes"} <= found.keys()


def test_the_commit_of_a_copy_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BASTION_COMMIT", "abc123")
    monkeypatch.setattr(origin, "command_output", lambda *command: "def456")
    found = gpu_provenance()  # the copy may have an older .git
    assert (found["commit"], found["commit_from"]) == ("abc123", "VLLM_BASTION_COMMIT")
    monkeypatch.delenv("VLLM_BASTION_COMMIT")
    found = gpu_provenance()
    assert (found["commit"], found["commit_from"]) == ("def456", "git")


@pytest.mark.parametrize(("printed", "clock"), [("1980", 1980), ("[N/A]", None), (None, None)])
def test_the_clock_is_read_from_nvidia_smi_without_pynvml(
    printed: str | None, clock: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> int:
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(torch.cuda, "clock_rate", absent)
    monkeypatch.setattr(device, "_smi", lambda field: printed)
    assert device.sm_clock() == clock
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda: 1755)
    assert device.sm_clock() == 1755


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=600, cwd=ROOT
    )


@pytest.mark.slow
@pytest.mark.parametrize("entry", cases(TINY, "cpu"), ids=lambda entry: entry.name)
def test_every_case_passes_its_check(entry: Entry) -> None:
    entry.make().check()


def test_a_case_whose_result_is_wrong_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    walk = next(entry for entry in cases(TINY, "cpu") if entry.op == "walk").make()
    walk.check()
    monkeypatch.setattr(accept_path, "triton", lambda *arguments: None)
    with pytest.raises(AssertionError, match="accept_path differs from its reference"):
        walk.check()


@pytest.mark.parametrize("arguments", [[], ["--quick", "--out", "x.json"]])
def test_without_a_gpu_it_times_nothing_and_gives_the_reason(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device, so there is no speed to measure"):
        main(arguments)


def test_without_pytorch_it_says_what_it_needs() -> None:
    done = run(sys.executable, "-I", "-S", SCRIPT)
    assert done.returncode == 1
    assert "has no torch. Speed is measured on a CUDA GPU" in done.stderr


def test_make_bench_builds_no_environment_and_passes_its_arguments() -> None:
    done = run("make", "-n", "bench", "BENCH_PYTHON=py", "BENCH_ARGS=--quick")
    assert done.returncode == 0, done.stderr
    assert '"py" benchmarks/gpu/bench_kernels.py --quick' in done.stdout
    assert "setup" not in done.stdout and ".venv" not in done.stdout
