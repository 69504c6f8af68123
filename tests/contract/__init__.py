# SPDX-License-Identifier: Apache-2.0
"""What this package relies on in vLLM beyond the signatures of its hooks, from `contract.table`.

tests/test_contract.py is generated from it. On a vLLM where something is gone, the test names it
and the file to look at, instead of an engine failing inside a step.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.contract.table import MINORS, SHORT, TABLE

__all__ = ["CONTRACT", "INHERITED_OF_MANAGER", "MINORS", "Reliance"]

# The only member of AdaptiveVerificationManager that TreeBudgetManager inherits: the constructor of
# its base class does not run.
INHERITED_OF_MANAGER = "set_cost_curves"


@dataclass(frozen=True)
class Reliance:
    """What files of ours rely on in one class, module or function of vLLM, see `contract.table`."""

    target: str
    files: str
    why: str
    methods: tuple[str, ...]
    names: str
    body: tuple[str, ...]
    fingerprints: tuple[str, ...]
    needs: str


def _rows() -> list[Reliance]:
    rows = []
    for group in re.split(r"\n(?=\S)", TABLE.strip()):
        files, *lines = re.split(r"\n  (?! )", group)
        for line in lines:
            short, *found = re.split(r"\s+@(\w+) ", " ".join(line.split()))
            field = dict(zip(found[::2], found[1::2], strict=True))
            name, rest = re.fullmatch(r"(\w+)(.*)", short).groups()  # type: ignore[union-attr]
            row = Reliance(
                target=SHORT.get(name, name) + rest,
                files=files,
                why=field.pop("why", ""),
                methods=tuple(filter(None, field.pop("calls", "").split("; "))),
                names=field.pop("names", ""),
                body=tuple(filter(None, field.pop("body", "").split(" … "))),
                fingerprints=tuple(field.pop("beside", "").split()),
                needs=field.pop("needs", ""),
            )
            assert not field, f"{short}: {field}"
            rows.append(row)
    return rows


CONTRACT = tuple(_rows())
