# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel workers, each with its own trees, agree on every budget and every token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import cases
from tests.e2e.drafters import REDUCED, make_drafter
from tests.e2e.engines import DRAFTER, ENVIRONMENT, ON_GPU, ROOT, Batch, Engine, Runner

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(ON_GPU, reason="splits the model over CPU workers"),
]

COUNTERS = [f"spec_decode_num_{what}" for what in ("drafts", "draft_tokens", "accepted_tokens")]


def generate(runner: Runner, engine: Engine, batch: Batch, folder: Path) -> dict[str, Any]:
    """Run the offline API in processes of its own."""
    spec, result = folder / "spec.json", folder / "result.json"
    prompts = [request["prompt"] for request in batch.requests]
    params = [request["params"] for request in batch.requests]
    spec.write_text(
        json.dumps({"engine": engine.arguments(), "prompts": prompts, "params": params})
    )
    env = {**os.environ, **ENVIRONMENT, **runner.caches, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # to ask the workers, see `offline.costs`
    del env["VLLM_ENABLE_V1_MULTIPROCESSING"]
    command = [sys.executable, "-m", "tests.e2e.offline", str(spec), str(result)]
    done = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return dict(json.loads(result.read_text()))


@pytest.mark.parametrize(
    ("eager", "kind"),
    [
        (True, None),
        pytest.param(False, None, marks=pytest.mark.slow),
        pytest.param(True, REDUCED[0], marks=pytest.mark.slow),
    ],
    ids=["eager", "compiled", "reduced vocabulary"],
)
def test_two_workers_give_the_tokens_and_trees_of_one(
    runner: Runner, tmp_path: Path, eager: bool, kind: str | None
) -> None:
    batch = Batch("two tensor-parallel workers")
    for i, (name, text) in enumerate(cases.some(1, first=3)):
        sampling = {"temperature": 1.0, "seed": 3} if i == 2 else {"temperature": 0}
        batch.add(name, text, **sampling, max_tokens=40, ignore_eos=True)
    # A fixed budget: when a request arrives, and so who shares its step, is the processes' affair.
    plain = Engine(max_num_seqs=3, eager=eager)
    drafter = make_drafter(kind, tmp_path / "drafter") if kind else DRAFTER
    bastion = plain.with_bastion(16, 16, model=drafter)
    alone = [runner.submit(engine, [batch]) for engine in (plain, bastion)]
    two = generate(runner, replace(bastion, extra=(("tensor_parallel_size", 2),)), batch, tmp_path)
    expected, tree = (run.result()["batches"][0] for run in alone)
    tokens = [expected["requests"][request["id"]]["token_ids"] for request in batch.requests]
    assert two["token_ids"] == tokens
    # Each worker has the drafter's logits of half the vocabulary, and grows what one alone grows.
    counts = {name: two["metrics"][f"vllm:{name}"] for name in COUNTERS}
    assert counts == {name: tree["metrics"][name] for name in COUNTERS}
    assert counts["spec_decode_num_accepted_tokens"] > counts["spec_decode_num_drafts"] > 0


@pytest.mark.parametrize("calibration", ["off", "auto"])
def test_two_workers_believe_the_same_costs(
    runner: Runner, tmp_path: Path, calibration: str
) -> None:
    """Two measurements of one machine are never equal; the workers' costs are, to the last bit."""
    two = Engine(max_num_seqs=3, eager=True, extra=(("tensor_parallel_size", 2),))
    two, batch = two.with_bastion(16, calibration=calibration), cases.greedy(1, tokens=4)
    believed = generate(runner, two, batch, tmp_path)["costs"]
    assert len(believed) == 2 and len(believed[0]) == 129
    assert believed[0] == believed[1]
