# SPDX-License-Identifier: Apache-2.0
"""What an engine launches besides the ops of `cases`, and tree attention by its heads.

The plan of tree attention, vLLM's kernel that prepares the drafter's inputs (once a step each),
gated delta trees (Qwen3-Next's sizes), vLLM's top-p filter over the rows of trees, and lookup's
search of token ids, which vLLM keeps in the host's memory.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from bastion_kernels import find_copy
from bastion_kernels.attention.workspace import TreeAttentionWorkspace
from bastion_kernels.draft.find_copy import LONGEST
from bastion_kernels.gated_delta.recurrence import gated_delta_tree
from benchmarks.gpu.attention_case import attention_case, random_trees
from benchmarks.gpu.cases import ATTENTION_RATIO, same
from benchmarks.gpu.harness import FA3, Bar, Case, Entry
from benchmarks.gpu.shapes import POISON, QWEN3_8B, TINY, Model
from tests import references

_BLOCK = 16  # rows of a block draft, and of a tree as large
_CONTEXT = 500
# Heads, key heads and dimension of attention layers as published: gpt-oss, Qwen3-8B, Qwen3.5.
_HEADS = {64: (64, 8), 128: (32, 8), 256: (16, 2)}


def plan_case(model: Model, reqs: int, most: int, device: str) -> Case:
    """Divide the attention of blocks of 16 rows among programs, where `most` requests may be."""
    starts = torch.arange(reqs + 1, dtype=torch.int32, device=device) * _BLOCK
    lengths = torch.full((reqs,), _CONTEXT + _BLOCK, dtype=torch.int32, device=device)
    workspace = TreeAttentionWorkspace(
        *(model.heads, model.kv_heads, model.head_dim, model.dtype), *(most * _BLOCK, most, device)
    )
    rows = reqs * _BLOCK

    def check() -> None:
        workspace.bundles.fill_(POISON)
        workspace.plan(starts, lengths, rows)
        blocks = -(-_BLOCK // workspace.block_q)
        count = reqs * -(-blocks // workspace.width)
        found = workspace.bundles[:count].cpu()
        ids = torch.arange(reqs, dtype=torch.int32).repeat_interleave(count // reqs)
        assert torch.equal(found[:, 0].sort().values, ids), "not every request has its bundles"
        most = -(-(_CONTEXT + _BLOCK) // workspace.tiles.block_n)
        # A bundle's tiles may be rounded up to whole runs.
        chunk, tiles = int(workspace.header[0]), int(found[:, 3].max())
        whole = -(-most // chunk) * chunk
        assert tiles in (most, whole), "the last rows do not see the whole context"

    return Case(check, [partial(workspace.plan, starts, lengths, rows)] * model.repeats)


def inputs_case(model: Model, reqs: int, most: int, device: str) -> Case:
    """vLLM's `prepare_dflash_inputs` in an engine of up to `most` requests."""
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import prepare_dflash_inputs

    def full(*shape: int, value: float = POISON, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    rows, page = reqs * _BLOCK, model.page
    pages = -(-(_CONTEXT + 2 * _BLOCK) // page)
    first = torch.arange(_BLOCK, device=device) + _CONTEXT
    buffers = SimpleNamespace(
        input_ids=full(most * _BLOCK),
        positions=full(most * _BLOCK, dtype=torch.int64),
        query_start_loc=full(most + 1),
        seq_lens=full(most),
    )
    batch = SimpleNamespace(
        num_reqs=reqs,
        num_scheduled_tokens=torch.full((reqs,), _BLOCK).numpy(),
        positions=first.repeat(reqs),
        query_start_loc=torch.arange(reqs + 1, dtype=torch.int32, device=device) * _BLOCK,
        idx_mapping=torch.arange(reqs, dtype=torch.int32, device=device),
    )
    table = torch.arange(1, most * pages + 1, dtype=torch.int32, device=device).view(most, pages)
    steps = most * (_BLOCK - 1)
    run = partial(
        prepare_dflash_inputs,
        input_buffers=buffers,
        query_slot_mapping=full(most * _BLOCK, dtype=torch.int64),
        context_positions=full(rows, dtype=torch.int64),
        context_slot_mapping=full(rows, dtype=torch.int64),
        sample_indices=full(steps, dtype=torch.int64),
        sample_pos=full(steps, dtype=torch.int64),
        sample_idx_mapping=full(steps),
        temperature=full(most, dtype=torch.float32),
        seeds=full(most, dtype=torch.int64),
        input_batch=batch,
        num_sampled=full(reqs, value=1),
        num_rejected=full(reqs, value=0),
        last_sampled=full(most, 1, value=7, dtype=torch.int64),
        next_prefill_tokens=full(most, value=0),
        input_temperature=full(most, value=0, dtype=torch.float32),
        input_seeds=full(most, value=0, dtype=torch.int64),
        block_table=table,
        block_size=page,
        cp_rank=0,
        cp_size=1,
        cp_interleave=1,
        parallel_drafting_token_id=9,
        num_query_per_req=_BLOCK,
        num_speculative_steps=_BLOCK - 1,
        max_num_reqs=most,
        max_num_tokens=most * _BLOCK,
        max_model_len=40960,
    )

    def check() -> None:
        run()
        want = (first + _BLOCK).repeat(reqs)
        same("positions of the drafted block", buffers.positions[:rows], want)
        ids = buffers.input_ids[:rows].view(reqs, _BLOCK)
        assert bool((ids[:, 0] == 7).all() and (ids[:, 1:] == 9).all()), "its tokens"
        assert bool((buffers.seq_lens[:reqs] == _CONTEXT + 2 * _BLOCK).all()), "its lengths"

    return Case(check, [run] * model.repeats)


def gated_delta_case(reqs: int, nodes: int, small: bool, device: str) -> Case:
    """A layer's recurrence over trees, against the reference."""
    heads, key_heads, dim = (2, 1, 16) if small else (32, 16, 128)
    dtype = torch.float32 if small else torch.bfloat16
    rows, g = reqs * (nodes + 1), torch.Generator().manual_seed(nodes)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g)

    unit = partial(torch.nn.functional.normalize, dim=-1)
    parents, _ = random_trees(reqs, nodes, g)
    bits = torch.zeros(reqs, nodes + 1, (nodes + 32) // 32, dtype=torch.int32)
    references.ancestor_bits(parents.int(), torch.arange(reqs), bits)
    given = (
        unit(normal(rows, key_heads, dim)).to(dtype),
        unit(normal(rows, key_heads, dim)).to(dtype),
        normal(rows, heads, dim).to(dtype),
        -torch.rand(rows, heads, generator=g),
        torch.rand(rows, heads, generator=g),
        normal(reqs, heads, dim, dim),
        torch.arange(reqs, dtype=torch.int32),
        torch.arange(reqs + 1, dtype=torch.int32) * (nodes + 1),
        torch.full((reqs,), nodes + 1, dtype=torch.int32),
        torch.arange(reqs),
        bits,
    )
    inputs = tuple(x.to(device) for x in given)

    def outs(where: str) -> tuple[torch.Tensor, ...]:
        shape = (rows, heads, dim)
        return (
            torch.full(shape, POISON, dtype=dtype, device=where),
            torch.full(shape, POISON, dtype=torch.float32, device=where),
            torch.full((rows, heads), POISON, dtype=torch.float64, device=where),
        )

    made = outs(device)
    run = partial(gated_delta_tree.triton, *inputs, dim**-0.5, *made)

    def check() -> None:
        run()
        want = outs("cpu")
        references.gated_delta_tree(*given, dim**-0.5, *want)
        for got, truth in zip(made[:2], want[:2], strict=True):
            got, truth = got.cpu().double(), truth.double()
            error = float((got - truth).norm() / truth.norm())
            assert error < (1e-4 if small else 1e-2), f"off by {error:.3g} of its norm"

    return Case(check, [run] * (1 if small else 5))


def top_p_case(rows: int, vocabulary: int, device: str) -> Case:
    """vLLM's top-p filter, with the copy of the logits that each call needs."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_triton

    g = torch.Generator(device).manual_seed(rows)
    logits = 3 * torch.randn(rows, vocabulary, generator=g, device=device)
    mass = torch.full((rows,), 0.9, device=device)
    buffer = torch.empty_like(logits)

    def run() -> torch.Tensor:
        return apply_top_k_top_p_triton(buffer.copy_(logits), None, mass)

    def check() -> None:
        kept = run() > float("-inf")
        likely = logits.softmax(-1)
        share = (likely * kept).sum(-1)
        # The least likely token that is kept was needed, and nothing above it is missing.
        least = likely.masked_fill(~kept, 2).amin(-1)
        # vLLM's search for the threshold stops early: on an H100 it once kept 0.898.
        assert bool((share > 0.9 - 1e-2).all()), f"only {float(share.min()):.4f} kept"
        assert bool((share - least < 0.9 + 1e-3).all()), "more kept than needed"
        assert bool((likely.masked_fill(kept, 0).amax(-1) <= least).all()), "a likelier one is gone"

    return Case(check, [run] * 5, bytes_moved=2 * logits.nbytes)


def find_copy_case(reqs: int, length: int, most: int, on_host: bool, device: str) -> Case:
    """The copies of requests of `length` tokens, in rows for `most`."""
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
    found = torch.zeros(reqs, dtype=torch.int64, device=device)
    slots = torch.arange(reqs, device=device)
    run = partial(find_copy.triton, history, lengths, slots, last, counts, found)

    def check() -> None:
        run()
        want = torch.zeros(reqs, dtype=torch.int64)
        rest = (slots.cpu(), last.cpu(), counts.cpu(), want)
        references.find_copy(buffer.cpu[:, :length], lengths.cpu(), *rest)
        assert int(want.min()) >> 32 >= 8, "no request repeats itself"
        same("find_copy's matches", found, want)

    return Case(check, [run] * 5)


def engine_cases(small: bool, device: str = "cuda") -> list[Entry]:
    """The cases of this file, and tree attention by size of heads and with an fp8 cache."""
    model = TINY if small else QWEN3_8B
    found = []

    def add(op: str, name: str, case: Any, *arguments: Any, bar: Bar | None = None) -> None:
        found.append(Entry(op, name, partial(case, *arguments), bar))

    context = model.contexts[len(model.contexts) // 2]
    for dim, (heads, kv_heads) in ({16: (4, 2)} if small else _HEADS).items():
        shape = replace(model, head_dim=dim, heads=heads, kv_heads=kv_heads)
        for cache in [None, torch.float8_e4m3fn] if small or dim == 128 else [None]:
            for reqs in (1, 8):
                name = f"attention {heads}/{kv_heads} heads of {dim}{', fp8' if cache else ''}"
                case = partial(attention_case, cache=cache)
                arguments = shape, reqs, model.nodes[0], context, device
                bar = Bar(FA3, ATTENTION_RATIO)
                add("attention", f"{name}, R={reqs}", case, *arguments, bar=bar)
    counts = (2, 4) if small else (16, 256, 1024)
    for reqs in counts:
        arguments = model, reqs, counts[-1], device
        add("plan", f"plan, {reqs} requests", plan_case, *arguments)
        add("inputs", f"vLLM's input kernel, {reqs} requests", inputs_case, *arguments)
    for nodes in (7, 15) if small else (63, 255):
        for reqs in (1,) if small else (1, 16):
            name = f"gated delta trees of {nodes} nodes, R={reqs}"
            add("gated_delta", name, gated_delta_case, reqs, nodes, small, device)
    for reqs in (2,) if small else (1, 16, 64):
        for length in (40,) if small else (1024, 8192):
            for on_host in (False, True):
                name = f"lookup in {length} tokens, R={reqs}, {'host' if on_host else 'device'}"
                most = 64 if small else 40960
                add("find_copy", name, find_copy_case, reqs, length, most, on_host, device)
    for rows in (3, 5) if small else (64, 256, 512):
        add("top_p", f"top-p, {rows} rows", top_p_case, rows, model.vocab, device)
    return found
