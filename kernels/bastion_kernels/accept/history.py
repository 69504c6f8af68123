# SPDX-License-Identifier: Apache-2.0
"""Logits processors that depend on a node's history.

Penalties and bad words depend on the tokens before a position. For a node these are the emitted
tokens, the tokens of its ancestors and its own. `ancestor_tokens` lists the last two for every
logits row. The other two ops treat them as vLLM's processors treat emitted tokens:

    penalise_ancestors   corrects the logits of at most D tokens: all other counts are unchanged
    mask_bad_words       masks a word's last token where the history ends in the rest of the word
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bastion_kernels.op import Op, public
from bastion_kernels.triton_or_none import tl, triton

_BLOCK = 64


# With chunked verification, slices start at any row of a batch: compile no variants by alignment.
@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=[
        "node_ids",
        "slots",
        "nodes",
        "out_tokens",
        "out_depths",
    ],
)
def _ancestors_kernel(
    node_ids,
    parents,
    slots,
    nodes,
    out_tokens,
    out_depths,
    rows,
    stride_parents_s,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (L / BLOCK,)."""
    i_b = tl.program_id(0)
    o_r = i_b * BLOCK + tl.arange(0, BLOCK)
    m_r = o_r < rows
    b_slot = tl.load(slots + o_r, mask=m_r, other=0).to(tl.int64)
    b_first = tl.load(nodes + o_r, mask=m_r, other=0).to(tl.int32)
    p_parents = parents + b_slot * stride_parents_s - 1
    b_node = b_first
    b_depth = tl.zeros([BLOCK], tl.int32)
    for _ in range(D):
        m_node = (b_node > 0) & (b_node <= N)
        b_depth += m_node.to(tl.int32)
        b_node = tl.load(p_parents + b_node, mask=m_node, other=0)
    tl.store(out_depths + o_r, b_depth, mask=m_r)
    b_root, b_node, b_left = o_r - b_first, b_first, b_depth
    for i in range(D):
        m_node = (b_node > 0) & (b_node <= N)
        b_left -= m_node.to(tl.int32)
        b_token = tl.load(node_ids + b_root + b_node, mask=m_node, other=0)
        tl.store(out_tokens + o_r * D + b_left, b_token, mask=m_r & m_node)
        tl.store(out_tokens + o_r * D + i, -1, mask=m_r & (i >= b_depth))
        b_node = tl.load(p_parents + b_node, mask=m_node, other=0)


@dataclass(slots=True)
class AncestorTokens(Op):
    """List the tokens on each logits row's path, without the root.

    The rows of a request are consecutive, its root first.
    """

    node_ids: Tensor
    """`[P]` integer, input token of every logits row."""
    parents: Tensor
    """`[S, N]` int32, node number of each column's parent."""
    slots: Tensor
    """`[P]` integer, request slot of each row."""
    nodes: Tensor
    """`[P]` integer, node number of each row, 0 = root."""
    out_tokens: Tensor
    """`[P, L]` int64 contiguous, written: tokens at depth 1, 2, .., ending with the row's own; then
    -1."""
    out_depths: Tensor
    """`[P]` int32, written: the number of those tokens."""

    def check(self) -> None:
        integers, rows = (torch.int32, torch.int64), self.out_tokens.shape[0]
        self.expect("node_ids", (rows,), *integers)
        self.expect("parents", (None, None), torch.int32)
        self.expect("slots", (rows,), *integers)
        self.expect("nodes", (rows,), *integers)
        self.expect("out_tokens", (rows, None), torch.int64)
        self.expect("out_depths", (rows,), torch.int32)

    def triton(self) -> None:
        rows, width = self.out_tokens.shape
        if rows:
            _ancestors_kernel[(triton.cdiv(rows, _BLOCK),)](
                node_ids=self.node_ids, parents=self.parents, slots=self.slots, nodes=self.nodes,
                out_tokens=self.out_tokens, out_depths=self.out_depths, rows=rows,
                stride_parents_s=self.parents.stride(0), N=self.parents.shape[1], D=width,
                BLOCK=_BLOCK, num_warps=2,
            )  # fmt: skip


ancestor_tokens = public(AncestorTokens, cpu="bastion_kernels.cpu.history")


@triton.jit(do_not_specialize_on_alignment=["tokens", "slots"])
def _penalise_kernel(
    logits,
    before,
    tokens,
    slots,
    repetition,
    frequency,
    presence,
    counts,
    stride_logits_s,
    stride_counts_s,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (L,)."""
    i_r = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + i_r).to(tl.int64)
    b_repetition = tl.load(repetition + slot)
    b_frequency = tl.load(frequency + slot)
    b_presence = tl.load(presence + slot)
    if (b_repetition != 1.0) | (b_frequency != 0.0) | (b_presence != 0.0):
        o_d = tl.arange(0, BLOCK)
        b_token = tl.load(tokens + i_r * D + o_d, mask=o_d < D, other=-1)
        m_token = b_token >= 0
        b_here = tl.sum((b_token[:, None] == b_token[None, :]).to(tl.int32), 1)
        b_count = tl.load(counts + slot * stride_counts_s + b_token, mask=m_token, other=0) + b_here
        # the order and the types of vLLM's kernel, for equal rounding
        b_value = tl.load(before + i_r * D + o_d, mask=m_token, other=0.0)
        b_value *= tl.where(b_value > 0, 1.0 / b_repetition, b_repetition)
        b_value -= b_frequency * b_count
        b_value -= b_presence * (b_count > 0)
        tl.store(logits + i_r * stride_logits_s + b_token, b_value, mask=m_token)


@dataclass(slots=True)
class PenaliseAncestors(Op):
    """Correct the logits of each row's ancestors, which count as output tokens.

    vLLM's kernel applies all other penalties; it must have run on these rows without their drafts.
    Rows of slots without a penalty are unchanged.
    """

    logits: Tensor
    """`[P, V]` fp32, written at `tokens`."""
    before: Tensor
    """`[P, L]` fp32 contiguous, the logits of `tokens` before any penalty; arbitrary where `tokens`
    is -1."""
    tokens: Tensor
    """`[P, L]` int64 contiguous, see `ancestor_tokens`."""
    slots: Tensor
    """`[P]` integer, request slot of each row."""
    repetition: Tensor
    """`[S]` fp32."""
    frequency: Tensor
    """`[S]` fp32."""
    presence: Tensor
    """`[S]` fp32."""
    counts: Tensor
    """`[S, V]` int32, number of times each token was emitted."""

    def check(self) -> None:
        (rows, width) = self.tokens.shape
        self.expect("logits", (rows, None), torch.float32)
        self.expect("before", (rows, width), torch.float32)
        self.expect("tokens", (rows, width), torch.int64)
        self.expect("slots", (rows,), torch.int32, torch.int64)
        for name in ("repetition", "frequency", "presence"):
            self.expect(name, (None,), torch.float32)
        self.expect("counts", (None, self.logits.shape[1]), torch.int32)

    def triton(self) -> None:
        rows, width = self.tokens.shape
        if rows:
            _penalise_kernel[(rows,)](
                logits=self.logits, before=self.before, tokens=self.tokens, slots=self.slots,
                repetition=self.repetition, frequency=self.frequency, presence=self.presence,
                counts=self.counts, stride_logits_s=self.logits.stride(0),
                stride_counts_s=self.counts.stride(0), D=width, BLOCK=triton.next_power_of_2(width),
                num_warps=1,
            )  # fmt: skip


penalise_ancestors = public(PenaliseAncestors, cpu="bastion_kernels.cpu.history")


@triton.jit(do_not_specialize_on_alignment=["tokens", "depths", "slots"])
def _bad_words_kernel(
    logits,
    tokens,
    depths,
    slots,
    word_tokens,
    word_offsets,
    num_words,
    emitted,
    prompt_len,
    total_len,
    stride_logits_s,
    stride_word_tokens_s,
    stride_word_offsets_s,
    stride_emitted_s,
    D: tl.constexpr,
):
    """Grid: (L, most words of a request)."""
    i_r, i_w = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + i_r).to(tl.int64)
    if i_w < tl.load(num_words + slot):
        total = tl.load(total_len + slot)
        length = total + tl.load(depths + i_r)
        start = tl.load(word_offsets + slot * stride_word_offsets_s + i_w)
        last = tl.load(word_offsets + slot * stride_word_offsets_s + i_w + 1) - 1
        p_word = word_tokens + slot * stride_word_tokens_s
        place = length - (last - start)
        match = place >= tl.load(prompt_len + slot)
        while match & (start < last):
            if place < total:
                actual = tl.load(emitted + slot * stride_emitted_s + place).to(tl.int64)
            else:
                actual = tl.load(tokens + i_r * D + place - total)
            match = actual == tl.load(p_word + start)
            start += 1
            place += 1
        if match:
            tl.store(logits + i_r * stride_logits_s + tl.load(p_word + last), -float("inf"))


@dataclass(slots=True)
class MaskBadWords(Op):
    """Set a bad word's last token to -inf where output plus ancestors end in its other tokens."""

    logits: Tensor
    """`[P, V]` fp32, written."""
    tokens: Tensor
    """`[P, L]` int64 contiguous, `out_tokens` of `ancestor_tokens`."""
    depths: Tensor
    """`[P]` int32, `out_depths` of `ancestor_tokens`."""
    slots: Tensor
    """`[P]` integer, request slot of each row."""
    word_tokens: Tensor
    """`[S, X]` int32, the concatenated words of a slot."""
    word_offsets: Tensor
    """`[S, Y + 1]` int32, start of each word, and end of the last."""
    num_words: Tensor
    """`[S]` int32."""
    emitted: Tensor
    """`[S, M]` int32, prompt and output."""
    prompt_len: Tensor
    """`[S]` int32, start of the output."""
    total_len: Tensor
    """`[S]` int32, end of the output."""
    max_words: int
    """Upper bound of `num_words` over the slots of these rows."""

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

    def triton(self) -> None:
        rows, width = self.tokens.shape
        if rows and self.max_words:
            _bad_words_kernel[(rows, self.max_words)](
                logits=self.logits, tokens=self.tokens, depths=self.depths, slots=self.slots,
                word_tokens=self.word_tokens, word_offsets=self.word_offsets,
                num_words=self.num_words, emitted=self.emitted, prompt_len=self.prompt_len,
                total_len=self.total_len, stride_logits_s=self.logits.stride(0),
                stride_word_tokens_s=self.word_tokens.stride(0),
                stride_word_offsets_s=self.word_offsets.stride(0),
                stride_emitted_s=self.emitted.stride(0), D=width, num_warps=1,
            )  # fmt: skip


mask_bad_words = public(MaskBadWords, cpu="bastion_kernels.cpu.history")
