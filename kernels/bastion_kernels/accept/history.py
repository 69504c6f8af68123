# SPDX-License-Identifier: Apache-2.0
"""A node's history, for the logits processors that read it.

Penalties and bad words look at the tokens before a position. For a node these are the emitted
tokens, then those of its ancestors and its own. `ancestor_tokens` lists the latter for every logits
row; the other two ops do for them what vLLM's processors do for emitted tokens:

    penalise_ancestors   corrects the logits of the ancestors, at most D: no other count changes
    mask_bad_words       masks a word's last token where the history ends in the rest of the word
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bastion_kernels.op import Op, public
from bastion_kernels.triton_or_none import tl, triton

_BLOCK = 64


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


@dataclass(slots=True)
class AncestorTokens(Op):
    """List the tokens between the root of each logits row and itself.

    The rows of a request are consecutive, its root first.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together.
    """

    node_ids: Tensor
    """`[L]` integer, token that every logits row feeds."""
    parents: Tensor
    """`[S, N]` int32, node number of each column's parent."""
    slots: Tensor
    """`[L]` integer, request slot of each row."""
    nodes: Tensor
    """`[L]` integer, node number of each row, 0 = root."""
    out_tokens: Tensor
    """`[L, D]` int64 contiguous, written: tokens at depth 1, 2, .., the row's own last; -1 past
    it."""
    out_depths: Tensor
    """`[L]` int32, written: how many."""

    def check(self) -> None:
        integers, rows = (torch.int32, torch.int64), self.out_tokens.shape[0]
        self.expect("node_ids", (rows,), *integers)
        self.expect("parents", (None, None), torch.int32)
        self.expect("slots", (rows,), *integers)
        self.expect("nodes", (rows,), *integers)
        self.expect("out_tokens", (rows, None), torch.int64)
        self.expect("out_depths", (rows,), torch.int32)

    def reference(self) -> None:
        """Row by row."""
        fed, width = self.node_ids.tolist(), self.out_tokens.shape[1]
        self.out_tokens.fill_(-1)
        for row, (slot, node) in enumerate(
            zip(self.slots.tolist(), self.nodes.tolist(), strict=True)
        ):
            root, path = row - node, list[int]()
            while 0 < node <= self.parents.shape[1] and len(path) < width:
                path.append(fed[root + node])
                node = int(self.parents[slot, node - 1])
            self.out_tokens[row, : len(path)] = torch.tensor(path[::-1])
            self.out_depths[row] = len(path)

    def triton(self) -> None:
        """A thread a row."""
        rows, width = self.out_tokens.shape
        if rows:
            _ancestors_kernel[(triton.cdiv(rows, _BLOCK),)](
                self.node_ids, self.parents, self.slots, self.nodes, self.out_tokens,
                self.out_depths, rows, self.parents.stride(0), N=self.parents.shape[1], D=width,
                BLOCK=_BLOCK, num_warps=2,
            )  # fmt: skip


ancestor_tokens = public(AncestorTokens, cpu="bastion_kernels.cpu.history")


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


@dataclass(slots=True)
class PenaliseAncestors(Op):
    """Count the ancestors of each row as output: correct their logits, and no others.

    Everything else about penalties is vLLM's kernel's, which must have run on these rows without
    their drafts. Rows of slots without a penalty are left alone.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together.
    """

    logits: Tensor
    """`[L, V]` fp32, written at `tokens`."""
    before: Tensor
    """`[L, D]` fp32 contiguous, the logits of `tokens` before any penalty; anything where there is
    none."""
    tokens: Tensor
    """`[L, D]` int64 contiguous, see `ancestor_tokens`."""
    slots: Tensor
    """`[L]` integer, request slot of each row."""
    repetition: Tensor
    """`[S]` fp32."""
    frequency: Tensor
    """`[S]` fp32."""
    presence: Tensor
    """`[S]` fp32."""
    counts: Tensor
    """`[S, V]` int32, how often each token was emitted."""

    def check(self) -> None:
        (rows, width) = self.tokens.shape
        self.expect("logits", (rows, None), torch.float32)
        self.expect("before", (rows, width), torch.float32)
        self.expect("tokens", (rows, width), torch.int64)
        self.expect("slots", (rows,), torch.int32, torch.int64)
        for name in ("repetition", "frequency", "presence"):
            self.expect(name, (None,), torch.float32)
        self.expect("counts", (None, self.logits.shape[1]), torch.int32)

    def reference(self) -> None:
        """All rows at once."""
        row_slots, live, safe = (
            self.slots.long()[:, None],
            self.tokens >= 0,
            self.tokens.clamp(min=0),
        )
        here = (self.tokens[:, :, None] == self.tokens[:, None, :]).sum(-1)
        scale = self.repetition[row_slots]
        value = self.before * torch.where(self.before > 0, 1.0 / scale, scale)
        value -= self.frequency[row_slots] * (self.counts[row_slots, safe] + here)
        value -= self.presence[row_slots]
        off = (scale == 1) & (self.frequency[row_slots] == 0) & (self.presence[row_slots] == 0)
        live &= ~off
        rows = torch.arange(len(self.logits), device=self.logits.device)[:, None].expand_as(
            self.tokens
        )
        self.logits[rows[live], self.tokens[live]] = value[live]

    def triton(self) -> None:
        """One warp a row."""
        rows, width = self.tokens.shape
        if rows:
            _penalise_kernel[(rows,)](
                self.logits, self.before, self.tokens, self.slots, self.repetition, self.frequency,
                self.presence, self.counts, self.logits.stride(0), self.counts.stride(0), D=width,
                BLOCK=triton.next_power_of_2(width), num_warps=1,
            )  # fmt: skip


penalise_ancestors = public(PenaliseAncestors, cpu="bastion_kernels.cpu.history")


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


@dataclass(slots=True)
class MaskBadWords(Op):
    """Set a bad word's last token to -inf where output and ancestors end in its other tokens.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together.
    """

    logits: Tensor
    """`[L, V]` fp32, written."""
    tokens: Tensor
    """`[L, D]` int64 contiguous, `out_tokens` of `ancestor_tokens`."""
    depths: Tensor
    """`[L]` int32, `out_depths` of `ancestor_tokens`."""
    slots: Tensor
    """`[L]` integer, request slot of each row."""
    word_tokens: Tensor
    """`[S, X]` int32, the words of a slot strung together."""
    word_offsets: Tensor
    """`[S, Y + 1]` int32, where each begins and the last one ends."""
    num_words: Tensor
    """`[S]` int32."""
    emitted: Tensor
    """`[S, M]` int32, prompt and output."""
    prompt_len: Tensor
    """`[S]` int32, where the output begins and ends."""
    total_len: Tensor
    """`[S]` int32, where the output begins and ends."""
    max_words: int
    """Most words of any slot here."""

    def check(self) -> None:
        (rows, width) = self.tokens.shape
        self.expect("logits", (rows, None), torch.float32)
        self.expect("tokens", (rows, width), torch.int64)
        self.expect("depths", (rows,), torch.int32)
        self.expect("slots", (rows,), torch.int32, torch.int64)
        for name in ("word_tokens", "word_offsets", "emitted"):
            self.expect(name, (None, None), torch.int32)
        for name in ("num_words", "prompt_len", "total_len"):
            self.expect(name, (None,), torch.int32)

    def reference(self) -> None:
        """Row by row."""
        for row, slot in enumerate(self.slots.tolist()):
            output = self.emitted[
                slot, int(self.prompt_len[slot]) : int(self.total_len[slot])
            ].tolist()
            output += self.tokens[row, : int(self.depths[row])].tolist()
            for word in range(min(self.max_words, int(self.num_words[slot]))):
                start, end = self.word_offsets[slot, word : word + 2].tolist()
                *rest, last = self.word_tokens[slot, start:end].tolist()
                if output[len(output) - len(rest) :] == rest and len(rest) <= len(output):
                    self.logits[row, last] = -torch.inf

    def triton(self) -> None:
        """One warp a row and word."""
        rows, width = self.tokens.shape
        if rows and self.max_words:
            _bad_words_kernel[(rows, self.max_words)](
                self.logits, self.tokens, self.depths, self.slots, self.word_tokens,
                self.word_offsets, self.num_words, self.emitted, self.prompt_len, self.total_len,
                self.logits.stride(0), self.word_tokens.stride(0), self.word_offsets.stride(0),
                self.emitted.stride(0), D=width, num_warps=1,
            )  # fmt: skip


mask_bad_words = public(MaskBadWords, cpu="bastion_kernels.cpu.history")
