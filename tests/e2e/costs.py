# SPDX-License-Identifier: Apache-2.0
"""Give an engine the step costs of another machine, as a latency profile.

With a GPU's costs, an engine budgets its trees as it would on that GPU; its tokens stay the same.
Also set `bastion_latency_model` to "table", or the engine corrects the costs by its own steps.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.replay.costs import CostSource
from vllm_bastion.policy.cost.store import Profile, ProfileKey, write_profile


def write_costs(source: CostSource, path: Path) -> str:
    """Write a cost source to `path`; returns the value for `bastion_calibration`.

    The table must reach to the engine's `max_num_batched_tokens`: see `CostSource`'s makers.
    """
    key = ProfileKey(source.name, "", "", "", "", 1, "")
    write_profile(Profile(key, source.table, source.calibrated), path)
    return str(path)
