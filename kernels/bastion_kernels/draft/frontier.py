# SPDX-License-Identifier: Apache-2.0
"""A lattice of prefixes for a drafter whose head carries a state along the branch.

Such a head (Domino's GRU) scores a candidate given all tokens of the block before it, so each
prefix has scores of its own, and the prefixes are too many to score them all. They are scored depth
by depth. Of every depth the B best prefixes by path score are kept, the frontier, each with its
state, and all M candidates of the next depth are scored after each of them. The result is the
lattice of `transitions`, with a row for each kept prefix in place of one for each candidate, and
the row of every child that was kept. Best-first expansion takes the tree from it.

With B at least the nodes of the tree nothing is lost: the N best prefixes of all have at most N at
a depth, and each of these is among the N best of its depth. With a smaller B a prefix may be a leaf
of the tree although its children deserve a place.

A round of `recurrent_lattice` is eight launches, whatever B, M and the batch are: the embeddings of
the frontier's tokens, their product with the GRU's input weights, the GRU's gates
(`advance_states`), the products of the new states with the GRU's state weights and the first
projection's, scores and choice (`extend_frontier`), and three to look up the chosen tokens. The
last projection is read at the M candidates alone. The products are PyTorch's.

Shapes: P prefixes of a depth (1 at the root, then B), M candidates, E the projection's width, G the
state's, H the hidden size, V the drafter's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bastion_kernels.draft.best_first import cost_of
from bastion_kernels.op import Op, public
from bastion_kernels.triton_or_none import tl, triton

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MOST_SCORES = 8192  # prefixes times candidates, in the registers of one program


def _power(number: int) -> int:
    """The next power of two, without Triton."""
    return 1 << (number - 1).bit_length()


@triton.jit
def _advance_kernel(
    inputs_ptr,
    gates_ptr,
    states_ptr,
    parents_ptr,
    out_ptr,
    gates_row,
    G: tl.constexpr,
    OLD: tl.constexpr,
    NEW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (R * NEW, blocks of G)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < G
    above = row // NEW * OLD + tl.load(parents_ptr + row)
    inputs_ptr += row * 3 * G + column
    gates_ptr += above * gates_row + column
    old = tl.load(states_ptr + above * G + column, mask=real, other=0.0).to(tl.float32)
    reset = tl.load(inputs_ptr, mask=real, other=0.0).to(tl.float32)
    reset += tl.load(gates_ptr, mask=real, other=0.0).to(tl.float32)
    update = tl.load(inputs_ptr + G, mask=real, other=0.0).to(tl.float32)
    update += tl.load(gates_ptr + G, mask=real, other=0.0).to(tl.float32)
    new = tl.load(inputs_ptr + 2 * G, mask=real, other=0.0).to(tl.float32)
    hidden = tl.load(gates_ptr + 2 * G, mask=real, other=0.0).to(tl.float32)
    new += hidden / (1.0 + tl.exp(-reset))
    new = 2.0 / (1.0 + tl.exp(-2.0 * new)) - 1.0  # tanh
    weight = 1.0 / (1.0 + tl.exp(-update))
    state = (1.0 - weight) * new + weight * old
    tl.store(out_ptr + row * G + column, state.to(out_ptr.dtype.element_ty), mask=real)


@dataclass(slots=True)
class AdvanceStates(Op):
    """Advance GRU states (without biases) by the last token of each prefix, as `torch.nn.GRU`.

    Raises:
        ValueError, TypeError: shapes, strides or dtypes do not fit together.
    """

    inputs: Tensor
    """`[R, P, 3G]`, the input weights' product with each prefix's last token."""
    gates: Tensor
    """`[R, O, 3G or more]`, the state weights' product with the O old states; further columns are
    not read."""
    states: Tensor
    """`[R, O, G]`, the old states."""
    parents: Tensor
    """`[R, P]` int32, the old state that each prefix continues."""
    out_states: Tensor
    """`[R, P, G]`, written."""

    def check(self) -> None:
        reqs, width, size = self.out_states.shape
        old, columns = self.gates.shape[1:]
        self.expect("inputs", (reqs, width, 3 * size), *_FLOATS)
        self.expect("gates", (reqs, old, columns), self.inputs.dtype)
        self.expect("states", (reqs, old, size), self.inputs.dtype)
        self.expect("parents", (reqs, width), torch.int32)
        self.expect("out_states", (reqs, width, size), self.inputs.dtype)
        for name in ("inputs", "gates", "states", "parents", "out_states"):
            if not getattr(self, name).is_contiguous():
                raise ValueError(f"{self.name}: {name} must be contiguous")
        if columns < 3 * size:
            raise ValueError(f"{self.name}: gates must have 3G = {3 * size} columns, got {columns}")

    def reference(self) -> None:
        """Gate by gate in fp32."""
        size = self.out_states.shape[2]
        parents = self.parents.long()[..., None]
        gates = self.gates[..., : 3 * size].gather(1, parents.expand(-1, -1, 3 * size)).float()
        old = self.states.gather(1, parents.expand(-1, -1, size)).float()
        reset_in, update_in, new_in = self.inputs.float().chunk(3, dim=-1)
        reset, update, new = gates.chunk(3, dim=-1)
        new = torch.tanh(new_in + torch.sigmoid(reset_in + reset) * new)
        update = torch.sigmoid(update_in + update)
        self.out_states.copy_((1 - update) * new + update * old)

    def triton(self) -> None:
        """One launch."""
        reqs, width, size = self.out_states.shape
        if reqs == 0:
            return
        block = min(1024, _power(size))
        _advance_kernel[(reqs * width, triton.cdiv(size, block))](
            self.inputs,
            self.gates,
            self.states,
            self.parents,
            self.out_states,
            self.gates.shape[2],
            G=size,
            OLD=self.gates.shape[1],
            NEW=width,
            BLOCK=block,
        )


@triton.jit
def _kth(bits, K: tl.constexpr, OF_ALL: tl.constexpr):
    """The K-th smallest of int32 keys [X, Y] >= 0: of each row, or with OF_ALL of all; [X]."""
    least = tl.sum(bits * 0, 1)
    for step in range(31):
        raised = least | (1 << (30 - step))
        below = tl.sum((bits < raised[:, None]).to(tl.int32), 1)
        if OF_ALL:
            below = tl.sum(below, 0) + below * 0
        least = tl.where(below < K, raised, least)
    return least


@triton.jit
def _extend_kernel(
    base_ptr,
    position_ptr,
    latent_ptr,
    weight_ptr,
    costs_ptr,
    logprobs_ptr,
    rows_ptr,
    parents_ptr,
    children_ptr,
    out_costs_ptr,
    base_r,
    position_r,
    latent_r,
    latent_p,
    weight_r,
    logprobs_r,
    rows_r,
    P: tl.constexpr,
    M: tl.constexpr,
    E: tl.constexpr,
    B: tl.constexpr,
    TOP_K: tl.constexpr,
    CORRECTED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Grid: (R,). Element [p, m] belongs to candidate m after prefix p."""
    req = tl.program_id(0).to(tl.int64)
    prefix, candidate = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_M)
    is_prefix, is_candidate = prefix < P, candidate < M
    real = is_prefix[:, None] & is_candidate[None, :]
    base = tl.load(base_ptr + req * base_r + candidate, mask=is_candidate, other=float("-inf"))
    scores = tl.zeros([BLOCK_P, BLOCK_M], tl.float32)
    if CORRECTED:
        latent_ptr += req * latent_r + prefix[:, None] * latent_p
        weight_ptr += req * weight_r + candidate[None, :] * E
        for start in range(0, E, BLOCK_E):
            column = start + tl.arange(0, BLOCK_E)
            inside = column < E
            mask = is_prefix[:, None] & inside[None, :]
            latent = tl.load(latent_ptr + column[None, :], mask=mask, other=0.0).to(tl.float32)
            position = tl.load(position_ptr + req * position_r + column, mask=inside, other=0.0)
            latent += position.to(tl.float32)[None, :]
            latent = latent / (1.0 + tl.exp(-latent))
            mask = inside[:, None] & is_candidate[None, :]
            weight = tl.load(weight_ptr + column[:, None], mask=mask, other=0.0)
            scores += tl.dot(latent.to(weight.dtype), weight, input_precision="ieee")
    scores += base[None, :]
    scores = tl.where(is_candidate[None, :], scores, float("-inf"))
    shifted = scores - tl.max(scores, 1)[:, None]
    logprobs = shifted - tl.log(tl.sum(tl.exp(shifted), 1))[:, None]
    entry = prefix[:, None] * M + candidate[None, :]
    tl.store(logprobs_ptr + req * logprobs_r + entry, logprobs, mask=real)

    none = tl.full([], float("inf"), tl.float32).to(tl.int32, bitcast=True)
    above = tl.load(costs_ptr + req * P + prefix, mask=is_prefix, other=float("inf"))
    own = cost_of(logprobs)
    bits = tl.where(real, own.to(tl.int32, bitcast=True), none)
    if TOP_K < M:
        limit = _kth(bits, TOP_K, False)[:, None]
        ties = (bits == limit).to(tl.int32)
        room = TOP_K - tl.sum((bits < limit).to(tl.int32), 1)[:, None]
        allowed = (bits < limit) | ((ties > 0) & (tl.cumsum(ties, 1) <= room))
    else:
        allowed = real
    cost = above[:, None] + own
    bits = tl.where(allowed & real, cost.to(tl.int32, bitcast=True), none)
    limit = _kth(bits, B, True)[:, None]
    ties = (bits == limit).to(tl.int32)
    count = tl.sum(ties, 1)
    rank = (tl.cumsum(count, 0) - count)[:, None] + tl.cumsum(ties, 1)
    below = tl.sum(tl.sum((bits < limit).to(tl.int32), 1), 0)
    kept = ((bits < limit) | ((ties > 0) & (rank <= B - below))) & (bits < none)
    one = kept.to(tl.int32)
    count = tl.sum(one, 1)
    place = (tl.cumsum(count, 0) - count)[:, None] + tl.cumsum(one, 1) - 1
    tl.store(rows_ptr + req * rows_r + entry, tl.where(kept, place, -1), mask=real)
    used = tl.sum(count, 0)
    nothing = tl.zeros([BLOCK_P, BLOCK_M], tl.int32)
    tl.store(parents_ptr + req * B + place, nothing + prefix[:, None], mask=kept)
    tl.store(children_ptr + req * B + place, nothing + candidate[None, :], mask=kept)
    tl.store(out_costs_ptr + req * B + place, cost, mask=kept)
    place = tl.arange(0, BLOCK_B)
    unused = (place >= used) & (place < B)
    zeros = tl.zeros([BLOCK_B], tl.int32)
    tl.store(parents_ptr + req * B + place, zeros, mask=unused)
    tl.store(children_ptr + req * B + place, zeros, mask=unused)
    tl.store(out_costs_ptr + req * B + place, zeros.to(tl.float32) + float("inf"), mask=unused)


@dataclass(slots=True)
class ExtendFrontier(Op):
    """Score the candidates of a depth after each prefix, and keep the B best new prefixes.

    The score of a candidate is its base score plus its row of the last projection times
    `silu(position + latent)` of the prefix; the softmax over the M candidates gives log q. A path's
    cost is -log rho, summed in fp32 from the root down as in `best_first`. The new prefixes are in
    the order of their parents and candidates; of equal costs the first in that order are kept.
    Places without a prefix have parent 0, child 0 and cost +inf.

    Raises:
        ValueError, TypeError: shapes, strides or dtypes do not fit together, or more prefixes,
            candidates or scores than the kernel holds (255, 255 and 8192).
    """

    base: Tensor
    """`[R, M]` fp32, rows at any stride, scores without the head's correction."""
    position: Tensor
    """`[R, E]`, rows at any stride, what the depth itself adds to every prefix's `latent`."""
    latent: Tensor
    """`[R, P, E]`, the first projection of each prefix's state; a slice of longer rows."""
    weight: Tensor
    """`[R, M, E]`, requests at any stride, rows of the last projection."""
    costs: Tensor
    """`[R, P]` fp32, -log rho of each prefix; +inf for none."""
    top_k: int
    """Most children of a prefix."""
    corrected: bool
    """Whether the head corrects this depth; else `base` alone counts."""
    logprobs: Tensor
    """`[R, P, M]` fp32, requests at any stride, log q, written."""
    rows: Tensor
    """`[R, P, M]` int32, requests at any stride, each child's place among the new prefixes, or -1;
    written."""
    parents: Tensor
    """`[R, B]` int32, prefix that each new prefix continues, written."""
    children: Tensor
    """`[R, B]` int32, its candidate, written."""
    out_costs: Tensor
    """`[R, B]` fp32, -log rho of each new prefix, written."""

    def check(self) -> None:
        reqs, prefixes, candidates = self.logprobs.shape
        width, kept = self.latent.shape[2], self.parents.shape[1]
        self.expect("base", (reqs, candidates), torch.float32)
        self.expect("position", (reqs, width), *_FLOATS)
        self.expect("latent", (reqs, prefixes, width), self.position.dtype)
        self.expect("weight", (reqs, candidates, width), self.position.dtype)
        self.expect("costs", (reqs, prefixes), torch.float32)
        for name in ("costs", "parents", "children", "out_costs"):
            if not getattr(self, name).is_contiguous():
                raise ValueError(f"{self.name}: {name} must be contiguous")
        self.expect("logprobs", (reqs, prefixes, candidates), torch.float32)
        self.expect("rows", (reqs, prefixes, candidates), torch.int32)
        self.expect("parents", (reqs, kept), torch.int32)
        self.expect("children", (reqs, kept), torch.int32)
        self.expect("out_costs", (reqs, kept), torch.float32)
        for name in ("weight", "logprobs", "rows"):
            tensor: Tensor = getattr(self, name)
            if tensor.shape[1] > 1 and tensor.stride(1) != tensor.shape[2]:
                raise ValueError(f"{self.name}: a request's {name} must be contiguous")
        most = max(prefixes, kept, candidates)
        padded = _power(prefixes) * _power(candidates)
        if most > 255 or padded > _MOST_SCORES or self.top_k < 1:
            raise ValueError(
                f"{self.name}: P, B and M <= 255, P * M <= {_MOST_SCORES}, top_k >= 1, got "
                f"{prefixes}, {kept}, {candidates}, {self.top_k}"
            )

    def score(self) -> None:
        """Write log q of every candidate after every prefix."""
        scores = self.base[:, None]
        if self.corrected:
            latent = F.silu(self.position[:, None].float() + self.latent.float())
            latent = latent.to(self.weight.dtype).float()
            scores = scores + latent @ self.weight.float().mT
        self.logprobs.copy_(scores.log_softmax(-1).expand_as(self.logprobs))

    def reference(self) -> None:
        """Stable sorts."""
        self.score()
        reqs, _, candidates = self.logprobs.shape
        own = (-self.logprobs).clamp(min=0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
        places = own.sort(dim=-1, stable=True).indices.argsort(dim=-1)
        costs = self.costs[..., None] + own.masked_fill(places >= self.top_k, torch.inf)
        kept = self.parents.shape[1]
        self.rows.fill_(-1)
        self.parents.zero_()
        self.children.zero_()
        self.out_costs.fill_(torch.inf)
        for req in range(reqs):
            best = costs[req].flatten().sort(stable=True)
            number = int(best.values[:kept].isfinite().sum())
            chosen = best.indices[:number].sort().values
            self.rows[req].view(-1)[chosen] = torch.arange(number, dtype=torch.int32)
            self.parents[req, :number] = (chosen // candidates).int()
            self.children[req, :number] = (chosen % candidates).int()
            self.out_costs[req, :number] = costs[req].flatten()[chosen]

    def triton(self) -> None:
        """One launch, one program per request."""
        reqs, prefixes, candidates = self.logprobs.shape
        if reqs == 0:
            return
        width, kept = self.latent.shape[2], self.parents.shape[1]
        _extend_kernel[(reqs,)](
            self.base,
            self.position,
            self.latent,
            self.weight,
            self.costs,
            self.logprobs,
            self.rows,
            self.parents,
            self.children,
            self.out_costs,
            self.base.stride(0),
            self.position.stride(0),
            self.latent.stride(0),
            self.latent.stride(1),
            self.weight.stride(0),
            self.logprobs.stride(0),
            self.rows.stride(0),
            P=prefixes,
            M=candidates,
            E=width,
            B=kept,
            TOP_K=self.top_k,
            CORRECTED=self.corrected,
            BLOCK_P=max(16, _power(prefixes)),
            BLOCK_M=max(16, _power(candidates)),
            BLOCK_E=32,
            BLOCK_B=_power(kept),
        )


advance_states = public(AdvanceStates)
extend_frontier = public(ExtendFrontier, cpu="bastion_kernels.cpu.draft", device_of="costs")


@dataclass(frozen=True)
class PrefixHead:
    """Domino's head: a GRU over the block's tokens, and a correction of every position's logits.

    weight_ih `[3G, H]` and weight_hh `[3G, G]` are `torch.nn.GRU`'s, without biases. `first`
    `[E, H + G]` and `last` `[V, E]` are the projections, with SiLU between them; the first one
    takes a position's hidden state and the GRU's state side by side. `corrected_from` is the first
    depth that is corrected, 0 for all.
    """

    weight_ih: Tensor
    weight_hh: Tensor
    first: Tensor
    last: Tensor
    corrected_from: int = 0

    def prepared(self) -> tuple[Tensor, Tensor]:
        """Contiguous weights of the hidden state `[E, H]` and of the GRU's state `[3G + E, G]`."""
        hidden = self.weight_ih.shape[1]
        of_state = torch.cat([self.weight_hh, self.first[:, hidden:]])
        return self.first[:, :hidden].contiguous(), of_state


@dataclass(frozen=True)
class PrefixLattice:
    """What `recurrent_lattice` returns; see `expand_transitions`."""

    logprobs: Tensor
    """`[R, D, B, M]` fp32, log q of each candidate after each kept prefix of the depth above."""
    rows: Tensor
    """`[R, D, B, M]` int32, the row of each candidate's own children at the next depth, or -1."""


def recurrent_lattice(
    head: PrefixHead,
    prepared: tuple[Tensor, Tensor],
    embed: Callable[[Tensor], Tensor],
    anchors: Tensor,
    tokens: Tensor,
    ids: Tensor,
    base: Tensor,
    hidden: Tensor,
    width: int,
    top_k: int,
) -> PrefixLattice:
    """Score the best prefixes of every depth with a head that carries a state.

    Args:
        head: the head's weights, of dtype T.
        prepared: `head.prepared()`.
        embed: [R * P] int64 target tokens -> [R * P, H] of dtype T.
        anchors: [R] integers, the root's token.
        tokens: [R, D, M] int32, candidates by the target's ids.
        ids: [R, D, M] integers, the same by the drafter's ids, the rows of `head.last`.
        base: [R, D, M] fp32, their scores before the correction.
        hidden: [R, D, H] of dtype T, hidden states of the positions.
        width: B, most prefixes kept at a depth.
        top_k: most children of a prefix.
    """
    reqs, depth, candidates = tokens.shape
    of_hidden, of_state = prepared
    size, kind, device = head.weight_hh.shape[1], head.weight_ih.dtype, tokens.device
    positions = F.linear(hidden, of_hidden)  # [R, D, E]
    rows_of_last = F.embedding(ids.long(), head.last)  # [R, D, M, E]

    def made(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    logprobs = made(reqs, depth, width, candidates, dtype=torch.float32)
    rows = made(reqs, depth, width, candidates)
    states = torch.zeros(reqs, 1, size, dtype=kind, device=device)
    products = torch.zeros(reqs, 1, of_state.shape[0], dtype=kind, device=device)
    costs = torch.zeros(reqs, 1, dtype=torch.float32, device=device)
    parents = torch.zeros(reqs, 1, dtype=torch.int32, device=device)
    last = anchors.view(reqs, 1).long()
    for d in range(depth):
        prefixes = last.shape[1]
        inputs = F.linear(embed(last.flatten()), head.weight_ih).view(reqs, prefixes, -1)
        old, states = states, made(reqs, prefixes, size, dtype=kind)
        advance_states(inputs, products, old, parents, states)
        products = F.linear(states, of_state)
        parents, children = made(reqs, width), made(reqs, width)
        above, costs = costs, made(reqs, width, dtype=torch.float32)
        extend_frontier(
            base[:, d], positions[:, d], products[..., 3 * size :], rows_of_last[:, d], above,
            top_k, d >= head.corrected_from, logprobs[:, d, :prefixes], rows[:, d, :prefixes],
            parents, children, costs,
        )  # fmt: skip
        last = tokens[:, d].gather(1, children.long()).long()
    return PrefixLattice(logprobs, rows)
