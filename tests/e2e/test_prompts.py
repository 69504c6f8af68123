# SPDX-License-Identifier: Apache-2.0
"""Every held-out prompt, at each batch size, gets plain decoding's tokens."""

from __future__ import annotations

import pytest

from tests.e2e import cases
from tests.e2e.compare import Comparison
from tests.e2e.engines import Engine, Runner

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3600)]

_SIZES = ((1, 63), (2, 32), (4, 16))  # requests at once, nodes


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(("seqs", "nodes"), _SIZES)
def test_all_prompts(runner: Runner, compare: Comparison, seqs: int, nodes: int, mode: str) -> None:
    """T=0 on all 90 prompts, T=0.8 and T=1 on 30; batch 1, 2 and 4, either scheduler."""
    plain = Engine(max_num_seqs=seqs, async_scheduling=mode == "async")
    batches = [cases.greedy(30), cases.sampled(30)]
    runs = runner.all([plain, plain.with_bastion(nodes)], batches)
    compare.same(f"batch {seqs}, {mode}, {nodes} nodes", batches, *runs)
