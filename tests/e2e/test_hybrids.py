# SPDX-License-Identifier: Apache-2.0
"""Recurrent states in the scheduler: preemption, prefix caching, and the blocks they occupy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.e2e import cases
from tests.e2e.compare import Comparison, answers
from tests.e2e.engines import GAMMA, Batch, Engine, Runner
from tests.e2e.marks import on_cpu, slow
from tests.e2e.targets import SPEC, engine_of, hybrid_pair

pytestmark = on_cpu("made for vLLM's kernels on a CPU")
TARGET = "qwen3-next"


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return engine_of(TARGET, tmp_path_factory.mktemp("hybrid") / TARGET)


def crowded() -> Batch:
    """Four requests, and a cache with one free block when their keys outgrow their first block."""
    batch = Batch("preempted requests of a hybrid, small KV cache")
    for i, domain in enumerate((*cases.DOMAINS, "code")):
        batch.add(f"crowded-{i}", cases.long_prompt(domain, 60 + i), max_tokens=64,
                  ignore_eos=True, **cases.drawn(i, temperature=0.8))  # fmt: skip
    return batch


@pytest.mark.slow
def test_a_preempted_request_of_a_hybrid_target(compare: Comparison, hybrid: Engine) -> None:
    """Preempted requests lose keys and state, start over, and end with the same tokens."""
    batches, spec = [crowded()], SPEC[TARGET]
    plain = replace(hybrid, max_model_len=224, num_blocks=10)
    fixed = plain.with_async().with_bastion(16, 16)
    expected, oracle = compare.oracle(f"{TARGET}, oracle, async", batches, plain, fixed, **spec)
    tree = compare.run(plain.with_bastion(16), batches, **spec)
    compare.same(f"{TARGET}, adaptive, sync", batches, expected, tree, plain, **spec)
    # A request may also resume from the states that its blocks still hold.
    cached = replace(plain, num_blocks=15).of(enable_prefix_caching=True).with_bastion(24, 24)
    known = {"answers": answers(expected)}
    resumed = compare.run(cached, batches, oracle=known, **spec)
    compare.same(f"{TARGET}, preempted, cached", batches, expected, resumed, plain, **spec)
    for run in (tree, oracle, resumed):
        assert run["batches"][0]["metrics"]["num_preemptions"] > 0
    assert max(map(len, oracle["batches"][0]["paths"])) > 4


def recurrent_blocks(session: Any) -> list[dict[str, Any]]:
    """Probe: a running request's number of `blocks` in each recurrent group, and their `bytes`.

    vLLM's null block (0), which replaces a block that is no longer needed, is not counted. A block
    holds a state for each of the group's layers.
    """
    from vllm.v1.kv_cache_interface import MambaSpec

    recurrent = {
        i: group.kv_cache_spec.page_size_bytes * len(group.layer_names)
        for i, group in enumerate(session.runner.kv_cache_config.kv_cache_groups)
        if isinstance(group.kv_cache_spec, MambaSpec)
    }
    out = []
    for request in session.scheduler.running:
        ids = session.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        blocks = {group: len(set(ids[group]) - {0}) for group in recurrent}
        size = sum(blocks[group] * recurrent[group] for group in recurrent)
        out.append({"blocks": list(blocks.values()), "bytes": size})
    return out


@pytest.mark.slow
def test_state_blocks_do_not_grow_with_the_tree(runner: Runner) -> None:
    """With 63 nodes a request occupies one state block per group; vLLM's chain of 15 takes 16."""
    batch = Batch("blocks of recurrent states")
    for i in range(2):
        batch.add(f"request-{i}", f"def area_{i}(", temperature=0, max_tokens=24, ignore_eos=True)
    engine, drafter = hybrid_pair()
    blocks, size = {}, {}
    for label, asked in (
        ("dflash", engine.with_method("dflash", GAMMA, **drafter)),
        ("bastion", engine.with_bastion(63, 63, **drafter)),
    ):
        probe = "tests.e2e.test_hybrids:recurrent_blocks"
        run = runner.run(asked, [batch], probe=probe)["batches"][0]
        assert all(result["token_ids"] for result in run["requests"].values())
        blocks[label] = {count for entry in run["probed"] for count in entry["blocks"]}
        size[label] = max(entry["bytes"] for entry in run["probed"])
    assert max(run["verified"]) == 63
    print(f"bytes of recurrent states a request: {size}")
    assert blocks == {"dflash": {1 + GAMMA}, "bastion": {1}}
    # Its blocks are no larger either: the convolution stores no input per draft token.
    assert size["bastion"] * (1 + GAMMA) <= size["dflash"]


def conversations() -> list[Batch]:
    """Turns that continue earlier ones, and forks of one prefix: hits on blocks that were decoded.

    Sampled and greedy requests; their prompts end anywhere in a block.
    """
    first, second, forks = (Batch(f"a hybrid's prefix cache, {x}") for x in ("1", "2", "forks"))
    for i, domain in enumerate((*cases.DOMAINS, "code")):
        params = {"ignore_eos": True, **cases.drawn(i, temperature=0.8)}
        first.add(f"turn-{i}", cases.long_prompt(domain, 61 + 23 * i), max_tokens=90, **params)
        earlier = {"id": f"turn-{i}", "tokens": 80 + i}
        second.add(f"next-{i}", "", max_tokens=60, follow=earlier, **params)
    for i in range(4):
        earlier = {"id": f"turn-{i % 2}", "tokens": 50 + 9 * i}
        forks.add(f"fork-{i}", "", max_tokens=40, follow=earlier, ignore_eos=True, temperature=0)
    # one token behind the cached block, while others decode
    one = {"id": "turn-0", "tokens": 36}
    forks.add("fork-one", "", arrive=3, max_tokens=20, follow=one, ignore_eos=True, temperature=0)
    return [first, second, forks]


def hits(run: dict[str, Any]) -> dict[str, int]:
    every = (batch["requests"].items() for batch in run["batches"])
    return {name: result["cached_tokens"] for requests in every for name, result in requests}


@pytest.mark.parametrize("kind", ["sync", slow("async")])
def test_prefix_caching_of_recurrent_states(kind: str, compare: Comparison, hybrid: Engine) -> None:
    """A fresh engine's tokens and plain decoding's hits, with block ends inside paths."""
    batches, spec = conversations(), SPEC[TARGET]
    fresh = replace(hybrid, max_model_len=384, num_blocks=96)
    fresh = fresh.of(max_num_batched_tokens=256)
    # By default vLLM keeps a prompt's last state alone; with no interval also those of decoding.
    plain = fresh.of(enable_prefix_caching=True, prefix_cache_retention_interval=None)
    cached = compare.run(plain, batches, **spec)
    tree = plain.with_bastion(24, 24)
    tree = tree.with_async() if kind == "async" else tree
    expected, run = compare.oracle(f"cached, oracle, {kind}", batches, fresh, tree, **spec)
    compare.same("plain, cached", batches, expected, cached, fresh, **spec)
    print(f"cached tokens: {hits(run)}")
    assert hits(run) == hits(cached)
    one = run["batches"][2]["requests"]["fork-one"]
    assert one["cached_tokens"] == len(one["prompt_token_ids"]) - 1
    # blocks that decoding filled, as the prompts of these turns are shorter than one
    assert hits(run)["next-0"] == hits(run)["next-1"] == hits(run)["fork-0"] > 0
    assert max(map(len, run["batches"][0]["paths"])) > 4
