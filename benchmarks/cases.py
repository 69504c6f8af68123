# SPDX-License-Identifier: Apache-2.0
"""Every op at the shapes of a real model, with the check that must pass before it is timed.

Shapes are Qwen3-8B's and its DFlash drafter's (36 layers, 32/8 heads of 128, hidden 4096,
vocabulary 151,936, block of 16, so 15 drafted depths); `TINY` are the same cases small enough for
Triton's interpreter. The checks compare with the ops' references, whose own tests are in `tests/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bastion_kernels.budget import choose_budget_reference, choose_budget_triton
from bastion_kernels.gather import gather_rows_reference, gather_rows_triton
from bastion_kernels.kv_compact import KVCompactor
from bastion_kernels.topk_logprobs import topk_logprobs_reference, topk_logprobs_triton
from bastion_kernels.tree_attention import TreeAttentionWorkspace, tree_attention_triton
from bastion_kernels.tree_build import expand_best_first_reference, expand_best_first_triton
from bastion_kernels.tree_mask import ancestor_bits_reference, ancestor_bits_triton
from bastion_kernels.tree_verify import accept_path_reference, accept_path_triton
from benchmarks._harness import Bar, Case
from benchmarks.attention_baseline import baseline

POISON = -7777


@dataclass(frozen=True)
class Model:
    """Sizes of a target and its drafter, and of the batches to run."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    depth: int
    top_k: int
    page: int
    dtype: torch.dtype
    # trees of this many nodes, with this many requests, over these contexts
    nodes: tuple[int, ...]
    many: int
    contexts: tuple[int, ...]
    # repeated calls, and bytes that drive the last call's data out of the L2 cache
    repeats: int
    cold_bytes: int


QWEN3_8B = Model(
    36, 32, 8, 128, 4096, 151936, 15, 16, 16, torch.bfloat16,
    nodes=(64, 256), many=64, contexts=(1024, 8192, 32768), repeats=20, cold_bytes=2**28,
)  # fmt: skip
# float16, because Triton's interpreter multiplies bfloat16 wrongly
TINY = Model(
    2, 4, 2, 16, 40, 257, 4, 4, 8, torch.float16,
    nodes=(9,), many=3, contexts=(40,), repeats=1, cold_bytes=1,
)  # fmt: skip


def same(name: str, got: Tensor, want: Tensor) -> None:
    """Bit-equal, wherever they are."""
    if not torch.equal(got.cpu(), want.cpu()):
        raise AssertionError(f"{name} differs from its reference")


class DraftStage:
    """From a drafter's logits to a masked, budgeted tree: the ops and their buffers."""

    def __init__(self, model: Model, reqs: int, nodes: int, device: str) -> None:
        self.model, self.nodes = model, nodes
        g = torch.Generator(device).manual_seed(nodes + reqs)
        rows = reqs * model.depth
        logits = 3 * torch.randn(rows, model.vocab, generator=g, device=device)
        self.logits = logits.to(model.dtype)

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, POISON, dtype=dtype, device=device)

        self.tokens = empty(rows, model.top_k)
        self.logprobs = empty(rows, model.top_k, dtype=torch.float32)
        self.spine_only = torch.zeros(reqs, dtype=torch.bool, device=device)
        self.slots = torch.arange(reqs, device=device).flip(0)
        self.tree = (
            empty(reqs, nodes, dtype=torch.int64),
            empty(reqs, nodes),
            empty(reqs, nodes),
            empty(reqs, nodes, dtype=torch.float32),
            empty(reqs),
        )
        self.limits = torch.full((reqs,), nodes, dtype=torch.int32, device=device)
        # a staircase that rises faster than linearly
        steps = torch.arange(reqs * (nodes + 1) + 1, device=device) // 16
        self.cost = 5 + 0.05 * steps.float() ** 1.5
        self.num_verify = empty(reqs)
        self.bits = empty(reqs, nodes + 1, (nodes + 32) // 32)

    def topk(self) -> None:
        topk_logprobs_triton(self.logits, self.model.top_k, self.tokens, self.logprobs)

    def expand(self) -> None:
        expand_best_first_triton(*self._lattice(), self.spine_only, self.slots, *self.tree)

    def budget(self) -> None:
        choose_budget_triton(
            self.tree[3], self.slots, self.limits, self.cost, len(self.slots), self.num_verify
        )

    def mask(self) -> None:
        ancestor_bits_triton(self.tree[1], self.slots, self.bits)

    def all(self) -> None:
        self.topk()
        self.expand()
        self.budget()
        self.mask()

    def _lattice(self) -> tuple[Tensor, Tensor]:
        shape = (-1, self.model.depth, self.model.top_k)
        return self.tokens.view(shape), self.logprobs.view(shape)

    def check(self) -> None:
        """Each op against its reference, on what the op before it gave."""
        self.all()
        tokens, logprobs = self.tokens.cpu(), self.logprobs.cpu()
        want_tokens, want_logprobs = torch.empty_like(tokens), torch.empty_like(logprobs)
        topk_logprobs_reference(self.logits.cpu(), self.model.top_k, want_tokens, want_logprobs)
        same("topk_logprobs' tokens", tokens, want_tokens)
        torch.testing.assert_close(logprobs, want_logprobs, rtol=1e-5, atol=1e-5)
        tree = tuple(torch.full_like(x, POISON, device="cpu") for x in self.tree)
        lattice_tokens, lattice_logprobs = (x.cpu() for x in self._lattice())
        slots = self.slots.cpu()
        expand_best_first_reference(
            lattice_tokens, lattice_logprobs, self.spine_only.cpu(), slots, *tree
        )
        for got, want in zip(self.tree, tree, strict=True):
            same("expand_best_first", got, want)
        verify = torch.empty_like(self.num_verify, device="cpu")
        choose_budget_reference(
            tree[3], slots, self.limits.cpu(), self.cost.cpu(), len(slots), verify
        )
        same("choose_budget", self.num_verify, verify)
        bits = torch.empty_like(self.bits, device="cpu")
        ancestor_bits_reference(tree[1], slots, bits)
        same("ancestor_bits", self.bits, bits)


def draft_case(model: Model, reqs: int, nodes: int, part: str, device: str) -> Case:
    """The draft stage or one op of it. Its logits are hot, as the head has just written them."""
    stage = DraftStage(model, reqs, nodes, device)
    limit = {(1, 64): 60.0, (1, 256): 150.0}.get((reqs, nodes))
    return Case(
        name=f"draft {part} R={reqs} N={nodes}",
        check=stage.check,
        calls=[getattr(stage, part)] * model.repeats,
        bytes_moved=stage.logits.nbytes if part == "topk" else 0,
        bar=Bar("microseconds", limit) if part == "all" and limit else None,
    )


def walk_case(model: Model, reqs: int, nodes: int, device: str) -> Case:
    """The acceptance walk, down the first child of every node."""
    stage = DraftStage(model, reqs, nodes, device)
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
        accept_path_triton(*inputs, *outs)
        wants = tuple(torch.empty_like(x, device="cpu") for x in outs)
        accept_path_reference(*(x.cpu() for x in inputs), *wants)
        for got, want in zip(outs, wants, strict=True):
            same("accept_path", got, want)
        assert int(counts.max()) > 2, "no path to walk"

    return Case(
        name=f"walk R={reqs} N={nodes}",
        check=check,
        calls=[lambda: accept_path_triton(*inputs, *outs)] * model.repeats,
        bar=Bar("microseconds", 15.0) if (reqs, nodes) == (1, 64) else None,
    )


def compact_case(model: Model, reqs: int, device: str) -> Case:
    """A path of 9 tokens, 8 of which move, in the caches of all layers."""
    nodes = min(64, 4 * model.depth)
    rows, moves = nodes + 1, min(8, model.depth)
    variants = min(64, max(1, 2 * model.repeats // reqs))
    blocks = -(-variants * reqs * rows // model.page)
    width = 2 * model.head_dim
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
            reference.compact_reference(*step)
        for got, want in zip(compactor.entries, reference.entries, strict=True):
            same("KVCompactor", got[0], want[0])

    row_bytes = model.kv_heads * width * caches[0].element_size()
    return Case(
        name=f"compact {moves + 1}-token path, {model.layers} layers, R={reqs}",
        check=check,
        calls=[partial(compactor.compact_triton, *step) for step in steps],
        bytes_moved=2 * reqs * moves * model.layers * row_bytes,
        bar=Bar("microseconds", 15.0) if reqs == 1 else Bar("of copy", 0.6),
    )


def gather_case(model: Model, reqs: int, device: str) -> Case:
    """Five layers' hidden states along the accepted paths."""
    rows = 65 * reqs
    sources = [torch.randn(rows, model.hidden, device=device).to(model.dtype) for _ in range(5)]
    index = torch.randperm(rows)[: reqs * (model.depth + 1)].to(device)
    outs = [torch.empty_like(s[: len(index)]) for s in sources]

    def check() -> None:
        gather_rows_triton(sources, index, outs)
        wants = [torch.empty_like(out) for out in outs]
        gather_rows_reference(sources, index, wants)
        for got, want in zip(outs, wants, strict=True):
            same("gather_rows", got, want)

    return Case(
        name=f"gather 5 x {model.hidden}, {len(index)} rows",
        check=check,
        calls=[lambda: gather_rows_triton(sources, index, outs)] * model.repeats,
        bytes_moved=2 * sum(out.nbytes for out in outs),
    )


def _dense(query: Tensor, kv: Tensor, allowed: Tensor, dtype: torch.dtype, device: str) -> Tensor:
    """`[rows, Hq, d]` masked attention of one request over `[L, Hkv, 2d]`, all in `dtype`."""
    heads, dim = query.shape[1:]
    kv = kv.to(dtype).repeat_interleave(heads // kv.shape[1], dim=1)
    scores = torch.einsum("qhd,lhd->hql", query.to(dtype), kv[..., :dim]) * dim**-0.5
    scores.masked_fill_(~allowed.to(device), float("-inf"))
    return torch.einsum("hql,lhd->qhd", scores.softmax(-1), kv[..., dim:])


def attention_case(model: Model, reqs: int, nodes: int, context: int, device: str) -> Case:
    """Trees of `nodes` nodes over `context` cached rows, one layer after another."""
    rows, dim = nodes + 1, model.head_dim
    length = context + rows
    pages = -(-length // model.page)
    layer_bytes = 2 * reqs * length * model.kv_heads * 2 * dim
    layers = min(model.layers, max(1, model.cold_bytes // layer_bytes))
    g = torch.Generator().manual_seed(context + reqs)
    table = torch.randperm(reqs * pages, generator=g).view(reqs, pages).int().to(device)
    caches = [
        torch.randn(
            reqs * pages, model.page, model.kv_heads, 2 * dim, device=device, dtype=model.dtype
        ).transpose(1, 2)
        for _ in range(layers)
    ]
    queries = [
        torch.randn(reqs * rows, model.heads, dim, device=device, dtype=model.dtype)
        for _ in range(layers)
    ]
    out = torch.full_like(queries[0], POISON)
    starts = torch.arange(reqs + 1, dtype=torch.int32, device=device) * rows
    lengths = torch.full((reqs,), length, dtype=torch.int32, device=device)
    tails = torch.full((reqs,), rows, dtype=torch.int32, device=device)
    slots = torch.arange(reqs, device=device)
    parents = torch.stack(
        [torch.tensor([int(torch.randint(0, j + 1, (1,), generator=g)) for j in range(nodes)])
         for _ in range(reqs)]
    )  # fmt: skip
    sees = torch.eye(rows, dtype=torch.bool).repeat(reqs, 1, 1)
    for r in range(reqs):
        for j, parent in enumerate(parents[r].tolist()):
            sees[r, j + 1] |= sees[r, parent]
    bits = torch.zeros(reqs, rows, (rows + 31) // 32, dtype=torch.int32)
    ancestor_bits_reference(parents.int(), slots.cpu(), bits)
    bits = bits.to(device)
    workspace = TreeAttentionWorkspace(
        model.heads, model.kv_heads, dim, model.dtype, reqs * rows, reqs, device
    )
    workspace.plan(starts, lengths)

    def attend(query: Tensor, cache: Tensor) -> None:
        tree_attention_triton(
            query, cache, table, starts, lengths, tails, slots, bits, dim**-0.5, out,
            workspace=workspace,
        )  # fmt: skip

    def check() -> None:
        attend(queries[0], caches[0])
        for r in range(reqs):
            kv = caches[0][table[r].long()].transpose(1, 2).flatten(0, 1)[:length]
            allowed = torch.cat([torch.ones(rows, context, dtype=torch.bool), sees[r]], dim=1)
            mine = slice(r * rows, (r + 1) * rows)
            query = queries[0][mine]
            truth = _dense(query, kv, allowed, torch.float32, device)
            usual = (_dense(query, kv, allowed, model.dtype, device) - truth).abs().max()
            error = (out[mine].float() - truth).abs().max()
            if not error <= 2 * usual + 1e-5:
                raise AssertionError(f"tree_attention: error {error:.3g}, PyTorch's {usual:.3g}")

    pairs = list(zip(queries, caches, strict=True))
    name, rivals = "", []
    if device != "cpu":
        name, make = baseline(rows, length, reqs, table, starts, lengths)
        rivals = [make(*pair) for pair in pairs]
    return Case(
        name=f"attention R={reqs} N={nodes} context={context}",
        check=check,
        calls=[partial(attend, *pair) for pair in pairs],
        bytes_moved=layer_bytes + 2 * out.nbytes,
        flops=4 * reqs * rows * length * model.heads * dim,
        bar=Bar("of baseline", 1.15) if nodes == 64 else None,
        baseline=name,
        baseline_calls=rivals,
    )


def cases(model: Model, device: str) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Op and function that makes the case: one at a time, because of the memory they take."""
    for nodes in model.nodes:
        for part in ("all", "topk", "expand", "budget", "mask"):
            yield "draft", partial(draft_case, model, 1, nodes, part, device)
        yield "draft", partial(draft_case, model, model.many, nodes, "all", device)
    for reqs in (1, model.many):
        yield "walk", partial(walk_case, model, reqs, model.nodes[0], device)
        yield "compact", partial(compact_case, model, reqs, device)
        yield "gather", partial(gather_case, model, reqs, device)
    for context in model.contexts:
        for reqs in (1, 8):
            yield "attention", partial(attention_case, model, reqs, model.nodes[0], context, device)
