# SPDX-License-Identifier: Apache-2.0
"""The patch table against running engines: every change has its row, and every row its change.

Each engine runs in a fresh process, beside the same engine without this plugin or without method
"bastion", and `patch_probe` looks through both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.assigned import ASSIGNED, NATIVE_WORKER, Change, every_change
from tests.e2e.engines import _INTERPRETED, ENVIRONMENT, ROOT, Engine
from tests.e2e.marks import on_cpu
from tests.e2e.test_cuda_path import PLAIN, SETUP
from vllm_bastion.hooks.hook import BASTION_WORKER, EVERY_PROCESS, Hook

pytestmark = on_cpu("engines on a CPU host", pytest.mark.slow)

_CPU = Engine(max_num_seqs=2, eager=True, extra={"dtype": "bfloat16"})
# name -> (with method "bastion", without, setup of both, environments of both)
ENGINES: dict[str, tuple[Engine, Engine, list[str], dict[str, str], dict[str, str]]] = {
    # The second one does not load the plugin at all.
    "CPU": (_CPU.with_bastion(8), _CPU, [], {}, {"VLLM_PLUGINS": ""}),
    "CUDA path": (
        PLAIN.with_bastion(8, top_k=4), PLAIN, SETUP, _INTERPRETED, _INTERPRETED,
    ),
}  # fmt: skip
# Rows that one of the two engines must show. Any other `when` is a condition of its own.
SHOWN = (EVERY_PROCESS, BASTION_WORKER, NATIVE_WORKER)


def _survey(engine: Engine, setup: list[str], variables: dict[str, str], out: Path) -> Any:
    spec = {
        "engine": engine.arguments(),
        "costs": engine.costs,
        "setup": setup,
        "prompts": ["def f(x):", "import"],
        "tokens": [6, 4],
    }
    environment = os.environ | ENVIRONMENT | variables
    # Method "bastion" chooses Model Runner V2 by itself; without the plugin a CPU host has V1.
    environment.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    path = [str(ROOT), str(ROOT / "tests"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.patch_probe", json.dumps(spec), str(out)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


@cache
def rows() -> dict[str, Hook | Change]:
    return {row.target: row for row in every_change()}


def _new_descriptions(own: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """Attributes that both engines' processes could have, and that differ.

    vLLM itself puts functions of its CPU runners into PyTorch, each runner its own, and of its CPU
    worker into its own modules, where those that were imported before keep the original. Triton's
    interpreter copies the names of its module into that of a kernel that it runs.
    """
    found, interpreter = set(), own["described"].get("triton.runtime.interpreter", {})
    for holder, names in own["described"].items():
        known = other["described"].get(holder)
        if known is None:
            continue
        for name, text in names.items():
            by_vllm = text.startswith("vllm.") and (
                not holder.startswith("vllm")
                or str(known.get(name)).startswith("vllm.v1.worker.cpu.")
            )
            by_triton = name not in known and interpreter.get(name) == text
            if known.get(name) != text and not by_vllm and not by_triton:
                found.add(f"{holder}.{name}" if ":" in holder else f"{holder}:{name}")
    return found


@pytest.fixture(scope="module")
def surveys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[set[str], set[str]]]:
    """Of each kind of engine: changed attributes, and changed attributes of objects."""
    folder, found = tmp_path_factory.mktemp("patches"), {}
    for name, (engine, other, setup, variables, others) in ENGINES.items():
        own = _survey(engine, setup, variables, folder / f"{name}.json")
        without = _survey(other, setup, others, folder / f"{name}, without.json")
        if "VLLM_PLUGINS" in others:
            assert not without["ours"] and not without["objects"], "the plugin was loaded"
        changed = {kernel or target for target, kernel in own["ours"].items()}
        found[name] = changed | _new_descriptions(own, without), set(own["objects"])
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
    absent = [row.target for row in rows().values() if row.when in SHOWN and row.target not in seen]
    assert not absent, f"no engine shows these rows: {absent}"


def test_rows_are_complete() -> None:
    targets = [row.target for row in every_change()]
    assert len(set(targets)) == len(targets)
    for row in every_change():
        assert row.why and row.when, row.target
