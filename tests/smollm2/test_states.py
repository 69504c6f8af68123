# SPDX-License-Identifier: Apache-2.0
"""What training reads of the replies is what the target computes on each of them alone."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from benchmarks.smollm2.states import LIKELY, States, store
from benchmarks.tiny.model import Dims, Target

DIMS = Dims(vocab_size=64, hidden_size=48, intermediate_size=80, head_dim=16)


def test_stored_states_are_those_of_each_conversation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    target = Target(DIMS)
    shards = {}
    for name, sizes in {"a-t0": [(5, 30), (9, 60), (4, 10)], "b-t1": [(12, 40)]}.items():
        rows = [{k: torch.randint(64, (n,)).tolist() for k, n in zip(("prompt", "reply"), size)}
                for size in sizes]  # fmt: skip
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
        shards[name] = rows
    store(target, tmp_path, tmp_path / "states")
    states = States()
    states.load(tmp_path / "states")
    # A reply without room for blocks is left out; the others are in order of length.
    assert [(row.length, row.first, row.greedy) for row in states.rows] == [
        (35, 4, True),
        (52, 11, False),
        (69, 8, True),
    ]
    batch = states.batch(states.rows)
    assert batch["ids"].shape == (3, 69)
    expected = [shards["a-t0"][0], shards["b-t1"][0], shards["a-t0"][1]]
    for i, row in enumerate(expected):
        ids = torch.tensor(row["prompt"] + row["reply"])
        with torch.inference_mode():
            hidden, features = target(ids[None], features=target.feature_layers)
            odds = target.logits(hidden[0]).softmax(-1)
        end, first = len(ids), len(row["prompt"]) - 1
        assert batch["ids"][i, :end].tolist() == ids.tolist()
        assert not batch["ids"][i, end:].any()
        # bf16 keeps 8 bits, fp16 11.
        torch.testing.assert_close(
            batch["features"][i, :end].float(), features[0], rtol=2**-7, atol=1e-3
        )
        kept, likely = batch["odds"][i, first:end].float(), batch["likely"][i, first:end].long()
        some = odds[first:].gather(-1, likely)
        torch.testing.assert_close(kept, some / some.sum(-1, keepdim=True), rtol=2e-3, atol=1e-4)
        assert torch.equal(likely[:, 0], odds[first:].argmax(-1))
        assert kept.shape[-1] == LIKELY
