# SPDX-License-Identifier: Apache-2.0
"""Rivals of tree attention: the installed causal attention functions, on the same shapes.

This file finds them; the harness times each after its result is checked. vLLM's FlashAttention 3
and 2 and the FlashAttention 3 package use the same paged cache. The flash_attn package (2),
PyTorch's varlen attention and PyTorch's SDPA use copies of the cache in their preferred layout,
which gives them less work than tree attention. None gets keys repeated for the heads of a group.
The bar compares with FlashAttention 3 only.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from benchmarks.gpu.harness import reason


@dataclass(frozen=True)
class Step:
    """A batch in which every request has `rows` query rows and `length` cached rows."""

    rows: int
    length: int
    # [R, *] int32
    table: Tensor
    # [R+1] int32, first row of each request
    starts: Tensor
    # [R] int32, all `length`
    lengths: Tensor


# (step, query [T, Hq, d], kv_cache [blocks, Hkv, page, 2d]) -> call that gives T * Hq * d numbers
Prepare = Callable[[Step, Tensor, Tensor], Callable[[], Tensor]]


@dataclass(frozen=True)
class Offer:
    """An installed attention function."""

    name: str
    prepare: Prepare
    fa3: bool = False


@cache
def offers() -> tuple[tuple[Offer, ...], dict[str, str]]:
    """The installed functions, and the reason why each of the others is missing."""
    found: list[Offer] = []
    missing: dict[str, str] = {}
    for name, probe in _PROBES.items():
        try:
            found += probe()
        except Exception as error:  # absent, or built for another PyTorch
            missing[name] = reason(error)
    return tuple(found), missing


def _paged(query: Tensor, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values `[blocks, page, Hkv, d]` without a copy, as vLLM passes them."""
    keys, values = kv_cache.transpose(1, 2).split(query.shape[2], dim=-1)
    return keys, values


def _unpaged(step: Step, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of keys and values, `[R, length, Hkv, d]`."""
    pages = -(-step.length // kv_cache.shape[2])
    kv = kv_cache[step.table[:, :pages].long()].transpose(2, 3).flatten(1, 2)[:, : step.length]
    keys, values = (part.contiguous() for part in kv.chunk(2, dim=-1))
    return keys, values


def _by_request(step: Step, query: Tensor) -> Tensor:
    """`[R, rows, Hq, d]`"""
    return query.view(-1, step.rows, *query.shape[1:])


def _vllm_offers() -> list[Offer]:
    package = importlib.import_module("vllm.vllm_flash_attn")
    found = []
    if package.is_fa_version_supported(3):
        # 0: FlashAttention chooses the number of splits; 32: vLLM's setting for captured graphs
        for splits in (0, 32):
            name = f"vLLM FA3, paged, {f'<= {splits} splits' if splits else 'free splits'}"
            found.append(Offer(name, partial(_vllm, package, 3, splits), fa3=True))
    if package.is_fa_version_supported(2):
        found.append(Offer("vLLM FA2, paged", partial(_vllm, package, 2, 0)))
    if not found:
        raise RuntimeError("neither FlashAttention 3 nor 2 supports this device")
    return found


def _vllm(
    package: Any, version: int, splits: int, step: Step, query: Tensor, kv_cache: Tensor
) -> Callable[[], Tensor]:
    keys, values = _paged(query, kv_cache)
    schedule = None
    if version == 3:
        # once per step in vLLM, so not part of a layer's time
        schedule = package.get_scheduler_metadata(
            **_schedule(step, query, kv_cache), cu_seqlens_q=step.starts, num_splits=splits
        )
    # from float8 it makes bf16
    out = torch.empty_like(query, dtype=torch.bfloat16 if query.dtype.itemsize == 1 else None)
    return lambda: package.flash_attn_varlen_func(
        q=query, k=keys, v=values, out=out, cu_seqlens_q=step.starts, max_seqlen_q=step.rows,
        seqused_k=step.lengths, max_seqlen_k=step.length, softmax_scale=query.shape[2] ** -0.5,
        causal=True, block_table=step.table, scheduler_metadata=schedule, num_splits=splits,
        fa_version=version,
    )  # fmt: skip


def _schedule(step: Step, query: Tensor, kv_cache: Tensor) -> dict[str, Any]:
    return {
        "batch_size": len(step.lengths), "max_seqlen_q": step.rows, "max_seqlen_k": step.length,
        "num_heads_q": query.shape[1], "num_heads_kv": kv_cache.shape[1],
        "headdim": query.shape[2], "cache_seqlens": step.lengths, "qkv_dtype": query.dtype,
        "page_size": kv_cache.shape[2], "causal": True,
    }  # fmt: skip


def _fa3_offers() -> list[Offer]:
    try:
        package = importlib.import_module("flash_attn_interface")
    except ImportError:
        package = importlib.import_module("flash_attn_3.flash_attn_interface")
    found = [Offer("FA3 package, paged", partial(_fa3, package, False), fa3=True)]
    if hasattr(package, "get_scheduler_metadata"):
        ahead = Offer("FA3 package, paged, scheduled ahead", partial(_fa3, package, True), True)
        found.append(ahead)
    return found


def _fa3(
    package: Any, ahead: bool, step: Step, query: Tensor, kv_cache: Tensor
) -> Callable[[], Tensor]:
    keys, values = _paged(query, kv_cache)
    options: dict[str, Any] = {}
    if ahead:
        schedule = package.get_scheduler_metadata(**_schedule(step, query, kv_cache))
        options["scheduler_metadata"] = schedule

    def attend() -> Tensor:
        return _first(
            package.flash_attn_with_kvcache(
                _by_request(step, query), keys, values, cache_seqlens=step.lengths,
                page_table=step.table, causal=True, **options,
            )
        )  # fmt: skip

    return attend


def _first(result: Any) -> Tensor:
    """Drop the softmax's sums, which some versions also return."""
    return result[0] if isinstance(result, tuple) else result


def _fa2_offers() -> list[Offer]:
    package = importlib.import_module("flash_attn")

    def prepare(step: Step, query: Tensor, kv_cache: Tensor) -> Callable[[], Tensor]:
        keys, values = _unpaged(step, kv_cache)  # its pages are multiples of 256
        attend = package.flash_attn_with_kvcache  # splits long contexts, unlike its varlen form
        return lambda: _first(
            attend(_by_request(step, query), keys, values, cache_seqlens=step.lengths, causal=True)
        )

    assert package.flash_attn_with_kvcache
    return [Offer("flash_attn 2, unpaged", prepare)]


def _varlen_offers() -> list[Offer]:
    attend = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    takes = inspect.signature(attend).parameters.keys()
    found = [Offer("torch varlen, unpaged", partial(_varlen, attend, False))]
    if {"block_table", "seqused_k"} <= takes:
        found.append(Offer("torch varlen, pages of 256", partial(_varlen, attend, True)))
    return found


def _varlen(
    attend: Callable[..., Any], paged: bool, step: Step, query: Tensor, kv_cache: Tensor
) -> Callable[[], Tensor]:
    keys, values = _unpaged(step, kv_cache)
    takes = inspect.signature(attend).parameters.keys()  # differs between versions of PyTorch
    # causal with the last rows aligned; older versions have a flag for it
    causal = {"window_size": (-1, 0)} if "window_size" in takes else {"is_causal": True}
    options: dict[str, Any] = dict(causal)
    if "enable_gqa" in takes:
        options["enable_gqa"] = True
    key_starts: Tensor | None = torch.arange(
        len(step.starts), device=query.device, dtype=torch.int32
    ) * step.length  # fmt: skip
    if paged:
        page, blocks = 256, -(-step.length // 256)
        pad = (0, 0, 0, 0, 0, blocks * page - step.length)
        keys, values = (F.pad(x, pad).view(-1, page, *x.shape[2:]) for x in (keys, values))
        table = torch.arange(len(keys), device=query.device, dtype=torch.int32)
        options |= {"block_table": table.view(-1, blocks), "seqused_k": step.lengths}
        key_starts = None
    else:
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
    return lambda: _first(
        attend(query, keys, values, step.starts, key_starts, step.rows, step.length, **options)
    )


def _sdpa_offers() -> list[Offer]:
    return [
        Offer("torch SDPA flash, unpaged", partial(_sdpa, SDPBackend.FLASH_ATTENTION)),
        Offer("torch SDPA cuDNN, unpaged", partial(_sdpa, SDPBackend.CUDNN_ATTENTION)),
    ]


def _sdpa(backend: SDPBackend, step: Step, query: Tensor, kv_cache: Tensor) -> Callable[[], Tensor]:
    keys, values = (x.transpose(1, 2) for x in _unpaged(step, kv_cache))
    rows = _by_request(step, query).transpose(1, 2)
    mask: Any = causal_lower_right(step.rows, step.length)
    if backend != SDPBackend.FLASH_ATTENTION:  # the only backend with this alignment
        seen = torch.ones(step.rows, step.length, dtype=torch.bool, device=query.device)
        hidden = ~seen.tril(step.length - step.rows)
        mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device)
        mask.masked_fill_(hidden, float("-inf"))

    def attend() -> Tensor:
        with sdpa_kernel(backend):  # this backend or an error, never a fallback
            out = F.scaled_dot_product_attention(
                rows, keys, values, attn_mask=mask, enable_gqa=True
            )
        return out.transpose(1, 2)

    return attend


_PROBES: dict[str, Callable[[], list[Offer]]] = {
    "vllm.vllm_flash_attn": _vllm_offers,
    "flash_attn_interface (FA3)": _fa3_offers,
    "flash_attn": _fa2_offers,
    "torch.nn.attention.varlen": _varlen_offers,
    "torch SDPA": _sdpa_offers,
}
