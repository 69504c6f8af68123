# SPDX-License-Identifier: Apache-2.0
"""The prompts that benchmarks decode."""

from __future__ import annotations

import json
from pathlib import Path

DOMAINS = ("code", "arithmetic", "chat")


def load_prompts(path: Path, per_domain: int | None = None) -> list[dict[str, str]]:
    """Read rows of `id`, `domain` and `prompt`: all, or `per_domain` evenly spaced ones of each.

    Rows of Spec-Bench have a `category` and `turns` instead, of which the first is taken.
    """
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for number, row in enumerate(rows):
        row.setdefault("domain", row.get("category"))
        row.setdefault("id", str(row.get("question_id", number)))
        if "turns" in row:
            row["prompt"] = row["turns"][0]
    picked = []
    for domain in dict.fromkeys([*DOMAINS, *(row["domain"] for row in rows)]):
        own = [row for row in rows if row["domain"] == domain]
        number = len(own) if per_domain is None else min(per_domain, len(own))
        picked += [own[i * len(own) // number] for i in range(number)]
    return picked
