# SPDX-License-Identifier: Apache-2.0
"""What the adapters for gated delta networks assume of vLLM beyond the signatures in the ledger."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

pytest.importorskip("vllm")


def test_the_hybrid_model_state_fits_vllms() -> None:
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

    from vllm_bastion.step.hybrid import HybridModelState
    from vllm_bastion.step.target import BastionModelState

    order = HybridModelState.__mro__
    assert order.index(BastionModelState) < order.index(MambaHybridModelState)
    # vLLM's forwards to the default's, but for what it counts
    assert MambaHybridModelState.__base__ is DefaultModelState
    given = list(inspect.signature(MambaHybridModelState.prepare_attn).parameters)
    assert given[1:4] == ["input_batch", "cudagraph_mode", "block_tables"]


def test_what_is_read_of_a_layer_and_its_metadata_exists() -> None:
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import (
        QwenGatedDeltaNetAttention,
    )
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
    from vllm.v1.kv_cache_interface import MambaSpec

    fields = {field.name for field in dataclasses.fields(GDNAttentionMetadata)}
    assert fields >= {
        "num_actual_tokens", "num_prefills", "non_spec_token_indx", "num_accepted_tokens",
        "spec_sequence_masks",
    }  # fmt: skip
    assert "num_speculative_blocks" in {field.name for field in dataclasses.fields(MambaSpec)}
    for name in ("_conv_buffer_view", "_ssm_state_view", "_unpacked_conv_weight"):
        assert list(inspect.signature(getattr(gdn_attention, name)).parameters) == ["layer"]
    source = inspect.getsource(QwenGatedDeltaNetAttention)
    assert all(f"self.{name}" in source for name in ("A_log", "dt_bias", "head_k_dim", "num_spec"))
