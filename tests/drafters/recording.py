# SPDX-License-Identifier: Apache-2.0
"""Read what other libraries have drafted."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from benchmarks import TINY

CANDIDATES = 255  # uncorrected tokens of a position that our chains correct


def specforge_chains() -> list[dict[str, Any]]:
    """Prompts, the target's greedy tokens, and the chain at each of the first of these tokens.

    A chain is None if one of its tokens is not among the `CANDIDATES`.
    """
    made = json.loads(Path(__file__).with_name("specforge_chains.json").read_text())
    weights = (TINY / "domino" / "model.safetensors").read_bytes()
    if made["weights_sha256"] != hashlib.sha256(weights).hexdigest():
        raise AssertionError("the drafter has other weights: run specforge_chains.py again")
    rows: list[dict[str, Any]] = made["rows"]
    for row in rows:
        pairs = zip(row["chains"], row["ranks"], strict=True)
        row["chains"] = [chain if rank < CANDIDATES else None for chain, rank in pairs]
    return rows
