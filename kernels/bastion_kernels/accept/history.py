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
from typing import Annotated

from torch import Tensor

from bastion_kernels.op import Op, cdiv, padded, public
from bastion_kernels.triton_or_none import tl, triton

_BLOCK = 64


# With chunked verification these are slices from any row on: compile no variants by alignment.
@triton.jit(
    do_not_specialize=["P"],
    do_not_specialize_on_alignment=["node_ids", "slots", "nodes", "out_tokens", "out_depths"],
)
def _ancestors_kernel(
    node_ids,
    parents,
    slots,
    nodes,
    out_tokens,
    out_depths,
    P,
    stride_parents_s,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (L / BLOCK,)."""
    i_b = tl.program_id(0)
    o_r = i_b * BLOCK + tl.arange(0, BLOCK)
    m_r = o_r < P
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

    node_ids: Annotated[Tensor, "[P] int32 or int64"]  # input token of every logits row
    parents: Annotated[Tensor, "[S, N] int32"]  # node number of each column's parent
    slots: Annotated[Tensor, "[P] int32 or int64"]  # request slot of each row
    nodes: Annotated[Tensor, "[P] int32 or int64"]  # node number of each row, 0 = root
    # Written, contiguous: tokens at depth 1, 2, .., ending with the row's own; then -1.
    out_tokens: Annotated[Tensor, "[P, D] int64"]
    out_depths: Annotated[Tensor, "[P] int32"]  # written: the number of those tokens

    def triton(self) -> None:
        blocks = cdiv(self.out_tokens.shape[0], _BLOCK)
        self.launch(_ancestors_kernel, blocks, BLOCK=_BLOCK, num_warps=2)


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
    stride_logits_p,
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
        # operations in the order and types of vLLM's kernel, for equal rounding
        b_value = tl.load(before + i_r * D + o_d, mask=m_token, other=0.0)
        b_value *= tl.where(b_value > 0, 1.0 / b_repetition, b_repetition)
        b_value -= b_frequency * b_count
        b_value -= b_presence * (b_count > 0)
        tl.store(logits + i_r * stride_logits_p + b_token, b_value, mask=m_token)


@dataclass(slots=True)
class PenaliseAncestors(Op):
    """Correct the logits of each row's ancestors, which count as output tokens.

    vLLM's kernel applies all other penalties; it must have run on these rows without their drafts.
    Rows of slots without a penalty are unchanged.
    """

    logits: Annotated[Tensor, "[P, V] float32"]  # written at `tokens`
    # Contiguous, the logits of `tokens` before any penalty; arbitrary where `tokens` is -1.
    before: Annotated[Tensor, "[P, D] float32"]
    tokens: Annotated[Tensor, "[P, D] int64"]  # contiguous, of `ancestor_tokens`
    slots: Annotated[Tensor, "[P] int32 or int64"]  # request slot of each row
    repetition: Annotated[Tensor, "[S] float32"]
    frequency: Annotated[Tensor, "[S] float32"]
    presence: Annotated[Tensor, "[S] float32"]
    counts: Annotated[Tensor, "[S, V] int32"]  # number of times each token was emitted

    def triton(self) -> None:
        rows, width = self.tokens.shape
        self.launch(_penalise_kernel, rows, BLOCK=padded(width), num_warps=1)


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
    stride_logits_p,
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
            tl.store(logits + i_r * stride_logits_p + tl.load(p_word + last), -float("inf"))


@dataclass(slots=True)
class MaskBadWords(Op):
    """Set a bad word's last token to -inf where output plus ancestors end in its other tokens."""

    logits: Annotated[Tensor, "[P, V] float32"]  # written
    tokens: Annotated[Tensor, "[P, D] int64"]  # contiguous, of `ancestor_tokens`
    depths: Annotated[Tensor, "[P] int32"]  # `out_depths` of `ancestor_tokens`
    slots: Annotated[Tensor, "[P] int32 or int64"]  # request slot of each row
    word_tokens: Annotated[Tensor, "[S, *] int32"]  # the concatenated words of a slot
    word_offsets: Annotated[Tensor, "[S, *] int32"]  # start of each word, and end of the last
    num_words: Annotated[Tensor, "[S] int32"]
    emitted: Annotated[Tensor, "[S, *] int32"]  # prompt and output
    prompt_len: Annotated[Tensor, "[S] int32"]  # start of the output
    total_len: Annotated[Tensor, "[S] int32"]  # end of the output
    max_words: int  # upper bound of `num_words` over the slots of these rows

    def triton(self) -> None:
        self.launch(_bad_words_kernel, self.tokens.shape[0], self.max_words, num_warps=1)


mask_bad_words = public(MaskBadWords, cpu="bastion_kernels.cpu.history")
