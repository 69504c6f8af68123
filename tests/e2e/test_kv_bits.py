# SPDX-License-Identifier: Apache-2.0
"""After a branch was accepted, the caches hold what decoding its prefix as a chain would leave.

Two engines decode the same requests. Every step has the same number of rows and accepts the same
number of tokens (a planned oracle, `tests.e2e.oracle`):

- `tree`: best-first trees of 15 nodes over which the right tokens are spread. The accepted path's
  keys and values must be moved, and its hidden states gathered for the drafter.
- `chain`: chains of 15 nodes (`bastion_top_k=1`) with plain causal attention. Nothing is moved, and
  the drafter reads the first rows as in vLLM's own DFlash.

After every step, every block that holds only computed tokens is compared bit by bit, in all layers
of target and drafter. The drafter's cache is a function of the target's hidden states, so it shows
whether those were gathered correctly. Bit equality holds because a row of a matrix product does not
depend on its place in the matrix, and because CPU attention sums one precision higher, where the
order of the sums is lost in rounding. A plain engine has other row counts, so only its tokens are
compared.
"""

from __future__ import annotations

import pytest

from tests.e2e import cases
from tests.e2e.compare import Comparison, answers, leaving_the_chain
from tests.e2e.engines import GAMMA, ON_GPU, Batch, Engine, Runner

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(ON_GPU, reason="bits need equal row counts to round equally"),
]

ACCEPT = [3, 0, 2, 3, 1, 3, 0, 2, 3]
PROBE = "tests.e2e.kv_probe:full_blocks"


@pytest.mark.parametrize("kind", ["auto", pytest.param("fp8", marks=pytest.mark.slow)])
def test_caches_are_bit_equal(runner: Runner, compare: Comparison, kind: str) -> None:
    plain = Engine(max_num_seqs=2, eager=True, extra=(("kv_cache_dtype", kind),))
    batch = Batch("KV rows bit-equal to a chain's")
    for i, (name, text) in enumerate(cases.some(1, first=5)):
        temperature = float(i == 2)
        batch.add(f"bits-{name}", text, temperature=temperature, seed=3, max_tokens=70,
                  ignore_eos=True)  # fmt: skip
    first = runner.run(plain, [batch])
    runs = {}
    for shape, top_k in (("tree", 16), ("chain", 1)):
        plan = {"accept": ACCEPT, "swap": shape == "tree"}
        runs[shape] = runner.submit(
            plain.with_bastion(GAMMA, GAMMA, top_k=top_k, lookup=False),
            [batch],
            oracle={"answers": answers(first), "plan": plan},
            probe=PROBE,
        )
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
    assert len(tree["probed"]) == len(chain["probed"])
    for left, right in zip(tree["probed"], chain["probed"], strict=True):
        assert {k: left[k] for k in ("request", "computed", "emitted")} == {
            k: right[k] for k in ("request", "computed", "emitted")
        }
        for layer, blocks in left["blocks"].items():
            assert blocks == right["blocks"][layer], (layer, left["request"], left["computed"])
            compared += len(blocks)
    layers = tree["probed"][-1]["blocks"]
    assert any(name.startswith("draft.") for name in layers)
    assert any(name.startswith("target.") for name in layers)
    assert compared > 500
