# SPDX-License-Identifier: Apache-2.0
"""After a branch was accepted, the caches hold what decoding its prefix as a chain would leave.

Two engines decode the same requests. Every step has the same number of rows and accepts the same
number of tokens (a planned oracle, `tests.e2e.oracle`):

- `tree`: best-first trees of 15 nodes over which the right tokens are spread. The accepted path's
  keys and values must be moved, and its hidden states gathered for the drafter.
- `chain`: chains of 15 nodes (`bastion_top_k=1`) with plain causal attention. Nothing is moved, and
  the drafter reads the first rows as in vLLM's own DFlash.

After every step, every block that holds only computed tokens is compared bit by bit, in all layers
of target and drafter; the drafter's show whether the right hidden states were gathered. Bits are
equal because a row of a matrix product does not depend on its place in the matrix, and because CPU
attention sums one precision higher, where the order of the sums is lost in rounding. A plain engine
has other row counts, so only its tokens are compared.
"""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from tests.e2e import cases
from tests.e2e.compare import Comparison, answers, leaving_the_chain
from tests.e2e.engines import GAMMA, Engine
from tests.e2e.marks import on_cpu

pytestmark = on_cpu("bits need equal row counts to round equally")

ACCEPT = [3, 0, 2, 3, 1, 3, 0, 2, 3]


def full_blocks(session: Any) -> list[dict[str, Any]]:
    """Probe: a digest of every running request's blocks that hold only computed tokens, by layer.

    A block is hashed as a whole, so the backend's layout within a block does not matter.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    groups = session.runner.kv_cache_config.kv_cache_groups
    layers = get_layers_from_vllm_config(session.runner.vllm_config, Attention)
    out = []
    for request in session.scheduler.running:
        ids = session.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        assert len(ids) == 1 or len({len(group) for group in ids}) == 1
        full = request.num_computed_tokens // session.scheduler.cache_config.block_size
        content = {}
        for name, layer in layers.items():
            group = next(i for i, group in enumerate(groups) if name in group.layer_names)
            kind = "draft." if getattr(layer, "is_draft_layer", False) else "target."
            blocks = layer.kv_cache[torch.tensor(ids[group][:full], dtype=torch.int64)]
            content[kind + name] = [
                hashlib.sha256(block.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
                for block in blocks
            ]
        name = request.request_id.rsplit("-", 1)[0]
        at = [name, request.num_computed_tokens, request.num_output_tokens]
        out.append({"at": at, "blocks": content})
    return out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_caches_are_bit_equal(compare: Comparison, kind: str) -> None:
    plain = Engine(max_num_seqs=2, eager=True).of(kv_cache_dtype=kind)
    batch = cases.texts(
        "KV rows bit-equal to a chain's", 1, 5, every=3, prefix="bits-", seed=3, max_tokens=70,
        ignore_eos=True,
    )  # fmt: skip
    first = compare.run(plain, [batch])
    runs = {}
    for shape, top_k in (("tree", 16), ("chain", 1)):
        plan = {"accept": ACCEPT, "swap": shape == "tree"}
        engine = plain.with_bastion(GAMMA, GAMMA, top_k=top_k, lookup=False)
        oracle = {"answers": answers(first), "plan": plan}
        probe = "tests.e2e.test_kv_bits:full_blocks"
        runs[shape] = compare.submit(engine, [batch], oracle=oracle, probe=probe)
    tree, chain = (runs[shape].result()["batches"][0] for shape in ("tree", "chain"))
    for shape, run in runs.items():
        compare.same(f"{shape} of {GAMMA} nodes, {kind}", [batch], first, run.result(), plain)

    # Both engines took the same steps with the same rows.
    assert [len(path) for path in tree["paths"]] == [len(path) for path in chain["paths"]]
    assert tree["verified"] == chain["verified"] == [GAMMA] * len(tree["paths"])
    # Only the trees' paths leave the first rows.
    assert not leaving_the_chain(chain["paths"])
    assert len(leaving_the_chain(tree["paths"])) > 20

    compared = 0
    for left, right in zip(tree["probed"], chain["probed"], strict=True):
        assert left["at"] == right["at"]
        for layer, blocks in left["blocks"].items():
            assert blocks == right["blocks"][layer], (layer, left["at"])
            compared += len(blocks)
    kinds = {name.partition(".")[0] for name in tree["probed"][-1]["blocks"]}
    assert kinds == {"draft", "target"}
    assert compared > 500
