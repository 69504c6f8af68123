# SPDX-License-Identifier: Apache-2.0
"""The case of tree attention: several KV caches in turn, a check in fp32, and FlashAttention 3.

In a model each layer reads its own cache, after a layer's weights have passed through the L2 cache.
Here the calls of a graph cycle through caches that together are many times the L2 cache, so that
each call reads its keys and values from memory. The queries are warm, as in a model. FlashAttention
3, as vLLM calls it, computes causal attention over the same caches in the same order.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bastion_kernels.attention.tree_attention import AttentionLayer, AttentionStep
from bastion_kernels.attention.workspace import TreeAttentionWorkspace
from benchmarks.gpu.harness import Call, Case, Rival
from benchmarks.gpu.shapes import POISON, Model
from tests import references

_MOST_CACHES = 128
# what FlashAttention 3 multiplies weights by before it rounds them to float8
_FLOAT8_FACTOR = 256.0
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
    # from float8 it makes bf16
    out = torch.empty_like(query, dtype=torch.bfloat16 if query.dtype.itemsize == 1 else None)
    return lambda: package.flash_attn_varlen_func(
        q=query, k=keys, v=values, out=out, cu_seqlens_q=step.starts, max_seqlen_q=step.rows,
        seqused_k=step.lengths, max_seqlen_k=step.length, softmax_scale=query.shape[2] ** -0.5,
        causal=True, block_table=step.table, scheduler_metadata=schedule, num_splits=splits,
        fa_version=3,
    )  # fmt: skip


def dense(query: Tensor, kv: Tensor, allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """`[rows, Hq, d]` masked attention of one request over `[L, Hkv, 2d]`, all in `dtype`.

    With a float8 the weights alone are rounded to it, because there is no other arithmetic in it.
    """
    heads, dim = query.shape[1:]
    math = torch.float32 if dtype.itemsize == 1 else dtype
    kv = kv.to(math).repeat_interleave(heads // kv.shape[1], dim=1)
    scores = torch.einsum("qhd,lhd->hql", query.to(math), kv[..., :dim]) * dim**-0.5
    scores.masked_fill_(~allowed, float("-inf"))
    if math == dtype:
        return torch.einsum("hql,lhd->qhd", scores.softmax(-1), kv[..., dim:])
    weights = (scores - scores.amax(-1, keepdim=True)).exp() * _FLOAT8_FACTOR
    rounded = weights.to(dtype).to(math) / weights.sum(-1, keepdim=True)
    return torch.einsum("hql,lhd->qhd", rounded, kv[..., dim:])


def check_attention(
    name: str, out: Tensor, step: Step, query: Tensor, kv_cache: Tensor, tails: Tensor
) -> None:
    """Check that `out` is at most twice as far from fp32 as plain PyTorch in the queries' dtype.

    Args:
        out: `[T, Hq, d]`.
        tails: `[R, rows, rows]` bool, which of the last rows each row sees.
    """
    context = step.length - step.rows
    pages, kind = -(-step.length // kv_cache.shape[2]), kv_cache.dtype
    # PyTorch picks blocks of bytes, but not of every float8
    stored = kv_cache.view(torch.uint8) if kind.itemsize == 1 else kv_cache
    for r, tail in enumerate(tails):
        kv = stored[step.table[r, :pages].long()].transpose(1, 2).flatten(0, 1)[: step.length]
        kv = kv.view(kind)
        allowed = torch.cat([tail.new_ones(step.rows, context), tail], dim=1).to(query.device)
        mine = slice(r * step.rows, (r + 1) * step.rows)
        truth = dense(query[mine], kv, allowed, torch.float32)
        usual = (dense(query[mine], kv, allowed, query.dtype) - truth).abs().max().item()
        error = (out[mine].float() - truth).abs().max().item()
        if not error <= 2 * usual + 1e-5:  # NaN fails
            raise AssertionError(f"{name}: error {error:.3g}, PyTorch's {usual:.3g}")


def in_turn(calls: Sequence[Callable[[], object]], least: int) -> list[Call]:
    """All of them, repeated in order until there are `least`."""
    return [calls[i % len(calls)] for i in range(max(least, len(calls)))]


def random_trees(
    reqs: int, nodes: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:  # [R, N] parents, [R, N+1, N+1] bool: who sees whom
    """Random trees: each node's parent is drawn uniformly from the nodes before it."""
    parents = torch.stack(
        [(torch.rand(reqs, generator=generator) * (j + 1)).long() for j in range(nodes)], dim=1
    )
    sees = torch.eye(nodes + 1, dtype=torch.bool).repeat(reqs, 1, 1)
    for j in range(nodes):
        sees[:, j + 1] |= sees[torch.arange(reqs), parents[:, j]]
    return parents, sees


def rival_of(name: str, step: Step, query: Tensor, caches: Sequence[Tensor], least: int) -> Rival:
    """FlashAttention 3 on this batch; building it makes its schedules."""

    def build() -> tuple[Sequence[Call], Call]:
        calls = [flash_attention_3(_SPLITS[name], step, query, kv_cache) for kv_cache in caches]

        def check() -> None:
            tails = torch.ones(len(step.lengths), step.rows, step.rows, dtype=torch.bool).tril()
            check_attention(name, calls[0](), step, query, caches[0], tails)

        return in_turn(calls, least), check

    return Rival(name, build)


def attention_case(
    model: Model,
    reqs: int,
    nodes: int,
    context: int,
    device: str,
    *,
    cache: torch.dtype | None = None,
) -> Case:
    """Trees of `nodes` nodes over `context` cached rows.

    cache: a float8 for caches and queries, as vLLM has them; default: the model's.
    """
    rows, dim = nodes + 1, model.head_dim
    length = context + rows
    pages = -(-length // model.page)
    kind = cache or model.dtype
    bytes_read = kind.itemsize * reqs * length * model.kv_heads * 2 * dim
    count = min(_MOST_CACHES, max(2, -(-model.cold_bytes // bytes_read)))
    g = torch.Generator().manual_seed(context + reqs)
    table = torch.randperm(reqs * pages, generator=g).view(reqs, pages).int().to(device)
    shape = (reqs * pages, model.page, model.kv_heads, 2 * dim)
    caches = [
        torch.randn(shape, device=device, dtype=model.dtype).to(kind).transpose(1, 2)
        for _ in range(count)
    ]
    query = torch.randn(reqs * rows, model.heads, dim, device=device, dtype=model.dtype).to(kind)
    out = torch.full(query.shape, POISON, device=device, dtype=model.dtype)
    starts = torch.arange(reqs + 1, dtype=torch.int32, device=device) * rows
    lengths = torch.full((reqs,), length, dtype=torch.int32, device=device)
    tails = torch.full((reqs,), rows, dtype=torch.int32, device=device)
    slots = torch.arange(reqs)
    parents, sees = random_trees(reqs, nodes, g)
    bits = torch.zeros(reqs, rows, (rows + 31) // 32, dtype=torch.int32)
    references.ancestor_bits(parents.int(), slots, bits)
    bits, slots = bits.to(device), slots.to(device)
    workspace = TreeAttentionWorkspace(
        model.heads, model.kv_heads, dim, model.dtype, reqs * rows, reqs, device
    )
    workspace.plan(starts, lengths)  # once per step, so not part of a layer's time
    step = Step(rows, length, table, starts, lengths)
    tree_step = AttentionStep(table, starts, lengths, tails, slots, bits, workspaces={0: workspace})

    def attend(kv_cache: Tensor) -> None:
        AttentionLayer(kv_cache, dim**-0.5).triton(tree_step, query, out)

    def check() -> None:
        for kv_cache in (caches[0], caches[-1]):
            out.fill_(POISON)
            attend(kv_cache)
            check_attention("tree_attention", out, step, query, kv_cache, sees)

    rivals = _SPLITS if device != "cpu" else ()
    return Case(
        check=check,
        calls=in_turn([partial(attend, kv_cache) for kv_cache in caches], model.least_calls),
        bytes_moved=bytes_read + query.nbytes + out.nbytes,
        flops=4 * reqs * rows * length * model.heads * dim,
        memory=f"cold: {count} caches of {bytes_read / 1e6:.0f} MB in turn",
        rivals=[rival_of(name, step, query, caches, model.least_calls) for name in rivals],
    )
