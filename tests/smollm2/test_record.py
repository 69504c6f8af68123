# SPDX-License-Identifier: Apache-2.0
"""A recording holds what a drafter drafts from each prefix alone, and tau follows from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.prompts import Prompt
from benchmarks.replay.recording import load_recording
from benchmarks.smollm2.record import TOP_K, record, taus
from benchmarks.smollm2.states import Reply
from benchmarks.tiny.drafter import load_drafter
from benchmarks.tiny.model import load_target

TINY = Path(__file__).resolve().parents[2] / "benchmarks" / "tiny"


@torch.inference_mode()
def test_replayed_chains_are_those_of_decoding(tmp_path: Path) -> None:
    target, drafter = load_target(TINY / "target"), load_drafter(TINY / "drafter")
    depth = drafter.block_size - 1

    def scores(features: Tensor, ids: list[int], at: int) -> Tensor:
        """Log-probabilities [D, V] after the token at a position, from what is before it."""
        root, place = torch.tensor([[ids[at]]]), torch.tensor([[at]])
        states = drafter(target, features[:, :at], root, place)[0, 0]
        return drafter.plain_logits(target, states).log_softmax(-1)

    many, steps, emitted, first = [], 0, 0, []
    for number, prompt in enumerate((b"def add(a, b):", b"for i in range(")):
        ids = list(prompt)
        for _ in range(90):
            hidden, _ = target(torch.tensor(ids)[None])
            ids.append(int(target.logits(hidden[0, -1]).argmax()))
        _, features = target(torch.tensor(ids)[None], features=target.feature_layers)
        assert features is not None
        rows = features.bfloat16().float()
        reply = Reply(ids, len(prompt) - 1, {"features": rows[0]})
        many.append((Prompt("set", str(number), ()), reply))
        first.append(scores(rows, ids, len(prompt)))
        at, end = len(prompt), len(ids) - depth - 1
        while at < end:
            guesses = scores(rows, ids, at).argmax(-1)
            right = guesses == torch.tensor(ids[at + 1 : at + 1 + depth])
            step = 1 + int(right.long().cumprod(0).sum())
            at, emitted, steps = at + step, emitted + step, steps + 1
    np.savez(tmp_path / "one.npz", meta="", **record(target, drafter, many))
    recording = load_recording(tmp_path / "one.npz")
    starts = np.flatnonzero(recording.step_positions == 1)
    for start, expected in zip(starts, first, strict=True):
        tokens = torch.from_numpy(recording.topk_tokens[start]).long()
        logprobs = torch.from_numpy(recording.topk_logprobs[start])
        assert tokens.shape == (depth, TOP_K)
        # Recorded in bf16.
        torch.testing.assert_close(expected.gather(-1, tokens), logprobs, rtol=0.05, atol=0.1)
    ((domain, found),) = taus(recording)
    assert domain == "set"
    assert found[0] == pytest.approx(emitted / steps, rel=0.05)
    assert found[0] > 1.5
    assert found == sorted(found)
