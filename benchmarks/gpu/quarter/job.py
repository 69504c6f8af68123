# SPDX-License-Identifier: Apache-2.0
"""What a question gets in its process: how large to ask, what is known, and where to tell."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from benchmarks import ROOT
from benchmarks.harness.process import report_item


@dataclass(frozen=True)
class Job:
    """A question's task. `known`: names of the parts that earlier calls have answered."""

    small: bool = False
    known: frozenset[str] = frozenset()
    tell: Callable[[dict[str, Any]], None] = report_item

    def note(self, part: str, **values: Any) -> None:
        """Tell a part of the answer; it is written at once."""
        self.tell({"part": part, **values})

    def lacks(self, *parts: str) -> list[str]:
        """Those that are not known."""
        return [part for part in parts if part not in self.known]


def ask(function: str, small: bool, known: frozenset[str]) -> None:
    """Entry point of a question's process: `function` is `module:name`."""
    os.chdir(ROOT)
    resolve_name(function)(Job(small, known))
