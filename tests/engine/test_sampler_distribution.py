# SPDX-License-Identifier: Apache-2.0
"""Tree sampling emits what the target would, at any temperature: chi-square on whole sequences.

A request without a seed is decoded 100,000 times over one fixed tree, through the plugin's sampler
with vLLM's own sampling state. The target's distribution at each node is known, so the probability
of every possible emitted sequence is a product that can be written down:

    P(t1 .. tk) = prod_i p(t_i | node reached by t1 .. t_(i-1)),   t_k no child of the last node

The observed counts are tested against it, so that draws must be right in combination as well.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

from bastion_kernels import expand_best_first
from tests.trees import make_trees
from vllm_bastion.engine.runtime import Runtime
from vllm_bastion.engine.sampler import TreeRejectionSampler

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the draw on the host"),
    # Kernels that the interpreter runs row by row.
    pytest.mark.usefixtures("pytorch_top_k", "replacements"),
]

VOCAB, DEPTH, NODES = 12, 4, 16
SLOTS, CALLS = 1000, 100
CPU = torch.device("cpu")

Tree = tuple[list[int], list[int]]
"""Parents (node numbers, the root is 0) and tokens of nodes 1, 2, .."""


def best_first() -> Tree:
    """The tree of the paper's expansion over a random drafter's top tokens."""
    generator = torch.Generator().manual_seed(5)
    logprobs = (2 * torch.randn(1, DEPTH, VOCAB, generator=generator)).log_softmax(-1)
    top = logprobs.topk(6, dim=-1)
    tokens, parents = torch.zeros(1, NODES, dtype=torch.int64), torch.zeros(1, NODES).int()
    expand_best_first(
        top.indices.int(), top.values[:, :, None], 6, torch.zeros(1, dtype=torch.int64), tokens,
        parents, torch.zeros(1, NODES).int(), torch.zeros(1, NODES), torch.zeros(1).int(),
    )  # fmt: skip
    return parents[0].tolist(), tokens[0].tolist()


TREES: dict[str, Tree] = {
    "chain": ([0, 1, 2, 3], [4, 4, 7, 0]),
    "star": ([0, 0, 0, 0, 0], [3, 11, 0, 5, 8]),
    "bushy": ([0, 0, 1, 1, 2, 2, 0, 3, 3, 5, 8], [1, 2, 1, 2, 3, 1, 9, 0, 4, 6, 6]),
    "best-first": best_first(),
}
PARAMS = {
    "T=1": SamplingParams(temperature=1.0),
    "T=0.7, top-k 5": SamplingParams(temperature=0.7, top_k=5),
    "T=1.3, top-p 0.8": SamplingParams(temperature=1.3, top_p=0.8),
    "T=1.5, min-p 0.1, biases": SamplingParams(
        temperature=1.5, min_p=0.1, logit_bias={2: 1.0, 9: 0.8, 4: -1.0}
    ),
    "T=1, penalties": SamplingParams(
        repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.6
    ),
}


def node_logits(tree: Tree) -> torch.Tensor:
    """[1 + n, V] logits of the target at the root and at every node, the children likely."""
    parents, tokens = tree
    generator = torch.Generator().manual_seed(7)
    logits = 1.5 * torch.randn(1 + len(parents), VOCAB, generator=generator)
    for parent, token in zip(parents, tokens, strict=True):
        logits[parent, token] += 1.5
    return logits


def node_probabilities(tree: Tree, logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """[1 + n, V] float64, written down without vLLM."""
    scores, paths = logits.double().numpy().copy(), [list[int]()]
    for parent, token in zip(*tree, strict=True):
        paths.append([*paths[parent], token])
    for row, path in zip(scores, paths, strict=True):
        for token, bias in (params.logit_bias or {}).items():
            row[token] += bias
        for token in set(path) - {-1}:
            row[token] *= params.repetition_penalty ** (-1 if row[token] > 0 else 1)
            row[token] -= params.frequency_penalty * path.count(token) + params.presence_penalty
    scaled = scores / params.temperature
    weights = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    probs = weights / weights.sum(axis=1, keepdims=True)
    for row in probs:
        row[row < params.min_p * row.max()] = 0
        order = np.argsort(-row)
        if params.top_k > 0:
            row[order[params.top_k :]] = 0
        if params.top_p < 1:
            # The smallest set of best tokens that has at least this much.
            before = np.cumsum(row[order]) - row[order]
            row[order[before >= params.top_p]] = 0
        row /= row.sum()
    return probs


def sequence_probabilities(tree: Tree, probs: np.ndarray) -> dict[tuple[int, ...], float]:
    """Emitted sequence -> probability."""
    parents, tokens = tree
    children = {(p, t): i + 1 for i, (p, t) in enumerate(zip(parents, tokens, strict=True))}
    out: dict[tuple[int, ...], float] = {}
    open_nodes: list[tuple[int, tuple[int, ...], float]] = [(0, (), 1.0)]
    while open_nodes:
        node, prefix, mass = open_nodes.pop()
        for token in range(VOCAB):
            emitted, share = (*prefix, token), mass * probs[node, token]
            child = children.get((node, token))
            if child is not None:
                open_nodes.append((child, emitted, share))
            elif share > 0:
                out[emitted] = share
    return out


def make_sampler(tree: Tree, params: SamplingParams) -> TreeRejectionSampler:
    """The plugin's sampler over vLLM's state, with SLOTS unseeded requests that share a tree."""
    req_states = RequestState(SLOTS, 64, 64, NODES, VOCAB, CPU)
    sampler = Sampler(SimpleNamespace(reasoning_config=None), SLOTS, VOCAB, CPU, req_states)
    trees = make_trees(SLOTS, NODES, DEPTH, top_k=6, rows=SLOTS)
    trees.parents[:, : len(tree[0])] = torch.tensor(tree[0], dtype=torch.int32)
    for slot in range(SLOTS):
        sampler.add_request(slot, params)
    sampler.apply_staged_writes()
    settings = SimpleNamespace(
        num_speculative_tokens=NODES, enable_adaptive_verification=False,
        rejection_sample_method="standard", fly_entropy_threshold=0.3, fly_entropy_top_k=3,
        bastion_budget="adaptive", bastion_budget_timing="exact",
    )  # fmt: skip
    return TreeRejectionSampler(Runtime(trees), sampler, settings, CPU)


def emitted_sequences(
    tree: Tree, logits: torch.Tensor, params: SamplingParams
) -> Counter[tuple[int, ...]]:
    """Decode SLOTS * CALLS times, at a new position each time, and count the sequences."""
    parents, tokens = tree
    rows = 1 + len(parents)
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    sampler = make_sampler(tree, params)
    slots = torch.arange(SLOTS)
    row_slots = slots.repeat_interleave(rows)
    node_ids = torch.tensor([0, *tokens]).repeat(SLOTS)
    position = torch.tensor(depths).repeat(SLOTS)
    starts = torch.arange(0, SLOTS * rows + 1, rows, dtype=torch.int32)
    counts: Counter[tuple[int, ...]] = Counter()
    for call in range(CALLS):
        sampler.begin(starts)
        _, sampled, num_sampled = sampler._verify(
            logits.repeat(SLOTS, 1), None, node_ids, position + (DEPTH + 1) * call, starts, slots,
            slots.numpy(), row_slots, torch.arange(rows).repeat(SLOTS), np.full(SLOTS, 64),
            node_ids,
        )  # fmt: skip
        for sequence, count in zip(sampled.tolist(), num_sampled.tolist(), strict=True):
            counts[tuple(sequence[:count])] += 1
    return counts


def p_value(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Chi-square, with rare sequences counted together; 0 if an impossible one was emitted."""
    total = sum(counts.values())
    if not set(counts) <= set(expected):
        return 0.0
    common = [seq for seq, mass in expected.items() if mass * total >= 10]
    observed = [counts[seq] for seq in common]
    wanted = [expected[seq] * total for seq in common]
    if len(common) < len(expected):
        observed.append(total - sum(observed))
        wanted.append(total - sum(wanted))
    return float(chisquare(observed, wanted).pvalue)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ("best-first", "T=1, penalties"),
        *(
            pytest.param(shape, kind, marks=pytest.mark.slow)
            for shape, kind in (
                ("bushy", "T=1"), ("chain", "T=1"), ("star", "T=1"), ("best-first", "T=1"),
                ("bushy", "T=0.7, top-k 5"), ("best-first", "T=0.7, top-k 5"),
                ("bushy", "T=1.3, top-p 0.8"), ("bushy", "T=1, penalties"),
                ("bushy", "T=1.5, min-p 0.1, biases"),
            )
        ),
    ],
)  # fmt: skip
def test_emitted_sequences_have_the_targets_distribution(shape: str, kind: str) -> None:
    np.random.seed(11)  # where vLLM takes the seeds of unseeded requests from
    tree, params = TREES[shape], PARAMS[kind]
    logits = node_logits(tree)
    expected = sequence_probabilities(tree, node_probabilities(tree, logits, params))
    assert abs(sum(expected.values()) - 1) < 1e-12
    counts = emitted_sequences(tree, logits, params)
    assert sum(counts.values()) == SLOTS * CALLS >= 100_000
    assert p_value(counts, expected) > 1e-4

    if params.presence_penalty:  # on the root's, the ancestors forgotten
        forgotten = node_probabilities((tree[0], [-1] * len(tree[1])), logits, params)
        assert p_value(counts, sequence_probabilities(tree, forgotten)) < 1e-4

    # The test can fail: a target that differs by 0.15 in one logit of the root is told apart.
    other = logits.clone()
    other[0, other[0].argmax()] += 0.15
    wrong = sequence_probabilities(tree, node_probabilities(tree, other, params))
    assert p_value(counts, wrong) < 1e-4
