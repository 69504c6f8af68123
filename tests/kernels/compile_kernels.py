# SPDX-License-Identifier: Apache-2.0
"""Compile every kernel to a cubin, on any machine: launch each op, but build instead of run.

The interpreter accepts code that Triton's compiler refuses (a variable whose type changes in a
loop, a missing conversion), so the interpreted tests alone would not show that a GPU can run the
kernels. `python compile_kernels.py 90` prints one line per kernel: name, registers, stack bytes
(spills), bytes of shared memory. Needs Triton's NVIDIA back end (part of its wheel), no GPU. A
script of its own, because TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from cross_compile import compile_instead, usage

import bastion_kernels as ops
from bastion_kernels.gated_delta.blocks import StateBlocks
from bastion_kernels.gated_delta.states import LayerStates


def build(capability: int) -> None:
    """Make every launch compile for sm_`capability`, and print each kernel once."""
    built = set()

    def add(name: str, kernel: Any) -> None:
        if kernel.hash not in built:
            built.add(kernel.hash)
            print(name, *usage(kernel), kernel.metadata.shared)

    compile_instead(capability, add)


def launch_all(reqs: int, limit: int, width: int, dtype: torch.dtype) -> None:
    """One launch of every kernel of the tree ops, for real sizes."""
    slots_total, depth = reqs + 1, 15
    slots = torch.zeros(reqs, dtype=torch.int64)
    ends = torch.zeros(reqs + 1, dtype=torch.int32)
    tokens = torch.zeros(reqs * depth, width, dtype=torch.int32)
    logprobs = torch.zeros(reqs * depth, width)
    logits = torch.zeros(reqs * depth, 151_936, dtype=dtype)
    ops.topk_logprobs.triton(logits, width, tokens, logprobs)

    out_tokens = torch.zeros(reqs, limit, dtype=torch.int64)
    parents, depths = (torch.zeros(slots_total, limit, dtype=torch.int32) for _ in range(2))
    log_rho, counts = torch.zeros(slots_total, limit), torch.zeros(slots_total, dtype=torch.int32)
    shape = (reqs, depth, width)
    trees = (out_tokens, parents, depths, log_rho, counts)
    candidates, scores = tokens.view(shape), torch.zeros(*shape, width)
    no_state = logprobs.view(shape)[:, :, None]
    ops.expand_best_first.triton(candidates, no_state, width, slots, *trees)
    ops.expand_best_first.triton(candidates, scores, width, slots, *trees)
    for lattice in (no_state, scores):
        copies(candidates, lattice, width, slots, trees)
    copies(candidates[:, :0], no_state[:, :0], width, slots, trees)
    ops.take_best.triton(log_rho, slots, counts, counts, 100, ends, ends, ends)
    bits = torch.zeros(slots_total, limit + 1, limit // 32 + 1, dtype=torch.int32)
    ops.ancestor_bits.triton(parents, slots, bits)
    rows = torch.zeros(reqs * (limit + 1), dtype=torch.int64)
    ops.tree_positions.triton(rows, depths, slots, ends, counts, rows)
    path = torch.zeros(reqs, depth + 1, dtype=torch.int32)
    walk = (rows, rows.int(), parents, slots, ends, path, path.long(), counts, counts)
    ops.accept_path.triton(*walk)
    ops.accept_path.triton(*walk, parents, path)
    history(rows, slots_total, parents)
    ops.bind_slots.triton(slots, slots)
    ops.bind_slots.triton(slots, slots, counts, ends)
    ops.bind_slots.triton(slots, slots, counts)
    table, longs = torch.zeros(reqs, 64, dtype=torch.int32), torch.zeros(reqs * 16).long()
    ops.draft_inputs.triton(
        slots, ends, path, rows, slots, [table], [16], longs, longs, [longs], slots, longs.int(),
        longs, [longs], longs.bool(), ends, ends, 16, 7, 4096,
    )  # fmt: skip
    few = counts[:reqs]
    context = (ends, few, ends, ends, path, rows, few, few, rows, rows, few, 16)
    for caches in ((), [rows], [rows, rows]):
        ops.context_rows.triton(*context, caches, caches)


def copies(
    candidates: torch.Tensor, logprobs: torch.Tensor, top_k: int, slots: torch.Tensor,
    trees: tuple[torch.Tensor, ...],
) -> None:  # fmt: skip
    """Lookup in histories of up to 128k tokens, and trees with copies."""
    reqs, _, width = candidates.shape
    _, parents, _, _, lengths = trees
    history = torch.zeros(len(lengths), 131_072, dtype=torch.int32)
    last = torch.zeros(len(lengths), 3, dtype=torch.int32)
    counts, found = torch.zeros(2, 66, dtype=torch.int32), lengths.long()
    table, clock, drafts = ops.ngram_table(1 << 20, history.device), found[:1], history[:, :31]
    ring = torch.zeros(4096, dtype=torch.int32)
    kept = ring, ring.long()
    ops.find_ngram.triton(
        history, lengths, slots, last, counts, found, *kept, table, clock, found, drafts
    )
    for one in torch.zeros(2, dtype=torch.int64).split(1):  # slices of any alignment
        ops.add_prompt.triton(history, one, found, table, 0, 300)
        ops.keep_replies.triton(history, lengths, lengths, found, one, *kept, clock, table, clock)
    tokens = torch.zeros(reqs, 31, dtype=torch.int32)
    ngram = tokens, tokens, torch.zeros(reqs, 31, width + 1)
    arrived = torch.zeros(1, dtype=torch.int32)
    ops.mix_ngram.triton(
        drafts, lengths, slots, found, last, counts, ops.ngram_priors(), arrived, candidates,
        logprobs, *ngram, torch.zeros(len(lengths)),
    )  # fmt: skip
    ops.expand_best_first.triton(candidates, logprobs, top_k, slots, *trees, *ngram, parents)


def launch_recurrent(dtype: torch.dtype) -> None:
    """One launch of the kernels for layers with a state, in Qwen3.5's sizes."""
    rows, heads, dim, channels = 65, (32, 16), 128, 8192
    ints, slots = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    query = torch.zeros(rows, heads[1], dim, dtype=dtype)
    value = torch.zeros(rows, heads[0], dim, dtype=dtype)
    gate, updates = torch.zeros(rows, heads[0]), torch.zeros(rows, heads[0], dim)
    decays, states = gate.double(), torch.zeros(4, heads[0], dim, dim, dtype=dtype).mT
    parents = torch.zeros(1, rows - 1, dtype=torch.int32)
    bits, path = torch.zeros(1, rows, 3, dtype=torch.int32), torch.zeros(1, 16, dtype=torch.int32)
    one = ints[:1]
    ops.gated_delta_tree.triton(
        query, query, value, gate, gate, states, one, ints, one, slots, bits, 1.0, value, updates,
        decays,
    )  # fmt: skip
    kept, layers = (x[None] for x in (query, updates, decays)), LayerStates([states], [0])
    commits = (one[None], one[None, None].repeat(2, 1, 1), ints, ints, path, one.repeat(2, 1))
    ops.gated_delta_commit.triton(*kept, layers, *commits)
    x, weight = torch.zeros(rows, channels, dtype=dtype), torch.zeros(channels, 4, dtype=dtype)
    inputs = torch.zeros(4, 3, channels, dtype=dtype).mT
    ops.short_conv_tree.triton(x, weight, inputs, one, ints, one, slots, parents, x)
    layers = LayerStates([inputs], [0])
    ops.short_conv_commit.triton(x[None], layers, *commits)
    blocks, requests = StateBlocks([ints[None]] * 3, 64), torch.zeros(1025, dtype=torch.int32)
    some, three = requests[1:].bool(), requests[1:].repeat(3, 1)
    for decodes in (None, some):
        ops.find_states.triton(
            requests, requests[1:], decodes, blocks, 1, requests, requests[1:], three
        )
    ops.find_commits.triton(one, path, blocks, three[:, :1].repeat(2, 1, 1), one.repeat(2, 1))


def history(rows: torch.Tensor, slots_total: int, parents: torch.Tensor) -> None:
    """What processors of logits make of ancestors."""
    above, depths = torch.zeros(len(rows), 15, dtype=torch.int64), torch.zeros(len(rows)).int()
    ops.ancestor_tokens.triton(rows, parents, rows.int(), rows, above, depths)
    logits, per_slot = torch.zeros(len(rows), 4096), torch.zeros(slots_total)
    words = torch.zeros(slots_total, 40, dtype=torch.int32)
    ops.penalise_ancestors.triton(
        logits, torch.zeros(len(rows), 15), above, rows, per_slot, per_slot, per_slot,
        torch.zeros(slots_total, 4096, dtype=torch.int32),
    )  # fmt: skip
    few = per_slot.int()
    ops.mask_bad_words.triton(logits, above, depths, rows, words, words, few, words, few, few, 3)


if __name__ == "__main__":
    build(int(sys.argv[1]))
    launch_all(reqs=1, limit=64, width=8, dtype=torch.bfloat16)
    launch_all(reqs=3, limit=512, width=32, dtype=torch.float32)
    launch_recurrent(torch.bfloat16)
    launch_recurrent(torch.float32)
