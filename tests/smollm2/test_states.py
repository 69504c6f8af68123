# SPDX-License-Identifier: Apache-2.0
"""What training reads of the replies is what the target computes on each of them alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.smollm2.states import LIKELY, States
from benchmarks.tiny.model import feature_layers, load_target

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "benchmarks" / "tiny" / "target"
PROMPTS = [list(range(5, 5 + n)) for n in (40, 7, 3, 21)]
SOURCE = """
import sys, torch
from benchmarks.smollm2.rollouts import Engine
from benchmarks.smollm2.states import pack
sizes = dict(max_num_batched_tokens=32, max_num_seqs=3, max_model_len=128)
engine = Engine(sys.argv[1], 0, dtype="float32", **sizes)
prompts = eval(sys.argv[2])
engine(prompts[:2], 1.0, 8, keep=False)  # which are not kept
replies = engine(prompts[:3], 0.0, 40) + engine(prompts[3:], 0.0, 12)
torch.save(pack(replies, greedy=True), sys.argv[3] + "/a-t0.pt")
torch.save(pack(engine(prompts[1:2], 1.0, 50), greedy=False), sys.argv[3] + "/b-t1.pt")
"""


@pytest.mark.e2e
@pytest.mark.slow
def test_stored_states_are_those_of_each_conversation(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SOURCE, str(TARGET), str(PROMPTS), str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    states = States()
    states.load(tmp_path)
    # A reply without room for blocks is left out; the others are in order of length.
    rows = [(row.length, row.first, row.greedy) for row in states.rows]
    assert rows == [(43, 2, True), (47, 6, True), (57, 6, False), (80, 39, True)]
    batch = states.batch(states.rows)
    assert batch["ids"].shape == (4, 80)
    target = load_target(TARGET)
    for i, (end, first, greedy) in enumerate(rows):
        ids = batch["ids"][i, :end].long()
        assert ids[: first + 1].tolist() in PROMPTS
        assert not batch["ids"][i, end:].any()
        with torch.inference_mode():
            hidden, features = target(ids[None], features=feature_layers(len(target.layers)))
            odds = target.logits(hidden[0]).softmax(-1)
        # No step computes the last token's state. bf16 keeps 8 bits, fp16 11.
        torch.testing.assert_close(
            batch["features"][i, : end - 1].float(), features[0, :-1], rtol=2**-7, atol=1e-3
        )
        kept, likely = (
            batch["odds"][i, first : end - 1].float(),
            batch["likely"][i, first : end - 1],
        )
        assert kept.shape == (end - 1 - first, LIKELY)
        some = odds[first:-1].gather(-1, likely.long())
        torch.testing.assert_close(kept, some / some.sum(-1, keepdim=True), rtol=2e-3, atol=1e-4)
        if greedy:
            assert torch.equal(likely[:, 0], batch["ids"][i, first + 1 : end])
        assert not batch["likely"][i, :first].any()
        assert not batch["features"][i, end - 1 :].any()
