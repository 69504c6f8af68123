# SPDX-License-Identifier: Apache-2.0
"""vLLM's DFlash drafter, proposing a tree.

``DFlashSpeculator`` runs as it is, with its own gamma: the drafter sees a config copy in which
``num_speculative_tokens`` is the checkpoint's ``block_size - 1``, whatever the node budget is.
Two things change. The block's logits become a tree inside ``_generate_draft``, which is what
DFlash captures into its CUDA graph. And after a tree was verified the drafter is given only the
rows on the accepted path: in order, so that its context is the accepted text and not the tree,
and gamma + 1 of them a request, so that rejected nodes cost it nothing and its graph fits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from bastion_kernels import gather_rows
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from vllm_bastion.config import chain_view_of
from vllm_bastion.runner.host import copy_to_device
from vllm_bastion.runner.runtime import Runtime


class BastionSpeculator(DFlashSpeculator):
    """Built by the hook on ``init_speculator``. D = gamma, M = rows handed to the drafter."""

    _speculator_name = "BASTION"

    def __init__(self, runtime: Runtime, vllm_config: VllmConfig, device: torch.device) -> None:
        trees = runtime.trees
        super().__init__(chain_view_of(vllm_config), device)
        self.runtime, self.trees = runtime, trees
        # The runner reads this from the speculator, not from the config, to create the manager
        # that trims the scheduled placeholders to N*.
        self.enable_adaptive_verification = True
        self.use_acceptance_estimator = False
        self._path_row = torch.zeros(self.max_num_tokens, dtype=torch.int64, device=device)
        self._linear_row = torch.zeros_like(self._path_row)
        self._kept_positions = torch.zeros_like(self._path_row)
        self._kept_start = torch.zeros(self.max_num_reqs + 1, dtype=torch.int32, device=device)
        self._kept_hidden: list[torch.Tensor] = []

    # ---- the drafter's forward and the trees --------------------------------------------

    def capture(self) -> None:
        self.trees.bind_rows(None)
        super().capture()

    def _generate_draft(
        self,
        num_reqs: int,
        num_tokens_padded: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> None:
        hidden_states = self._run_model(
            num_tokens_padded,
            attn_metadata,
            slot_mappings,
            num_tokens_across_dp,
            cudagraph_runtime_mode,
        )
        num_sample = num_reqs * self.num_speculative_steps
        logits = self.compute_draft_logits(hidden_states[self.sample_indices[:num_sample]], 0)
        self.trees.grow(logits, num_reqs)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        *args: Any,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Draft, and build each request's tree. Returns the nodes' tokens, [R, N] int64."""
        num_reqs = input_batch.num_reqs
        self.trees.bind_rows(None if dummy_run else input_batch.idx_mapping)
        costs = self.runtime.costs
        if costs is not None and not dummy_run:
            costs.learn()
            costs.install(num_reqs, float(input_batch.num_computed_tokens_np.mean()))
        if self.trees.verifying and not dummy_run:
            hidden = aux_hidden_states or [last_hidden_states]
            input_batch, hidden, num_rejected = self._keep_accepted(
                input_batch, hidden, num_rejected
            )
            if aux_hidden_states:
                aux_hidden_states = hidden
            else:
                last_hidden_states = hidden[0]
        super().propose(
            input_batch,
            attn_metadata,
            slot_mappings,
            last_hidden_states,
            aux_hidden_states,
            num_sampled,
            num_rejected,
            *args,
            dummy_run=dummy_run,
            **kwargs,
        )
        if not dummy_run:
            self.trees.publish()
            if costs is not None:
                costs.timer.drafting_done()
        return self.trees.tokens[:num_reqs]

    # ---- the drafter's context ----------------------------------------------------------

    def _keep_accepted(
        self, batch: InputBatch, hidden: list[torch.Tensor], num_rejected: torch.Tensor
    ) -> tuple[InputBatch, list[torch.Tensor], torch.Tensor]:
        """Replace each request's tree rows by its accepted path, padded to at most D + 1 rows.

        hidden: tensors [T, H]. Returns the batch, the hidden states [M, H] and num_rejected [R]
        as the drafter is to see them: vLLM drops the last ``num_rejected`` rows of a request.
        """
        num_reqs, width = batch.num_reqs, self.trees.depth + 1
        start = batch.query_start_loc_np[: num_reqs + 1].astype(np.int64)
        tail = np.diff(batch.cu_num_logits_np[: num_reqs + 1]).astype(np.int64)
        before = np.diff(start) - tail  # rows of a prompt in front of the root
        kept_tail = np.minimum(tail, width)
        kept = before + kept_tail
        kept_start = np.zeros(num_reqs + 1, dtype=np.int32)
        np.cumsum(kept, out=kept_start[1:])
        total = int(kept_start[-1])
        # Of every kept row: its linear row, and where its path entry is (-1: none, keep linear).
        request = np.repeat(np.arange(num_reqs), kept)
        offset = np.arange(total) - kept_start[request]
        linear = start[request] + offset
        depth = offset - before[request]
        entry = np.where(depth >= 0, request * width + depth, -1)

        linear_row = copy_to_device(linear, self._linear_row[:total])
        path_row = copy_to_device(entry, self._path_row[:total])
        root_row = batch.query_start_loc[1 : num_reqs + 1] - torch.diff(batch.cu_num_logits)
        node = self.trees.path[:num_reqs].flatten()[path_row.clamp(min=0)]
        on_path = (path_row >= 0) & (node >= 0)
        root_of_row = root_row[path_row.clamp(min=0) // width]
        source = torch.where(on_path, (root_of_row + node).to(torch.int64), linear_row)

        if not self._kept_hidden:
            self._kept_hidden = [
                torch.empty(self.max_num_tokens, h.shape[1], dtype=h.dtype, device=h.device)
                for h in hidden
            ]
        kept_hidden = [out[:total] for out in self._kept_hidden]
        gather_rows(hidden, source, kept_hidden)
        # Positions stay linear: the path's i-th row has the place of the request's i-th row.
        positions = self._kept_positions[:total]
        torch.index_select(batch.positions, 0, linear_row, out=positions)
        dropped = copy_to_device(
            (tail - kept_tail).astype(np.int32), torch.empty_like(num_rejected)
        )
        kept_batch = replace(
            batch,
            num_tokens=total,
            num_tokens_after_padding=total,
            num_scheduled_tokens=kept.astype(np.int32),
            positions=positions,
            query_start_loc=copy_to_device(kept_start, self._kept_start[: num_reqs + 1]),
            query_start_loc_np=kept_start,
        )
        return kept_batch, kept_hidden, num_rejected - dropped
