# SPDX-License-Identifier: Apache-2.0
"""Every op at the shapes of a real model, with the check that must pass before it is timed.

Shapes are Qwen3-8B's and its DFlash drafter's (36 layers, 32/8 heads of 128, hidden 4096,
vocabulary 151,936, block of 16, so 15 drafted depths). `TINY` has the same cases, small enough for
Triton's interpreter. The checks compare with the ops' references, whose own tests are in `tests/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bastion_kernels import (
    accept_path,
    ancestor_bits,
    choose_budget,
    expand_best_first,
    gather_rows,
    topk_logprobs,
)
from bastion_kernels.accept.kv_compact import KVCompactor
from benchmarks.gpu.attention_case import attention_case
from benchmarks.gpu.harness import FA3, OF_COPY, US, Bar, Case, Entry
from benchmarks.gpu.shapes import POISON, Model
from tests import references


def same(name: str, got: Tensor, want: Tensor) -> None:
    if not torch.equal(got.cpu(), want.cpu()):
        raise AssertionError(f"{name} differs from its reference")


def check_op(op: Any, inputs: Sequence[Any], outs: Sequence[Tensor]) -> None:
    """Assert that an op's outputs on the device are its reference's on the host, bit by bit."""
    for out in outs:
        out.fill_(POISON)
    op.triton(*inputs, *outs)
    wants = [torch.full_like(out, POISON, device="cpu") for out in outs]
    references.OF[op.__name__](*(x.cpu() if isinstance(x, Tensor) else x for x in inputs), *wants)
    for got, want in zip(outs, wants, strict=True):
        same(op.__name__, got, want)


class DraftStage:
    """From a drafter's logits to a masked, budgeted tree: the ops and their buffers."""

    def __init__(self, model: Model, reqs: int, nodes: int, top_k: int, device: str) -> None:
        self.depth, self.top_k = model.depth, top_k
        g = torch.Generator(device).manual_seed(nodes + reqs)
        rows = reqs * model.depth
        logits = 3 * torch.randn(rows, model.vocab, generator=g, device=device)
        self.logits = logits.to(model.dtype)

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, POISON, dtype=dtype, device=device)

        self.tokens = empty(rows, top_k)
        self.logprobs = empty(rows, top_k, dtype=torch.float32)
        self.slots = torch.arange(reqs, device=device).flip(0)
        self.tree = (
            empty(reqs, nodes, dtype=torch.int64),
            empty(reqs, nodes),
            empty(reqs, nodes),
            empty(reqs, nodes, dtype=torch.float32),
            empty(reqs),
        )
        # a head's scores of each candidate given each predecessor
        shape = (reqs, model.depth, top_k, top_k)
        self.scores = 3 * torch.randn(shape, generator=g, device=device)
        self.limits = torch.full((reqs,), nodes, dtype=torch.int32, device=device)
        # a staircase that rises faster than linearly
        steps = torch.arange(reqs * (nodes + 1) + 1, device=device) // 16
        self.cost = 5 + 0.05 * steps.float() ** 1.5
        self.num_verify = empty(reqs)
        self.bits = empty(reqs, nodes + 1, (nodes + 32) // 32)

    def topk(self) -> None:
        topk_logprobs.triton(self.logits, self.top_k, self.tokens, self.logprobs)

    def expand(self) -> None:
        expand_best_first.triton(*self._lattice(), self.top_k, self.slots, *self.tree)

    def branch(self) -> None:
        expand_best_first.triton(*self._branching(), *self.tree)

    def budget(self) -> None:
        choose_budget.triton(*self._sizes(), self.num_verify)

    def mask(self) -> None:
        ancestor_bits.triton(self.tree[1], self.slots, self.bits)

    def all(self) -> None:
        self.topk()
        self.expand()
        self.budget()
        self.mask()

    def _lattice(self) -> tuple[Tensor, Tensor]:
        shape = (-1, self.depth, self.top_k)
        return self.tokens.view(shape), self.logprobs.view(shape)[:, :, None]

    def _branching(self) -> tuple[Any, ...]:
        return self._lattice()[0], self.scores.log_softmax(-1), self.top_k, self.slots

    def _sizes(self) -> tuple[Any, ...]:
        return self.tree[3], self.slots, self.limits, self.cost, len(self.slots)

    def check(self) -> None:
        """Check each op against its reference, on the output of the op before it."""
        self.all()
        # plain PyTorch on the device, because the host takes seconds at these sizes
        tokens, logprobs = torch.empty_like(self.tokens), torch.empty_like(self.logprobs)
        references.topk_logprobs(self.logits, self.top_k, tokens, logprobs)
        same("topk_logprobs' tokens", self.tokens, tokens)
        torch.testing.assert_close(self.logprobs, logprobs, rtol=1e-5, atol=1e-5)
        branching = tuple(torch.empty_like(x) for x in self.tree)
        check_op(expand_best_first, self._branching(), branching)
        check_op(expand_best_first, (*self._lattice(), self.top_k, self.slots), self.tree)
        check_op(choose_budget, self._sizes(), (self.num_verify,))
        check_op(ancestor_bits, (self.tree[1], self.slots), (self.bits,))


def draft_case(model: Model, reqs: int, nodes: int, top_k: int, part: str, device: str) -> Case:
    """The draft stage, or one of its ops, over logits that the head has just written."""
    stage = DraftStage(model, reqs, nodes, top_k, device)
    megabytes = stage.logits.nbytes / 1e6
    return Case(
        check=stage.check,
        calls=[getattr(stage, part)] * model.repeats,
        bytes_moved=stage.logits.nbytes if part == "topk" else 0,
        memory=f"as after the head: the same {megabytes:.0f} MB of logits every time",
    )


def walk_case(model: Model, reqs: int, nodes: int, device: str) -> Case:
    stage = DraftStage(model, reqs, nodes, model.top_ks[0], device)
    stage.all()
    node_ids = torch.arange(reqs * (nodes + 1), device=device) + 1000
    sampled = torch.zeros_like(node_ids)
    for r, slot in enumerate(stage.slots.tolist()):
        for column, parent in reversed(list(enumerate(stage.tree[1][slot].tolist()))):
            if parent >= 0:
                sampled[r * (nodes + 1) + parent] = node_ids[r * (nodes + 1) + column + 1]
    cu = torch.arange(reqs + 1, device=device, dtype=torch.int32) * (nodes + 1)
    width = model.depth + 1
    path = torch.full((reqs, width), POISON, dtype=torch.int32, device=device)
    tokens = torch.full((reqs, width), POISON, dtype=torch.int64, device=device)
    counts = torch.full((reqs,), POISON, dtype=torch.int32, device=device)
    inputs = (sampled, node_ids, stage.tree[1], stage.slots, cu)
    outs = (path, tokens, counts)

    def check() -> None:
        check_op(accept_path, inputs, outs)
        assert int(counts.max()) > 2, "no path to walk"

    walk = partial(accept_path.triton, *inputs, *outs)
    return Case(check=check, calls=[walk] * model.repeats)


def compact_case(model: Model, reqs: int, device: str) -> Case:
    """A path of 9 tokens, 8 of which move, in the caches of all layers."""
    nodes = min(64, 4 * model.depth)
    rows, moves = nodes + 1, min(8, model.depth)
    width = 2 * model.head_dim
    bytes_moved = 2 * reqs * moves * model.layers * model.kv_heads * width * model.dtype.itemsize
    # every call of a graph compacts other requests
    variants = min(64, max(model.least_calls, -(-model.cold_bytes // bytes_moved)))
    blocks = -(-variants * reqs * rows // model.page)
    caches = [
        torch.randint(
            -(2**15), 2**15, (blocks, model.page, model.kv_heads, width),
            dtype=torch.int16, device=device,
        ).view(model.dtype).transpose(1, 2)
        for _ in range(model.layers)
    ]  # fmt: skip
    compactor = KVCompactor(caches, [0] * len(caches))
    starts = torch.arange(reqs + 1, dtype=torch.int32, device=device) * rows
    path = torch.full((reqs, model.depth + 1), -1, dtype=torch.int32, device=device)
    path[:, : moves + 1] = 2 * torch.arange(moves + 1, device=device)
    slots = torch.randperm(blocks * model.page)[: variants * reqs * rows].to(device)
    steps = [(s[None], starts, starts, path) for s in slots.view(variants, -1)]

    def check() -> None:
        expected = [cache.clone() for cache in caches]
        for step in steps:
            compactor.compact_triton(*step)
        reference = KVCompactor(expected, [0] * len(expected))
        for step in steps:
            references.compact_caches(reference, *step)
        for got, want in zip(compactor.entries, reference.entries, strict=True):
            same("KVCompactor", got[0], want[0])

    return Case(
        check=check,
        calls=[partial(compactor.compact_triton, *step) for step in steps],
        bytes_moved=bytes_moved,
        memory=f"cold: {variants} times {bytes_moved / 1e6:.0f} MB in turn",
    )


def gather_case(model: Model, reqs: int, device: str) -> Case:
    """Five layers' hidden states along the accepted paths."""
    rows, count = 65 * reqs, reqs * (model.depth + 1)
    sources = [torch.randn(rows, model.hidden, device=device).to(model.dtype) for _ in range(5)]
    indices = [torch.randperm(rows)[:count].to(device) for _ in range(model.least_calls)]
    outs = [torch.empty_like(s[:count]) for s in sources]
    steps = [partial(gather_rows.triton, sources, index, outs) for index in indices]

    def check() -> None:
        for index, step in zip(indices, steps, strict=True):
            for out in outs:
                out.fill_(POISON)
            step()
            wants = [torch.empty_like(out) for out in outs]
            references.gather_rows(sources, index, wants)
            for got, want in zip(outs, wants, strict=True):
                same("gather_rows", got, want)

    megabytes = sum(source.nbytes for source in sources) / 1e6
    return Case(
        check=check,
        calls=steps * (-(-model.repeats // len(steps))),
        bytes_moved=2 * sum(out.nbytes for out in outs),
        memory=f"other rows every time, of {megabytes:.0f} MB, into the same outputs",
    )


# The bars in microseconds, by nodes of a single request's tree
_DRAFT_US = {64: 60.0, 256: 150.0}
_WALK_US = 15.0
_COMPACT_US, _COMPACT_OF_COPY = 15.0, 0.6
ATTENTION_RATIO = 1.15


def _draft_entries(model: Model, device: str) -> list[Entry]:
    found = []
    for nodes in model.nodes:
        for top_k in model.top_ks:
            parts = ["expand", "branch"]
            parts += ["topk"] * (nodes == model.nodes[0])
            parts += ["budget", "mask"] * (top_k == model.top_ks[0])
            for reqs, part in ((1, "all"), *((1, part) for part in parts), (model.many, "all")):
                name = f"draft {part} R={reqs} N={nodes} K={top_k}"
                make = partial(draft_case, model, reqs, nodes, top_k, part, device)
                limit = _DRAFT_US.get(nodes) if (reqs, part) == (1, "all") else None
                found.append(Entry("draft", name, make, limit and Bar(US, limit)))
    return found


def cases(model: Model, device: str, quick: bool = False) -> list[Entry]:
    nodes = model.nodes[0]
    found = _draft_entries(model, device)
    for reqs in (1, model.many):
        alone = reqs == 1
        name = f"walk R={reqs} N={nodes}"
        walk = partial(walk_case, model, reqs, nodes, device)
        found.append(Entry("walk", name, walk, Bar(US, _WALK_US) if alone else None))
        name = f"compact {min(9, model.depth + 1)}-token path, {model.layers} layers, R={reqs}"
        bar = Bar(US, _COMPACT_US) if alone else Bar(OF_COPY, _COMPACT_OF_COPY)
        found.append(Entry("compact", name, partial(compact_case, model, reqs, device), bar))
        name = f"gather 5 x {model.hidden}, {reqs * (model.depth + 1)} rows"
        found.append(Entry("gather", name, partial(gather_case, model, reqs, device)))
    for context in model.contexts:
        for reqs in (1, 8):
            name = f"attention R={reqs} N={nodes} context={context}"
            make = partial(attention_case, model, reqs, nodes, context, device)
            found.append(Entry("attention", name, make, Bar(FA3, ATTENTION_RATIO)))
    return [entry for entry in found if entry.bar or not quick]
