# SPDX-License-Identifier: Apache-2.0
"""A replacement writes what vLLM's own kernel writes, which runs in Triton's interpreter.

The whole memory is compared bit for bit: noise, gaps between rows, and rows past the batch.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    # vLLM's substitutes for pinned memory and events; they must come before its GPU modules.
    import vllm.v1.worker.cpu.shm  # noqa: F401

# Each registers its cases.
from tests.cpu import batch_cases, sampler_cases  # noqa: F401
from tests.cpu.replacement_cases import CASES, USUAL, Draw, Launch
from tests.cpu.without import WITHOUT
from tests.e2e.engines import ENVIRONMENT
from vllm_bastion.cpu.replacements import (
    REPLACEMENTS,
    Replacement,
    ReplacementError,
    install,
    parameters,
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for CPU hosts only")

# How many seeds at least; a kernel that wrote nothing gets more.
SEEDS, MOST_SEEDS = [1, pytest.param(2, marks=pytest.mark.slow)], 4


def kernel_of(target: str) -> Any:
    """vLLM's kernel."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def launch_of(name: str, draw: Draw) -> Launch:
    """A case with the arguments it does not give, without what another version's kernel takes."""
    target, launch = name.partition("/")[0], CASES[name](draw)
    names = parameters(kernel_of(target))
    launch.args = {name: value for name, value in launch.args.items() if name in names}
    for missing in [name for name in names if name not in launch.args]:
        if missing in USUAL:
            launch.args[missing] = USUAL[missing](draw)
        else:
            launch.args[missing] = launch.args[missing.replace("_stride", "_ptr")].stride(0)
    return launch


@pytest.fixture(autouse=True)
def device_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace a function of CUDA's libdevice, which the interpreter lacks, by NumPy's."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle
    from vllm.v1.worker.gpu.metrics import logits

    def isnan(x: Any) -> Any:
        data = np.isnan(x.handle.data).astype(x.handle.data.dtype)
        return tl.tensor(TensorHandle(data, x.handle.dtype), x.type)

    monkeypatch.setattr(logits, "libdevice", SimpleNamespace(isnan=isnan))


@pytest.mark.parametrize("hostile", [False, True], ids=["random", "hostile"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seeds", SEEDS)
def test_twin_equals_the_kernel(seeds: int, name: str, hostile: bool) -> None:
    target = name.partition("/")[0]
    changed = False
    for seed in range(MOST_SEEDS):
        if changed and seed >= seeds:
            break
        before, theirs, ours = (launch_of(name, Draw(seed, hostile)) for _ in range(3))
        kernel_of(target)[theirs.grid](**theirs.args)
        REPLACEMENTS[target][ours.grid](**ours.args)
        for (argument, a), (_, b), (_, was) in zip(
            theirs.tensors(), ours.tensors(), before.tensors(), strict=True
        ):
            if a.dtype == torch.uint64 or argument.endswith(("ptrs_ptr", "addrs_ptr")):
                continue  # addresses: kernel and replacement have their own tables
            assert torch.equal(_bits(a), _bits(b)), f"{argument}, seed {seed}: {a} and {b}"
            changed |= not torch.equal(_bits(a), _bits(was))
    assert changed, "the kernel wrote nothing"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of floats: NaN equals NaN, and -0 differs from 0."""
    kinds = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16}
    return tensor.view(kinds.get(tensor.dtype, tensor.dtype))


def test_replacements_and_engines_of_the_tests_check_every_index() -> None:
    import numba

    assert numba.config.BOUNDSCHECK == 1
    assert ENVIRONMENT["NUMBA_BOUNDSCHECK"] == "1"


def test_every_twin_has_a_case() -> None:
    assert {name.partition("/")[0] for name in CASES} == set(REPLACEMENTS)


def test_every_kernel_that_v2_launches_has_a_twin_or_a_reason() -> None:
    """Parses vLLM's sources, so that a kernel that a new version adds is not overlooked."""
    import vllm.v1.worker.gpu as package

    launched = set()
    root = Path(package.__path__[0])
    files = [*root.rglob("*.py"), root.parent / "utils.py", root.parent / "mamba_utils.py"]
    texts = {path: path.read_text() for path in files}
    for path, text in texts.items():
        name = ".".join(path.relative_to(root.parents[3]).with_suffix("").parts)
        for node in ast.walk(ast.parse(text)):
            jitted = isinstance(node, ast.FunctionDef) and any(
                ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list
            )
            if jitted and any(f"{node.name}[" in other for other in texts.values()):
                launched.add(f"{name}:{node.name}")
    without = {f"{module}:{name}" for module, names in WITHOUT.items() for name in names.split()}
    ours = set(REPLACEMENTS)
    # Some kernels of WITHOUT exist in vLLM 0.33 only.
    assert not without & ours and ours <= launched <= without | ours


@pytest.mark.parametrize("target", REPLACEMENTS)
def test_parameters_are_the_kernels(target: str) -> None:
    own, names = REPLACEMENTS[target], parameters(kernel_of(target))
    assert not own.bind((*names, "added")) and not own.bind(names[1:]) and own.bind(names)


def test_a_twin_of_two_versions_goes_by_the_names_of_the_installed_one() -> None:
    got: list[Any] = []

    def newer(grid0: int, first: Any, last: Any, between: Any = None) -> None:
        got.append((grid0, first, between, last))

    own = Replacement(newer, newer)
    assert own.bind(("first", "last")) and not own.bind(("first", "between"))
    assert own.bind(("first", "last"))
    own[(2, 9)](1, 3)
    assert own.bind(("first", "between", "last"))
    own[(2,)](1, 2, last=3)
    assert got == [(2, 1, None, 3), (2, 1, 2, 3)]


def test_a_kernel_with_other_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu import input_batch

    def changed(idx_mapping_ptr: Any, num_computed_tokens_ptr: Any, added: Any) -> None:
        pass

    name = "_post_update_num_computed_tokens_kernel"
    monkeypatch.setattr(input_batch, name, changed)
    before = input_batch._post_update_kernel
    with pytest.raises(ReplacementError, match=name):
        install()
    assert input_batch._post_update_kernel is before, "no kernel is replaced then"


def test_half_precision_is_rounded_back() -> None:
    """vLLM has no such logits today: 16-bit, with gaps between the rows."""
    target = "vllm.v1.worker.gpu.sample.gumbel:_temperature_kernel"
    wide = torch.linspace(-9, 9, 60).reshape(3, 20).to(torch.bfloat16)
    logits, expected = wide[:, :16], wide.clone()
    expected[:2, :16] = (expected[:2, :16].float() / 0.7).to(torch.bfloat16)
    slots, temperature = torch.tensor([0, 0, 1]), torch.tensor([0.7, 1.0])
    REPLACEMENTS[target][(3, 1)](
        logits_ptr=logits, logits_stride=20, expanded_idx_mapping_ptr=slots,
        temperature_ptr=temperature, vocab_size=16, BLOCK_SIZE=16,
    )  # fmt: skip
    assert torch.equal(wide, expected)
