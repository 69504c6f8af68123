# SPDX-License-Identifier: Apache-2.0
"""The draft trees of all requests, in buffers that live as long as the engine.

Sizes: R requests of a batch, S request slots (vLLM's ``max_num_reqs``), N nodes of a tree
(root not counted), D drafted depth (gamma), K candidates per depth, V vocabulary.

A tree is written at the end of step t by the drafter (``grow``), verified by the target in step
t+1 and gone after it. Nodes are numbered 0 = root, then by column + 1, in non-increasing path
score, so that any prefix of columns is a tree: trimming to the budget is cutting columns.

Everything of a request is kept in the row of its *slot* (vLLM's ``idx_mapping``), because the
batch of step t+1 may hold other requests than the batch of step t.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from bastion_kernels import (
    ancestor_bits,
    bind_slots,
    bind_tails,
    choose_budget,
    expand_best_first,
    expand_transitions,
    merge_topk,
    topk_logprobs,
    topk_partial,
    tree_positions,
)
from vllm_bastion.policy.host_mirror import HostMirror, to_device


@dataclass(frozen=True)
class Published:
    """What the host learns of a step at its end. By slot, [S]; views, see `HostMirror.read`."""

    # The batch whose trees were grown, [R] slots; None where the step did not draft.
    grown_for: np.ndarray | None
    # N* of those trees, and the accepted tokens that these nodes promise.
    num_verify: np.ndarray
    promised: np.ndarray
    # Tokens that the step emitted.
    emitted: np.ndarray


class Trees:
    """Trees by request slot, and what the current step knows about its rows.

    Args:
        max_num_reqs: S.
        max_num_tokens: most rows of one step (vLLM's ``max_num_batched_tokens``).
        num_nodes: N, vLLM's ``num_speculative_tokens``.
        depth: D, the drafter's ``block_size - 1``.
        top_k: K.
        budget: nodes verified of every request, or None for the controller's choice.
        device: where the target runs.
    """

    def __init__(
        self,
        *,
        max_num_reqs: int,
        max_num_tokens: int,
        num_nodes: int,
        depth: int,
        top_k: int,
        budget: int | None,
        device: torch.device,
    ) -> None:
        self.num_nodes, self.depth = num_nodes, depth
        self.budget, self.device = budget, device
        slots = max_num_reqs

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        # Of the drafter's batch, by row.
        self.row_slots = torch.full((slots,), -1, dtype=torch.int64, device=device)  # [R]
        # Of a slice of the vocabulary, with its mass in the last column; see `grow`.
        self._keys: torch.Tensor | None = None
        self.tokens = zeros(slots, num_nodes, dtype=torch.int64)
        # Of every request, by slot.
        self.parents = torch.full((slots, num_nodes), -1, dtype=torch.int32, device=device)
        self.depths = zeros(slots, num_nodes)
        self.log_rho = torch.full((slots, num_nodes), -torch.inf, device=device)
        self.size = zeros(slots)  # nodes the tree has
        self.bits = zeros(slots, num_nodes + 1, (num_nodes + 32) // 32)
        # N* of the next step, the accepted tokens that its nodes promise (the sum of their path
        # scores), and what the last step emitted, in one buffer: the host learns all by one copy.
        self._news = zeros(3, slots)
        self.num_verify = self._news[0]
        self.promised = self._news[1].view(torch.float32)
        self.emitted = self._news[2]
        self._limits = zeros(slots)  # for a budget chosen again, see `choose_again`
        # Of the step being run, by row (padding rows: slot -1, tail 0).
        self.step_slots = torch.full((slots,), -1, dtype=torch.int64, device=device)
        self.tail_lens = zeros(slots)
        self.positions = zeros(max_num_tokens, dtype=torch.int64)
        self.path = torch.full((slots, depth + 1), -1, dtype=torch.int32, device=device)
        # [R] on the host, exact in every mode: most nodes a row may have, rows that are no nodes.
        self.step_drafts = np.zeros(0, dtype=np.int32)
        self.step_rest = np.zeros(0, dtype=np.int32)
        self.changed = False  # whether trees lost columns since N* was chosen
        self.masking = False  # whether the step's attention reads the mask
        self.always_masking = False  # whether every step's does, trees or not
        self.verifying = False  # whether the step's acceptance moved along trees
        self.walked = False  # whether the step had an acceptance, so that `path` is its

        # Cost of a whole step by its target rows; a buffer, since the drafter's captured graph
        # reads it. Flat until something was measured: then the largest tree is the best one.
        self.cost_ms = torch.ones(max_num_tokens + 1, dtype=torch.float32, device=device)
        self.cost_ms_host = np.ones(max_num_tokens + 1, dtype=np.float32)
        self.base_rows = torch.zeros((), dtype=torch.int32, device=device)
        self._mirror = HostMirror(self._news)
        self._grown_for: dict[int, np.ndarray | None] = {}
        self._set_top_k(top_k)

    def use_chains(self) -> None:
        """Draft chains only. To be called before the first forward pass, dummy or captured."""
        self._set_top_k(1)

    def _set_top_k(self, top_k: int) -> None:
        self.top_k = top_k
        # A chain's rows are causal and accepted in place: nothing to mask, nothing to move.
        self.chains = top_k == 1
        # Fewer than N only where the whole lattice has fewer nodes.
        self.tree_size = min(self.num_nodes, sum(top_k**d for d in range(1, self.depth + 1)))
        shape = (len(self.row_slots), self.depth, top_k)
        self.top_tokens = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self.top_logprobs = torch.zeros(shape, device=self.device)

    # ---- end of step t: the drafter's logits become trees -------------------------------

    def bind_rows(
        self, idx_mapping: torch.Tensor | None = None, num_sampled: torch.Tensor | None = None
    ) -> None:
        """Name the slots the next ``grow`` writes to; none for a dummy batch.

        idx_mapping: [R] int64 slot of every row; num_sampled: [R] int32, what each has emitted.
        """
        if idx_mapping is None or num_sampled is None:
            idx_mapping, num_sampled = self.row_slots[:0], self.emitted[:0]
        bind_slots(idx_mapping, num_sampled, self.row_slots, self.base_rows, self.emitted)

    def grow(
        self,
        logits: torch.Tensor,
        num_reqs: int,
        vocab_start: int = 0,
        all_gather: Callable[[torch.Tensor], torch.Tensor] | None = None,
        draft_id_to_target_id: torch.Tensor | None = None,
    ) -> None:
        """Build the trees of a batch. Runs inside the drafter's captured graph.

        Args:
            logits: [num_reqs * D, V] of the drafter, the D positions of a request consecutive. With
                `all_gather` V is this rank's slice of the vocabulary, from token `vocab_start` on.
            all_gather: [M, 1, X] int64 of this rank -> [M, ranks, X] of all.
            draft_id_to_target_id: [V of the drafter] int64, where its vocabulary is a part of the
                target's: what a token's number lacks to the target's number of it ("d2t").
        """
        rows = slice(0, num_reqs)
        tokens, logprobs = self.top_tokens[rows], self.top_logprobs[rows]
        best = tokens.view(-1, self.top_k), logprobs.view(-1, self.top_k)
        if all_gather is None:
            topk_logprobs(logits, self.top_k, *best)
        else:
            keys, mass = _split(all_gather(self._best_of_slice(logits, vocab_start)[:, None]))
            merge_topk(keys, mass.contiguous(), *best)
        if draft_id_to_target_id is not None:
            tokens += draft_id_to_target_id[tokens.long()].to(torch.int32)
        slots = self.row_slots[rows]
        expand_best_first(tokens, logprobs, slots, *self._nodes(rows))
        self._take_stock(slots)

    def grow_transitions(self, candidates: torch.Tensor, scores: torch.Tensor) -> None:
        """Build the trees of a batch whose drafter knows the candidate above. In its graph as well.

        Args:
            candidates: [R, D, M] integer tokens of each depth, M >= K.
            scores: [R, D, M, M] of each candidate after each one of the depth above, the root's
                in row 0 of the first depth; a row's softmax is what its parent would draw from.
        """
        rows = slice(0, len(candidates))
        slots, logprobs = self.row_slots[rows], scores.float().log_softmax(-1)
        tokens = candidates.to(torch.int32)
        expand_transitions(tokens, logprobs, self.top_k, slots, *self._nodes(rows))
        self._take_stock(slots)

    def _nodes(self, rows: slice) -> tuple[torch.Tensor, ...]:
        return self.tokens[rows], self.parents, self.depths, self.log_rho, self.size

    def _take_stock(self, slots: torch.Tensor) -> None:
        """Mask and budget of trees that have just been grown."""
        ancestor_bits(self.parents, slots, self.bits)
        if self.budget is not None:
            torch.clamp(self.size, max=self.budget, out=self.num_verify)
        else:
            self._choose(slots, self.size, self.base_rows)

    def _best_of_slice(self, logits: torch.Tensor, vocab_start: int) -> torch.Tensor:
        """The K best of a slice and its mass, [M, K + 1] int64: one message between ranks."""
        if self._keys is None:  # in the profiling run, so that vLLM counts it
            shape = (len(self.row_slots) * self.depth, self.top_k + 1)
            self._keys = torch.zeros(shape, dtype=torch.int64, device=self.device)
        packed = self._keys[: len(logits)]
        keys, packed_mass = _split(packed)
        mass = torch.empty_like(packed_mass)
        topk_partial(logits, self.top_k, vocab_start, keys, mass)
        packed_mass.copy_(mass)
        return packed

    def _choose(
        self, slots: torch.Tensor, limits: torch.Tensor, base_rows: torch.Tensor | int
    ) -> None:
        choose_budget(
            self.log_rho,
            slots,
            limits,
            self.cost_ms,
            base_rows,
            self.num_verify,
            promised=self.promised,
        )

    def set_cost_ms(self, cost_ms: np.ndarray) -> None:
        """Install the cost (ms) of a whole step by its target rows: [max_num_tokens + 1]."""
        self.cost_ms_host = np.ascontiguousarray(cost_ms, dtype=np.float32)
        to_device(self.cost_ms_host, out=self.cost_ms)

    def publish(self, step: int, grown_for: np.ndarray | None) -> None:
        """Start the copy by which the host learns what came of a step, at its end.

        step: its number; grown_for: [R] slots of the batch that trees were grown for, if any.
        """
        self._grown_for = {s: g for s, g in self._grown_for.items() if s > step - 2}
        self._grown_for[step] = grown_for
        self._mirror.start_copy(step)

    def published(self, step: int) -> Published | None:
        """What `step`, one of the last two, published; waits for its copy if it has not arrived."""
        news = self._mirror.read(step)
        if news is None:
            return None
        num_verify, promised, emitted = news
        return Published(self._grown_for[step], num_verify, promised.view(np.float32), emitted)

    def keep(
        self,
        slots: torch.Tensor,
        sizes: torch.Tensor,
        columns: torch.Tensor,
        parents: torch.Tensor,
    ) -> None:
        """Move some columns to the front, the rest is gone; N* has to be chosen again.

        slots: [G] int64; sizes: [G] int64, columns that stay; columns: [G, N] int64 where they are;
        parents: [G, N] int64, as they are numbered then, -1 past the end.
        """
        self.parents[slots] = parents.to(torch.int32)
        gone = parents < 0
        self.depths[slots] = self.depths[slots].gather(1, columns).masked_fill(gone, 0)
        scores = self.log_rho[slots].gather(1, columns)
        self.log_rho[slots] = scores.masked_fill(gone, -torch.inf)
        self.size[slots] = sizes.to(torch.int32)
        ancestor_bits(self.parents, slots.contiguous(), self.bits)
        self.changed = True

    def choose_again(self, slots: np.ndarray, drafts: np.ndarray, base_rows: int) -> None:
        """Choose N* anew for a step with `base_rows` rows that are no nodes.

        slots: [R]; drafts: [R] most nodes each may have.
        """
        both = np.stack([slots, drafts])
        self.changed = False
        rows, most = to_device(both, dtype=torch.int64, device=self.device)
        self._limits[rows] = torch.minimum(self.size[rows], most.to(torch.int32))
        self._choose(rows, self._limits, base_rows)

    # ---- step t+1: the trees are verified -----------------------------------------------

    def begin_step(
        self, idx_mapping: torch.Tensor | None = None, tails: torch.Tensor | None = None
    ) -> None:
        """Bind the target's batch: which slot each row is, and how many of its rows are a tree.

        idx_mapping: [R] int64 slots, None for a dummy batch. tails: [R + 1] int32, vLLM's
        ``cu_num_logits``; None where every tail is a chain or a lone root, whose rows are causal
        and need no mask.
        """
        self.masking = tails is not None
        self.verifying = self.walked = False
        if idx_mapping is None:
            idx_mapping = self.step_slots[:0]
        bind_tails(idx_mapping, tails, self.step_slots, self.tail_lens)

    def place(
        self,
        positions: torch.Tensor,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        cu_num_logits: torch.Tensor,
    ) -> torch.Tensor:
        """Positions by depth of every row of the step, in the buffer the graphs read.

        positions: [T] int64, linear. Returns a [T] view.
        """
        out = self.positions[: positions.shape[0]]
        num_reqs = idx_mapping.shape[0]
        tree_positions(
            positions,
            self.depths,
            idx_mapping,
            query_start_loc[: num_reqs + 1],
            cu_num_logits,
            out,
        )
        return out


def _split(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [..., K] int64 and mass [...] fp32, of [..., K + 1] int64."""
    return packed[..., :-1], packed[..., -1:].view(torch.float32)[..., 0]
