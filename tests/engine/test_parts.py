# SPDX-License-Identifier: Apache-2.0
"""The vLLM-free parts of the runner adapters, on the CPU; the whole is tested in tests/e2e."""

from __future__ import annotations

import heapq
from functools import partial

import numpy as np
import pytest
import torch

from tests.trees import grow
from tests.trees import make_trees as trees_of
from vllm_bastion.policy.trees import Trees

DEPTH, TOP_K, NODES, VOCAB, SLOTS = 4, 3, 10, 32, 5
make_trees = partial(trees_of, SLOTS, NODES, DEPTH)


def bind(trees: Trees, slots: list[int] | np.ndarray) -> None:
    trees.bind_rows(torch.tensor(slots))


def logits_of(num_reqs: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(num_reqs * DEPTH, VOCAB, generator=generator)


def best_paths(
    logits: torch.Tensor, tokens: torch.Tensor | None = None
) -> list[tuple[float, tuple[int, ...]]]:
    """The NODES most probable prefixes of one request, by brute force over the lattice.

    logits: [D, V]; or [D, M, M] of `tokens` [D, M] given each one of the depth above.
    """
    prefixes, found = [(0.0, (), 0)], []
    for depth, rows in enumerate(logits.log_softmax(-1)):
        grown = []
        for score, path, last in prefixes:
            best = (rows if tokens is None else rows[last]).topk(TOP_K)
            for value, k in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                token = k if tokens is None else int(tokens[depth, k])
                grown.append((score + value, (*path, token), k))
        prefixes, found = grown, found + grown
    return [(score, path) for score, path, _ in heapq.nlargest(NODES, found)]


def path_of(trees: Trees, row: int, slot: int, node: int) -> tuple[int, ...]:
    path: tuple[int, ...] = ()
    while node:
        path = (int(trees.tokens[row, node - 1]), *path)
        node = int(trees.parents[slot, node - 1])
    return path


def test_scores_that_know_the_candidate_above_grow_the_most_probable_prefixes() -> None:
    """Each node's children by the softmax of its own row, TOP_K of more candidates."""
    width, trees = TOP_K + 2, make_trees()
    generator = torch.Generator().manual_seed(0)
    scores = 3 * torch.randn(2, DEPTH, width, width, generator=generator)
    candidates = torch.rand(2, DEPTH, VOCAB, generator=generator).argsort(-1)[..., :width]
    trees.bind_rows(torch.tensor([3, 1]))
    trees.grow_transitions(candidates, scores)
    for row, slot in enumerate((3, 1)):
        for column, (score, path) in enumerate(best_paths(scores[row], candidates[row])):
            assert path_of(trees, row, slot, column + 1) == path
            assert abs(float(trees.log_rho[slot, column]) - score) < 1e-5
        bits = [int(word) for word in trees.bits[slot, :, 0]]
        assert bits[1] == 3 and all(bit & 1 for bit in bits)


@pytest.mark.parametrize("ends", [(13, 26, 32), (3, 29, 32)])
def test_ranks_with_a_slice_of_the_vocabulary_each_grow_the_same_trees(ends: tuple[int]) -> None:
    logits, whole = logits_of(2), make_trees()
    whole.bind_rows(torch.tensor([3, 1]))
    grow(whole, logits, 2)
    starts = (0, *ends[:-1])
    sent: list[torch.Tensor] = []

    def send(keys: torch.Tensor) -> torch.Tensor:
        sent.append(keys.clone())
        return keys.expand(-1, len(ends), -1)

    for start, end in zip(starts, ends, strict=True):
        grow(make_trees(), logits[:, start:end], 2, start, send)
    gathered = torch.cat(sent, dim=1)
    assert gathered.shape == (2 * DEPTH, len(ends), 2 * TOP_K + 1)
    for start, end in zip(starts, ends, strict=True):
        trees = make_trees()
        trees.bind_rows(torch.tensor([3, 1]))
        grow(trees, logits[:, start:end], 2, start, lambda keys: gathered)
        for name in ("top_tokens", "tokens", "parents", "size"):
            assert torch.equal(getattr(trees, name), getattr(whole, name)), name
        torch.testing.assert_close(trees.log_rho, whole.log_rho, rtol=0, atol=1e-5)


def test_a_reduced_vocabulary_grows_the_trees_of_its_logits_scattered() -> None:
    """As vLLM scatters them: -inf for a token of the target that the drafter does not have."""
    kept = torch.arange(VOCAB)[torch.arange(VOCAB) % 4 != 3]
    logits, trees, whole = logits_of(2)[:, kept], make_trees(), make_trees()
    everything = torch.full((2 * DEPTH, VOCAB), -torch.inf)
    everything[:, kept] = logits
    for one in (trees, whole):
        bind(one, [2, 0])
    grow(whole, everything, 2)
    grow(trees, logits, 2, draft_id_to_target_id=kept - torch.arange(len(kept)))
    for name in ("top_tokens", "tokens", "parents", "size"):
        assert torch.equal(getattr(trees, name), getattr(whole, name)), name
    torch.testing.assert_close(trees.log_rho, whole.log_rho)


@pytest.mark.parametrize("depth", [1, 2, 3, DEPTH])
def test_trees_are_the_most_probable_prefixes_in_the_rows_of_their_slots(depth: int) -> None:
    """Of a draft that stops early, those of its depths."""
    trees, logits = make_trees(), logits_of(2)
    bind(trees, [3, 1])
    grow(trees, logits_of(2, seed=1), 2)  # what an earlier draft leaves behind
    first = logits.view(2, DEPTH, VOCAB)[:, :depth]
    grow(trees, first.flatten(0, 1), 2)
    for row, slot in enumerate((3, 1)):
        expected = best_paths(first[row])
        size = int(trees.size[slot])
        assert size == len(expected)
        got = [path_of(trees, row, slot, node) for node in range(1, size + 1)]
        assert got == [path for _, path in expected]
        scores = torch.tensor([score for score, _ in expected])
        torch.testing.assert_close(trees.log_rho[slot, :size], scores)
        assert trees.depths[slot, :size].tolist() == [len(path) for path in got]
    assert (trees.parents[[0, 2, 4]] == -1).all()


def test_a_dummy_batch_leaves_every_tree_alone() -> None:
    trees = make_trees()
    bind(trees, [0, 1, 2, 3, 4])
    grow(trees, logits_of(5), 5)
    before = [t.clone() for t in (trees.parents, trees.depths, trees.log_rho, trees.bits)]
    trees.bind_rows()
    grow(trees, logits_of(5, seed=1), 5)
    after = (trees.parents, trees.depths, trees.log_rho, trees.bits)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("configured", [True, False])
def test_a_chain_is_the_drafters_top_choice_at_every_depth(configured: bool) -> None:
    trees = make_trees(top_k=1 if configured else TOP_K)
    if not configured:  # a custom logits processor is installed
        trees.use_chains()
    assert trees.chains and trees.tree_size == DEPTH
    logits = logits_of(1)
    bind(trees, [2])
    grow(trees, logits, 1)
    assert trees.tokens[0, :DEPTH].tolist() == logits.argmax(-1).tolist()
    assert trees.parents[2, :DEPTH].tolist() == list(range(DEPTH))
    assert int(trees.size[2]) == DEPTH


def test_positions_are_root_plus_depth_in_the_tail_and_linear_before_it() -> None:
    trees = make_trees()
    bind(trees, [3])
    grow(trees, logits_of(1), 1)
    # A prompt chunk of 4 rows in slot 0, then a root with 5 nodes in slot 3.
    positions = torch.tensor([10, 11, 12, 13, 40, 41, 42, 43, 44, 45])
    starts, logits = (torch.tensor(x, dtype=torch.int32) for x in ([0, 4, 10], [0, 1, 7]))
    trees.begin_step(torch.tensor([0, 3]), logits)
    placed = trees.positions_by_depth(positions, starts)
    depths = trees.depths[3, :5].tolist()
    assert placed.tolist() == [10, 11, 12, 13, 40, *(40 + d for d in depths)]
    assert placed.data_ptr() == trees.positions.data_ptr()


def test_only_rows_with_a_tree_have_a_masked_tail() -> None:
    trees = make_trees()
    # a tree, and a lone root whose slot never had one
    cu_num_logits = torch.tensor([0, 4, 5], dtype=torch.int32)
    trees.begin_step(torch.tensor([2, 0]), cu_num_logits)
    assert trees.tail_lens.tolist() == [4, 0, 0, 0, 0]
    assert trees.step_slots.tolist() == [2, 0, -1, -1, -1]
    trees.begin_step(torch.tensor([2, 0]))
    assert not trees.tail_lens.any()
