# SPDX-License-Identifier: Apache-2.0
"""The ops of `history` on a CPU, equal to the references."""

from __future__ import annotations

import numpy as np

from bastion_kernels.cpu.cache import native


@native
def ancestor_tokens(node_ids, parents, slots, nodes, out_tokens, out_depths):
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
            out_tokens[row, left] = node_ids[row - first + node]
            node = parents[slot, node - 1]
        out_tokens[row, depth:] = -1


@native
def penalise_ancestors(logits, before, tokens, slots, repetition, frequency, presence, counts):
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


@native
def mask_bad_words(
    logits, tokens, depths, slots, word_tokens, word_offsets, num_words, emitted, prompt_len,
    total_len, max_words,
):  # fmt: skip
    for row in range(tokens.shape[0]):
        slot = slots[row]
        total = total_len[slot]
        for word in range(min(max_words, num_words[slot])):
            start, last = word_offsets[slot, word], word_offsets[slot, word + 1] - 1
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
