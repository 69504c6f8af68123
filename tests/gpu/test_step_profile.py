# SPDX-License-Identifier: Apache-2.0
"""The parts of a step, from traces in the format of PyTorch's profiler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu.step_profile import device_ms, our_kernels, profile_steps


def trace(path: Path, *events: tuple[str, str, float]) -> None:
    """Write a trace of (category, name, microseconds)."""
    rows = [{"ph": "X", "cat": cat, "name": name, "ts": 0, "dur": us} for cat, name, us in events]
    rows.append({"ph": "M", "name": "process_name", "args": {}})  # has no category
    path.write_text(json.dumps({"traceEvents": rows}))


class Engine:
    """A fake engine to profile: a prompt of 1 ms, then steps of 0.5 ms and a kernel."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tokens, self.running = folder, 0, False

    def start_profile(self) -> None:
        self.running = True

    def generate(self, tokens: int) -> None:
        assert self.running
        self.tokens = tokens

    def stop_profile(self) -> None:
        self.running = False
        steps = self.tokens - 1
        trace(
            self.folder / "worker.pt.trace.json",
            ("kernel", "gemm", 1000.0),
            *[("kernel", "gemm", 500.0)] * steps,
            *[("kernel", "expand_kernel", 20.0)] * steps,
            *[("gpu_memcpy", "Memcpy DtoH", 2.0)] * steps,
            ("cpu_op", "aten::mm", 9999.0),
        )
        trace(self.folder / "front.pt.trace.json", ("cpu_op", "aten::add", 7.0))


def test_a_step_is_the_difference_to_the_prompt_alone(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    found = profile_steps(engine, engine.generate, steps=8, step_ms=0.6, folder=tmp_path)
    assert found["ours"] == pytest.approx({"expand_kernel": 0.02})
    assert found["others"] == pytest.approx({"gemm": 0.5, "Memcpy DtoH": 0.002})
    assert found["busy_ms"] == pytest.approx(0.522)
    assert found["idle_ms"] == pytest.approx(0.078)
    assert not list(tmp_path.iterdir())


def test_traces_are_read_once(tmp_path: Path) -> None:
    trace(tmp_path / "a.json", ("kernel", "gemm", 500.0))
    assert device_ms(tmp_path) == {"gemm": 0.5}
    assert not device_ms(tmp_path)


def test_our_kernels_are_distinguished_from_vllms() -> None:
    names = our_kernels()
    assert {"tree_attention_kernel", "plan_kernel", "expand_kernel", "_choose_kernel"} <= names
    assert {"_accept_kernel", "_compact_kernel", "_gather_kernel", "_bind_kernel"} <= names
    assert "_gumbel_sample_kernel" not in names
