# SPDX-License-Identifier: Apache-2.0
"""Packed copies of weights that change, each compared with a product of the new weight."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import linear as product

from bastion_kernels.cpu.linear import can_multiply, can_multiply_int8
from vllm_bastion.cpu.build import is_cpu_build

if not is_cpu_build() or not (can_multiply() or can_multiply_int8()):
    pytest.skip("for CPUs whose products are ours", allow_module_level=True)

from vllm_bastion.cpu import context_kv, linear
from vllm_bastion.engine.weights import _join, loading_drafter

ours = pytest.mark.skipif(not can_multiply(), reason="for CPUs whose bf16 product is ours")
int8 = pytest.mark.skipif(not can_multiply_int8(), reason="for CPUs that multiply int8")


def layer(weight: torch.Tensor) -> nn.Module:
    out = nn.Module()
    out.weight = nn.Parameter(weight, requires_grad=False)
    return out


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(got.float(), expected.float(), atol=0.3, rtol=0.05)


@pytest.fixture(autouse=True)
def of_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "MIN_WEIGHT_BYTES", 0)


@ours
@pytest.mark.parametrize("in_int8", [False, pytest.param(True, marks=int8)])
def test_a_loaded_weight_is_packed_where_compiled_code_reads_it(in_int8: bool) -> None:
    def install() -> None:
        assert linear.install_linear(one, remove_weight=True, int8=in_int8)

    one, x = layer(random(64, 32, seed=0)), random(5, 32, seed=1)
    install()
    seen_by_compiled_code, new = one.cpu_linear, random(64, 32, seed=2)
    one.weight = nn.Parameter(new, requires_grad=False)
    install()
    for used in (one.cpu_linear, seen_by_compiled_code):
        assert close(used(x, one.weight, None), product(x, new))


@pytest.mark.parametrize("in_int8", [False, pytest.param(True, marks=int8)])
@pytest.mark.parametrize("own", [pytest.param(True, marks=ours), False])
def test_a_tied_head_follows_the_embeddings(
    own: bool, in_int8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`own`: with our product; otherwise with vLLM's, which packs a copy too."""
    if not own:
        monkeypatch.setattr(linear, "can_multiply", lambda: False)
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    target, drafter = nn.Module(), nn.Module()
    target.embed, target.head = layer(random(64, 32, seed=0)), nn.Module()
    target.head.weight = target.embed.weight
    for one in (target.embed, target.head):
        if not linear.install_linear(one, remove_weight=False):
            dispatch_cpu_unquantized_gemm(one, remove_weight=False)
    drafter.lm_head = target.head
    if in_int8:
        linear.with_int8_head(drafter)
        assert drafter.lm_head is not target.head
    new, x = random(64, 32, seed=2), random(5, 32, seed=1)
    target.embed.weight.data.copy_(new)
    if own or can_multiply_int8():  # vLLM packs a copy for AVX-512 only
        assert not close(target.head.cpu_linear(x, target.head.weight, None), product(x, new))
    linear.repack(target, drafter)
    for head in (target.embed, target.head, drafter.lm_head):
        assert close(head.cpu_linear(x, head.weight, None), product(x, new))
    assert linear.is_int8(drafter.lm_head) == in_int8


@int8
def test_a_drafters_own_head_becomes_int8_itself() -> None:
    """vLLM loads new weights into the module that it has built."""
    drafter = nn.Module()
    drafter.lm_head, drafter.has_own_lm_head = layer(random(64, 32, seed=0)), True
    head = drafter.lm_head
    linear.with_int8_head(drafter)
    assert drafter.lm_head is head and linear.is_int8(head)


def drafter_model(layers: int) -> SimpleNamespace:
    """As vLLM's DFlash model: 16 rows of queries in each layer, 32 of keys and values."""
    model = SimpleNamespace(layers=[], _fused_kv_bias=None)
    for index in range(layers):
        attn = SimpleNamespace(
            qkv_proj=layer(random(48, 32, seed=index)), q_size=16, k_norm=layer(random(8, seed=9))
        )
        model.layers.append(SimpleNamespace(self_attn=attn))
    fused = torch.cat([one.self_attn.qkv_proj.weight[16:] for one in model.layers])
    model._k_norm_weights = torch.zeros(layers, 8, dtype=torch.bfloat16)
    model._hidden_norm_weight = torch.ones(32, dtype=torch.bfloat16)
    model._fused_kv_weight = fused
    return model


def test_a_drafters_joined_weights_follow_its_layers() -> None:
    model = drafter_model(3)
    context_kv.install(model)
    joined = model._fused_kv_weight
    new = [random(48, 32, seed=20 + index) for index in range(3)]
    for one, weight in zip(model.layers, new, strict=True):
        one.self_attn.qkv_proj.weight.data.copy_(weight)
        context_kv.take_rows(one.self_attn.qkv_proj)
    expected = torch.cat([weight[16:] for weight in new])
    assert torch.equal(joined, expected)
    context_kv.take_rows(layer(random(48, 32, seed=1)))  # of another model


def test_a_gpu_joins_what_vllm_has_loaded() -> None:
    model = drafter_model(2)
    joined, norms = model._fused_kv_weight, model._k_norm_weights
    for index, one in enumerate(model.layers):
        one.self_attn.qkv_proj.weight.data.copy_(random(48, 32, seed=30 + index))
        one.self_attn.k_norm.weight.data.copy_(random(8, seed=40 + index))
    _join(model)
    assert model._fused_kv_weight is joined
    assert torch.equal(joined, torch.cat([random(48, 32, seed=30 + i)[16:] for i in (0, 1)]))
    assert torch.equal(norms, torch.stack([random(8, seed=40 + i) for i in (0, 1)]))


def test_nothing_is_joined_of_packed_4_bit_weights() -> None:
    model = drafter_model(1)
    attn, model._fused_kv_weight = model.layers[0].self_attn, None
    del attn.qkv_proj.weight
    _join(model)
    assert torch.equal(model._k_norm_weights[0], attn.k_norm.weight)


def test_vllm_does_not_join_while_weights_arrive() -> None:
    drafter = nn.Module()
    drafter.model = nn.Module()
    with pytest.raises(KeyError), loading_drafter(drafter, "dflash"):
        drafter.model._build_fused_kv_buffers()
        raise KeyError
    assert "_build_fused_kv_buffers" not in vars(drafter.model)
