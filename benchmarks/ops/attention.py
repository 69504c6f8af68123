# SPDX-License-Identifier: Apache-2.0
"""Tree attention: a check in fp32, and the causal attention that judges it.

In a model each layer reads its own cache, after a layer's weights have passed through the L2 cache.
Here the calls of a graph cycle through caches that together are many times the L2 cache, so that
each call reads its keys and values from memory. The queries are warm, as in a model. The rival,
FlashAttention 3 as vLLM calls it, computes causal attention over the same caches in the same order.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bastion_kernels import ancestor_bits
from bastion_kernels.attention.tree_attention import AttentionLayer, AttentionStep
from bastion_kernels.attention.workspace import TreeAttentionWorkspace
from benchmarks.ops.checks import POISON, reference
from benchmarks.ops.sizes import Model
from benchmarks.ops.timing import Call, Case, Rival

_MOST_CACHES = 128
# 0: FlashAttention chooses the number of splits; 32: vLLM's setting for captured graphs
_SPLITS = {"FlashAttention 3, free splits": 0, "FlashAttention 3, <= 32 splits": 32}


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


def flash_attention_3(
    splits: int, step: Step, query: Tensor, kv_cache: Tensor
) -> Callable[[], Tensor]:
    """vLLM's call over query `[T, Hq, d]` and kv_cache `[blocks, Hkv, page, 2d]`.

    Raises:
        ImportError: no vLLM for CUDA is installed.
        RuntimeError: the device is not supported.
    """
    package = importlib.import_module("vllm.vllm_flash_attn")
    if not package.is_fa_version_supported(3):
        raise RuntimeError("FlashAttention 3 does not support this device")
    # [blocks, page, Hkv, d] without a copy
    keys, values = kv_cache.transpose(1, 2).split(query.shape[2], dim=-1)
    # once per step in vLLM, so not part of a layer's time
    schedule = package.get_scheduler_metadata(
        batch_size=len(step.lengths), max_seqlen_q=step.rows, max_seqlen_k=step.length,
        num_heads_q=query.shape[1], num_heads_kv=kv_cache.shape[1], headdim=query.shape[2],
        cache_seqlens=step.lengths, qkv_dtype=query.dtype, page_size=kv_cache.shape[2], causal=True,
        cu_seqlens_q=step.starts, num_splits=splits,
    )  # fmt: skip
    out = torch.empty_like(query)
    return lambda: package.flash_attn_varlen_func(
        q=query, k=keys, v=values, out=out, cu_seqlens_q=step.starts, max_seqlen_q=step.rows,
        seqused_k=step.lengths, max_seqlen_k=step.length, softmax_scale=query.shape[2] ** -0.5,
        causal=True, block_table=step.table, scheduler_metadata=schedule, num_splits=splits,
        fa_version=3,
    )  # fmt: skip


def dense(query: Tensor, kv: Tensor, allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """`[rows, Hq, d]` masked attention of one request over `[L, Hkv, 2d]`, all in `dtype`."""
    heads, dim = query.shape[1:]
    query, kv = query.to(dtype), kv.to(dtype).repeat_interleave(heads // kv.shape[1], dim=1)
    scores = torch.einsum("qhd,lhd->hql", query, kv[..., :dim]) * dim**-0.5
    weights = scores.masked_fill_(~allowed, float("-inf")).softmax(-1)
    return torch.einsum("hql,lhd->qhd", weights, kv[..., dim:])


def check_attention(
    name: str, out: Tensor, step: Step, query: Tensor, kv_cache: Tensor, tails: Tensor
) -> None:
    """Check that `out` is at most twice as far from exact as plain PyTorch in the queries' dtype.

    Args:
        out: `[T, Hq, d]`.
        tails: `[R, rows, rows]` bool, which of the last rows each row sees.
    """
    context, pages = step.length - step.rows, -(-step.length // kv_cache.shape[2])
    exact = torch.float64 if query.dtype == torch.float32 else torch.float32
    for r, tail in enumerate(tails):
        kv = kv_cache[step.table[r, :pages].long()].transpose(1, 2).flatten(0, 1)[: step.length]
        allowed = torch.cat([tail.new_ones(step.rows, context), tail], dim=1).to(query.device)
        mine = slice(r * step.rows, (r + 1) * step.rows)
        truth = dense(query[mine], kv, allowed, exact)
        usual = (dense(query[mine], kv, allowed, query.dtype) - truth).abs().max().item()
        error = (out[mine] - truth).abs().max().item()
        if not error <= 2 * usual + 1e-5:  # NaN fails
            raise AssertionError(f"{name}: error {error:.3g}, PyTorch's {usual:.3g}")


def in_turn(calls: Sequence[Callable[[], object]], least: int) -> list[Call]:
    """All of them, repeated in order until there are `least`."""
    return [calls[i % len(calls)] for i in range(max(least, len(calls)))]


def random_trees(
    reqs: int, nodes: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:  # [R, N+1, W] int32 bits and [R, N+1, N+1] bool: who sees whom
    """Random trees: each node's parent is drawn uniformly from the nodes before it."""
    parents = torch.stack(
        [(torch.rand(reqs, generator=generator) * (j + 1)).int() for j in range(nodes)], dim=1
    )
    sees = torch.eye(nodes + 1, dtype=torch.bool).repeat(reqs, 1, 1)
    for j in range(nodes):
        sees[:, j + 1] |= sees[torch.arange(reqs), parents[:, j].long()]
    bits = torch.zeros(reqs, nodes + 1, (nodes + 32) // 32, dtype=torch.int32)
    reference(ancestor_bits)(parents, torch.arange(reqs), bits)
    return bits, sees


def rival_of(name: str, attend: Any, step: Step, query: Tensor, caches: list[Tensor]) -> Rival:
    """Causal attention on this batch; building it makes its schedules."""

    def build() -> tuple[Sequence[Call], Call]:
        calls = [attend(step, query, kv_cache) for kv_cache in caches]

        def check() -> None:
            tails = torch.ones(len(step.lengths), step.rows, step.rows, dtype=torch.bool).tril()
            check_attention(name, calls[0](), step, query, caches[0], tails)

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
    tails = torch.full((reqs,), rows, dtype=torch.int32, device=device)
    bits, sees = random_trees(reqs, nodes, g)
    workspaces = None
    if device != "cpu":
        sizes = model.heads, model.kv_heads, dim, model.dtype, reqs * rows, reqs, device
        workspaces = {0: TreeAttentionWorkspace(*sizes)}
        workspaces[0].plan(starts, lengths)  # once per step, so not part of a layer's time
    step = Step(rows, length, table, starts, lengths)
    slots = torch.arange(reqs, device=device)
    trees = AttentionStep(
        table, starts, lengths, tails, slots, bits.to(device), workspaces=workspaces
    )

    def attend(kv_cache: Tensor) -> None:
        AttentionLayer(kv_cache, dim**-0.5)(trees, query, out)

    def check() -> None:
        for kv_cache in (caches[0], caches[-1]):
            out.fill_(POISON)
            attend(kv_cache)
            check_attention("tree_attention", out, step, query, kv_cache, sees)

    others = {name: partial(flash_attention_3, splits) for name, splits in _SPLITS.items()}
    return Case(
        check=check,
        calls=in_turn([partial(attend, kv_cache) for kv_cache in caches], model.least_calls),
        bytes_moved=bytes_read + query.nbytes + out.nbytes,
        memory=f"cold: {count} caches of {bytes_read / 1e6:.0f} MB in turn",
        rivals=[
            rival_of(name, other, step, query, caches)
            for name, other in others.items()
            if device != "cpu"
        ],
    )
