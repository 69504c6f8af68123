# SPDX-License-Identifier: Apache-2.0
"""The parts of `make rehearse` without a CUDA build: what is compared, what counts as a failure."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rehearsal import report
from tests.rehearsal.cases import CASES
from tests.rehearsal.emulation import declared_ops

PLAIN, LAGGED = (next(c for c in CASES if c.name == name) for name in ("plain", "lagged"))


def _result(**changes: Any) -> dict[str, Any]:
    steady = {"waits:ours": 0.0, "waits:vllm": 1.0, "sync:event": 1.0, "launch": 20.5}
    fine = {"tokens": [[1, 2]], "cached": [], "steady": steady, "steady_steps": 3, "waits": {}}
    return {**fine, "faults": [], "missing": [], "errors": [], **changes}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"tokens": [[1, 3]]}, "other tokens than plain"),
        ({"faults": ["launch of k with grid 0,1,1"]}, "fault: launch of k"),
        ({"missing": ["_C::unknown"]}, "no numbers for _C::unknown"),
        ({"steady": {"waits:ours": 2.0}}, "2.0 waits of ours"),
        ({"steady": {"waits:ours": 0.0, "alloc:device": 0.5}}, "blocks or allocates"),
        ({"steady": {"waits:ours": 0.0, "sync:memcpy": 0.5}}, "blocks or allocates"),
        ({"cached": [0]}, "[0] cached tokens, not []"),
        ({"failure": "Traceback"}, "did not run to its end"),
    ],
)
def test_a_rehearsal_fails_on_each_kind_of_problem(
    changes: dict[str, Any], expected: str | None
) -> None:
    results = {"plain": _result(), "lagged": _result(**changes)}
    found = report.problems([PLAIN, LAGGED], results)
    if expected is None:
        assert not found
        return
    (problem,) = found
    assert problem.startswith("lagged: ") and expected in problem


def test_every_case_is_compared_with_plain_decoding_of_its_target() -> None:
    by_name = {case.name: case for case in CASES}
    assert len(by_name) == len(CASES)
    for case in CASES:
        # An engine that gets new weights is compared with one that starts with them.
        fresh = by_name[case.plain]
        assert not case.like_fresh or fresh.speculative == case.speculative
        plain = by_name[fresh.plain] if case.like_fresh else fresh
        assert plain.speculative is None and plain.pair == case.pair
        assert plain.adapters == fresh.adapters == case.adapters
        assert plain.long == fresh.long == case.long
        assert plain.arguments == fresh.arguments == case.arguments


def test_emulation_finds_the_ops_that_declare_a_reference() -> None:
    names = set(declared_ops())
    assert {"accept_path", "choose_budget", "gather_rows", "topk_logprobs"} <= names
