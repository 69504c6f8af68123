# SPDX-License-Identifier: Apache-2.0
"""Verification: draw a token at every node and follow the drawn tokens down the tree.

A row's token is drawn from the target's fully processed distribution (argmax at temperature 0). If
a child of the node has that token, the path goes on there; else the token is the bonus token.
The emitted tokens have the target's distribution, because the tree was built before they were
drawn. A draw's noise is keyed by (seed, position) as in plain decoding, so a seeded request gets
the tokens of plain decoding.

Log-probabilities are reported for the rows on the accepted path.
"""

from __future__ import annotations

from functools import cached_property, partial

import numpy as np
import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.worker.gpu.async_utils import async_copy_to_np
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    RejectionSampler,
    get_max_chunk_logits,
)

from bastion_kernels import accept_path
from bastion_kernels.bound import BoundOp
from vllm_bastion.config import BastionSpeculativeConfig, is_lagged
from vllm_bastion.engine.logprobs import PathLogprobs
from vllm_bastion.engine.processors import follow_ancestors, has_unknown
from vllm_bastion.engine.runtime import Runtime
from vllm_bastion.platform import current_host


class TreeRejectionSampler(RejectionSampler):
    """vLLM's ``RejectionSampler`` (chunks, masks) with verification along a tree's paths."""

    def __init__(
        self,
        runtime: Runtime,
        sampler: Sampler,
        spec_config: BastionSpeculativeConfig,
        device: torch.device,
    ) -> None:
        super().__init__(sampler, spec_config, device)
        # With lagged timing only the device knows the nodes per request, so vLLM must not split
        # the batch into chunks by the host's counts. This flag of vLLM says so.
        self.enable_adaptive_verification = is_lagged(spec_config)
        self.runtime, self.trees = runtime, runtime.trees
        self._ancestors = follow_ancestors(sampler)
        self._host = current_host()
        # A custom processor reads the rows before a row, so all of them must be processed.
        self._every_row = has_unknown(sampler)
        self._next_row = 0
        self._counted: tuple[torch.Tensor, torch.Tensor | None]
        self._logprobs = PathLogprobs(sampler)

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Draw the tokens and find the accepted paths.

        logits: [L, V], a request's rows consecutive, root first. invalid_drafts: [L] bool, drafts
        without a grammar row, which must not be followed. Returns tokens
        [R, a tree's depth + 1].
        """
        num_nans = get_num_nans(logits) if self.sampler.compute_nans else None
        rows, trees = logits.shape[0], self.trees
        # Without prompts every row has logits, in order.
        chosen = slice(rows) if rows == input_batch.num_tokens else input_batch.logits_indices
        node_ids = input_batch.input_ids[chosen]
        followed_ids = node_ids
        if invalid_drafts is not None:
            followed_ids = node_ids.masked_fill(invalid_drafts, -1)
        num_rejected, counts = self.begin(input_batch.cu_num_logits)
        self._logprobs.begin(input_batch.idx_mapping_np)
        sampled, num_sampled, _, sampling_mask = self._verify_in_chunks(
            logits,
            input_batch,
            draft_logits,
            node_ids,
            # Positions by depth: a draw is keyed by the position of its token.
            (input_batch if trees.chains else trees).positions[chosen],
            get_max_chunk_logits(logits.shape[1]),
            NO_LOGPROBS,
            followed_ids,
        )
        if input_batch.has_prefill:
            # A prompt that is not complete emits nothing.
            num_sampled, num_rejected = get_num_sampled_and_rejected(
                num_sampled,
                input_batch.seq_lens,
                input_batch.cu_num_logits,
                input_batch.idx_mapping,
                self.sampler.req_states.prefill_len.gpu,
            )
        if counts is not None and self.runtime.records:
            # Queued before the output's own copy, so it has arrived when the output has.
            self.runtime.sources = async_copy_to_np(counts)
        return SamplerOutput(
            sampled_token_ids=sampled,
            logprobs_tensors=self._logprobs.tensors(),
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
            sampling_mask_tensors=sampling_mask,
        )

    def begin(self, cu_num_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Start a step. Returns what it will count: rejected rows [R], nodes by source [R, 2, 3].

        Allocated in each step: copies to the host may outlive it.
        """
        counts, num_rejected = None, torch.empty_like(cu_num_logits[1:])
        if self.trees.ngram is not None:
            counts = num_rejected.new_empty(num_rejected.shape[0], 2, 3)
        self._next_row, self._counted = 0, (num_rejected, counts)
        return self._counted

    def _verify(
        self,
        logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        pos: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        verify_draft_sampled: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        num_reqs = idx_mapping.shape[0]
        trees, rows = self.trees, slice(self._next_row, self._next_row + num_reqs)
        self._next_row += num_reqs
        num_rejected, counts = self._counted
        # Allocated in each step: vLLM's output copy reads them while the next step runs.
        sampled = idx_mapping.new_empty(num_reqs, trees.depth + 1, dtype=torch.int64)
        num_sampled = cu_num_logits.new_empty(num_reqs)
        ancestors = None
        if self._ancestors.wanted(idx_mapping_np):
            ancestors = self._ancestors.gather(
                trees, draft_sampled, expanded_idx_mapping, expanded_local_pos
            )

        def draw(chosen: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
            """Processed logits and tokens of the chosen rows [A], or of all rows in place."""
            step: tuple[torch.Tensor, ...]
            step = (logits, expanded_idx_mapping, pos, draft_sampled, expanded_local_pos)
            tokens_above = ancestors
            if chosen is not None:
                step = tuple(tensor[chosen] for tensor in step)
                if ancestors is not None:
                    tokens_above = ancestors[0][chosen], ancestors[1][chosen]
            scores, slots, positions, drafts, nodes = step
            self._ancestors.show(tokens_above)
            processed = self.sampler.apply_sampling_params(
                scores,
                slots,
                idx_mapping,
                idx_mapping_np,
                positions,
                drafts,
                nodes,
                seq_lens_upper_bound_np,
            )
            self._ancestors.show(None)
            states = self.sampler.sampling_states
            tokens = gumbel_sample(
                processed,
                slots,
                states.temperature.gpu,
                states.seeds.gpu,
                positions,
                apply_temperature=False,
                is_drafting=False,
                use_fp64=self.sampler.use_fp64_gumbel,
            )
            return processed, tokens

        given = (
            verify_draft_sampled,
            idx_mapping,
            cu_num_logits,
            trees.path[rows],
            sampled,
            num_sampled,
            num_rejected[rows],
            None if counts is None else counts[rows],
        )
        reports_processed = self.sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES
        processed = self._host.accept(
            logits,
            draw,
            self._accept_path,
            given,
            every_row=self._every_row,
            keep_processed=self._logprobs.wanted and reports_processed,
            is_argmax=partial(self._is_argmax, idx_mapping_np),
        )
        self._logprobs.add(
            processed if reports_processed else logits,
            cu_num_logits,
            trees.path[rows],
            sampled,
            idx_mapping,
            idx_mapping_np,
        )
        return processed, sampled, num_sampled

    @cached_property
    def _accept_path(self) -> BoundOp:
        trees = self.trees
        sources = None if trees.ngram is None else trees.ngram.sources
        return accept_path.bind(parents=trees.parents, sources=sources)

    def _is_argmax(self, slots: np.ndarray) -> bool:
        """Whether every token of the requests in `slots` is the argmax of unprocessed logits."""
        sampler = self.sampler
        greedy = sampler.sampling_states.temperature.np[slots] == 0.0
        return bool(greedy.all() and not sampler.needs_logits_processing[slots].any())
