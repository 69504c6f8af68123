# SPDX-License-Identifier: Apache-2.0
"""Preemption, and a custom logits processor."""

from __future__ import annotations

import pytest

from tests.e2e import cases
from tests.e2e.compare import Comparison, answers
from tests.e2e.engines import Engine

pytestmark = pytest.mark.e2e


def test_preemption(compare: Comparison) -> None:
    """Preempted requests lose their blocks, start over, and end with the same tokens."""
    # Room for two or three of six long requests.
    sync = Engine(max_model_len=224, num_blocks=14, eager=True)
    case = "preempted requests, small KV cache"
    batches = [cases.texts(case, 2, first=16, every=3, max_tokens=80, ignore_eos=True)]
    plain, tree = compare.both("batch 4, sync", batches, sync, sync.with_bastion(16, 16))
    known = {"answers": answers(plain)}
    oracle = compare.run(sync.with_async().with_bastion(16, 16), batches, oracle=known)
    compare.same("batch 4, async, oracle", batches, plain, oracle, sync)
    counts = [run["batches"][0]["metrics"]["num_preemptions"] for run in (plain, tree, oracle)]
    # Nodes preempt nobody. The drafter's own gamma + 1 slots may.
    print("preemptions, plain, trees and oracle:", counts)
    assert counts[2] > 0 and 0 < counts[1] <= 2 * counts[0], counts


@pytest.mark.slow
def test_logits_processor_sees_its_history(compare: Comparison) -> None:
    """With a custom processor that reads earlier tokens, every tree is a chain."""
    batches = [cases.texts("custom logits processor", 2, first=22, every=2, max_tokens=32)]
    without = Engine(eager=True)
    plain = without.of(logits_processors=["tests.e2e.processors:Alternate"])
    first, second, other = compare.all([plain, plain.with_bastion(16), without], batches)
    compare.same("batch 4", batches, first, second)
    assert answers(first) != answers(other), "the processor had nothing to do"
