# SPDX-License-Identifier: Apache-2.0
"""The n-gram drafts of all requests, in buffers that live as long as the engine.

The longest suffix of a request's text that occurs earlier in it, or in replies to other requests of
its group, is looked up (`bastion_kernels.draft.find_ngram`). What follows the latest occurrence,
the n-gram draft, becomes a branch of the request's tree. A tree still depends only on the drafter
and on emitted text, so verification stays exact.
"""

from __future__ import annotations

import numpy as np
import torch

from bastion_kernels import (
    add_prompt,
    find_ngram,
    keep_replies,
    mix_ngram,
    ngram_chances,
    ngram_priors,
    ngram_table,
)
from bastion_kernels.draft.ngram_table import LONGEST


class NgramDrafts:
    """What n-gram lookup keeps by request slot, and the rows that it adds to the candidates.

    Args:
        history: [S, most tokens] int32, tokens of each slot's request: prompt and reply.
        lengths: [S] int32, number of these tokens.
        depth: most tokens of an n-gram draft.
        num_nodes: N.
        step_tokens: most tokens of a step, and of the prompts that it adds to the table.
        num_kept: tokens of other requests' replies that are kept.
    """

    def __init__(
        self,
        history: torch.Tensor,
        lengths: torch.Tensor,
        depth: int,
        num_nodes: int,
        step_tokens: int,
        num_kept: int = 0,
    ) -> None:
        slots, device = len(lengths), lengths.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.history, self.lengths, self.depth = history, lengths, depth
        self._found = zeros(slots, dtype=torch.int64)
        self._last, self._drafts = zeros(slots, 3), zeros(slots, depth)
        self._table: torch.Tensor | None = None
        self._clock = torch.ones(1, dtype=torch.int64, device=device)
        # By slot: prompt tokens that are not in the table yet, and the number on its entries there.
        self._step_tokens, self._prompts = step_tokens, dict[int, int]()
        self._numbers = zeros(slots, dtype=torch.int64)
        # The ring of the last replies that ended, and the group of each of its tokens.
        self._num_kept, self._slots = num_kept, torch.arange(slots, device=device)
        self._ring, self._ring_groups = zeros(1), zeros(1, dtype=torch.int64)
        self._head = zeros(1, dtype=torch.int64)
        # By slot, if replies are kept: the request's group, and where its reply begins.
        self._groups, self._begins = zeros(slots, dtype=torch.int64), zeros(slots)
        self._slot_of: dict[str, int] = {}
        self._priors = ngram_priors(device)
        # [2, 66] trials and successes by match length, of all requests.
        self.counts = zeros(2, len(self._priors))
        self._arrived = zeros(1)
        self._depths = np.arange(depth)
        self._is_found = False  # whether `find` has found the drafts of the next `mix`
        # Most tokens of the next drafts, where every reply ends before `depth`; None: `depth`.
        self.longest: int | None = None
        # By row of the batch.
        self.tokens, self.places = zeros(slots, depth), zeros(slots, depth)
        self.rows = zeros(0, dtype=torch.float32)
        # [S, N] of every node: 1 the drafter's, 2 of the n-gram draft alone, 3 of both.
        self.sources = zeros(slots, num_nodes)

    def restart(self, slot: int, request: str, size: int, group: int = 0, begin: int = 0) -> None:
        """A new request takes the slot.

        size: number of its tokens. group: of the requests that see each other's replies; 0 for
        none. begin: where its reply begins.
        """
        self._slot_of[request], self._prompts[slot] = slot, size
        self._last[slot, :2], self._last[slot, 2] = 0, size
        self._clock += 1
        self._numbers[slot] = self._clock[0]
        if self._num_kept:
            self._groups[slot], self._begins[slot] = group, begin

    def add_prompts(self) -> None:
        """Add prompts to the table, each from its end, at most `step_tokens` tokens in all."""
        left = self._step_tokens
        while self._prompts and left:
            slot, end = self._prompts.popitem()
            begin = max(end - left, 0)
            if begin:
                self._prompts[slot] = begin
            left -= end - begin
            slots = self._slots[slot : slot + 1]
            add_prompt(self.history, slots, self._numbers, self._allocate(), begin, end)

    def leave(self, request: str, ended: bool) -> None:
        """A request gives up its slot. Its reply is kept if it has ended."""
        slot = self._slot_of.pop(request, None)
        if slot is None:
            return
        self._prompts.pop(slot, None)
        if not (ended and self._num_kept):
            return
        table = self._allocate()
        keep_replies(
            self.history, self.lengths, self._begins, self._groups, self._slots[slot : slot + 1],
            self._ring, self._ring_groups, self._head, table, self._clock,
        )  # fmt: skip

    @torch.inference_mode()  # the profiling run, which makes the ring, is in this mode
    def forget(self) -> None:
        """Drop the replies that are kept."""
        self._ring_groups.zero_()

    def _allocate(self) -> torch.Tensor:
        """The table. Table and ring are made in vLLM's profiling run, which counts their memory."""
        if self._table is None:
            device = self.lengths.device
            self._table = ngram_table(self.history.numel() + self._num_kept, device)
            if self._num_kept:
                self._ring = self._ring.new_zeros(self._num_kept)
                self._ring_groups = self._ring_groups.new_zeros(self._num_kept)
        return self._table

    def find(self, slots: torch.Tensor) -> None:
        """Find the n-gram drafts of the requests in `slots`, [R], before `mix` does."""
        table = self._allocate()
        find_ngram(
            self.history, self.lengths, slots, self._last, self.counts, self._groups, self._ring,
            self._ring_groups, table, self._clock, self._found, self._drafts,
        )  # fmt: skip
        self._is_found = True

    def give_up(self, slots: torch.Tensor) -> None:
        """Do not verify the drafts that `find` found; the next `find` still counts their successes.

        On the host: for a CPU.
        """
        rows, found, last = slots.numpy(), self._found.numpy(), self._last.numpy()
        last[rows, 0] = found[rows] & 0xFFFFFFFF
        last[rows, 1] = found[rows] >> 32
        last[rows, 2] = self.lengths.numpy()[rows]
        self._is_found = False

    def expected(self, slots: np.ndarray, most: np.ndarray) -> np.ndarray:
        """[R] accepted tokens expected of each request's n-gram draft, found for the next `mix`.

        On the host: for a CPU. most: [R] most nodes of each request.
        """
        if not self._is_found:
            self.find(torch.from_numpy(slots))
        codes = self._found.numpy()[slots] >> 32
        if not codes.any():
            return np.zeros(len(slots))
        chances = ngram_chances(self.counts.numpy(), self._priors.numpy())
        lengths = np.minimum((codes >> 1)[:, None] + self._depths, LONGEST)
        lengths += np.where(codes & 1, 0, LONGEST + 1)[:, None]
        scores = chances[lengths].cumprod(axis=1)
        scores[(codes == 0)[:, None] | (self._depths >= most[:, None])] = 0.0
        expected: np.ndarray = scores.sum(axis=1)
        return expected

    def mix(
        self,
        slots: torch.Tensor,
        tokens: torch.Tensor,
        logprobs: torch.Tensor,
        expected: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Find the n-gram drafts of a batch, and mix them into its candidates.

        Args:
            slots: [R] int64 request slots.
            tokens, logprobs: see `Trees.grow_candidates`; D may be 0.
            expected: [S], written: expected accepted tokens of each n-gram draft.

        Returns:
            The last arguments of `expand_best_first`.
        """
        reqs, width = len(slots), tokens.shape[2]
        longest = self.depth if self.longest is None else self.longest
        depth = min(self.depth, max(longest, tokens.shape[1], 1))
        size = len(self.lengths) * self.depth * (width + 1)
        if len(self.rows) < size:  # in vLLM's profiling run, so that its memory is counted
            self.rows = torch.zeros(size, device=self.lengths.device)
        rows = self.rows[: reqs * depth * (width + 1)].view(reqs, depth, width + 1)
        drafted, places = (
            buffer.view(-1)[: reqs * depth].view(reqs, depth)
            for buffer in (self.tokens, self.places)
        )
        if not self._is_found:
            self.find(slots)
        self._is_found = False
        mix_ngram(
            self._drafts, self.lengths, slots, self._found, self._last, self.counts, self._priors,
            self._arrived, tokens, logprobs, drafted, places, rows, expected,
        )  # fmt: skip
        return drafted, places, rows, self.sources
