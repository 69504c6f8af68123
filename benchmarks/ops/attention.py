# SPDX-License-Identifier: Apache-2.0
"""Tree attention: a check against its reference, and the causal attention that judges it.

In a model each layer reads its own cache, after a layer's weights have passed through the L2 cache.
Here the calls of a graph cycle through caches that together are many times the L2 cache, so that
each call reads its keys and values from memory. The queries are warm, as in a model. The rival,
FlashAttention 3 as vLLM calls it, computes causal attention over the same caches in the same order.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from bastion_kernels.attention.tree_attention import AttentionLayer, AttentionStep
from bastion_kernels.attention.workspace import TreeAttentionWorkspace
from benchmarks.ops.checks import POISON
from benchmarks.ops.sizes import Model
from benchmarks.ops.timing import Call, Case, Rival
from tests.references import ancestor_bits, tree_attention

_MOST_CACHES = 128
# 0: FlashAttention chooses the number of splits; 32: vLLM's setting for captured graphs
_SPLITS = {"FlashAttention 3, free splits": 0, "FlashAttention 3, <= 32 splits": 32}


def flash_attention_3(
    splits: int, step: AttentionStep, query: Tensor, kv_cache: Tensor
) -> Callable[[], Tensor]:
    """vLLM's causal call over query `[T, Hq, d]` and kv_cache `[blocks, Hkv, page, 2d]`.

    All requests of the step have as many rows.

    Raises:
        ImportError: no vLLM for CUDA is installed.
        RuntimeError: the device is not supported.
    """
    package = importlib.import_module("vllm.vllm_flash_attn")
    if not package.is_fa_version_supported(3):
        raise RuntimeError("FlashAttention 3 does not support this device")
    # [blocks, page, Hkv, d] without a copy
    keys, values = kv_cache.transpose(1, 2).split(query.shape[2], dim=-1)
    reqs, length = len(step.seq_lens), int(step.seq_lens.max())
    rows = len(query) // reqs
    # once per step in vLLM, so not part of a layer's time
    schedule = package.get_scheduler_metadata(
        batch_size=reqs, max_seqlen_q=rows, max_seqlen_k=length,
        num_heads_q=query.shape[1], num_heads_kv=kv_cache.shape[1], headdim=query.shape[2],
        cache_seqlens=step.seq_lens, qkv_dtype=query.dtype, page_size=kv_cache.shape[2],
        causal=True, cu_seqlens_q=step.query_start_loc, num_splits=splits,
    )  # fmt: skip
    out = torch.empty_like(query)
    return lambda: package.flash_attn_varlen_func(
        q=query, k=keys, v=values, out=out, cu_seqlens_q=step.query_start_loc, max_seqlen_q=rows,
        seqused_k=step.seq_lens, max_seqlen_k=length, softmax_scale=query.shape[2] ** -0.5,
        causal=True, block_table=step.block_table, scheduler_metadata=schedule, num_splits=splits,
        fa_version=3,
    )  # fmt: skip


def check_attention(
    name: str, out: Tensor, kv_cache: Tensor, step: AttentionStep, query: Tensor
) -> None:
    """Check `out` [T, Hq, d] against the reference, up to two roundings of its largest value."""
    want = torch.full_like(out, POISON)
    tree_attention(AttentionLayer(kv_cache, query.shape[2] ** -0.5), step, query, want)
    error = (out.float() - want.float()).abs().max().item()
    allowed = 2 * torch.finfo(out.dtype).eps * want.abs().max().item()
    if not error <= allowed:  # NaN fails
        raise AssertionError(f"{name}: error {error:.3g}, allowed {allowed:.3g}")


def in_turn(calls: Sequence[Callable[[], object]], least: int) -> list[Call]:
    """All of them, repeated in order until there are `least`."""
    return [calls[i % len(calls)] for i in range(max(least, len(calls)))]


def random_trees(reqs: int, nodes: int, generator: torch.Generator) -> Tensor:
    """[R, N+1, W] int32 bits of trees whose nodes' parents are drawn from the nodes before them."""
    drawn = torch.rand(reqs, nodes, generator=generator) * torch.arange(1, nodes + 1)
    bits = torch.zeros(reqs, nodes + 1, (nodes + 32) // 32, dtype=torch.int32)
    ancestor_bits(drawn.int(), torch.arange(reqs), bits)
    return bits


def rival(
    splits: int, name: str, step: AttentionStep, query: Tensor, caches: list[Tensor]
) -> Rival:
    """Causal attention on this batch; building it makes its schedules."""
    causal = replace(step, slots=torch.full_like(step.slots, -1))

    def build() -> tuple[Sequence[Call], Call]:
        calls = [flash_attention_3(splits, causal, query, kv_cache) for kv_cache in caches]

        def check() -> None:
            check_attention(name, calls[0](), caches[0], causal, query)

        return in_turn(calls, 5), check

    return Rival(name, build)


def attention_case(model: Model, reqs: int, nodes: int, context: int, device: str) -> Case:
    """Trees of `nodes` nodes over `context` cached rows."""
    rows, dim = nodes + 1, model.head_dim
    length = context + rows
    pages = -(-length // model.page)
    bytes_read = model.dtype.itemsize * reqs * length * model.kv_heads * 2 * dim
    count = min(_MOST_CACHES, max(2, -(-model.cold_bytes // bytes_read)))
    g = torch.Generator().manual_seed(context + reqs)
    table = torch.randperm(reqs * pages, generator=g).view(reqs, pages).int().to(device)
    shape = (reqs * pages, model.page, model.kv_heads, 2 * dim)
    caches = [
        torch.randn(shape, device=device, dtype=model.dtype).transpose(1, 2) for _ in range(count)
    ]
    query = torch.randn(reqs * rows, model.heads, dim, device=device, dtype=model.dtype)
    out = torch.full(query.shape, POISON, device=device, dtype=model.dtype)
    starts = torch.arange(reqs + 1, dtype=torch.int32, device=device) * rows
    lengths = torch.full((reqs,), length, dtype=torch.int32, device=device)
    workspaces = None
    if device != "cpu":
        sizes = model.heads, model.kv_heads, dim, model.dtype, reqs * rows, reqs, device
        workspaces = {0: TreeAttentionWorkspace(*sizes)}
        workspaces[0].plan(starts, lengths)  # once per step, so not part of a layer's time
    step = AttentionStep(
        table, starts, lengths, torch.full_like(lengths, rows), torch.arange(reqs, device=device),
        random_trees(reqs, nodes, g).to(device), workspaces=workspaces,
    )  # fmt: skip

    def attend(kv_cache: Tensor) -> None:
        AttentionLayer(kv_cache, dim**-0.5)(step, query, out)

    def check() -> None:
        for kv_cache in (caches[0], caches[-1]):
            out.fill_(POISON)
            attend(kv_cache)
            check_attention("tree_attention", out, kv_cache, step, query)

    return Case(
        check=check,
        calls=in_turn([partial(attend, kv_cache) for kv_cache in caches], model.least_calls),
        bytes_moved=bytes_read + query.nbytes + out.nbytes,
        rivals=[
            rival(splits, name, step, query, caches)
            for name, splits in _SPLITS.items()
            if device != "cpu"
        ],
    )
