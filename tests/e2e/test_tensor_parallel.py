# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel workers, each with its own trees, agree on every budget and every token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import cases
from tests.e2e.engines import ENVIRONMENT, ON_GPU, ROOT, Engine, caches
from vllm_bastion.cost.store import Profile, ProfileKey, write_profile
from vllm_bastion.cost.table import StepCostTable

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(ON_GPU, reason="splits the model over CPU workers"),
]


def generate(engine: Engine, folder: Path, name: str) -> dict[str, Any]:
    """Run the offline API in processes of its own."""
    prompts, params = [], []
    for i, (_, text) in enumerate(cases.some(1, first=3)):
        prompts.append(text)
        sampling = {"temperature": 1.0, "seed": 3} if i == 2 else {"temperature": 0}
        params.append({**sampling, "max_tokens": 40, "ignore_eos": True})
    spec, result = folder / f"{name}.json", folder / f"{name}-result.json"
    spec.write_text(
        json.dumps({"engine": engine.arguments(), "prompts": prompts, "params": params})
    )
    env = {**os.environ, **ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    env |= caches(folder)
    del env["VLLM_ENABLE_V1_MULTIPROCESSING"]
    command = [sys.executable, "-m", "tests.e2e.offline", str(spec), str(result)]
    done = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return dict(json.loads(result.read_text()))


def test_two_workers_give_the_tokens_of_one(tmp_path: Path) -> None:
    plain = Engine(max_num_seqs=3)
    two = Engine(max_num_seqs=3, extra=(("tensor_parallel_size", 2),))
    expected = generate(plain, tmp_path, "plain")
    # Costs that do not depend on how busy this machine is: a row is a fiftieth of a step.
    costs = tmp_path / "costs.json"
    table = StepCostTable.linear(10.0, 0.2, max_rows=128)
    write_profile(Profile(ProfileKey("", "", "", "", "", 2, ""), table), costs)
    keys = {"calibration": str(costs), "latency_model": "table"}
    tree = generate(two.with_bastion(16, **keys), tmp_path, "tree")
    assert tree["token_ids"] == expected["token_ids"]
    # Each has the drafter's logits of half the vocabulary, and the same trees as one that has all.
    alone = generate(plain.with_bastion(16, **keys), tmp_path, "alone")
    counts = [
        f"vllm:spec_decode_num_{what}" for what in ("drafts", "draft_tokens", "accepted_tokens")
    ]
    assert [tree["metrics"][name] for name in counts] == [alone["metrics"][name] for name in counts]
    assert tree["metrics"][counts[2]] > tree["metrics"][counts[0]] > 0
