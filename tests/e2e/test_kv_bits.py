# SPDX-License-Identifier: Apache-2.0
"""After a branch is accepted the caches hold what decoding the same prefix as a chain leaves there.

Two engines decode the same requests with the same number of rows in every step and the same number
of tokens accepted in every step (a planned oracle, `tests.e2e.oracle`):

- `tree`: best-first trees of 15 nodes in which the right tokens are spread, so that the accepted
  path's keys and values must be moved, and its hidden states gathered for the drafter;
- `chain`: chains of 15 nodes, `bastion_top_k=1`: plain causal attention, nothing is moved, the
  drafter reads the first rows as vLLM's own DFlash does.

After every step every block that holds computed tokens only is compared bit by bit, for all layers
of the target and of the drafter: its cache is a function of the target's hidden states, so that it
tells whether those were gathered rightly. Bit equality can be asked for because a row of a
matrix product does not depend on where in the matrix it stands, and because the CPU attention works
one precision up, where the order of its sums is lost in rounding. A plain engine is compared as
well, with other row counts and therefore not bit by bit: its tokens are the same.
"""

from __future__ import annotations

import pytest

from tests.e2e import cases
from tests.e2e.compare import Comparison
from tests.e2e.engines import GAMMA, ON_GPU, Batch, Engine, Runner

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(ON_GPU, reason="bits need equal row counts to round equally"),
]

ACCEPT = [3, 0, 2, 3, 1, 3, 0, 2, 3]
PROBE = "tests.e2e.kv_probe:full_blocks"


@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_bits_of_the_caches(runner: Runner, compare: Comparison, kind: str) -> None:
    plain = Engine(max_num_seqs=2, eager=True, extra=(("kv_cache_dtype", kind),))
    batch = Batch("KV rows bit-equal to a chain's")
    for i, (name, text) in enumerate(cases.some(1, first=5)):
        temperature = float(i == 2)
        batch.add(f"bits-{name}", text, temperature=temperature, seed=3, max_tokens=70,
                  ignore_eos=True)  # fmt: skip
    first = runner.run(plain, [batch])
    answers = {name: r["token_ids"] for name, r in first["batches"][0]["requests"].items()}
    runs = {}
    for shape, top_k in (("tree", 16), ("chain", 1)):
        plan = {"accept": ACCEPT, "swap": shape == "tree"}
        runs[shape] = runner.submit(
            plain.with_bastion(GAMMA, GAMMA, top_k=top_k),
            [batch],
            oracle={"answers": answers, "plan": plan},
            probe=PROBE,
        )
    tree, chain = (runs[shape].result()["batches"][0] for shape in ("tree", "chain"))
    for shape, run in runs.items():
        compare.same(f"{shape} of {GAMMA} nodes, {kind}", [batch], first, run.result(), plain)

    # The two engines are comparable: the same steps with the same rows.
    assert [len(path) for path in tree["paths"]] == [len(path) for path in chain["paths"]]
    assert tree["verified"] == chain["verified"] == [GAMMA] * len(tree["paths"])
    # And they differ where they should: only the trees' paths leave the first rows.
    assert all(path == list(range(len(path))) for path in chain["paths"])
    moved = [path for path in tree["paths"] if path != list(range(len(path)))]
    assert len(moved) > 20

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
