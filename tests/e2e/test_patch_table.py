# SPDX-License-Identifier: Apache-2.0
"""The patch table against running engines: every change has its row, and every row its change."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.e2e import cases
from tests.e2e.assigned import (
    ASSIGNED,
    BASTION_WORKER,
    EVERY_PROCESS,
    NATIVE_WORKER,
    Change,
    every_change,
)
from tests.e2e.engines import Engine, Runner
from tests.e2e.marks import on_cpu
from tests.e2e.test_cuda_path import PLAIN, SETUP
from vllm_bastion.hooks.hook import Hook
from vllm_bastion.hooks.table import PLUGIN_HOOKS, WORKER_HOOKS

pytestmark = on_cpu("engines on a CPU host", pytest.mark.slow)

_CPU = Engine(max_num_seqs=2, eager=True, extra={"dtype": "bfloat16"}).with_bastion(8)
ENGINES: dict[str, tuple[Engine, dict[str, Any]]] = {
    "CPU": (_CPU, {}),
    "CUDA path": (PLAIN.with_bastion(8, top_k=4), {"setup": SETUP, "interpreted": True}),
}
# Changes that one of the two engines must show. Any other `when` is a condition of its own.
SHOWN = (EVERY_PROCESS, BASTION_WORKER, NATIVE_WORKER)


@cache
def rows() -> dict[str, Hook | Change]:
    return {row.target: row for row in every_change()}


@pytest.fixture(scope="module")
def surveys(runner: Runner) -> dict[str, tuple[set[str], set[str]]]:
    """Of each kind of engine: changed attributes, and changed attributes of objects."""
    found, probe = {}, "tests.e2e.patch_probe:survey"
    runs = {
        name: runner.submit(engine, [cases.greedy(1, tokens=6)], probe=probe, **spec)
        for name, (engine, spec) in ENGINES.items()
    }
    for name, run in runs.items():
        own = run.result()["batches"][0]["probed"][-1]
        changed = {kernel or target for target, kernel in own["ours"].items()}
        found[name] = changed, set(own["objects"])
    return found


@pytest.mark.parametrize("name", ENGINES)
def test_every_change_has_its_row(name: str, surveys: Any) -> None:
    attributes, objects = surveys[name]
    of_objects = {row.target for row in ASSIGNED if row.on_instance}
    missing = {one for one in attributes if one not in rows() or one in of_objects}
    assert not missing, f"changed without a row in vllm_bastion.hooks: {sorted(missing)}"
    named = {target.rpartition(".")[2] for target in of_objects}
    unnamed = {one for one in objects if one.rpartition(".")[2] not in named}
    assert not unnamed, f"objects changed without a row: {sorted(unnamed)}"


def test_every_row_has_its_change(surveys: Any) -> None:
    seen = set().union(*(part for survey in surveys.values() for part in survey))
    changes = [row for row in rows().values() if isinstance(row, Change) and row.when in SHOWN]
    shown = [row.target for row in (*PLUGIN_HOOKS, *WORKER_HOOKS, *changes)]
    absent = [target for target in shown if target not in seen]
    assert not absent, f"no engine shows these rows: {absent}"


def test_rows_are_complete() -> None:
    targets = [row.target for row in every_change()]
    assert len(set(targets)) == len(targets)
    for row in every_change():
        assert row.why, row.target
