# SPDX-License-Identifier: Apache-2.0
"""The target's attention on CPU machines, over a paged cache of rows.

vLLM's C++ kernel has no mask argument and packs its blocks in a layout private to it, in which a
token's keys are not a row. This backend keeps rows (so that compaction is a row copy) and reads
the tree from its metadata. It serves the target's layers only: the drafter keeps vLLM's kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from bastion_kernels import tree_attention, write_kv
from vllm_bastion.step.trees import Trees


@dataclass
class TreeCPUAttentionMetadata(CPUAttentionMetadata):
    # Set by BastionModelState.prepare_attn; None for a batch that it did not prepare.
    trees: Trees | None = None


class TreeCPUAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TreeCPUAttentionMetadata:
        # Without the base class's scheduler metadata: only its C++ kernel reads that.
        common = common_attn_metadata
        return TreeCPUAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            scheduler_metadata=None,
        )


class TreeCPUAttentionImpl(CPUAttentionBackendImpl):
    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self.tree_sinks = None if self.sinks is None else self.sinks.float()

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        rows = slot_mapping.shape[0]
        write_kv(key[:rows], value[:rows], kv_cache, slot_mapping)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TreeCPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query: [T, Hq, d]; kv_cache: [blocks, Hkv, block_size, 2d]; fills output [T, Hq, d]."""
        if attn_metadata is None:
            # The memory-profiling run: what is in fresh memory would become logits.
            return output.fill_(0)
        trees = attn_metadata.trees
        assert trees is not None, "a batch reached the target's layers without its trees"
        num_reqs = attn_metadata.seq_lens.shape[0]
        rows = attn_metadata.num_actual_tokens
        tree_attention(
            query[:rows],
            kv_cache,
            attn_metadata.block_table,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            trees.tail_lens[:num_reqs],
            trees.step_slots[:num_reqs],
            trees.bits,
            self.scale,
            output[:rows],
            softcap=self.logits_soft_cap,
            window=max(self.sliding_window, 0),
            sinks=self.tree_sinks,
            depths=trees.depths,
        )
        return output


class TreeCPUAttentionBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[TreeCPUAttentionImpl]:
        return TreeCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeCPUAttentionMetadataBuilder]:
        return TreeCPUAttentionMetadataBuilder
