# SPDX-License-Identifier: Apache-2.0
"""The states of all gated delta layers: those that a step reads, and those that it writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bastion_kernels import (
    LayerStates,
    StateBlocks,
    find_commits,
    find_states,
    gated_delta_commit,
    short_conv_commit,
)
from vllm_bastion.attention.gated_delta import CommitInputs, states_of


class RecurrentStates:
    """The states of at most S requests, in G groups of layers; L = most nodes of a path.

    FULL graphs read `rows` and `starts`, so they are written and never replaced.

    Args:
        layers: all layers by name.
        groups: the group of each layer, by name.
        blocks: the groups' block tables.
        saved: what the layers' forward passes leave for the commit, in the order of `layers`.
        max_rows: most tree rows of a step.
        root_only: [S, L + 1] int32, paths of the root alone: 0, then -1.
    """

    def __init__(
        self,
        layers: Mapping[str, Any],
        groups: Mapping[str, int],
        blocks: StateBlocks,
        saved: CommitInputs,
        max_rows: int,
        root_only: torch.Tensor,
    ) -> None:
        self._layers, self._groups, self.blocks = layers, groups, blocks
        self._saved, self._max_rows, self._root_only = saved, max_rows, root_only
        self._states: tuple[LayerStates, LayerStates] | None = None
        most = len(root_only)
        # [G, S] int32 states before the step, and [S] int32 tokens that they have seen.
        self.rows = root_only.new_full((len(blocks.tables), most), -1)
        self._computed = self.rows[0].clone()
        # [S + 1] int32 first tree row of each request.
        self.starts = root_only.new_zeros(most + 1)
        # [2, G, S] int32 states that the commits write, and [2, S] int32 their paths' lengths.
        self._into_rows = self.rows.repeat(2, 1, 1)
        self._lengths = self._into_rows[:, 0].clone()

    def find(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        decodes: torch.Tensor | None = None,
    ) -> None:
        """Find the states that a step starts from, and number its tree rows.

        Args:
            query_start_loc: [R + 1] int32 first row of each request.
            seq_lens: [R] int32 tokens of each request with this step's.
            decodes: [R] bool, which requests have tree rows; None: all.
        """
        find_states(
            query_start_loc,
            seq_lens,
            decodes,
            self.blocks,
            self._max_rows,
            self.starts,
            self._computed,
            self.rows,
        )

    def commit(self, num_reqs: int, cu_num_logits: torch.Tensor, path: torch.Tensor | None) -> None:
        """Move the states of all layers along accepted paths.

        Args:
            num_reqs: R, of the batch of the last `find`.
            cu_num_logits: [R + 1] int32 first logits row of each request.
            path: [R or more, L + 1] int32 nodes of the accepted path; None: only the root.
        """
        conv_states, states = self._bound()
        saved, path = self._saved, (self._root_only if path is None else path)[:num_reqs]
        rows = self.rows[:, :num_reqs]
        into_rows, lengths = rows[None], None
        if self.blocks.block_size:
            into_rows, lengths = self._into_rows[..., :num_reqs], self._lengths[:, :num_reqs]
            find_commits(self._computed[:num_reqs], path, self.blocks, into_rows, lengths)
        starts = self.starts[: num_reqs + 1]
        where = (rows, into_rows, starts, cu_num_logits, path, lengths)
        gated_delta_commit(saved.key, saved.updates, saved.decays, states, *where)
        short_conv_commit(saved.conv_input, conv_states, *where)

    def _bound(self) -> tuple[LayerStates, LayerStates]:
        """The states' addresses; vLLM binds its caches after the groups are known."""
        if self._states is None:
            both = zip(*(states_of(layer) for layer in self._layers.values()), strict=True)
            groups = [self._groups[name] for name in self._layers]
            conv_states, states = (LayerStates(by_layer, groups) for by_layer in both)
            self._states = conv_states, states
        return self._states

    def warm_up(self) -> None:
        """Bind the caches, and compile the ops."""
        nothing = self._root_only.new_zeros(2)
        for decodes in (None, nothing[:1].bool()):
            self.find(nothing, nothing[:1], decodes)
        self.commit(1, nothing, None)
