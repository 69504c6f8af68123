# SPDX-License-Identifier: Apache-2.0
"""Scheduling: preemption, chains, and counters."""

from __future__ import annotations

import pytest

from tests.e2e import cases
from tests.e2e.compare import Comparison, answers
from tests.e2e.engines import GAMMA, ON_GPU, Batch, Engine, Runner

pytestmark = pytest.mark.e2e


def crowded() -> Batch:
    """Six long requests and a cache with room for two or three."""
    batch = Batch("preempted requests, small KV cache")
    for i, (name, text) in enumerate(cases.some(2, first=16)):
        extra = {"temperature": 1.0, "seed": i} if i % 3 == 2 else {"temperature": 0}
        batch.add(f"crowded-{name}", text, max_tokens=80, ignore_eos=True, **extra)
    return batch


def test_preemption(runner: Runner, compare: Comparison) -> None:
    """Preempted requests lose their blocks, start over, and end with the same tokens."""
    sync = Engine(max_model_len=224, num_blocks=14, eager=True)
    batch = crowded()
    engines = [sync, sync.with_bastion(16, 16), sync.with_async()]
    plain, tree, plain_async = runner.all(engines, [batch])
    compare.same("batch 4, sync", [batch], plain, tree)
    known = {"answers": answers(plain)}
    oracle = runner.run(sync.with_async().with_bastion(16, 16), [batch], oracle=known)
    compare.same("batch 4, async, oracle", [batch], plain_async, oracle)
    counts = [run["batches"][0]["metrics"]["num_preemptions"] for run in (plain, tree, oracle)]
    # Nodes preempt nobody. The drafter's own gamma + 1 slots may.
    print("preemptions, plain, trees and oracle:", counts)
    assert counts[2] > 0 and 0 < counts[1] <= 2 * counts[0], counts


def test_chain_is_dflash(runner: Runner, compare: Comparison) -> None:
    """A tree of width 1 with budget gamma equals vLLM's own DFlash, in tokens and in steps."""
    batch = Batch("width-1 tree against dflash, T=0")
    for name, text in cases.some(2):
        batch.add(name, text, temperature=0, max_tokens=48, ignore_eos=True)
    # Room for all requests: vLLM reserves gamma tokens more per request than dflash uses.
    plain = Engine(eager=True, extra=(("max_num_batched_tokens", 512),))
    engines = [plain.with_method("dflash", GAMMA), plain.with_bastion(GAMMA, GAMMA, top_k=1)]
    dflash, chain = runner.all(engines, [batch])
    compare.same("chain against dflash", [batch], dflash, chain)
    left, right = dflash["batches"][0], chain["batches"][0]
    if ON_GPU:
        return  # the two have different attention kernels, and drafts may round apart
    assert right["forwards"] == left["forwards"]
    for name, result in left["requests"].items():
        assert right["requests"][name]["chunks"] == result["chunks"], name
    assert left["metrics"]["spec_decode_num_accepted_tokens"] > 20
    keys = [key for key in left["metrics"] if key.startswith("spec_decode")]
    assert {key: right["metrics"][key] for key in keys} == {
        key: left["metrics"][key] for key in keys
    }


def test_logits_processor_sees_its_history(runner: Runner, compare: Comparison) -> None:
    """With a custom processor that reads earlier tokens, every tree is a chain."""
    batch = Batch("custom logits processor")
    for i, (name, text) in enumerate(cases.some(2, first=22)):
        extra = {"temperature": 1.0, "seed": i} if i % 2 else {"temperature": 0}
        batch.add(name, text, max_tokens=32, **extra)
    plain = Engine(eager=True, extra=(("logits_processors", ["tests.e2e.processors:Alternate"]),))
    engines = [plain, plain.with_bastion(16), Engine(eager=True)]
    first, second, without = runner.all(engines, [batch])
    compare.same("batch 4", [batch], first, second)
    assert answers(first) != answers(without), "the processor had nothing to do"
