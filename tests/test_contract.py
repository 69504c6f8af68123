# SPDX-License-Identifier: Apache-2.0
"""What this package relies on in vLLM, against the installed one; see `tests.contract`."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from packaging.specifiers import SpecifierSet
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

import vllm_bastion
from tests.contract import CONTRACT, MINORS, Reliance
from vllm_bastion import compat
from vllm_bastion.hooks.hook import resolve
from vllm_bastion.versions import capabilities, capabilities_of

PACKAGE = Path(vllm_bastion.__file__).parent
# The only member of AdaptiveVerificationManager that ours inherits: the base class's constructor
# does not run.
INHERITED_OF_MANAGER = "set_cost_curves"


@pytest.fixture(scope="module", autouse=True)
def _cpu_patches() -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        # vLLM's CPU worker imports this first, too.
        import vllm.v1.worker.cpu.shm  # noqa: F401


def found(target: str) -> Any:
    owner, name, _ = resolve(target)
    return getattr(owner, name)


def rows_with(field: str) -> Any:
    rows = [row for row in CONTRACT if getattr(row, field)]
    return pytest.mark.parametrize("row", rows, ids=[row.target for row in rows])


def assigned_by(kind: type) -> set[str]:
    """Names that the methods of a class set."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    stores = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute))
    return {node.attr for node in stores if isinstance(node.ctx, ast.Store)}


def called_by_us() -> set[str]:
    """Names of attributes that our code reads, but for those of `super()`."""
    names = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "super()":
                names.add(node.attr)
    return names


def subclasses() -> Iterator[type]:
    """Our classes that extend one of vLLM's."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
        for kind in vars(module).values():
            ours = isinstance(kind, type) and kind.__module__ == module.__name__
            if ours and any(base.__module__.startswith("vllm.") for base in kind.__mro__):
                yield kind


def test_methods_override_vllms_or_are_called() -> None:
    """A method that vLLM has renamed would never run."""
    called = called_by_us()
    for kind in subclasses():
        bases = [base for base in kind.__mro__[1:] if base.__module__.startswith("vllm.")]
        for name, value in vars(kind).items():
            ours = getattr(value, "fget", None) or getattr(value, "__func__", value)
            if not inspect.isfunction(ours) or name.startswith("__"):
                continue
            overridden = [vars(base)[name] for base in bases if name in vars(base)]
            if not overridden:
                assert name in called, f"{kind.__name__}.{name} is no method of vLLM, or unused"
            elif inspect.isfunction(overridden[0]):
                theirs = list(inspect.signature(inspect.unwrap(overridden[0])).parameters)
                for given in inspect.signature(ours).parameters.values():
                    if given.kind in (given.VAR_POSITIONAL, given.VAR_KEYWORD) or not theirs:
                        break
                    assert given.name == theirs.pop(0), f"{kind.__name__}.{name}"


@rows_with("body")
def test_the_order_of_calls(row: Reliance) -> None:
    source = inspect.getsource(inspect.unwrap(found(row.target)))
    at = [source.find(piece) for piece in row.body]
    assert -1 not in at and at == sorted(at), f"vLLM's {row.target} has changed: {row.why}"


def fingerprint(function: object) -> str:
    """Of a function's tokens, so that comments and line breaks do not count."""
    function = getattr(function, "fget", None) or function
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))  # type: ignore[arg-type]
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    text = "".join(token.string for token in tokens if token.type not in layout)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@rows_with("fingerprints")
def test_bodies_that_adapters_were_written_beside(row: Reliance) -> None:
    installed = MINORS.index(".".join(str(compat.vllm_version()).split(".")[:2]))
    now, known = fingerprint(found(row.target)), row.fingerprints[installed]
    assert now == known, (
        f"the body of vLLM's {row.target} is new ({now}): read the change beside {row.files}, then "
        "note the fingerprint in tests/contract.py"
    )


# --- versions ---------------------------------------------------------------------------------


def test_every_version_in_the_range_has_its_module() -> None:
    supported = SpecifierSet(compat.SUPPORTED_VLLM)
    minors = [f"0.{n}" for n in range(100) if f"0.{n}.0" in supported]
    assert minors
    for minor in minors:
        assert capabilities_of(minor)
    assert tuple(minors) == MINORS
    assert all(len(row.fingerprints) in (0, len(MINORS)) for row in CONTRACT)


def test_capabilities_are_those_of_the_installed_vllm() -> None:
    """Each is found here the hard way, so that `versions` cannot be wrong about it."""
    bitmask = inspect.unwrap(StructuredOutputManager.grammar_bitmask)
    worker = importlib.import_module("vllm.v1.worker.gpu_worker")
    reallocate = AdaptiveVerificationManager.reallocate_drafts
    assert capabilities() == dataclasses.replace(
        capabilities(),
        returns_admitted_drafts=len(get_args(get_type_hints(reallocate)["return"])) == 4,
        pads_grammar_rows="mask_stride" in bitmask.__code__.co_varnames,
        worker_requires_triton="HAS_TRITON" in vars(worker),
    )


# --- the manager, which does not run its base constructor ---------------------------------------


def unpacked(caller: object, callee: str) -> int:
    """How many values `caller` takes from its call of a method `callee`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(caller))))  # type: ignore[arg-type]
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            called, target = node.value.func, node.targets[0]
            if isinstance(called, ast.Attribute) and called.attr == callee:
                return len(target.elts) if isinstance(target, ast.Tuple) else 1
    raise AssertionError(f"vLLM no longer calls {callee} there")


def manager_class() -> Any:
    from vllm_bastion.engine.budget import TreeBudgetManager

    return TreeBudgetManager


def test_vllm_takes_as_many_values_as_the_manager_returns() -> None:
    manager = object.__new__(manager_class())
    manager.lagged, manager._num_nodes, manager._limits = False, 0, np.zeros(1, dtype=np.int32)
    manager._num_logits_np = np.zeros(2, dtype=np.int32)
    manager.trees = SimpleNamespace(device=torch.device("cpu"))
    manager.query_start_loc = torch.zeros(2, dtype=torch.int32)
    given = manager.reallocate_drafts(["a"], torch.zeros(1, dtype=torch.int32))
    caller = found("vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_inputs")
    assert unpacked(caller, "reallocate_drafts") == len(given), "see engine/budget.py"
    assert unpacked(caller, "compact_batch") == 2, "see engine/budget.py"


def test_nothing_of_the_managers_base_class_runs_half_initialised() -> None:
    own = vars(manager_class())
    inherited = {name for name in vars(AdaptiveVerificationManager) if name not in own}
    added = {name for name in inherited if not name.startswith("__")} - {INHERITED_OF_MANAGER}
    assert not added, f"vLLM's manager has new members: override {added} in engine/budget.py"
    source = inspect.getsource(getattr(AdaptiveVerificationManager, INHERITED_OF_MANAGER))
    read = set(re.findall(r"self\.(\w+)", source))
    assert read <= assigned_by(manager_class()), f"see engine/budget.py: {read}"


def test_the_runner_calls_of_the_manager_what_ours_has() -> None:
    ours = {*vars(manager_class()), *assigned_by(manager_class())}
    folder = Path(inspect.getfile(AdaptiveVerificationManager)).parents[1]
    used: set[str] = set()
    for path in folder.rglob("*.py"):
        for name in re.findall(r"(?:self|runner)\.adaptive_verification\.(\w+)", path.read_text()):
            used.add(name)
    assert used and used <= ours, f"see engine/budget.py: {used - ours}"
