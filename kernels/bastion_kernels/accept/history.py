# SPDX-License-Identifier: Apache-2.0
"""What stands before a node: its ancestors' tokens, and what processors of logits make of them.

Penalties and bad words look at the tokens before a position. For a node these are the tokens that
were emitted and then those of its ancestors, itself included. `ancestor_tokens` lists the latter
for every logits row; the other two ops do for them what vLLM's processors do for emitted ones:

    penalise_ancestors   the logits of the ancestors, at most D: no other token's count changes
    mask_bad_words       a word's last token, where emitted tokens and ancestors end in the rest
"""

from __future__ import annotations

import torch
from torch import Tensor

from bastion_kernels.checks import check, version_for
from bastion_kernels.cpu.history import (
    ancestor_tokens_cpu,
    mask_bad_words_cpu,
    penalise_ancestors_cpu,
)
from bastion_kernels.triton_or_none import tl, triton

__all__ = [
    "ancestor_tokens",
    "ancestor_tokens_reference",
    "mask_bad_words",
    "mask_bad_words_reference",
    "penalise_ancestors",
    "penalise_ancestors_reference",
]

_BLOCK = 64


def ancestor_tokens_reference(
    node_ids: Tensor,
    parents: Tensor,
    slots: Tensor,
    nodes: Tensor,
    out_tokens: Tensor,
    out_depths: Tensor,
) -> None:
    """Row by row; see `ancestor_tokens`."""
    fed, width = node_ids.tolist(), out_tokens.shape[1]
    out_tokens.fill_(-1)
    for row, (slot, node) in enumerate(zip(slots.tolist(), nodes.tolist(), strict=True)):
        root, path = row - node, list[int]()
        while 0 < node <= parents.shape[1] and len(path) < width:
            path.append(fed[root + node])
            node = int(parents[slot, node - 1])
        out_tokens[row, : len(path)] = torch.tensor(path[::-1])
        out_depths[row] = len(path)


# Slices of a batch that start at any row (chunked verification): no variant by alignment.
@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=[
        "fed_ptr",
        "slots_ptr",
        "nodes_ptr",
        "tokens_ptr",
        "depths_ptr",
    ],
)
def _ancestors_kernel(
    fed_ptr,
    parents_ptr,
    slots_ptr,
    nodes_ptr,
    tokens_ptr,
    depths_ptr,
    rows,
    parents_s,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (L / BLOCK,)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < rows
    slot = tl.load(slots_ptr + row, mask=live, other=0).to(tl.int64)
    first = tl.load(nodes_ptr + row, mask=live, other=0).to(tl.int32)
    parents_row_ptr = parents_ptr + slot * parents_s - 1
    node = first
    depth = tl.zeros([BLOCK], tl.int32)
    for _ in range(D):
        inside = (node > 0) & (node <= N)
        depth += inside.to(tl.int32)
        node = tl.load(parents_row_ptr + node, mask=inside, other=0)
    tl.store(depths_ptr + row, depth, mask=live)
    root, node, left = row - first, first, depth
    for i in range(D):
        inside = (node > 0) & (node <= N)
        left -= inside.to(tl.int32)
        token = tl.load(fed_ptr + root + node, mask=inside, other=0)
        tl.store(tokens_ptr + row * D + left, token, mask=live & inside)
        tl.store(tokens_ptr + row * D + i, -1, mask=live & (i >= depth))
        node = tl.load(parents_row_ptr + node, mask=inside, other=0)


def ancestor_tokens_triton(
    node_ids: Tensor,
    parents: Tensor,
    slots: Tensor,
    nodes: Tensor,
    out_tokens: Tensor,
    out_depths: Tensor,
) -> None:
    """A thread a row; see `ancestor_tokens`."""
    rows, width = out_tokens.shape
    if rows:
        _ancestors_kernel[(triton.cdiv(rows, _BLOCK),)](
            node_ids, parents, slots, nodes, out_tokens, out_depths, rows, parents.stride(0),
            N=parents.shape[1], D=width, BLOCK=_BLOCK, num_warps=2,
        )  # fmt: skip


def ancestor_tokens(
    node_ids: Tensor,
    parents: Tensor,
    slots: Tensor,
    nodes: Tensor,
    out_tokens: Tensor,
    out_depths: Tensor,
) -> None:
    """List the tokens between the root of each logits row and itself.

    The rows of a request are consecutive, its root first.

    Args:
        node_ids: `[L]` integer, token that every logits row feeds.
        parents: `[S, N]` int32, node number of each column's parent.
        slots: `[L]` integer, request slot of each row.
        nodes: `[L]` integer, node number of each row, 0 = root.
        out_tokens: `[L, D]` int64 contiguous, written: tokens at depth 1, 2, .., the row's own
            last; -1 past it.
        out_depths: `[L]` int32, written: how many.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together.
    """
    op, integers, rows = "ancestor_tokens", (torch.int32, torch.int64), out_tokens.shape[0]
    check(op, "node_ids", node_ids, (rows,), *integers)
    check(op, "parents", parents, (None, None), torch.int32)
    check(op, "slots", slots, (rows,), *integers)
    check(op, "nodes", nodes, (rows,), *integers)
    check(op, "out_tokens", out_tokens, (rows, None), torch.int64)
    check(op, "out_depths", out_depths, (rows,), torch.int32)
    run = version_for(
        node_ids, ancestor_tokens_triton, ancestor_tokens_cpu, ancestor_tokens_reference
    )
    run(node_ids, parents, slots, nodes, out_tokens, out_depths)


def penalise_ancestors_reference(
    logits: Tensor,
    before: Tensor,
    tokens: Tensor,
    slots: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    counts: Tensor,
) -> None:
    """All rows at once; see `penalise_ancestors`."""
    slots, live, safe = slots.long()[:, None], tokens >= 0, tokens.clamp(min=0)
    here = (tokens[:, :, None] == tokens[:, None, :]).sum(-1)
    scale = repetition[slots]
    value = before * torch.where(before > 0, 1.0 / scale, scale)
    value -= frequency[slots] * (counts[slots, safe] + here)
    value -= presence[slots]
    off = (scale == 1) & (frequency[slots] == 0) & (presence[slots] == 0)
    live &= ~off
    rows = torch.arange(len(logits), device=logits.device)[:, None].expand_as(tokens)
    logits[rows[live], tokens[live]] = value[live]


@triton.jit(do_not_specialize_on_alignment=["tokens_ptr", "slots_ptr"])
def _penalise_kernel(
    logits_ptr,
    before_ptr,
    tokens_ptr,
    slots_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    counts_ptr,
    logits_s,
    counts_s,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (L,)."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    repetition = tl.load(repetition_ptr + slot)
    frequency = tl.load(frequency_ptr + slot)
    presence = tl.load(presence_ptr + slot)
    if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
        depth = tl.arange(0, BLOCK)
        token = tl.load(tokens_ptr + row * D + depth, mask=depth < D, other=-1)
        live = token >= 0
        here = tl.sum((token[:, None] == token[None, :]).to(tl.int32), 1)
        count = tl.load(counts_ptr + slot * counts_s + token, mask=live, other=0) + here
        # In the order and the types of vLLM's kernel: the same roundings.
        value = tl.load(before_ptr + row * D + depth, mask=live, other=0.0)
        value *= tl.where(value > 0, 1.0 / repetition, repetition)
        value -= frequency * count
        value -= presence * (count > 0)
        tl.store(logits_ptr + row * logits_s + token, value, mask=live)


def penalise_ancestors_triton(
    logits: Tensor,
    before: Tensor,
    tokens: Tensor,
    slots: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    counts: Tensor,
) -> None:
    """One warp a row; see `penalise_ancestors`."""
    rows, width = tokens.shape
    if rows:
        _penalise_kernel[(rows,)](
            logits, before, tokens, slots, repetition, frequency, presence, counts,
            logits.stride(0), counts.stride(0),
            D=width, BLOCK=triton.next_power_of_2(width), num_warps=1,
        )  # fmt: skip


def penalise_ancestors(
    logits: Tensor,
    before: Tensor,
    tokens: Tensor,
    slots: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    counts: Tensor,
) -> None:
    """Count the ancestors of each row as output: correct their logits, and no others.

    Everything else about penalties is vLLM's kernel's, which must have run on these rows without
    their drafts. Rows of slots without a penalty are left alone.

    Args:
        logits: `[L, V]` fp32, written at `tokens`.
        before: `[L, D]` fp32 contiguous, the logits of `tokens` before any penalty; anything where
            there is none.
        tokens: `[L, D]` int64 contiguous, see `ancestor_tokens`.
        slots: `[L]` integer, request slot of each row.
        repetition, frequency, presence: `[S]` fp32.
        counts: `[S, V]` int32, how often each token was emitted.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together.
    """
    op, (rows, width) = "penalise_ancestors", tokens.shape
    check(op, "logits", logits, (rows, None), torch.float32)
    check(op, "before", before, (rows, width), torch.float32)
    check(op, "tokens", tokens, (rows, width), torch.int64)
    check(op, "slots", slots, (rows,), torch.int32, torch.int64)
    for name, tensor in (
        ("repetition", repetition),
        ("frequency", frequency),
        ("presence", presence),
    ):
        check(op, name, tensor, (None,), torch.float32)
    check(op, "counts", counts, (None, logits.shape[1]), torch.int32)
    run = version_for(
        logits, penalise_ancestors_triton, penalise_ancestors_cpu, penalise_ancestors_reference
    )
    run(logits, before, tokens, slots, repetition, frequency, presence, counts)


def mask_bad_words_reference(
    logits: Tensor,
    tokens: Tensor,
    depths: Tensor,
    slots: Tensor,
    word_tokens: Tensor,
    word_offsets: Tensor,
    num_words: Tensor,
    emitted: Tensor,
    prompt_len: Tensor,
    total_len: Tensor,
    max_words: int,
) -> None:
    """Row by row; see `mask_bad_words`."""
    for row, slot in enumerate(slots.tolist()):
        output = emitted[slot, int(prompt_len[slot]) : int(total_len[slot])].tolist()
        output += tokens[row, : int(depths[row])].tolist()
        for word in range(min(max_words, int(num_words[slot]))):
            start, end = word_offsets[slot, word : word + 2].tolist()
            *rest, last = word_tokens[slot, start:end].tolist()
            if output[len(output) - len(rest) :] == rest and len(rest) <= len(output):
                logits[row, last] = -torch.inf


@triton.jit(do_not_specialize_on_alignment=["tokens_ptr", "depths_ptr", "slots_ptr"])
def _bad_words_kernel(
    logits_ptr,
    tokens_ptr,
    depths_ptr,
    slots_ptr,
    word_tokens_ptr,
    word_offsets_ptr,
    num_words_ptr,
    emitted_ptr,
    prompt_len_ptr,
    total_len_ptr,
    logits_s,
    word_tokens_s,
    word_offsets_s,
    emitted_s,
    D: tl.constexpr,
):
    """Grid: (L, most words of a request)."""
    row, word = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if word < tl.load(num_words_ptr + slot):
        total = tl.load(total_len_ptr + slot)
        length = total + tl.load(depths_ptr + row)
        start = tl.load(word_offsets_ptr + slot * word_offsets_s + word)
        last = tl.load(word_offsets_ptr + slot * word_offsets_s + word + 1) - 1
        word_ptr = word_tokens_ptr + slot * word_tokens_s
        place = length - (last - start)
        match = place >= tl.load(prompt_len_ptr + slot)
        while match & (start < last):
            if place < total:
                actual = tl.load(emitted_ptr + slot * emitted_s + place).to(tl.int64)
            else:
                actual = tl.load(tokens_ptr + row * D + place - total)
            match = actual == tl.load(word_ptr + start)
            start += 1
            place += 1
        if match:
            tl.store(logits_ptr + row * logits_s + tl.load(word_ptr + last), -float("inf"))


def mask_bad_words_triton(
    logits: Tensor,
    tokens: Tensor,
    depths: Tensor,
    slots: Tensor,
    word_tokens: Tensor,
    word_offsets: Tensor,
    num_words: Tensor,
    emitted: Tensor,
    prompt_len: Tensor,
    total_len: Tensor,
    max_words: int,
) -> None:
    """One warp a row and word; see `mask_bad_words`."""
    rows, width = tokens.shape
    if rows and max_words:
        _bad_words_kernel[(rows, max_words)](
            logits, tokens, depths, slots, word_tokens, word_offsets, num_words, emitted,
            prompt_len, total_len, logits.stride(0), word_tokens.stride(0),
            word_offsets.stride(0), emitted.stride(0), D=width, num_warps=1,
        )  # fmt: skip


def mask_bad_words(
    logits: Tensor,
    tokens: Tensor,
    depths: Tensor,
    slots: Tensor,
    word_tokens: Tensor,
    word_offsets: Tensor,
    num_words: Tensor,
    emitted: Tensor,
    prompt_len: Tensor,
    total_len: Tensor,
    max_words: int,
) -> None:
    """Set a bad word's last token to -inf where output and ancestors end in its other tokens.

    Args:
        logits: `[L, V]` fp32, written.
        tokens, depths: `[L, D]` int64 and `[L]` int32, see `ancestor_tokens`.
        slots: `[L]` integer, request slot of each row.
        word_tokens: `[S, X]` int32, the words of a slot strung together.
        word_offsets: `[S, Y + 1]` int32, where each begins and the last one ends.
        num_words: `[S]` int32.
        emitted: `[S, M]` int32, prompt and output.
        prompt_len, total_len: `[S]` int32, where the output begins and ends.
        max_words: most words of any slot here.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together.
    """
    op, (rows, width) = "mask_bad_words", tokens.shape
    check(op, "logits", logits, (rows, None), torch.float32)
    check(op, "tokens", tokens, (rows, width), torch.int64)
    check(op, "depths", depths, (rows,), torch.int32)
    check(op, "slots", slots, (rows,), torch.int32, torch.int64)
    for name, tensor in (
        ("word_tokens", word_tokens),
        ("word_offsets", word_offsets),
        ("emitted", emitted),
    ):
        check(op, name, tensor, (None, None), torch.int32)
    for name, tensor in (
        ("num_words", num_words),
        ("prompt_len", prompt_len),
        ("total_len", total_len),
    ):
        check(op, name, tensor, (None,), torch.int32)
    run = version_for(logits, mask_bad_words_triton, mask_bad_words_cpu, mask_bad_words_reference)
    run(
        logits, tokens, depths, slots, word_tokens, word_offsets, num_words, emitted, prompt_len,
        total_len, max_words,
    )  # fmt: skip
