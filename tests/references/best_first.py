# SPDX-License-Identifier: Apache-2.0
"""Algorithm 1: the open node of largest rho, N times."""

from __future__ import annotations

import ctypes
import math
from itertools import takewhile
from typing import NamedTuple

import torch

from bastion_kernels.draft.best_first import ExpandBestFirst
from tests.references.declare import of


class _Child(NamedTuple):
    logprob: float
    token: int
    row: int  # of its own children in the lattice, -1 = unknown
    source: int  # 1 the drafter, 2 the copy, 3 both


class _Node(NamedTuple):
    token: int
    parent: int
    depth: int
    cost: float  # -log rho in fp32
    source: int
    children: list[_Child]


def _children(op: ExpandBestFirst, r: int, depth: int, row: int, source: int) -> list[_Child]:
    """The possible children of a node, in their order."""
    (_, depths, width), copied, place = op.candidates.shape, None, -1
    tokens = op.candidates[r, depth].tolist() if depth < depths else [0] * width
    if source > 1 and op.ngram_tokens is not None:
        if depth == op.ngram_tokens.shape[1]:
            return []
        logprobs, place = op.ngram_rows[r, depth].tolist(), int(op.places[r, depth])
        tokens, copied = [*tokens, int(op.ngram_tokens[r, depth])], 3 if place < width else 2
    elif row < 0 or depth >= depths:
        return []
    else:
        logprobs = op.logprobs[r, depth, row].tolist()
    found = []
    for c, (logprob, token) in enumerate(zip(logprobs, tokens, strict=True)):
        after = -1
        if depth < depths and c < width:
            after = 0 if op.stateless else c
        own = copied if copied is not None and c == place else 1
        found.append(_Child(min(logprob, 0.0), token, after, own))
    if copied is not None or not op.stateless:  # else they are in order
        found.sort(key=lambda x: math.inf if math.isnan(x.logprob) else -x.logprob)
    return list(takewhile(lambda child: child.logprob > -math.inf, found[: op.top_k]))


@of(ExpandBestFirst)
def expand_best_first(op: ExpandBestFirst) -> None:
    limit = op.out_tokens.shape[1]
    for r, slot in enumerate(op.slots.tolist()):
        if slot < 0:
            continue
        source = 2 if op.ngram_tokens is not None and op.places[r, 0] >= 0 else 1
        nodes = [_Node(0, -1, 0, 0.0, source, _children(op, r, 0, 0, source))]
        while len(nodes) <= limit:
            # a node's best child that has not been taken; ties go to the lower parent
            frontier = [
                (ctypes.c_float(node.cost - node.children[0].logprob).value, number)
                for number, node in enumerate(nodes)
                if node.children
            ]
            if not frontier or min(frontier)[0] == math.inf:
                break
            cost, parent = min(frontier)
            _, token, row, source = nodes[parent].children.pop(0)
            depth = nodes[parent].depth + 1
            children = _children(op, r, depth, row, source)
            nodes.append(_Node(token, parent, depth, cost, source, children))
        columns = [*nodes[1:], *[_Node(0, -1, 0, math.inf, 0, [])] * (limit + 1 - len(nodes))]
        op.num_nodes[slot] = len(nodes) - 1
        op.out_tokens[r] = torch.tensor([node.token for node in columns])
        op.parents[slot] = torch.tensor([node.parent for node in columns])
        op.depths[slot] = torch.tensor([node.depth for node in columns])
        op.log_rho[slot] = torch.tensor([0.0 - node.cost for node in columns])
        if op.ngram_tokens is not None:
            op.sources[slot] = torch.tensor([node.source for node in columns])
