# SPDX-License-Identifier: Apache-2.0
"""Requests with recurrent states in the scheduler: preemption, and the blocks they occupy."""

from __future__ import annotations

import pytest

from tests.e2e import cases
from tests.e2e.compare import Comparison, answers
from tests.e2e.engines import GAMMA, ON_GPU, PAIR, Batch, Engine, Runner
from tests.e2e.targets import ARGUMENTS, HYBRID, SPEC, make_target

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(ON_GPU, reason="made for vLLM's kernels on a CPU"),
]


def crowded() -> Batch:
    """Four requests, and a cache with one free block when their keys outgrow their first block."""
    batch = Batch("preempted requests of a hybrid, small KV cache")
    for i, domain in enumerate((*cases.DOMAINS, "code")):
        extra = {"temperature": 0.8, "seed": i} if i % 2 else {"temperature": 0}
        prompt = cases.long_prompt(domain, 60 + i)
        batch.add(f"crowded-{i}", prompt, max_tokens=64, ignore_eos=True, **extra)
    return batch


def test_a_preempted_request_of_a_hybrid_target(
    runner: Runner, compare: Comparison, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Preempted requests lose keys and state, start over, and end with the same tokens."""
    name, batch = "qwen3-next", crowded()
    folder = make_target(name, tmp_path_factory.mktemp("preempted"))
    plain = Engine(
        eager=True,
        max_model_len=224,
        num_blocks=10,
        extra=(("model", folder), *ARGUMENTS[name].items()),
    )
    expected = runner.run(plain, [batch], **SPEC[name])
    known = {"answers": answers(expected)}
    tree = runner.submit(plain.with_bastion(16), [batch], **SPEC[name])
    oracle = runner.run(
        plain.with_async().with_bastion(16, 16), [batch], oracle=known, **SPEC[name]
    )
    for label, run in (("adaptive, sync", tree.result()), ("oracle, async", oracle)):
        compare.same(f"{name}, {label}", [batch], expected, run, plain, **SPEC[name])
        assert run["batches"][0]["metrics"]["num_preemptions"] > 0
    assert max(map(len, oracle["batches"][0]["paths"])) > 4


def test_state_blocks_do_not_grow_with_the_tree(runner: Runner) -> None:
    """With 63 nodes a request occupies one state block per group; vLLM's chain of 15 takes 16."""
    batch = Batch("blocks of recurrent states")
    for i in range(2):
        batch.add(f"request-{i}", f"def area_{i}(", temperature=0, max_tokens=24, ignore_eos=True)
    pair = PAIR / "hybrid"
    extra = (("model", str(pair / "target")), ("dtype", "bfloat16"), *HYBRID.items())
    engine = Engine(eager=True, extra=extra)
    drafter = {"model": str(pair / "drafter")}
    probe = {"probe": "tests.e2e.state_blocks:recurrent_blocks"}
    blocks, size = {}, {}
    for label, asked in (
        ("dflash", engine.with_method("dflash", GAMMA, **drafter)),
        ("bastion", engine.with_bastion(63, 63, **drafter)),
    ):
        run = runner.run(asked, [batch], **probe)["batches"][0]
        assert all(result["token_ids"] for result in run["requests"].values())
        blocks[label] = {count for entry in run["probed"] for count in entry["blocks"]}
        size[label] = max(entry["bytes"] for entry in run["probed"])
    assert max(run["verified"]) == 63
    print(f"bytes of recurrent states a request: {size}")
    assert blocks == {"dflash": {1 + GAMMA}, "bastion": {1}}
    # Its blocks are no larger either: the convolution stores no input per draft token.
    assert size["bastion"] * (1 + GAMMA) <= size["dflash"]
