# SPDX-License-Identifier: Apache-2.0
"""Recurrent states in the scheduler: preemption, prefix caching, and the blocks they occupy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.e2e import cases
from tests.e2e.compare import Comparison, answers
from tests.e2e.engines import GAMMA, ON_GPU, PAIR, Batch, Engine, Runner
from tests.e2e.targets import ARGUMENTS, HYBRID, SPEC, make_target

pytestmark = [
    pytest.mark.e2e,
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


@pytest.mark.slow
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


@pytest.mark.slow
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


# By default vLLM keeps a prompt's last state alone; with no interval also those of decoding.
CACHED = (
    ("enable_prefix_caching", True),
    ("max_num_batched_tokens", 256),
    ("prefix_cache_retention_interval", None),
)


def conversations() -> list[Batch]:
    """Turns that continue earlier ones, and forks of one prefix: hits on blocks that were decoded.

    Sampled and greedy requests; their prompts end anywhere in a block.
    """
    first, second, forks = (Batch(f"a hybrid's prefix cache, {x}") for x in ("1", "2", "forks"))
    for i, domain in enumerate((*cases.DOMAINS, "code")):
        extra = {"temperature": 0.8, "seed": i} if i % 2 else {"temperature": 0}
        prompt = cases.long_prompt(domain, 61 + 23 * i)
        first.add(f"turn-{i}", prompt, max_tokens=90, ignore_eos=True, **extra)
        earlier = {"id": f"turn-{i}", "tokens": 80 + i}
        second.add(f"next-{i}", "", max_tokens=60, follow=earlier, ignore_eos=True, **extra)
    for i in range(4):
        earlier = {"id": f"turn-{i % 2}", "tokens": 50 + 9 * i}
        forks.add(f"fork-{i}", "", max_tokens=40, follow=earlier, ignore_eos=True, temperature=0)
    # one token behind the cached block, while others decode
    one = {"id": "turn-0", "tokens": 36}
    forks.add("fork-one", "", arrive=3, max_tokens=20, follow=one, ignore_eos=True, temperature=0)
    return [first, second, forks]


def hits(run: dict[str, Any]) -> dict[str, int]:
    """Tokens of every request that came from the cache."""
    return {
        name: result["cached_tokens"]
        for batch in run["batches"]
        for name, result in batch["requests"].items()
    }


@pytest.mark.parametrize("kind", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_prefix_caching_of_recurrent_states(
    kind: str, runner: Runner, compare: Comparison, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A fresh engine's tokens and plain decoding's hits, with block ends inside paths."""
    name, batches = "qwen3-next", conversations()
    folder = make_target(name, tmp_path_factory.getbasetemp() / "cached")
    fresh = Engine(
        eager=True,
        max_model_len=384,
        extra=(("model", folder), ("max_num_batched_tokens", 256), *ARGUMENTS[name].items()),
    )
    plain = replace(fresh, extra=(("model", folder), *CACHED))
    expected = runner.run(fresh, batches, **SPEC[name])
    cached = runner.run(plain, batches, **SPEC[name])
    compare.same("plain, cached", batches, expected, cached, fresh, **SPEC[name])
    tree = plain.with_bastion(24, 24)
    tree = tree.with_async() if kind == "async" else tree
    known = {"answers": answers(expected)}
    run = runner.run(tree, batches, oracle=known, **SPEC[name])
    compare.same(f"cached, oracle, {kind}", batches, expected, run, fresh, **SPEC[name])
    print(f"cached tokens: {hits(run)}")
    assert hits(run) == hits(cached)
    assert (
        hits(run)["fork-one"]
        == len(run["batches"][2]["requests"]["fork-one"]["prompt_token_ids"]) - 1
    )
    # blocks that decoding filled, as the prompts of these turns are shorter than one
    assert hits(run)["next-0"] == hits(run)["next-1"] == hits(run)["fork-0"] > 0
    assert max(map(len, run["batches"][0]["paths"])) > 4


@pytest.mark.slow
def test_preemption_with_prefix_caching(
    runner: Runner, compare: Comparison, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A preempted request resumes from the states that its blocks still hold."""
    name, batch = "qwen3-next", crowded()
    folder = make_target(name, tmp_path_factory.getbasetemp() / "crowded")
    fresh = Engine(
        eager=True, max_model_len=224, extra=(("model", folder), *ARGUMENTS[name].items())
    )
    expected = runner.run(fresh, [batch], **SPEC[name])
    small = replace(fresh, num_blocks=15, extra=(("model", folder), CACHED[0]))
    known = {"answers": answers(expected)}
    run = runner.run(small.with_bastion(24, 24), [batch], oracle=known, **SPEC[name])
    compare.same(f"{name}, preempted, cached", [batch], expected, run, fresh, **SPEC[name])
    assert run["batches"][0]["metrics"]["num_preemptions"] > 0
