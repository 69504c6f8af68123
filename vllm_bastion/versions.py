# SPDX-License-Identifier: Apache-2.0
"""What differs between the supported minor versions of vLLM, in one place.

Code that depends on the version reads a named field of `capabilities()`. To support another minor
version, add it here and extend the range in `vllm_bastion.compat`; tests/test_contract.py then says
what each field must be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from packaging.version import Version

from vllm_bastion import compat

_GPU = "vllm.v1.worker.gpu"


@dataclass(frozen=True)
class Capabilities:
    """What one minor version of vLLM has. Nothing here imports vLLM."""

    returns_admitted_drafts: bool
    """`reallocate_drafts` returns a fourth value: drafts per request, being copied to the host."""
    pads_grammar_rows: bool
    """A grammar bitmask has `mask_stride` rows for every request, however many drafts it has."""
    worker_requires_triton: bool
    """The GPU worker refuses Model Runner V2 where its `HAS_TRITON` is false."""
    signatures: Mapping[str, str] = field(default_factory=dict)
    """Hook target -> its signature, where it is not the one that the hook's row expects."""


_V0_32 = Capabilities(
    returns_admitted_drafts=False,
    pads_grammar_rows=False,
    worker_requires_triton=False,
    signatures={
        f"{_GPU}.model_runner:maybe_create_adaptive_verification_manager": (
            "(enable_adaptive_verification, attn_groups, req_states, query_start_loc, "
            "num_bonus_tokens, max_total_logits, vllm_config, target_layer_names=, "
            "additional_attn_cg_support=)"
        ),
        f"{_GPU}.model_runner:StructuredOutputsWorker": (
            "(max_num_logits, vocab_size, device, mask_stride, num_bonus_tokens)"
        ),
        f"{_GPU}.warmup:_warmup_kernels": (
            "(model_runner, worker_execute_model, worker_sample_tokens)"
        ),
    },
)
_V0_33 = Capabilities(
    returns_admitted_drafts=True,
    pads_grammar_rows=True,
    worker_requires_triton=True,
)
_OF_MINOR = {(0, 32): _V0_32, (0, 33): _V0_33}


def capabilities_of(version: str) -> Capabilities:
    """The capabilities of a vLLM version, by its minor one; KeyError where that is not known."""
    major, minor = Version(version).release[:2]
    return _OF_MINOR[major, minor]


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
