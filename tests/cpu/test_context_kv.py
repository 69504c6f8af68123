# SPDX-License-Identifier: Apache-2.0
"""Keys and values of a drafter's context against vLLM's own, on a CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_bastion.cpu import context_kv

LAYERS, HEADS, DIM, HIDDEN = 3, 2, 16, 64


def drafter(dtype: torch.dtype) -> SimpleNamespace:
    """The attributes that vLLM's model has once its weights are loaded."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    # Only what renewed weights need; the product is the fused one.
    attention = [
        SimpleNamespace(qkv_proj=torch.nn.Module(), q_size=HEADS * DIM) for _ in range(LAYERS)
    ]
    return SimpleNamespace(
        layers=[SimpleNamespace(self_attn=one) for one in attention],
        _hidden_norm_weight=random(HIDDEN),
        _fused_kv_weight=random(LAYERS * 2 * HEADS * DIM, HIDDEN),
        _fused_kv_bias=random(LAYERS * 2 * HEADS * DIM),
        _k_norm_weights=random(LAYERS, DIM),
        _rms_norm_eps=1e-6,
        _rope_cos_sin_cache=torch.randn(8, DIM, generator=generator),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_context(dtype: torch.dtype) -> None:
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    model, states = drafter(dtype), torch.randn(5, HIDDEN).to(dtype)
    sizes = (states, len(states), LAYERS, HEADS, DIM)
    expected = DFlashQwen3Model._project_context_kv(model, *sizes)
    before = model._rope_cos_sin_cache
    context_kv.install(model)
    assert torch.equal(model._rope_cos_sin_cache, before.to(dtype))
    keys = expected[0]
    normed = model._normalize_context_k(keys).float()
    for layer in range(LAYERS):
        wide = keys[layer].float()
        scale = wide.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        wanted = wide * scale * model._k_norm_weights[layer].float()
        torch.testing.assert_close(normed[layer], wanted, rtol=2**-6, atol=2**-8)
