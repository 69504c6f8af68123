# SPDX-License-Identifier: Apache-2.0
"""What vLLM's compiled CUDA kernels compute, in PyTorch on CPU tensors.

Products and attention are summed in float64 and rounded once, so that a row's result does not
depend on how many rows it is computed with: plain decoding and tree verification then round alike.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`aten::linear`."""
    out = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return out.to(x.dtype)


def mm(x: Tensor, other: Tensor, out: Tensor | None = None) -> Tensor:
    """`aten::mm`, `aten::matmul` and `aten::bmm`."""
    found = (x.double() @ other.double()).to(x.dtype)
    return found if out is None else out.copy_(found)


def rms_norm(out: Tensor, x: Tensor, weight: Tensor | None, epsilon: float, *_: Any) -> None:
    """`_C::rms_norm`; weight: [H], or [groups, H] for x [groups, .., H]."""
    normalised = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
    if weight is None:
        out.copy_(normalised)
        return
    if weight.dim() == 2:
        weight = weight.view(weight.shape[0], *[1] * (x.dim() - 2), weight.shape[1])
    out.copy_(normalised.to(x.dtype) * weight)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
    """`_C::fused_add_rms_norm`."""
    residual.add_(x)
    rms_norm(x, residual, weight, epsilon)


def silu_and_mul(out: Tensor, x: Tensor) -> None:
    """`_C::silu_and_mul`."""
    gate, up = x.chunk(2, -1)
    out.copy_(F.silu(gate.float()).to(x.dtype) * up)


def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, cos_sin_cache: Tensor,
    is_neox: bool, *_: Any,
) -> None:  # fmt: skip
    """`_C::rotary_embedding`, GPT-NeoX's layout."""
    if not is_neox:
        raise NotImplementedError("rotary embedding of interleaved pairs")
    rotary = cos_sin_cache.shape[-1]
    cos, sin = (x[:, None] for x in cos_sin_cache[positions.flatten()].float().chunk(2, -1))
    for x in (query, key):
        if x is None:
            continue
        heads = x.view(positions.numel(), -1, head_size)[..., :rotary]
        first, second = heads.float().chunk(2, -1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        heads.copy_(turned)


def reshape_and_cache_flash(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, *_: Any
) -> None:
    """`_C_cache_ops::reshape_and_cache_flash`; a slot of -1 is not written."""
    real = slots >= 0
    rows, size = slots[real], key_cache.shape[1]
    for x, cache in ((key, key_cache), (value, value_cache)):
        cache[rows // size, rows % size] = x[: len(real)][real]


def varlen_attention(
    *, q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu_seqlens_q: Tensor, seqused_k: Tensor,
    block_table: Tensor, softmax_scale: float, causal: bool, window_size: list[int] | None = None,
    softcap: float = 0.0, s_aux: Tensor | None = None, **_: Any,
) -> None:  # fmt: skip
    """FlashAttention over a paged cache: q [T, Hq, d]; k, v [blocks, block_size, Hkv, d].

    window_size: positions to the left and right, -1 = all; s_aux: [Hq] sinks.
    """
    starts, lengths = cu_seqlens_q.tolist(), seqused_k.tolist()
    left, right = window_size or (-1, -1)
    for r, length in enumerate(lengths):
        rows = slice(starts[r], starts[r + 1])
        count = rows.stop - rows.start
        if count <= 0 or length <= 0:
            continue
        blocks = block_table[r, : -(-length // k.shape[1])].long()
        group = q.shape[1] // k.shape[2]
        keys, values = (
            cache[blocks].flatten(0, 1)[:length].transpose(0, 1).double() for cache in (k, v)
        )
        keys, values = (x.repeat_interleave(group, 0) for x in (keys, values))
        scores = q[rows].transpose(0, 1).double() @ keys.mT * softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(length) - torch.arange(length - count, length)[:, None]
        hidden = torch.zeros(count, length, dtype=torch.bool)
        if causal or right >= 0:
            hidden |= distance > (0 if causal else right)
        if left >= 0:
            hidden |= distance < -left
        scores.masked_fill_(hidden, -torch.inf)
        if s_aux is not None:
            sinks = s_aux.double()[:, None, None].expand(-1, count, 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        out[rows] = (weights @ values).transpose(0, 1).to(out.dtype)


def topk_softmax(
    weights: Tensor, indices: Tensor, token_expert: Tensor, gating: Tensor, renormalize: bool,
    *_: Any,
) -> None:  # fmt: skip
    """`_moe_C::topk_softmax`: gating [T, E] to weights and indices [T, k]."""
    found, which = gating.float().softmax(-1).topk(weights.shape[1], -1)
    if renormalize:
        found = found / found.sum(-1, keepdim=True)
    weights.copy_(found)
    indices.copy_(which)
    places = torch.arange(weights.numel()).view(weights.shape[1], -1).T
    token_expert.copy_(places)


def moe_align_block_size(
    topk_ids: Tensor, num_experts: int, block_size: int, sorted_ids: Tensor, expert_ids: Tensor,
    num_padded: Tensor, expert_map: Tensor | None = None, *_: Any,
) -> None:  # fmt: skip
    """`_moe_C::moe_align_block_size`: rows by expert, each expert's padded to whole blocks."""
    if expert_map is not None:
        raise NotImplementedError("experts on several ranks")
    rows, begin = topk_ids.flatten(), 0
    sorted_ids.fill_(len(rows))
    expert_ids.fill_(-1)
    for expert in range(num_experts):
        own = (rows == expert).nonzero()[:, 0]
        blocks = -(-len(own) // block_size)
        sorted_ids[begin : begin + len(own)] = own
        expert_ids[begin // block_size :][:blocks] = expert
        begin += blocks * block_size
    num_padded.fill_(begin)


def moe_sum(x: Tensor, out: Tensor, *_: Any) -> None:
    """`_moe_C::moe_sum`: [T, k, H] to [T, H]."""
    out.copy_(x.float().sum(1))


def static_scaled_fp8_quant(out: Tensor, x: Tensor, scale: Tensor, *_: Any) -> None:
    """`_C::static_scaled_fp8_quant`, one scale."""
    limit = torch.finfo(out.dtype).max
    out.copy_((x.float() / scale).clamp(-limit, limit))


def dynamic_per_token_scaled_fp8_quant(
    out: Tensor, x: Tensor, scale: Tensor, upper: Tensor | None = None
) -> None:
    """`_C::dynamic_per_token_scaled_fp8_quant`: x [T, H], scale [T, 1], written."""
    largest = x.float().abs().amax(-1, keepdim=True)
    if upper is not None:
        largest = largest.clamp(max=float(upper))
    limit = torch.finfo(out.dtype).max
    scale.copy_((largest / limit).clamp(min=1 / (512 * limit)).view_as(scale))
    static_scaled_fp8_quant(out, x, scale)


def cutlass_scaled_mm(
    out: Tensor, x: Tensor, other: Tensor, scale: Tensor, scale_other: Tensor, bias: Tensor | None
) -> None:
    """`_C::cutlass_scaled_mm`: a scale for each row of x or one, for each column or one."""
    found = x.double() * scale.double().view(-1, 1) @ other.double()
    found *= scale_other.double().view(1, -1)
    out.copy_(found if bias is None else found + bias.double())


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_states: Tensor, query_start_loc: Tensor,
    cache_indices: Tensor, has_initial_state: Tensor,
) -> Tensor:  # fmt: skip
    """The short convolution and SiLU over prompts: x [C, T], weight [C, W] to [C, T].

    conv_states: [B, C, W - 1], the inputs before a prompt's rows, written.
    """
    out, width = torch.zeros_like(x), weight.shape[1]
    starts, states = query_start_loc.tolist(), cache_indices.tolist()
    for r in range(len(starts) - 1):
        rows = slice(starts[r], starts[r + 1])
        if starts[r] == starts[r + 1]:
            continue
        before = conv_states[states[r]]
        before = before.clone() if has_initial_state[r] else torch.zeros_like(before)
        inputs = torch.cat([before.to(x.dtype), x[:, rows]], 1)
        mixed = (inputs.double().unfold(1, width, 1) * weight.double()[:, None]).sum(-1)
        if bias is not None:
            mixed += bias.double()[:, None]
        out[:, rows] = F.silu(mixed).to(x.dtype)
        conv_states[states[r]] = inputs[:, 1 - width :].to(conv_states.dtype)
    return out


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gated delta rule over prompts, row by row.

    q, k: [1, T, Hk, K], normalised; v: [1, T, H, V]; g (logarithm) and beta: [1, T, H];
    initial_state: [R, H, V, K]. Returns the outputs [1, T, H, V] and the states after each prompt.
    """
    heads, scale = v.shape[2], k.shape[-1] ** -0.5
    queries, keys = (x[0].double().repeat_interleave(heads // x.shape[2], 1) for x in (q, k))
    values, decays, betas = v[0].double(), g[0].double().exp(), beta[0].double()
    states, out = initial_state.double(), torch.zeros_like(v[0], dtype=torch.float64)
    starts = cu_seqlens.tolist()
    for r in range(len(starts) - 1):
        state = states[r]  # [H, V, K]
        for t in range(starts[r], starts[r + 1]):
            state *= decays[t][:, None, None]
            update = betas[t][:, None] * (values[t] - (state @ keys[t][..., None])[..., 0])
            state += update[..., None] * keys[t][:, None]
            out[t] = (state @ queries[t][..., None])[..., 0] * scale
    return out.to(v.dtype)[None], states.to(initial_state.dtype)


# By the operator's name; the library's name (`_C`, `_C_stable_libtorch`, ..) differs by version.
KERNELS = {
    kernel.__name__: kernel
    for kernel in (
        rms_norm, fused_add_rms_norm, silu_and_mul, rotary_embedding, reshape_and_cache_flash,
        topk_softmax, moe_align_block_size, moe_sum, static_scaled_fp8_quant,
        dynamic_per_token_scaled_fp8_quant, cutlass_scaled_mm,
    )
}  # fmt: skip
# In place of ATen's, for numbers of half precision.
PRODUCTS = {"linear": linear, "mm": mm, "matmul": mm, "bmm": mm}
