# SPDX-License-Identifier: Apache-2.0
"""A drafter that usually knows the answer, for long accepted paths with branches.

Just before the drafter's logits become a tree, they are replaced by noise with bumps on the token
that plain decoding emits and on its neighbour. The heights vary, so that the correct token is first
or second among the candidates. The drafter still runs and its context is correct, and the target
still decides what it accepts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

# Called with the tokens to come, the tokens emitted so far, and logits [D, V] to write into.
Bumps = Callable[[Sequence[int], int, torch.Tensor], None]


def install(runner: Any, answers: dict[str, list[int]], plan: Any = None, seed: int = 0) -> None:
    """Patch the trees of an engine.

    Args:
        answers: request id -> the tokens plain decoding emits; other requests draft noise.
        plan: None for random bumps, which end at each depth with a probability of a tenth; or
            {"accept": [..], "swap": bool} for fixed ones, see `_planned`.
    """
    bumps = _random(random.Random(seed)) if plan is None else _planned(**plan)
    generator = torch.Generator().manual_seed(seed)
    trees, states = runner.speculator.trees, runner.req_states
    rank, grow_ranked = trees.rank, trees.grow_ranked
    vocab = 0
    graphs = runner.speculator.query_cudagraph_manager
    if graphs is not None:
        graphs._graphs_captured = False  # a replay would not run this code

    def rank_as_before(logits: torch.Tensor, *args: Any) -> None:
        nonlocal vocab
        vocab = logits.shape[-1]
        rank(logits, *args)

    def grow_known(num_reqs: int, *_: Any) -> None:
        made = torch.randn(num_reqs, trees.gamma, vocab, generator=generator)
        for row in range(num_reqs):
            slot = int(trees.row_slots[row])
            if slot < 0:
                continue
            name = states.index_to_req_id[slot].rsplit("-", 1)[0]
            emitted = int(states.total_len.gpu[slot]) - int(states.prompt_len.gpu[slot])
            truth = answers.get(name, [])[emitted : emitted + trees.gamma]
            bumps(truth, emitted, made[row])
        rank(made.view(-1, vocab).to(trees.device), 0)
        grow_ranked(num_reqs, trees.gamma)

    trees.rank, trees.grow_ranked = rank_as_before, grow_known


def _random(rng: random.Random, miss: float = 0.1) -> Bumps:
    def bumps(truth: Sequence[int], emitted: int, logits: torch.Tensor) -> None:
        for depth, token in enumerate(truth):
            if rng.random() < miss:
                break
            logits[depth, token] += rng.choice((9, 10, 11, 12))
            logits[depth, (token + 1) % logits.shape[1]] += rng.choice((7, 8, 9, 10))

    return bumps


def _planned(accept: Sequence[int], swap: bool) -> Bumps:
    """Exactly `accept[i % len(accept)]` tokens right after i emitted ones.

    With `swap` every other depth prefers a wrong token to the correct one, so that the accepted
    path leaves the chain; without it the correct one comes first at every depth.
    """

    def bumps(truth: Sequence[int], emitted: int, logits: torch.Tensor) -> None:
        right = accept[emitted % len(accept)]
        logits *= 0.3
        for depth, token in enumerate(truth):
            wrong = (token + 1) % logits.shape[1]
            if depth >= right:
                logits[depth, token] = -20.0
            elif swap:
                logits[depth, token] += 10 - depth % 2
                logits[depth, wrong] += 9 + depth % 2
            else:
                logits[depth, token] += 14

    return bumps
