# SPDX-License-Identifier: Apache-2.0
"""The CUDA adapter in an engine on the CPU: vLLM's FlashAttention backend without its kernels.

The backend's Python is vLLM's own: metadata, cache layout, the order of its calls. Its kernels,
which exist on a GPU only, are replaced as in a rehearsal, and so is our tree kernel. Its plan and
workspace are made as on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bastion_kernels import AttentionLayer, AttentionStep
from tests.references import tree_attention
from tests.rehearsal import arithmetic

# (longest query, window to the left, to the right) of every batch that was planned ahead.
_PLANNED: list[tuple[int, ...]] = []


def planned(session: Any) -> list[dict[str, Any]]:
    """Probe: at the end of a batch, what FlashAttention 3 has planned, and what a graph plans."""
    from tests.e2e.capture_probe import prepare

    if session.engine.has_unfinished_requests():
        return []
    planned = [*_PLANNED]
    metadata = prepare(session, "plain").attn_metadata
    _PLANNED.clear()
    for of_layer in metadata.values():
        of_layer.plan_in_graph()
    return [{"planned": planned, "in graph": _PLANNED}]


def plan(**kwargs: Any) -> Tensor:
    """FlashAttention 3's plan of a batch."""
    _PLANNED.append((kwargs["max_seqlen_q"], *kwargs["window_size"]))
    return torch.zeros(1, dtype=torch.int32)


def varlen_attention(
    *, q: Tensor, k: Tensor, v: Tensor, out: Tensor, q_descale: Tensor | None = None,
    k_descale: Tensor | None = None, v_descale: Tensor | None = None, **more: Any,
) -> None:  # fmt: skip
    """FlashAttention; the factors `[R, Hkv]` scale float8 numbers and are equal within a layer."""
    if k.dtype == torch.float8_e4m3fn:
        assert q.dtype == k.dtype, "FlashAttention 3 takes one dtype"
        factors = [x.flatten()[0] for x in (q_descale, k_descale, v_descale) if x is not None]
        q, k, v = (x.to(out.dtype) * f for x, f in zip((q, k, v), factors, strict=True))
    arithmetic.varlen_attention(q=q, k=k, v=v, out=out, **more)


def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor,
    kv_cache_dtype: str, *scales: Tensor,
) -> None:  # fmt: skip
    """Write keys and values [T, Hkv, d] to their slots."""
    if kv_cache_dtype.startswith("fp8"):
        key, value = (
            (rows / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
            for rows, scale in zip((key, value), scales, strict=True)
        )
    arithmetic.reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping)


def attend(layer: AttentionLayer, step: AttentionStep, query: Tensor, out: Tensor) -> None:
    """Tree attention, of float8 queries too, for which a CPU has no kernel."""
    layer.check(step, query, out)
    tree_attention(layer, step, query, out)


def install() -> None:
    """Setup: use it in every attention layer of this process."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends import flash_attn

    AttentionLayer.__call__ = attend
    torch.cuda.is_current_stream_capturing = lambda: False  # it raises in a CPU build
    # As on a Hopper GPU.
    flash_attn.get_flash_attn_version = lambda *args, **kwargs: 3
    flash_attn.flash_attn_supports_kv_cache_dtype = lambda *args, **kwargs: True
    flash_attn.flash_attn_supports_sinks = lambda: True
    flash_attn.get_scheduler_metadata = plan
    flash_attn.flash_attn_varlen_func = varlen_attention
    flash_attn.reshape_and_cache_flash = reshape_and_cache
    CpuPlatform.get_attn_backend_cls = classmethod(
        lambda cls, *args, **kwargs: f"{flash_attn.__name__}.FlashAttentionBackend"
    )
