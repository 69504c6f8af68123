# SPDX-License-Identifier: Apache-2.0
"""The ops of a step at the shapes of a real model, attention aside."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bastion_kernels import (
    KVCaches,
    accept_path,
    ancestor_bits,
    bind_slots,
    compact_caches,
    context_rows,
    expand_best_first,
    gather_rows,
    take_best,
    topk_logprobs,
    tree_positions,
)
from benchmarks.ops.checks import POISON, check_op
from benchmarks.ops.sizes import Model
from benchmarks.ops.timing import OF_COPY, US, Bar, Case, Entry

# From a drafter's logits to a masked tree of the step's size.
_DRAFT = ("topk", "expand", "size", "mask")
STEP = (*_DRAFT, "bind_tails", "positions", "walk", "context_rows", "gather", "bind_slots")
# The bars in microseconds; of the draft by nodes of a single request's tree.
_DRAFT_US = {64: 60.0, 256: 150.0}
_WALK_US = 15.0
_COMPACT_US, _COMPACT_OF_COPY = 15.0, 0.6


class Step:
    """The buffers of a step, and its ops by name: what to call, its arguments and its outputs.

    A request's target draws the tokens of a path of its tree.
    """

    def __init__(self, model: Model, reqs: int, nodes: int, top_k: int, device: str) -> None:
        g = torch.Generator(device).manual_seed(nodes + reqs)
        depth, rows, width = model.depth, reqs * (nodes + 1), model.depth + 1
        on = partial(torch.arange, device=device)
        shape = (reqs, depth, top_k)

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, POISON, dtype=dtype, device=device)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, device=device)

        longs, floats = partial(empty, dtype=torch.int64), partial(empty, dtype=torch.float32)
        logits = (3 * normal(reqs * depth, model.vocab)).to(model.dtype)
        tokens, logprobs = empty(*shape), floats(*shape)
        flat = tokens.flatten(0, 1), logprobs.flatten(0, 1)
        slots, limits = on(reqs).flip(0), empty(reqs).fill_(nodes)
        ones, none, scratch = empty(reqs).fill_(1), empty(reqs).zero_(), empty(reqs + 1).zero_()
        trees = [
            (longs(reqs, nodes), empty(reqs, nodes), empty(reqs, nodes), floats(reqs, nodes),
             empty(reqs))
            for _ in range(2)
        ]  # fmt: skip
        tree, parents, depths, scores = trees[0], trees[0][1], trees[0][2], trees[0][3]
        # a head's scores of each candidate given each predecessor
        transitions = (3 * normal(*shape, top_k)).log_softmax(-1)
        bits, sizes = empty(reqs, nodes + 1, (nodes + 32) // 32), (empty(reqs + 1), empty(reqs + 1))
        topk_logprobs(logits, top_k, *flat)
        expand_best_first(tokens, logprobs[:, :, None], top_k, slots, *tree)
        fed, starts = on(rows) + 1000, on(reqs + 1, dtype=torch.int32) * (nodes + 1)
        drawn, positions = torch.zeros_like(fed), on(rows)
        for r, slot in enumerate(slots.tolist()):
            for column, parent in reversed(list(enumerate(parents[slot].tolist()))):
                if parent >= 0:
                    drawn[r * (nodes + 1) + parent] = fed[r * (nodes + 1) + column + 1]
        path, sampled, counts = empty(reqs, width), longs(reqs, width), empty(reqs)
        walk = (drawn, fed, parents, slots, starts, path, sampled, counts)
        accept_path(*walk)
        assert int(counts.max()) > 2, "no path to walk"
        context, count = on(reqs + 1, dtype=torch.int32) * width, reqs * width
        source, kept, rejected = longs(count), longs(count), empty(reqs)
        states = [normal(rows, model.hidden).to(model.dtype) for _ in range(5)]
        gathered = [torch.empty_like(state[:count]) for state in states]
        chosen = torch.randperm(rows, generator=torch.Generator().manual_seed(1))[:count]
        bound, tails, placed = longs(reqs), empty(reqs), longs(rows)
        lengths = empty(reqs).fill_(nodes + 1)
        self.ops: dict[str, tuple[Any, Sequence[Any], Sequence[Tensor]]] = {
            "topk": (topk_logprobs, (logits, top_k, *flat), flat),
            "expand": (
                expand_best_first, (tokens, logprobs[:, :, None], top_k, slots, *tree), tree
            ),
            "expand by transitions": (
                expand_best_first, (tokens, transitions, top_k, slots, *trees[1]), trees[1]
            ),
            "size": (
                take_best,
                (scores, slots, limits, ones, reqs * nodes // 2, *sizes, scratch),
                sizes,
            ),
            "mask": (ancestor_bits, (parents, slots, bits), (bits,)),
            "bind_tails": (bind_slots, (slots, bound, tails, starts), (bound, tails)),
            "positions": (
                tree_positions, (positions, depths, slots, starts, lengths, placed), (placed,)
            ),
            "walk": (accept_path, walk, walk[5:]),
            "context_rows": (
                context_rows,
                (context, none, starts, starts, path, positions, counts, none, source, kept,
                 rejected, count),
                (source, kept, rejected),
            ),
            "gather": (gather_rows, (states, chosen.to(device), gathered), gathered),
            "bind_slots": (bind_slots, (slots, bound), (bound,)),
        }  # fmt: skip
        self.device = device

    def check(self, *names: str) -> None:
        """Check ops against their references, each on the output of the ops before it."""
        for name in names:
            op, args, outs = self.ops[name]
            # a host takes seconds for the logits of many requests
            check_op(op, args, outs, device=self.device if name == "topk" else "cpu")

    def run(self, *names: str) -> None:
        for name in names:
            op, args, _ = self.ops[name]
            op(*args)


def step_case(
    model: Model, reqs: int, nodes: int, top_k: int, names: Sequence[str], device: str
) -> Case:
    """Ops of a step in turn, over what was written just before, as in a step."""
    step = Step(model, reqs, nodes, top_k, device)
    return Case(partial(step.check, *names), [partial(step.run, *names)] * model.repeats)


def compact_case(model: Model, reqs: int, device: str) -> Case:
    """A path of 9 tokens, 8 of which move, in the caches of all layers."""
    rows, moves = min(64, 4 * model.depth) + 1, min(8, model.depth)
    width = 2 * model.head_dim
    bytes_moved = 2 * reqs * moves * model.layers * model.kv_heads * width * model.dtype.itemsize
    # every call of a graph compacts other requests
    variants = min(64, max(model.least_calls, -(-model.cold_bytes // bytes_moved)))
    blocks = -(-variants * reqs * rows // model.page)
    shape = (blocks, model.page, model.kv_heads, width)
    caches = [
        torch.randint(-99, 99, shape, device=device).to(model.dtype).transpose(1, 2)
        for _ in range(model.layers)
    ]
    compact = partial(compact_caches, KVCaches(caches, [0] * len(caches)))
    starts = torch.arange(reqs + 1, dtype=torch.int32, device=device) * rows
    path = torch.full((reqs, model.depth + 1), -1, dtype=torch.int32, device=device)
    path[:, : moves + 1] = 2 * torch.arange(moves + 1, device=device)
    slots = torch.randperm(blocks * model.page)[: variants * reqs * rows].to(device)
    steps = [(s[None], starts, starts, path) for s in slots.view(variants, -1)]

    def rows_of(cache: Tensor) -> Tensor:  # [slots, Hkv, 2d], a copy
        return cache.transpose(1, 2).flatten(0, 1).clone()

    def check() -> None:
        wants, own = [rows_of(cache) for cache in caches], slots.view(-1, rows)
        for step in steps:
            compact(*step)
        for cache, want in zip(caches, wants, strict=True):
            want[own[:, : moves + 1]] = want[own[:, : 2 * moves + 1 : 2]]
            if not torch.equal(rows_of(cache), want):
                raise AssertionError("compact_caches moved other rows")

    return Case(check, [partial(compact, *step) for step in steps], bytes_moved)


def step_cases(model: Model, device: str) -> list[Entry]:
    """The draft stage at all sizes, and each op of a step at the first."""
    found, first = [], (model.nodes[0], model.top_ks[0])
    for reqs in model.reqs:
        alone = reqs == 1
        for size in [(n, k) for n in model.nodes for k in model.top_ks]:
            parts = [("draft", _DRAFT)]
            if size == first:
                parts += [(name, (name,)) for name in (*STEP, "expand by transitions")]
            for name, names in parts:
                limit = {"draft": _DRAFT_US.get(size[0]), "walk": _WALK_US}.get(name)
                make = partial(step_case, model, reqs, *size, names, device)
                text = f"{model.name} {name} R={reqs} N={size[0]} K={size[1]}"
                found.append(Entry(name, text, make, Bar(US, limit) if limit and alone else None))
        bar = Bar(US, _COMPACT_US) if alone else Bar(OF_COPY, _COMPACT_OF_COPY)
        text = f"{model.name} compact {model.layers} layers, R={reqs}"
        make = partial(compact_case, model, reqs, device)
        found.append(Entry("compact", text, make, bar))
    return found
