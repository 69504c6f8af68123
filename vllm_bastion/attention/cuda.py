# SPDX-License-Identifier: Apache-2.0
"""The target's attention on CUDA: our Triton kernel for steps with trees, else FlashAttention.

FlashAttention writes the cache, defines its layout and runs batches without trees. A step with
trees runs ``bastion_kernels.AttentionLayer``. That kernel takes any mix of trees, chains and prompt
chunks and reads all of it from device buffers, so the builder can declare full CUDA-graph support.
Plain steps have FULL graphs of their own, which hold FlashAttention and its plan of the step
(``attention.graphs``). So no replay needs metadata.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from bastion_kernels import AttentionLayer, AttentionStep
from bastion_kernels.attention.workspace import TreeAttentionWorkspace
from vllm_bastion.attention.graphs import PLAIN_QUERY_LEN
from vllm_bastion.attention.kv_cache import float8
from vllm_bastion.step import TreeMetadata


@dataclass(kw_only=True)
class TreeFlashAttentionMetadata(TreeMetadata, FlashAttentionMetadata):
    """vLLM's metadata, and what a step with trees needs in addition."""

    builder: TreeFlashAttentionMetadataBuilder
    _step: AttentionStep | None = None
    _in_graph: bool = False

    def step(self) -> AttentionStep:
        """The tree kernel's view of the step, planned when the first layer needs it."""
        if self._step is None:
            trees, num_reqs = self.trees, self.seq_lens.shape[0]
            assert trees is not None
            workspaces = self.builder.workspaces
            for workspace in workspaces.values():
                workspace.plan(self.query_start_loc, self.seq_lens, self.num_actual_tokens)
            self._step = AttentionStep(
                self.block_table,
                self.query_start_loc,
                self.seq_lens,
                trees.tail_lens[:num_reqs],
                trees.step_slots[:num_reqs],
                trees.bits,
                trees.depths,
                workspaces,
            )
        return self._step

    def plan_in_graph(self) -> None:
        """Let a graph that is being captured begin with FlashAttention's plan of each replay."""
        if not self._in_graph:
            self.builder.update_draft_decode_metadata(self)
            self._in_graph = True


class TreeFlashAttentionMetadataBuilder(FlashAttentionMetadataBuilder):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        scheduler, spec_config = vllm_config.scheduler_config, vllm_config.speculative_config
        assert spec_config is not None
        # A KV-cache group may hold layers with different windows: a vLLM option gives all layers
        # the blocks of full attention.
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names).values()
        # By sliding window; 0 = full attention.
        self.workspaces = {
            window: TreeAttentionWorkspace(
                self.num_heads_q,
                self.num_heads_kv,
                self.headdim,
                vllm_config.model_config.dtype,
                max_rows=scheduler.max_num_batched_tokens,
                max_requests=scheduler.max_num_seqs,
                device=device,
                window=window,
                max_tail=1 + spec_config.num_speculative_tokens,
            )
            for window in {layer.sliding_window or 0 for layer in layers}
        }
        for workspace in self.workspaces.values():
            workspace.warm_up()

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TreeFlashAttentionMetadata:
        # FlashAttention is planned ahead, and its splits limited, where a graph may hold it. The
        # first call plans in any case: only there does vLLM look for sliding windows.
        plain = common_attn_metadata.max_query_len == PLAIN_QUERY_LEN
        fast_build = fast_build or (not plain and self.aot_sliding_window is not None)
        flash = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata = TreeFlashAttentionMetadata(**vars(flash), builder=self)
        if not plain:
            metadata.scheduler_metadata, metadata.max_num_splits = None, 0
        return metadata


class TreeFlashAttentionImpl(FlashAttentionImpl):
    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        super().process_weights_after_loading(act_dtype)
        self.tree_sinks = None if self.sinks is None else self.sinks.float()
        self.window = max(self.sliding_window[0] + 1, 0)
        self.float8 = float8(self.kv_cache_dtype)

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TreeFlashAttentionMetadata | None,
        output: torch.Tensor,
        **output_scales: torch.Tensor | None,
    ) -> torch.Tensor:
        """query: [T, Hq, d]; kv_cache: [blocks, Hkv, block_size, 2d]; fills output [T, Hq, d]."""
        record = None if attn_metadata is None else attn_metadata.record
        if attn_metadata is None or record is None or not record.masked:
            if attn_metadata is not None and torch.cuda.is_current_stream_capturing():
                # Other graphs are replayed for trees too, so they must hold the tree kernel.
                assert attn_metadata.max_query_len == PLAIN_QUERY_LEN
                attn_metadata.plan_in_graph()
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, **output_scales
            )
        scales: dict[str, Any] = {}
        if self.float8 is not None:
            kv_cache = kv_cache.view(self.float8)
            scales = {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
            if query.dtype == self.float8:  # the layer has quantised it for FlashAttention
                scales["q_scale"] = layer._q_scale
        attend = AttentionLayer(
            kv_cache, self.scale, self.logits_soft_cap, self.window, self.tree_sinks, **scales
        )
        attend(attn_metadata.step(), query, output)
        return output


class TreeFlashAttentionBackend(FlashAttentionBackend):
    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """No: how a request's keys are split depends on the other requests of the batch."""
        return False

    @staticmethod
    def get_impl_cls() -> type[TreeFlashAttentionImpl]:
        return TreeFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeFlashAttentionMetadataBuilder]:
        return TreeFlashAttentionMetadataBuilder
