# SPDX-License-Identifier: Apache-2.0
"""A lattice of prefixes for a drafter with a recurrent head.

Such a head (Domino's GRU) scores a candidate given all preceding tokens of the block, so each
prefix has its own scores, and there are too many prefixes to score all of them. They are scored
depth by depth: the B best prefixes by path score (the frontier) are kept with their states, and all
M candidates of the next depth are scored after each of them. The result is a lattice for
`best_first`, with a row for each kept prefix, and the row of every kept child.

If B is at least the number of nodes of the tree, the tree is exact: a depth has at most N of the N
best prefixes, and each of them is among the N best of its depth. With a smaller B a prefix may
become a leaf although its children belong in the tree.

On a CPU all rounds are one call, which multiplies a token or state once even if several prefixes
share it. On a GPU a round is eight launches for any B, M and batch: the embeddings of the
frontier's tokens, their product with the GRU's input weights, the GRU's gates (`advance_states`),
the products of the new states with the GRU's state weights and the first projection, scores and
choice (`extend_frontier`), and three to look up the chosen tokens. The last projection is read only
at the M candidates. PyTorch computes the products.

Shapes: P prefixes of a depth (1 at the root, then B), M candidates, E the projection's width, G the
state's, H the hidden size, V the drafter's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bastion_kernels.draft.frontier import extend_frontier
from bastion_kernels.draft.gru_states import advance_states
from bastion_kernels.op import Op, load, public


@dataclass(frozen=True)
class PrefixHead:
    """Domino's head: a GRU over the block's tokens, and a correction of every position's logits.

    weight_ih `[3G, H]` and weight_hh `[3G, G]` are `torch.nn.GRU`'s, without biases. `first`
    `[E, H + G]` and `last` `[V, E]` are the projections, with SiLU between them; the first one
    takes a position's hidden state and the GRU's state side by side. `corrected_from` is the first
    corrected depth, 0 for all.
    """

    weight_ih: Tensor
    weight_hh: Tensor
    first: Tensor
    last: Tensor
    corrected_from: int = 0

    def prepared(self) -> tuple[Tensor, ...]:
        """The weights in the layout for their device."""
        if self.first.is_cuda:
            return self.joined()
        packed: tuple[Tensor, ...] = load("bastion_kernels.cpu.prefix_lattice", "pack_head")(self)
        return packed

    def joined(self) -> tuple[Tensor, Tensor]:
        """Contiguous weights of the hidden state `[E, H]` and of the GRU's state `[3G + E, G]`."""
        hidden = self.weight_ih.shape[1]
        of_state = torch.cat([self.weight_hh, self.first[:, hidden:]])
        return self.first[:, :hidden].contiguous(), of_state


@dataclass(frozen=True)
class PrefixLattice:
    """Output of `recurrent_lattice`; see `expand_best_first`.

    Unused rows are not written. With the sizes of a published drafter (D 15, B 16, M 32) it takes
    60 KiB per request.
    """

    logprobs: Tensor
    """`[R, D, B, M]` fp32, log q of each candidate after each kept prefix of the depth above."""
    rows: Tensor
    """`[R, D, B, M]` int32, the row of each candidate's own children at the next depth, or -1."""

    @classmethod
    def empty(
        cls, reqs: int, depth: int, width: int, candidates: int, device: torch.device
    ) -> PrefixLattice:
        """An uninitialised lattice of R requests, D depths, B prefixes and M candidates."""
        shape = (reqs, depth, width, candidates)
        rows = torch.empty(shape, dtype=torch.int32, device=device)
        return cls(torch.empty(shape, dtype=torch.float32, device=device), rows)

    def of(self, reqs: int) -> PrefixLattice:
        """The first requests' part."""
        return PrefixLattice(self.logprobs[:reqs], self.rows[:reqs])


@dataclass(slots=True)
class RecurrentLattice(Op):
    """Score the best prefixes of every depth with a recurrent head.

    Raises:
        ValueError, TypeError: shapes, strides or dtypes do not fit together, or more prefixes or
            candidates than 255.
    """

    head: PrefixHead
    """The head's weights, of dtype T."""
    prepared: tuple[Tensor, ...]
    """`head.prepared()`."""
    embed: Callable[[Tensor], Tensor]
    """[any number] int64 target tokens -> their embeddings [.., H] of dtype T."""
    anchors: Tensor
    """`[R]` integers, the root's token."""
    tokens: Tensor
    """`[R, D, M]` int32, candidates by the target's ids."""
    ids: Tensor
    """`[R, D, M]` integers, the candidates by the drafter's ids (rows of `head.last`)."""
    base: Tensor
    """`[R, D, M]` fp32, their scores before the correction."""
    hidden: Tensor
    """`[R, D, H]` of dtype T, hidden states of the positions."""
    top_k: int
    """Most children of a prefix."""
    out: PrefixLattice
    """R requests, written; B is the number of prefixes kept at a depth."""

    def check(self) -> None:
        reqs, depth, width, candidates = self.out.rows.shape
        kind = self.head.weight_ih.dtype
        self.expect("anchors", (reqs,), torch.int32, torch.int64)
        self.expect("tokens", (reqs, depth, candidates), torch.int32)
        self.expect("ids", (reqs, depth, candidates), torch.int32, torch.int64)
        self.expect("base", (reqs, depth, candidates), torch.float32)
        self.expect("hidden", (reqs, depth, self.head.weight_ih.shape[1]), kind)
        if not (self.out.rows.is_contiguous() and self.out.logprobs.is_contiguous()):
            raise ValueError(f"{self.name}: out must be contiguous")
        if max(width, candidates) > 255 or self.top_k < 1:
            raise ValueError(
                f"{self.name}: B and M <= 255, top_k >= 1, got {width}, {candidates}, {self.top_k}"
            )

    def reference(self) -> None:
        """All rounds with the references of both ops."""
        self._rounds(self.head.joined(), advance_states.reference, extend_frontier.reference)

    def triton(self) -> None:
        """All rounds with PyTorch's products and the kernels of both ops."""
        self._rounds(self.prepared, advance_states.triton, extend_frontier.triton)

    def _rounds(
        self, joined: tuple[Tensor, ...], advance: Callable[..., None], extend: Callable[..., None]
    ) -> None:
        reqs, depth, width, _ = self.out.rows.shape
        head, device = self.head, self.tokens.device
        of_hidden, of_state = joined
        size, kind = head.weight_hh.shape[1], head.weight_ih.dtype
        positions = F.linear(self.hidden, of_hidden)  # [R, D, E]
        rows_of_last = F.embedding(self.ids.long(), head.last)  # [R, D, M, E]

        def made(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        logprobs, rows = self.out.logprobs, self.out.rows
        states = torch.zeros(reqs, 1, size, dtype=kind, device=device)
        products = torch.zeros(reqs, 1, of_state.shape[0], dtype=kind, device=device)
        costs = torch.zeros(reqs, 1, dtype=torch.float32, device=device)
        parents = torch.zeros(reqs, 1, dtype=torch.int32, device=device)
        last = self.anchors.view(reqs, 1).long()
        for d in range(depth):
            prefixes = last.shape[1]
            inputs = F.linear(self.embed(last.flatten()), head.weight_ih).view(reqs, prefixes, -1)
            old, states = states, made(reqs, prefixes, size, dtype=kind)
            advance(inputs, products, old, parents, states)
            products = F.linear(states, of_state)
            parents, children = made(reqs, width), made(reqs, width)
            above, costs = costs, made(reqs, width, dtype=torch.float32)
            extend(
                self.base[:, d], positions[:, d], products[..., 3 * size :], rows_of_last[:, d],
                above, self.top_k, d >= head.corrected_from, logprobs[:, d, :prefixes],
                rows[:, d, :prefixes], parents, children, costs,
            )  # fmt: skip
            last = self.tokens[:, d].gather(1, children.long()).long()


recurrent_lattice = public(
    RecurrentLattice, cpu="bastion_kernels.cpu.prefix_lattice", device_of="tokens"
)
