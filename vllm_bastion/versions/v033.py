# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.33."""

from __future__ import annotations

from vllm_bastion.versions import Capabilities

_SPEC = "vllm.v1.worker.gpu.spec_decode"

CAPABILITIES = Capabilities(
    returns_admitted_drafts=True,
    pads_grammar_rows=True,
    stages_hidden_states=True,
    worker_requires_triton=True,
    seeds_draft_steps=True,
    absent_kernel_parameters={
        f"{_SPEC}.rejection_sampler_utils:_compute_local_logits_stats_kernel": (
            "num_speculative_steps",
        ),
    },
)
