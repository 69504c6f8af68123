# SPDX-License-Identifier: Apache-2.0
"""The ops of `history` on a CPU, equal to the references."""

from __future__ import annotations

import numpy as np

from bastion_kernels.accept.history import AncestorTokens, MaskBadWords, PenaliseAncestors
from bastion_kernels.cpu.cache import njit


@njit
def _ancestors(fed, parents, slots, nodes, out_tokens, out_depths):
    rows, width = out_tokens.shape
    for row in range(rows):
        slot, first, depth = slots[row], nodes[row], 0
        node = first
        while 0 < node <= parents.shape[1] and depth < width:
            depth += 1
            node = parents[slot, node - 1]
        out_depths[row] = depth
        node = first
        for left in range(depth - 1, -1, -1):
            out_tokens[row, left] = fed[row - first + node]
            node = parents[slot, node - 1]
        out_tokens[row, depth:] = -1


def ancestor_tokens(op: AncestorTokens) -> None:
    _ancestors(
        *(
            x.numpy()
            for x in (op.node_ids, op.parents, op.slots, op.nodes, op.out_tokens, op.out_depths)
        )
    )


@njit
def _penalise(logits, before, tokens, slots, repetition, frequency, presence, counts):
    one = np.float32(1.0)
    for row in range(tokens.shape[0]):
        slot = slots[row]
        factor, each, once = repetition[slot], frequency[slot], presence[slot]
        if factor == one and each == 0 and once == 0:
            continue
        for depth in range(tokens.shape[1]):
            token = tokens[row, depth]
            if token < 0:
                break
            count = counts[slot, token]
            for other in tokens[row]:
                count += other == token
            value = before[row, depth]
            value = value * (one / factor if value > 0 else factor)
            value = value - each * np.float32(count)
            logits[row, token] = value - once


def penalise_ancestors(op: PenaliseAncestors) -> None:
    arguments = (
        op.logits,
        op.before,
        op.tokens,
        op.slots,
        op.repetition,
        op.frequency,
        op.presence,
        op.counts,
    )
    _penalise(*(x.numpy() for x in arguments))


@njit
def _bad_words(
    logits, tokens, depths, slots, word_tokens, offsets, num_words, emitted, prompt_len, total_len,
    max_words,
):  # fmt: skip
    for row in range(tokens.shape[0]):
        slot = slots[row]
        total = total_len[slot]
        for word in range(min(max_words, num_words[slot])):
            start, last = offsets[slot, word], offsets[slot, word + 1] - 1
            place = total + depths[row] - (last - start)
            match = place >= prompt_len[slot]
            while match and start < last:
                if place < total:
                    match = emitted[slot, place] == word_tokens[slot, start]
                else:
                    match = tokens[row, place - total] == word_tokens[slot, start]
                start, place = start + 1, place + 1
            if match:
                logits[row, word_tokens[slot, last]] = -np.inf


def mask_bad_words(op: MaskBadWords) -> None:
    arguments = (
        op.logits, op.tokens, op.depths, op.slots, op.word_tokens, op.word_offsets, op.num_words,
        op.emitted, op.prompt_len, op.total_len,
    )  # fmt: skip
    _bad_words(*(x.numpy() for x in arguments), op.max_words)
