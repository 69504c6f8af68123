# SPDX-License-Identifier: Apache-2.0
"""NgramDrafts by request slot: what the host is told before they are mixed into a lattice."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bastion_kernels.draft.ngram_table import LONGEST
from vllm_bastion.policy.ngram import NgramDrafts

DEPTH, WIDTH, SLOTS = 9, 3, 5

if torch.cuda.is_available():
    pytest.skip("the host sees copies on a CPU only", allow_module_level=True)


def test_what_copies_promise_is_known_before_they_are_mixed() -> None:
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, high, size).tolist() for high, size in ((3, 60), (2, 9), (4000, 40))]
    texts.append(texts[2] + texts[2][:12])
    history = torch.zeros(SLOTS, 128, dtype=torch.int32)
    lengths = torch.zeros(SLOTS, dtype=torch.int32)
    slots = torch.tensor([4, 0, 2, 1])
    for slot, text in zip(slots, texts):
        history[slot, : len(text)] = torch.tensor(text)
        lengths[slot] = len(text)
    copies = NgramDrafts(history, lengths, DEPTH, 16, 128)
    copies.counts[0] = torch.arange(LONGEST + 1).repeat(2)
    copies.counts[1] = copies.counts[0] // 2
    copies.find(slots)
    most = np.array([DEPTH, 4, DEPTH, DEPTH])
    told = copies.expected(slots.numpy(), np.full(4, DEPTH))
    fewer = copies.expected(slots.numpy(), most)
    assert told[2] == 0.0 and (told[[0, 1, 3]] > 0.5).all()
    assert 0.0 < fewer[1] < told[1] and fewer[3] == told[3]

    expected = torch.full((SLOTS,), -1.0)
    tokens = torch.zeros(4, 2, WIDTH, dtype=torch.int32)
    copies.mix(slots, tokens, torch.zeros(4, 2, 1, WIDTH), expected)
    np.testing.assert_allclose(expected[slots], told, rtol=1e-5)


def test_copies_that_were_given_up_are_judged_too() -> None:
    history = torch.tensor([[1, 2, 3, 1, 2, 9, 9, 9]], dtype=torch.int32)
    slots, judged = torch.zeros(1, dtype=torch.int64), []
    for gives_up in (False, True):
        copies = NgramDrafts(history, torch.tensor([5], dtype=torch.int32), DEPTH, 16, 128)
        copies.find(slots)
        assert copies.expected(np.zeros(1, int), np.array([DEPTH])) > 0
        if gives_up:
            copies.give_up(slots)
        else:
            empty = torch.zeros(1, 0, WIDTH, dtype=torch.int32)
            copies.mix(slots, empty, torch.zeros(1, 0, 1, WIDTH), torch.zeros(1))
        copies.lengths += 1
        copies.find(slots)
        judged.append(copies.counts)
    assert judged[0].sum() == 1 and torch.equal(*judged)


def test_replies_are_kept_for_requests_of_their_group() -> None:
    history = torch.zeros(3, 64, dtype=torch.int32)
    lengths, every = torch.zeros(3, dtype=torch.int32), np.arange(3)
    copies = NgramDrafts(history, lengths, DEPTH, 16, 128, num_kept=100)

    def begin(slot: int, group: int, tokens: list[int]) -> None:
        history[slot, : len(tokens)], lengths[slot] = torch.tensor(tokens).int(), len(tokens)
        copies.restart(slot, f"request {slot}", len(tokens), group, 2)

    def told() -> list[bool]:
        found = copies.expected(every, np.full(3, DEPTH)) > 0
        copies.give_up(torch.from_numpy(every))
        return list(found)

    for slot, group in enumerate((5, 6, 0)):
        begin(slot, group, [1, 2, *range(100 * slot, 100 * slot + 20)])
    for slot, ended in enumerate((True, False, True)):  # 1: preempted; 2: of no group
        copies.leave(f"request {slot}", ended)
    ends = [7, 8, 9], [107, 108, 109], [207, 208, 209]
    for groups, end, found in (
        ((5, 6, 0), ends[0], [True, False, False]),
        ((5, 6, 0), ends[1], [False] * 3),
        ((5, 6, 0), ends[2], [False] * 3),
        ((5, 5, 5), [1, 2, 0], [False] * 3),  # the prompt is not kept
        ((5, 5, 5), ends[0], [True] * 3),
    ):
        for slot, group in enumerate(groups):
            begin(slot, group, end)
        assert told() == found
    copies.forget()
    for slot in range(3):
        begin(slot, 5, ends[0])
    assert told() == [False] * 3


def test_a_step_adds_no_more_of_prompts_than_it_has_tokens() -> None:
    history, lengths = torch.zeros(2, 64, dtype=torch.int32), torch.tensor([36, 36]).int()
    history[:, :36] = torch.tensor([1, 2, *range(10, 42), 1, 2])
    copies = NgramDrafts(history, lengths, DEPTH, 16, 20)

    def told() -> list[bool]:
        found = copies.expected(np.arange(2), np.full(2, DEPTH)) > 0
        copies.give_up(torch.arange(2))
        return list(found)

    copies.restart(0, "a", 36)
    copies.restart(1, "b", 36)
    steps = []
    for _ in range(4):
        copies.add_prompts()
        steps.append(told())
    # Of the newer one 20 and 16 tokens, then of the other one.
    assert steps == [[False, False], [False, True], [False, True], [True, True]]
    copies.restart(0, "a", 36)
    copies.leave("a", ended=True)
    copies.restart(1, "c", 20)
    copies.add_prompts()
    assert not copies._prompts
