# SPDX-License-Identifier: Apache-2.0
"""A GPU's step costs for engines that run on a CPU.

On a CPU the interpreter's overhead hides what nodes cost. An engine that is given a GPU's costs as
its latency profile budgets its trees as it would there; the tokens do not depend on it.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.replay_costs import paper_a100
from vllm_bastion.profile_store import Profile, ProfileKey, write_profile


def write_a100_profile(path: Path, max_rows: int) -> Path:
    """The paper's A100 points as a profile for `bastion_calibration`.

    max_rows: the engine's `max_num_batched_tokens`.
    """
    source = paper_a100(max_rows)
    key = ProfileKey(source.name, "", "", "", "", 1, "")
    write_profile(Profile(key, source.table, source.calibrated), path)
    return path
