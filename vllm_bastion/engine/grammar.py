# SPDX-License-Identifier: Apache-2.0
"""A grammar's word on a draft tree, given where the grammar lives: in the engine core.

The worker sends a tree over vLLM's channel for draft tokens, each token with its parent beside it
(`encode`). `walk` asks the grammar about every node: what may follow it, and whether the node may
be there itself. Nodes that the grammar refuses are left out with all that hangs on them, and the
next best take their place; where the step has been launched by then (async scheduling) they stay,
and are never followed, because the row above them does not allow their token.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.structured_output import StructuredOutputManager

from vllm_bastion.carriers import GrammarTree

_SHIFT = 32
_ANYTHING = -1  # a word of a bitmask row that allows everything


def encode(tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    """Tokens and the numbers of their parents (0 = root) in one int64 each; -1 where no node is.

    tokens: [R, N] int64; parents: [R, N] int32.
    """
    return torch.where(
        (tokens < 0) | (parents < 0), -1, tokens | (parents.to(torch.int64) << _SHIFT)
    )


def decode(codes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Tokens and parents of a tree, up to the first column without a node."""
    tokens, parents = [], []
    for code in codes:
        if code < 0:
            break
        tokens.append(code & ((1 << _SHIFT) - 1))
        parents.append(code >> _SHIFT)
    return tokens, parents


def walk(
    manager: StructuredOutputManager,
    request: Any,
    tokens: list[int],
    parents: list[int],
    prune: bool,
) -> GrammarTree:
    """Ask a request's grammar about a tree of n nodes; its state is as before afterwards.

    parents: node numbers, 0 = root, parents before their children. prune: leave out what is
    refused.
    """
    assert manager.backend is not None
    bitmask = manager.backend.allocate_token_bitmask(1 + len(tokens)).fill_(_ANYTHING)
    grammar = request.structured_output_request.grammar
    matcher = getattr(grammar, "matcher", None)
    constrained = manager._get_constraint_bounds(request, ()).constraint_start == 0
    if constrained and not grammar.is_terminated() and hasattr(matcher, "traverse_draft_tree"):
        alive = _traverse(matcher, tokens, parents, bitmask)
    else:
        alive = _by_paths(manager, request, tokens, parents, bitmask)
    kept = [node for node in range(1, 1 + len(tokens)) if alive[node] or not prune]
    number = {node: i for i, node in enumerate([0, *kept])}
    return GrammarTree(
        tokens=[tokens[node - 1] for node in kept],
        parents=[number[parents[node - 1]] for node in kept],
        columns=[node - 1 for node in kept],
        rows=bitmask.numpy()[[0, *kept]],
        num_tokens=request.num_tokens,
        refused=alive.count(False),
    )


def _traverse(
    matcher: Any, tokens: list[int], parents: list[int], bitmask: torch.Tensor
) -> list[bool]:
    """xgrammar's own walk. Returns which of root and nodes are allowed."""
    size = 1 + len(tokens)
    child, sibling = [-1] * size, [-1] * size
    for node in range(size - 1, 0, -1):
        parent = parents[node - 1]
        child[node], sibling[node] = child[node], child[parent]
        child[parent] = node
    matcher.traverse_draft_tree(
        torch.tensor(child), torch.tensor(sibling), torch.tensor([0, *tokens]), bitmask
    )
    rows = bitmask.numpy()
    alive, ended = [True], [False]
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True), start=1):
        allowed = bool(rows[parent, token // 32] >> (token % 32) & 1)
        alive.append(alive[parent] and not ended[parent] and allowed)
        # A grammar that has come to its end allows nothing; vLLM asks it no more.
        ended.append(alive[node] and not rows[node].any())
    rows[ended] = _ANYTHING
    return alive


def _by_paths(
    manager: StructuredOutputManager,
    request: Any,
    tokens: list[int],
    parents: list[int],
    bitmask: torch.Tensor,
) -> list[bool]:
    """vLLM's own rows for every path to a leaf: any back end, and while a model still reasons."""
    fill = inspect.unwrap(StructuredOutputManager.grammar_bitmask)
    name = request.request_id
    alive = [True] + [False] * len(tokens)
    for leaf in set(range(1 + len(tokens))) - set(parents):
        path, node = list[int](), leaf
        while node:
            path.insert(0, node)
            node = parents[node - 1]
        valid = manager.validate_tokens(request, [tokens[node - 1] for node in path])
        rows = fill(manager, {name: request}, [name], {name: valid})
        nodes = [0, *path[: len(valid)]]
        bitmask[nodes] = torch.from_numpy(rows[: len(nodes)])
        for node in nodes:
            alive[node] = True
    return alive
