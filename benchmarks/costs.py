# SPDX-License-Identifier: Apache-2.0
"""Give an engine the step costs of another machine, as a latency profile.

What nodes cost differs from machine to machine. An engine that is given a GPU's costs budgets its
trees as it would there; the tokens do not depend on it. Give it `bastion_latency_model: "table"` as
well, or it corrects the costs by this machine's steps.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.replay.costs import CostSource
from vllm_bastion.policy.cost.store import Profile, ProfileKey, write_profile


def write_costs(source: CostSource, path: Path) -> str:
    """Write a cost source for `bastion_calibration`; returns that setting.

    The table must reach to the engine's `max_num_batched_tokens`: see `CostSource`'s makers.
    """
    key = ProfileKey(source.name, "", "", "", "", 1, "")
    write_profile(Profile(key, source.table, source.calibrated), path)
    return str(path)
