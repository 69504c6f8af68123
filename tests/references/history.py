# SPDX-License-Identifier: Apache-2.0
"""Ancestors' tokens, and the processors of logits that count them."""

from __future__ import annotations

import torch

from bastion_kernels.accept.history import AncestorTokens, MaskBadWords, PenaliseAncestors
from tests.references.declare import of


@of(AncestorTokens)
def ancestor_tokens(op: AncestorTokens) -> None:
    fed, width = op.node_ids.tolist(), op.out_tokens.shape[1]
    op.out_tokens.fill_(-1)
    for row, (slot, node) in enumerate(zip(op.slots.tolist(), op.nodes.tolist(), strict=True)):
        root, path = row - node, list[int]()
        while 0 < node <= op.parents.shape[1] and len(path) < width:
            path.append(fed[root + node])
            node = int(op.parents[slot, node - 1])
        op.out_tokens[row, : len(path)] = torch.tensor(path[::-1])
        op.out_depths[row] = len(path)


@of(PenaliseAncestors)
def penalise_ancestors(op: PenaliseAncestors) -> None:
    for row, slot in enumerate(op.slots.tolist()):
        repetition, frequency, presence = (
            x[slot] for x in (op.repetition, op.frequency, op.presence)
        )
        if repetition == 1 and frequency == 0 and presence == 0:
            continue
        path = [token for token in op.tokens[row].tolist() if token >= 0]
        for depth, token in enumerate(path):
            value = op.before[row, depth]
            value = value * (1.0 / repetition if value > 0 else repetition)
            count = op.counts[slot, token] + path.count(token)
            op.logits[row, token] = value - frequency * count - presence


@of(MaskBadWords)
def mask_bad_words(op: MaskBadWords) -> None:
    for row, slot in enumerate(op.slots.tolist()):
        text = op.emitted[slot, int(op.prompt_len[slot]) : int(op.total_len[slot])].tolist()
        text += op.tokens[row, : int(op.depths[row])].tolist()
        for word in range(min(op.max_words, int(op.num_words[slot]))):
            start, end = op.word_offsets[slot, word : word + 2].tolist()
            *rest, last = op.word_tokens[slot, start:end].tolist()
            if text[len(text) - len(rest) :] == rest and len(rest) <= len(text):
                op.logits[row, last] = -torch.inf
