# SPDX-License-Identifier: Apache-2.0
"""Checks draft trees against grammars, in the engine core, where the grammars live.

The worker sends a tree over vLLM's channel for draft tokens, with each token's parent encoded into
it (`encode`). `walk` checks each node with the grammar: whether it may follow its parent, and which
tokens may follow it. Refused nodes stay, and are never accepted, because their parent's bitmask row
does not allow their token.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.structured_output import StructuredOutputManager

from vllm_bastion.attached import GrammarTree

_SHIFT = 32
_ANYTHING = -1  # a word of a bitmask row that allows everything


def encode(tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    """Tokens and their parents' node numbers (0 = root) in one int64 each; -1 without a node.

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
) -> GrammarTree:
    """Walk a request's grammar along a tree of n nodes; leaves the grammar's state unchanged.

    parents: node numbers, 0 = root, parents before their children.
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
    return GrammarTree(tokens, bitmask.numpy(), request.num_tokens, alive.count(False))


def _traverse(
    matcher: Any, tokens: list[int], parents: list[int], bitmask: torch.Tensor
) -> list[bool]:
    """xgrammar's own tree walk. Returns whether root and nodes are allowed, [1 + n]."""
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
        # A terminated grammar allows nothing, and vLLM no longer consults it.
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
    """vLLM's own bitmask rows along every path to a leaf.

    For back ends without a tree walk, and while a model is still reasoning.
    """
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
