# SPDX-License-Identifier: Apache-2.0
"""What `seed: -1` means in vLLM, without speculation."""

from __future__ import annotations

import pytest

from tests.e2e import cases
from tests.e2e.compare import answers
from tests.e2e.engines import ON_GPU, Batch, Engine, Runner

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.skipif(ON_GPU, reason="about vLLM's own bookkeeping, which is the same there")
def test_minus_one_is_no_seed_and_the_draw_follows_the_order_of_arrival(runner: Runner) -> None:
    """Every request without a seed takes the engine's next one, so text depends on who came before.

    Two engines that start alike and get the same requests in the same order agree.
    """
    prompt = cases.prompts()["chat"][0]

    def run(*names: str) -> dict[str, list[int]]:
        batch = Batch("no seeds")
        for at, name in enumerate(names):
            temperature = 0.0 if name == "greedy" else 1.0
            batch.add(name, prompt, arrive=at, temperature=temperature, seed=-1, max_tokens=24,
                      ignore_eos=True)  # fmt: skip
        return answers(runner.run(Engine(eager=True), [batch]))

    one, other = run("first", "second"), run("second", "first")
    assert one["first"] != other["first"]
    assert (one["first"], one["second"]) == (other["second"], other["first"])
    # A greedy request draws a seed too, and has no use for it.
    assert run("greedy", "first")["first"] == one["second"]
