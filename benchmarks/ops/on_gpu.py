# SPDX-License-Identifier: Apache-2.0
"""The cases of a GPU: the ops of a step, attention by context and by size of heads, and rarer ops.

The plan of tree attention (once a step), gated delta trees (Qwen3-Next's sizes), and the search
for n-gram drafts in token ids, which vLLM keeps in the host's memory.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from bastion_kernels import find_copy
from bastion_kernels.attention.workspace import TreeAttentionWorkspace
from bastion_kernels.draft.find_copy import LONGEST
from bastion_kernels.gated_delta.recurrence import gated_delta_tree
from benchmarks.ops.attention import attention_case, random_trees
from benchmarks.ops.checks import POISON, check_op, reference
from benchmarks.ops.sizes import QWEN3_8B, SMALL, Model
from benchmarks.ops.step import step_cases
from benchmarks.ops.timing import FA3, Bar, Case, Entry

_BLOCK = 16  # rows of a block draft, and of a tree as large
_CONTEXT = 500
# Heads, key heads and dimension of attention layers as published: gpt-oss, Qwen3-8B, Qwen3.5.
_HEADS = {64: (64, 8), 128: (32, 8), 256: (16, 2)}
_ATTENTION_RATIO = 1.15


def plan_case(model: Model, reqs: int, most: int, device: str) -> Case:
    """Divide the attention of blocks of 16 rows among programs, where `most` requests may be."""
    starts = torch.arange(reqs + 1, dtype=torch.int32, device=device) * _BLOCK
    lengths = torch.full((reqs,), _CONTEXT + _BLOCK, dtype=torch.int32, device=device)
    workspace = TreeAttentionWorkspace(
        *(model.heads, model.kv_heads, model.head_dim, model.dtype), *(most * _BLOCK, most, device)
    )

    def check() -> None:
        workspace.bundles.fill_(POISON)
        workspace.plan(starts, lengths, reqs * _BLOCK)
        blocks = math.ceil(_BLOCK / workspace.block_q)
        count = reqs * math.ceil(blocks / workspace.width)
        found = workspace.bundles[:count].cpu()
        ids = torch.arange(reqs, dtype=torch.int32).repeat_interleave(count // reqs)
        assert torch.equal(found[:, 0].sort().values, ids), "not every request has its bundles"
        tiles = math.ceil((_CONTEXT + _BLOCK) / workspace.tiles.block_n)
        # A bundle's tiles may be rounded up to whole runs.
        chunk = int(workspace.header[0])
        whole = math.ceil(tiles / chunk) * chunk
        assert int(found[:, 3].max()) in (tiles, whole), (
            "the last rows do not see all of the context"
        )

    return Case(check, [partial(workspace.plan, starts, lengths, reqs * _BLOCK)] * model.repeats)


def gated_delta_case(reqs: int, nodes: int, small: bool, device: str) -> Case:
    """A layer's recurrence over trees."""
    heads, key_heads, dim = (2, 1, 16) if small else (32, 16, 128)
    dtype = torch.float32 if small else torch.bfloat16
    rows, g = reqs * (nodes + 1), torch.Generator().manual_seed(nodes)
    normal = partial(torch.randn, generator=g)
    keys = [
        torch.nn.functional.normalize(normal(rows, key_heads, dim), dim=-1).to(dtype)
        for _ in range(2)
    ]
    given = (
        *(*keys, normal(rows, heads, dim).to(dtype)),
        *(-torch.rand(rows, heads, generator=g), torch.rand(rows, heads, generator=g)),
        *(normal(reqs, heads, dim, dim), torch.arange(reqs, dtype=torch.int32)),
        torch.arange(reqs + 1, dtype=torch.int32) * (nodes + 1),
        *(torch.full((reqs,), nodes + 1, dtype=torch.int32), torch.arange(reqs)),
        random_trees(reqs, nodes, g)[0],
    )
    types = ((rows, heads, dim), dtype), ((rows, heads, dim), torch.float32)

    def outs(where: str) -> list[torch.Tensor]:
        shapes = [*types, ((rows, heads), torch.float64)]
        return [torch.full(shape, POISON, dtype=kind, device=where) for shape, kind in shapes]

    made = outs(device)
    run = partial(gated_delta_tree, *(x.to(device) for x in given), dim**-0.5, *made)

    def check() -> None:
        run()
        want = outs("cpu")
        reference(gated_delta_tree)(*given, dim**-0.5, *want)
        for got, truth in zip(made[:2], want[:2], strict=True):
            error = float((got.cpu().double() - truth.double()).norm() / truth.double().norm())
            assert error < (1e-4 if small else 1e-2), f"off by {error:.3g} of its norm"

    return Case(check, [run] * (1 if small else 5))


def find_copy_case(reqs: int, length: int, most: int, on_host: bool, device: str) -> Case:
    """The n-gram drafts of requests of `length` tokens, in rows for `most`."""
    from vllm.v1.worker.gpu.buffer_utils import UvaBuffer

    g = torch.Generator().manual_seed(length)
    text = torch.randint(1000, (reqs, length), generator=g, dtype=torch.int32)
    for row in text:  # an end of eight tokens that occurs before
        row[length // 2 : length // 2 + 8] = row[-8:]
    buffer = UvaBuffer((reqs, most), torch.int32)
    buffer.cpu[:, :length] = text
    history = buffer.uva() if on_host else buffer.cpu.to(device)
    lengths = torch.full((reqs,), length, dtype=torch.int32, device=device)
    last = torch.zeros(reqs, 3, dtype=torch.int32, device=device)
    counts = torch.zeros(2, LONGEST + 1, dtype=torch.int32, device=device)
    found, slots = torch.zeros(reqs, dtype=torch.int64, device=device), torch.arange(reqs)
    args = history, lengths, slots.to(device), last, counts, found

    def check() -> None:
        check_op(find_copy, args, ())
        assert int(found.min()) >> 32 >= 8, "no request repeats itself"

    return Case(check, [partial(find_copy, *args)] * 5)


def gpu_cases(model: Model = QWEN3_8B, device: str = "cuda") -> list[Entry]:
    """The cases of a GPU; of `SMALL` such as the simulated GPU can compute."""
    small, found, nodes = model is SMALL, step_cases(model, device), model.nodes[0]

    def add(op: str, name: str, case: Any, *arguments: Any, bar: Bar | None = None) -> None:
        found.append(Entry(op, name, partial(case, *arguments), bar))

    for context in model.contexts:
        for reqs in (1, 8):
            name, bar = (
                f"attention R={reqs} N={nodes} context={context}",
                Bar(FA3, _ATTENTION_RATIO),
            )
            add("attention", name, attention_case, model, reqs, nodes, context, device, bar=bar)
    context = model.contexts[len(model.contexts) // 2]
    for dim, (heads, kv_heads) in ({16: (4, 2)} if small else _HEADS).items():
        shape = replace(model, head_dim=dim, heads=heads, kv_heads=kv_heads)
        name = f"attention {heads}/{kv_heads} heads of {dim}, R=8"
        add("heads", name, attention_case, shape, 8, nodes, context, device)
    for reqs in (2, 4) if small else (16, 256, 1024):
        most = 4 if small else 1024
        add("plan", f"plan, {reqs} requests", plan_case, model, reqs, most, device)
    for size in (7, 15) if small else (63, 255):
        for reqs in (1,) if small else (1, 16):
            name = f"gated delta trees of {size} nodes, R={reqs}"
            add("gated_delta", name, gated_delta_case, reqs, size, small, device)
    for reqs in (2,) if small else (1, 16, 64):
        for length in (40,) if small else (1024, 8192):
            for on_host in (False, True):
                name = f"n-grams in {length} tokens, R={reqs}, {'host' if on_host else 'device'}"
                most = 64 if small else 40960
                add("find_copy", name, find_copy_case, reqs, length, most, on_host, device)
    return found
