# SPDX-License-Identifier: Apache-2.0
"""What differs between the supported minor versions of vLLM, one module each.

Code that depends on the version reads a named field of `capabilities()`. To support another minor
version, add a module `v0NN.py` here and extend the range in `vllm_bastion.compat`;
tests/test_contract.py then says what each field must be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module

from packaging.version import Version

from vllm_bastion import compat


@dataclass(frozen=True)
class Capabilities:
    """What one minor version of vLLM has. Nothing here imports vLLM."""

    returns_admitted_drafts: bool
    """`reallocate_drafts` returns a fourth value: drafts per request, being copied to the host."""
    pads_grammar_rows: bool
    """A grammar bitmask has `mask_stride` rows for every request, however many drafts it has."""
    worker_requires_triton: bool
    """The GPU worker refuses Model Runner V2 where its `HAS_TRITON` is false."""
    seeds_draft_steps: bool
    """Each step of a draft is drawn with a seed of its own."""
    absent_kernel_parameters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Kernel -> parameters of its CPU replacement that this version's kernel does not take."""
    signatures: Mapping[str, str] = field(default_factory=dict)
    """Hook target -> its signature, where it is not the one that the hook's row expects."""


def capabilities_of(version: str) -> Capabilities:
    """The capabilities of a vLLM version.

    Raises:
        ImportError: there is no module for its minor version.
    """
    major, minor = Version(version).release[:2]
    return _of_module(f"v{major}{minor:02d}")


def _of_module(name: str) -> Capabilities:
    found = import_module(f"{__name__}.{name}").CAPABILITIES
    assert isinstance(found, Capabilities)
    return found


@cache
def capabilities() -> Capabilities:
    """The capabilities of the installed vLLM. Looked up once per process.

    Raises:
        UnsupportedVllmError: vLLM is missing or outside of the supported range.
    """
    version = compat.vllm_version()
    problem = compat.version_problem(version)
    if version is None or problem is not None:
        raise compat.UnsupportedVllmError(problem)
    return capabilities_of(version)
