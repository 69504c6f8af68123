# SPDX-License-Identifier: Apache-2.0
"""An engine starts and decodes whatever fresh memory holds."""

from __future__ import annotations

import pytest

from tests.e2e import cases
from tests.e2e.compare import Comparison
from tests.e2e.engines import ON_GPU, Engine, Runner

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(ON_GPU, reason="poisons a CPU's memory")]


def test_nothing_reads_memory_that_nothing_filled(runner: Runner, compare: Comparison) -> None:
    """In the profiling run, which has no attention metadata, too."""
    plain, batch = Engine(max_num_seqs=2), cases.greedy(1, tokens=24)
    tree = runner.submit(
        plain.with_bastion(16, 16), [batch], setup=["tests.e2e.fresh_memory:poison"]
    )
    expected = runner.run(plain, [batch])
    compare.same("NaN in fresh memory", [batch], expected, tree.result())
    assert max(map(len, tree.result()["batches"][0]["paths"])) > 4
