# SPDX-License-Identifier: Apache-2.0
"""Ancestors' tokens against lists written down per row; penalties and bad words over them."""

from __future__ import annotations

import pytest
import torch
from op_helpers import assert_same, call, poisoned, random_parents, runs, versions

from bastion_kernels import ancestor_tokens, mask_bad_words, penalise_ancestors
from tests import references

NODES, DEPTH, SLOTS, VOCAB = 12, 6, 5, 7


class Rows:
    """Random trees of three requests, cut anywhere, and every row's ancestors as a list."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def integers(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=generator)

        self.integers, self.generator = integers, generator
        self.parents = poisoned(SLOTS, NODES + 2, dtype=torch.int32)[:, :NODES]
        slots, nodes, self.above = [], [], list[list[int]]()
        fed = []
        for slot in torch.randperm(SLOTS, generator=generator)[:3].tolist():
            parents = random_parents(NODES, NODES, generator)
            depth = [0]
            for column, parent in enumerate(parents):
                if depth[parent] == DEPTH:
                    parents[column] = parent = 0
                depth.append(depth[parent] + 1)
            self.parents[slot] = torch.tensor(parents, dtype=torch.int32)
            count = int(integers(1, NODES + 2, 1))
            tokens = integers(0, VOCAB, count)
            paths = [list[int]()]
            for node in range(1, count):
                paths.append([*paths[parents[node - 1]], int(tokens[node])])
            slots += [slot] * count
            nodes += range(count)
            fed.append(tokens)
            self.above += paths
        self.slots, self.nodes = torch.tensor(slots, dtype=torch.int32), torch.tensor(nodes)
        self.fed = torch.cat(fed)
        self.tokens = torch.full((len(slots), DEPTH), -1)
        for row, path in enumerate(self.above):
            self.tokens[row, : len(path)] = torch.tensor(path)
        self.depths = torch.tensor([len(path) for path in self.above], dtype=torch.int32)
        self.logits = 3 * torch.randn(len(slots), VOCAB, generator=generator)


SEEDS = range(6)


@runs(ancestor_tokens, ancestor_tokens)
def test_every_row_has_the_tokens_of_its_own_branch(run) -> None:
    for seed in SEEDS:
        rows = Rows(seed)
        tokens = poisoned(len(rows.fed), DEPTH, dtype=torch.int64)
        depths = poisoned(len(rows.fed), dtype=torch.int32)
        call(run, rows.fed, rows.parents, rows.slots, rows.nodes, tokens, depths)
        assert_same(tokens, rows.tokens)
        assert_same(depths, rows.depths)


@runs(ancestor_tokens)
def test_a_node_without_a_tree_has_no_ancestors(run) -> None:
    # As in warm-up, where drafts are verified that no tree was grown for: no loop, no stray store.
    parents, rows = torch.full((1, 3), -1, dtype=torch.int32), torch.arange(5)
    tokens, depths = poisoned(5, DEPTH, dtype=torch.int64), poisoned(5, dtype=torch.int32)
    call(run, rows + 10, parents, torch.zeros_like(rows), rows, tokens, depths)
    assert depths.tolist() == [0, 1, 1, 1, 0]
    assert tokens[:, 0].tolist() == [-1, 11, 12, 13, -1]
    assert tokens[:, 1:].eq(-1).all()


@pytest.mark.parametrize("run", versions(penalise_ancestors.triton, penalise_ancestors.cpu))
def test_penalties_count_output_and_ancestors(run) -> None:
    for seed in SEEDS:
        rows = Rows(seed)
        counts = rows.integers(0, 3, SLOTS, VOCAB).int()
        penalties = [
            torch.tensor(values)
            for values in ([1.0, 1.3, 0.7, 1.0, 1.3], [0.0, 0.5, 0, 0, -0.4], [0.0, 0, 0.9, 0.8, 0])
        ]
        before = rows.logits.gather(1, rows.tokens.clamp(min=0))
        logits = rows.logits.clone()
        call(run, logits, before, rows.tokens, rows.slots, *penalties, counts)
        expected = rows.logits.clone()
        references.penalise_ancestors(expected, before, rows.tokens, rows.slots, *penalties, counts)
        torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
        # Where nothing is penalised, not a bit.
        free = rows.slots == 0
        assert_same(logits[free], rows.logits[free])


@pytest.mark.parametrize("run", versions(mask_bad_words.triton, mask_bad_words.cpu))
def test_bad_words_end_output_and_ancestors(run) -> None:
    masked = 0
    for seed in SEEDS:
        rows = Rows(seed)
        # Words of one to four of three tokens, so that many match, over the end of the output too.
        rows.tokens = torch.where(rows.tokens >= 0, rows.tokens % 3, -1)
        words = [
            [
                rows.integers(0, 3, int(rows.integers(1, 5, 1))).tolist()
                for _ in range(int(rows.integers(0, 5, 1)))
            ]
            for _ in range(SLOTS)
        ]
        word_tokens = torch.full((SLOTS, 20), 9, dtype=torch.int32)
        offsets = torch.zeros(SLOTS, 6, dtype=torch.int32)
        for slot, own in enumerate(words):
            flat = [token for word in own for token in word]
            word_tokens[slot, : len(flat)] = torch.tensor(flat, dtype=torch.int32)
            ends = torch.tensor([len(word) for word in own]).cumsum(0)
            offsets[slot, 1 : len(own) + 1] = ends
        num_words = torch.tensor([len(own) for own in words], dtype=torch.int32)
        emitted = rows.integers(0, 3, SLOTS, 9).int()
        prompt_len = rows.integers(1, 4, SLOTS).int()
        total_len = prompt_len + rows.integers(0, 5, SLOTS).int()
        logits = rows.logits.clone()
        given = rows.tokens, rows.depths, rows.slots, word_tokens, offsets, num_words, emitted
        call(run, logits, *given, prompt_len, total_len, int(num_words.max()))
        expected = rows.logits.clone()
        references.mask_bad_words(expected, *given, prompt_len, total_len, int(num_words.max()))
        masked += int(expected.isinf().sum())
        assert_same(logits, expected)
    assert masked > 50
