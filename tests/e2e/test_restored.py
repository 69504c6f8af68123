# SPDX-License-Identifier: Apache-2.0
"""Drafts are as good after restored state as after computed state.

The same texts are decoded fresh, after a prefix hit, after preemption and as a second turn;
`test_connectors` has blocks that a connector restores. Tokens alone would not show a lost context
of the drafter: they stay right while drafts become useless. So what is compared is how much of the
tree is accepted at each position, which must be equal.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.e2e import cases
from tests.e2e.compare import Comparison
from tests.e2e.engines import DRAFTER, Batch, Engine

pytestmark = pytest.mark.e2e

NODES, TOKENS, BLOCK = 12, 64, 32
# Of all trees. While others' prompts are computed, or blocks are few, a step has smaller trees or
# none.
COMMON = 0.5
# The same after a prefix hit. Whether prompts fill a step is decided before vLLM looks into the
# cache, so the step of a long prompt ends without a draft.
HIT = 0.95


def first_turns(name: str = "first turns") -> Batch:
    return cases.texts(name, 2, first=3, max_tokens=TOKENS, ignore_eos=True)


def second_turns(run: dict[str, Any]) -> Batch:
    batch = Batch("second turns")
    replies = run["batches"][0]["requests"]
    others = [*list(replies)[1:], next(iter(replies))]
    for (name, result), other in zip(replies.items(), others, strict=True):
        ids = result["prompt_token_ids"] + result["token_ids"]
        more = replies[other]["prompt_token_ids"][:20]
        batch.add(f"{name}-2", ids + more, temperature=0, max_tokens=TOKENS, ignore_eos=True)
    return batch


def accepted(batch: dict[str, Any]) -> dict[tuple[str, int], int]:
    """Accepted nodes by request and position, of trees that other requests did not make smaller."""
    rows = zip(batch["path_requests"], batch["roots"], batch["verified"], batch["paths"])
    return {(name, at): len(path) for name, at, nodes, path in rows if nodes == NODES}


def assert_as_good(fresh: dict[str, Any], restored: dict[str, Any], reach: float = 1.0) -> None:
    """Equal acceptance wherever both have a tree; `reach`: share of the positions where they do."""
    ours, theirs = accepted(restored), accepted(fresh)
    common = ours.keys() & theirs.keys()
    assert len(common) >= reach * len(theirs)
    assert {at: ours[at] for at in common} == {at: theirs[at] for at in common}
    tau = sum(theirs.values()) / len(theirs)
    print(f"{len(common)} of {len(theirs)} trees in common, {tau:.2f} tokens each")
    assert tau > 2, "drafts are worth comparing"


@pytest.fixture
def tree() -> Engine:
    """One request at a time, everything computed. What copies gain depends on earlier requests."""
    alone = Engine(max_num_seqs=1, eager=True, extra={"enable_prefix_caching": False})
    return alone.with_bastion(NODES, NODES, lookup=False)


def test_after_a_prefix_hit(compare: Comparison, tree: Engine) -> None:
    fresh, caching = compare.run(tree, [first_turns()]), tree.of(enable_prefix_caching=True)
    run = compare.run(caching, [first_turns(), first_turns("first turns again")])
    again = run["batches"][1]
    for result in again["requests"].values():
        assert result["cached_tokens"] >= BLOCK
    assert_as_good(fresh["batches"][0], again)


@pytest.mark.slow
def test_as_a_second_turn(compare: Comparison, tree: Engine) -> None:
    turns = second_turns(compare.run(tree, [first_turns()]))
    fresh_turns = compare.submit(tree, [turns])
    run = compare.run(tree.of(enable_prefix_caching=True), [first_turns(), turns])
    cached, later = run["batches"]
    # A second turn finds what was decoded, not only what was asked.
    assert all(
        result["cached_tokens"] > len(cached["requests"][name[:-2]]["prompt_token_ids"])
        for name, result in later["requests"].items()
    )
    compare.same("second turns", [turns], fresh_turns.result(), {"batches": [later]})
    assert_as_good(fresh_turns.result()["batches"][0], later, HIT)


def test_after_preemption(compare: Comparison, tree: Engine) -> None:
    fresh = compare.run(tree, [first_turns()])
    crowded = replace(tree, max_num_seqs=4, num_blocks=13)
    run = compare.run(crowded, [first_turns()])
    assert run["batches"][0]["metrics"]["num_preemptions"] > 0
    compare.same("preempted", [first_turns()], fresh, run)
    assert_as_good(fresh["batches"][0], run["batches"][0], COMMON)


def changed_drafter(folder: Path, **changes: object) -> str:
    config = json.loads((Path(DRAFTER) / "config.json").read_text())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | changes))
    (folder / "model.safetensors").symlink_to(Path(DRAFTER) / "model.safetensors")
    return str(folder)


# Layers that see a window, so that no row sees more of a long context than of a short one.
WINDOW, NEAR, FAR = 128, 1024, 40_000
LOCAL = {"use_sliding_window": True, "sliding_window": WINDOW, "max_position_embeddings": 65_536}
SCALED = {
    "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 4096,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip


def ends_at(position: int) -> Batch:
    """Texts that end there; what is in front of their last NEAR tokens is the same for all."""
    batch = Batch(f"contexts of {position} tokens")
    before = 100 * cases.long_prompt("chat", 1000)
    for domain in cases.DOMAINS:
        prompt = [*before[: position - NEAR], *cases.long_prompt(domain, NEAR)]
        assert len(prompt) == position
        batch.add(f"far-{domain}", prompt, temperature=0, max_tokens=64, ignore_eos=True)
    return batch


@pytest.mark.slow
def test_acceptance_beyond_position_32768(compare: Comparison, tmp_path: Path) -> None:
    """A drafter of 32,768 positions with scaled rotations, after computed and cached prefixes."""
    sliding = {"layer_types": 3 * ["sliding_attention"]}
    own = {"mask_token_id": 1, "target_layer_ids": [1, 3, 4], "causal": False}
    limits = {"max_position_embeddings": 32_768, "rope_scaling": SCALED, "dflash_config": own}
    drafter = changed_drafter(tmp_path / "scaled", **(LOCAL | sliding | limits))
    plain = Engine(max_num_seqs=1, max_model_len=FAR + 100, num_blocks=4500, eager=True)
    overrides = LOCAL | {"layer_types": 6 * ["sliding_attention"]}
    plain = plain.of(
        hf_overrides=overrides, max_num_batched_tokens=2048, enable_prefix_caching=True
    )
    tree = plain.with_bastion(12, 12, lookup=False, model=drafter)
    far = [ends_at(FAR), ends_at(FAR)]
    near, run = compare.run(tree, [ends_at(NEAR)]), compare.run(tree, far)
    compare.same("beyond 32,768 positions", far, compare.run(plain, far), run, plain)
    fresh, again = run["batches"]
    cached = [result["cached_tokens"] for result in again["requests"].values()]
    assert_as_good(fresh, again, COMMON)
    taus = [mean(map(len, done["paths"])) for done in (near["batches"][0], fresh, again)]
    print(f"tokens a step at {NEAR}, at {FAR}, and there after a hit: {taus}; cached {cached}")
    assert min(cached) > 38_000 and taus[0] > 2 and taus[1] > 0.95 * taus[0]
