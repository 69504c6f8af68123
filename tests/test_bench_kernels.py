# SPDX-License-Identifier: Apache-2.0
"""The kernel benchmark: no speed without a passed check, honest ratios, a word without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from bastion_kernels.tree_attention import tree_attention_reference
from benchmarks._harness import Bar, Call, Case, Ceilings, Timing, provenance, quantiles, run_case
from benchmarks.attention_baseline import _sdpa
from benchmarks.bench_kernels import line, main

ROOT = Path(__file__).resolve().parent.parent
CEILINGS = Ceilings(copy=4000.0, matmul=800.0)


def timer(calls: Sequence[Call], replays: int) -> Timing:
    """20 us per call of ours, 16 of a baseline of two calls."""
    median = 20.0 if len(calls) == 1 else 16.0
    return Timing(median, median - 1, median + 1)


def passes() -> None:
    pass


def fails() -> None:
    raise AssertionError("rows differ")


def test_a_case_whose_check_fails_gets_no_speed() -> None:
    def forbidden(calls: Sequence[Call], replays: int) -> Timing:
        raise AssertionError("timed")

    row = run_case(Case("walk", fails, [passes]), CEILINGS, 10, forbidden)
    assert row.timing is None
    assert row.as_json() == {"name": "walk", "error": "AssertionError: rows differ"}
    assert "CHECK FAILED, not timed: AssertionError: rows differ" in line(row)


def test_rates_are_fractions_of_the_machines_own() -> None:
    case = Case("x", passes, [passes], bytes_moved=20_000_000, flops=1_600_000_000)
    row = run_case(case, CEILINGS, 10, timer)
    assert row.gb_per_s == pytest.approx(1000)  # 20 MB in 20 us
    assert row.tflop_per_s == pytest.approx(80)
    assert row.fraction == pytest.approx(0.25)  # a quarter of the copy, a tenth of the product


@pytest.mark.parametrize(
    ("bar", "ratio"),
    [
        (Bar("microseconds", 40.0), 0.5),
        (Bar("of copy", 0.5), 2.0),  # a quarter reached where half is asked
        (Bar("of baseline", 1.25), 1.0),  # 20 us against 16
    ],
)
def test_bars_are_met_at_one(bar: Bar, ratio: float) -> None:
    case = Case("x", passes, [passes], bytes_moved=20_000_000, bar=bar)
    case.baseline, case.baseline_calls = "other", [passes, passes]
    row = run_case(case, CEILINGS, 10, timer)
    assert row.bar_ratio == pytest.approx(ratio)
    assert ("met" in line(row)) == (ratio <= 1)
    assert json.loads(json.dumps(row.as_json()))["baseline_timing"]["median"] == 16.0


def test_quantiles_of_known_samples() -> None:
    assert quantiles([float(x) for x in range(11)]) == Timing(5.0, 2.0, 8.0)
    assert quantiles([3.0]) == Timing(3.0, 3.0, 3.0)


def test_provenance_says_versions_and_command() -> None:
    found = provenance()
    assert found["torch"] == torch.__version__
    assert found["argv"] == sys.argv
    assert {"gpu", "driver", "triton", "vllm", "commit", "changed", "time"} <= found.keys()


def test_the_pytorch_baseline_is_causal_attention_of_the_same_rows() -> None:
    g = torch.Generator().manual_seed(0)
    reqs, rows, length, page = 2, 5, 21, 4
    table = torch.randperm(12, generator=g).view(2, 6).int()
    cache = torch.randn(12, 2, page, 16, generator=g)
    query = torch.randn(reqs * rows, 4, 8, generator=g)
    got = _sdpa(rows, length, reqs, table)(query, cache)()
    out = torch.empty_like(query)
    none = torch.zeros(reqs, dtype=torch.int32)
    tree_attention_reference(
        query, cache, table, torch.tensor([0, 5, 10]), none + length, none,
        none.long() - 1, torch.zeros(1, 1, 1, dtype=torch.int32), 8**-0.5, out,
    )  # fmt: skip
    # [R * group, Hkv, rows, d] -> [T, Hq, d]
    got = got.view(reqs, 2, 2, rows, 8).permute(0, 3, 2, 1, 4).reshape(out.shape)
    torch.testing.assert_close(got, out)


def test_without_a_gpu_it_checks_every_op() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_kernels.py"), "--check"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    for op in ("draft all", "walk", "compact", "gather", "attention"):
        assert f"\n{op}" in "\n" + done.stdout


def test_without_a_gpu_it_times_nothing_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device, so there is no speed to measure"):
        main([])
