# SPDX-License-Identifier: Apache-2.0
"""The benchmark scripts around an engine: counting, recording, reading a recorded tree."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness.decoder import Completion, Run, count
from benchmarks.harness.engine import GAMMA
from benchmarks.probes import SeenDraft, SeenTree
from benchmarks.replay.costs import paper_a100
from benchmarks.replay.record import collect, requests_for
from benchmarks.replay.recording import load_recording, save_recording
from tests.e2e.engines import given_costs
from vllm_bastion.policy.cost.store import read_profile

PROMPTS = [
    {"id": f"{domain}-{i}", "domain": domain, "prompt": f"{domain} {i}"}
    for domain in ("code", "arithmetic", "chat")
    for i in range(2)
]


def test_recording_holds_what_was_drafted_and_emitted(tmp_path: Path) -> None:
    steps, top_k = 3, 4
    rng = np.random.default_rng(0)
    asked = requests_for(PROMPTS, [0.0, 1.0], steps)
    done, drafts = Run(), {}
    for index, (name, (request, _)) in enumerate(asked.items()):
        assert request.max_tokens == steps + GAMMA + 1
        tokens = rng.integers(0, 1000, request.max_tokens).tolist()
        done.completions.append(Completion(name, tokens, prompt_ids=[7] * (5 + index)))
        # The drafter also drafts after the last step that can be replayed.
        for position in range(1, request.max_tokens):
            logprobs = -np.sort(rng.random((GAMMA, top_k)) * 5, axis=1).astype(np.float16)
            drafted = rng.integers(0, 1000, (GAMMA, top_k)).astype(np.int32)
            drafts[name, position] = SeenDraft(index, position, drafted, logprobs)
    done.probed = list(drafts.values())[::-1]
    path = tmp_path / "recording.npz"
    save_recording(collect(done, asked, {"command": "none"}), path)

    recording = load_recording(path)
    assert recording.request_ids == list(asked)
    assert recording.domains == [domain for _, domain in asked.values()]
    assert recording.temperatures.tolist() == [0.0] * 6 + [1.0] * 6
    assert recording.num_steps == len(asked) * steps
    for step in range(recording.num_steps):
        q, position = int(recording.step_requests[step]), int(recording.step_positions[step])
        draft = drafts[recording.request_ids[q], position]
        assert np.array_equal(recording.topk_tokens[step], draft.tokens)
        assert np.array_equal(recording.topk_logprobs[step], draft.logprobs.astype(np.float32))
        truth = done.completions[q].token_ids[position : position + GAMMA + 1]
        assert recording.continuation(step).tolist() == truth
        assert recording.context_lens[step] == 5 + q + position - 1


def test_counts() -> None:
    tree = [Completion(row["id"], [1, 2, 3, 4, 5], "", [3, 1], [8, 6]) for row in PROMPTS]
    total = count(tree[:2])
    assert (total.tokens, total.forwards, total.tau, total.mean_verified) == (8, 4, 2.0, 7.0)
    assert count([]).tau == 0.0


@pytest.mark.parametrize(
    ("path", "chain"),
    [([0], 0), ([0, 1, 2], 2), ([0, 1, 4], 1), ([0, 3], 0)],
    ids=["nothing accepted", "a chain", "leaves at depth 2", "leaves at once"],
)
def test_the_length_that_a_chain_would_have_had_accepted(path: list[int], chain: int) -> None:
    # 1 and 3 below the root, 2 and 4 below 1: best children are 1 and 2.
    seen = SeenTree(
        request=0,
        position=1,
        root=9,
        tokens=[10, 11, 12, 13],
        parents=[0, 1, 0, 1],
        log_rho=[-0.1, -0.2, -2.0, -3.0],
        num_verified=4,
        path=path,
        emitted=[0],
    )
    assert seen.chain_length() == chain
    assert seen.accepted == len(path) - 1


def test_a_gpus_costs_are_written_as_a_profile(tmp_path: Path) -> None:
    source = paper_a100(128)
    keys = given_costs(source.table, tmp_path / "a100.json", source.calibrated)
    profile = read_profile(Path(keys["calibration"]))
    costs = profile.table.cost_ms(1, 100.0)
    assert len(costs) == 129
    # The paper's 22.0 ms at 32 nodes and 55.9 ms at 1024, with the drafter's 3.06 ms on top.
    assert costs[32] == pytest.approx(25.06, abs=0.1)
    assert costs[128] == pytest.approx(25.06 + 96 * 33.9 / 992, abs=0.1)
