# SPDX-License-Identifier: Apache-2.0
"""The target's attention on a CPU: our loops for requests with drafts, else vLLM's C++ kernel.

The cache is vLLM's own. Its layout depends on the instruction set, so `learn_layout` finds it out
by running vLLM's op that writes it. Prompts and plain rows stay on vLLM's kernel: they get the
numbers that it computes for a batch of them alone. Trees and chains run on our loops, in which a
row's result depends on its path only. The drafter keeps vLLM's kernel.

A layer writes its keys and values in the same call, for which vLLM has an op of its own, and keeps
the kernel's arguments. Without both, a step of 8 nodes of SmolLM2 took 26 to 28 ms in place of 24
to 27 on two cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from bastion_kernels import AttentionLayer as TreeAttentionLayer
from bastion_kernels import AttentionStep, KVLayout, learn_layout
from vllm_bastion.attention.kv_cache import float8
from vllm_bastion.policy.trees import Trees
from vllm_bastion.step import TreeMetadata


@lru_cache
def cache_layout(
    isa: str, page: int, head_dim: int, dtype: torch.dtype, kv_cache_dtype: str = "auto"
) -> KVLayout:
    """How vLLM's kernels for an instruction set pack a block.

    Args:
        dtype: of the model.

    Raises:
        ValueError: the kernels change the values that they store beyond rounding to float8.
    """
    stored = float8(kv_cache_dtype)

    def write(
        key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        if stored is not None:
            key, value, kv_cache = key.to(dtype), value.to(dtype), kv_cache.view(torch.uint8)
        keys, values = kv_cache.view(1, 1, 2 * page, head_dim).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            key, value, keys, values, slots, isa, kv_cache_dtype=kv_cache_dtype
        )

    return learn_layout(write, page, head_dim, stored or dtype)


@dataclass
class Part:
    """Requests of a batch that run on one kernel: vLLM's (`plain`) or ours (`step`)."""

    rows: torch.Tensor | None  # of the batch, [M] int64; None: all
    plain: CPUAttentionMetadata | None = None
    step: AttentionStep | None = None


@dataclass
class TreeCPUAttentionMetadata(TreeMetadata, CPUAttentionMetadata):
    """vLLM's metadata, and what splits the batch between its kernel and ours."""

    common: CommonAttentionMetadata | None = None
    builder: TreeCPUAttentionMetadataBuilder | None = None
    _parts: list[Part] = field(default_factory=list)

    def parts(self) -> list[Part]:
        """The batch split by kernel; the first layer of a step computes it for all layers."""
        if not self._parts:
            assert self.builder is not None and self.common is not None
            missing = "a batch reached the target's layers without its trees"
            assert self.trees is not None and self.record is not None, missing
            self._parts = list(self.builder.split(self.common, self.trees, self.record.nodes))
        return self._parts


class TreeCPUAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TreeCPUAttentionMetadata:
        # No scheduler metadata yet: `split` builds it for the rows that vLLM's kernel gets.
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
            common=common,
            builder=self,
        )

    def split(
        self, common: CommonAttentionMetadata, trees: Trees, nodes: np.ndarray
    ) -> Iterator[Part]:
        """Separate requests with `nodes` [R] from those without."""
        drafted = nodes > 0
        if not drafted.any():
            yield Part(None, super().build(0, common))
            return
        counts = np.diff(common.query_start_loc.numpy()[: len(nodes) + 1])
        # One call for all requests of a kernel: it divides its work among threads.
        for chosen in (~drafted, drafted):
            requests = torch.from_numpy(np.flatnonzero(chosen))
            if not len(requests):
                continue
            rows = torch.from_numpy(np.flatnonzero(np.repeat(chosen, counts)))
            part = Part(None if len(requests) == len(nodes) else rows)
            starts = np.zeros(len(requests) + 1, dtype=np.int32)
            np.cumsum(counts[chosen], out=starts[1:])
            own_starts = torch.from_numpy(starts)
            table = common.block_table_tensor[requests]
            seq_lens = common.seq_lens[requests]
            if chosen is drafted:
                tails, slots = trees.tail_lens[requests], trees.step_slots[requests]
                part.step = AttentionStep(
                    table, own_starts, seq_lens, tails, slots, trees.bits, trees.depths
                )
            else:
                part.plain = super().build(
                    0,
                    replace(
                        common,
                        num_reqs=len(requests),
                        num_actual_tokens=len(rows),
                        query_start_loc=own_starts,
                        seq_lens=seq_lens,
                        block_table_tensor=table,
                        slot_mapping=common.slot_mapping[rows],
                    ),
                )
            yield part


class TreeCPUAttentionImpl(CPUAttentionBackendImpl):
    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self.tree_sinks = None if self.sinks is None else self.sinks.float()
        self._dtype = act_dtype
        self._bound: tuple[Any, TreeAttentionLayer] | None = None

    def cache_layout(self, layer: AttentionLayer, kv_cache: torch.Tensor) -> KVLayout:
        """kv_cache: [blocks, Hkv, block_size, 2d]."""
        isa: str = layer.isa
        _, _, page, columns = kv_cache.shape
        return cache_layout(isa, page, columns // 2, self._dtype, self.kv_cache_dtype)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TreeCPUAttentionMetadata | None,
        output: torch.Tensor,
        **_output_scales: torch.Tensor | None,
    ) -> torch.Tensor:
        """query: [T, Hq, d]; kv_cache: [blocks, Hkv, block_size, 2d]; fills output [T, Hq, d]."""
        if attn_metadata is None:
            # The memory-profiling run. Uninitialised memory would become logits.
            return output.fill_(0)
        if self.kv_sharing_target_layer_name is None:
            self.do_kv_cache_update(layer, key, value, kv_cache, attn_metadata.slot_mapping)
        for part in attn_metadata.parts():
            queries, outputs = query, output
            if part.rows is not None:
                queries = query.index_select(0, part.rows)
                outputs = torch.empty_like(queries)
            if part.plain is not None:
                super().forward(layer, queries, key, value, kv_cache, part.plain, outputs)
            else:
                assert part.step is not None
                self._with_cache(layer, kv_cache).cpu(part.step, queries, outputs)
            if part.rows is not None:
                output.index_copy_(0, part.rows, outputs)
        return output

    def _with_cache(self, layer: Any, kv_cache: torch.Tensor) -> TreeAttentionLayer:
        """Our loops over the layer's cache; made anew when vLLM gives the layer another one."""
        key = kv_cache.data_ptr(), layer._k_scale_float, layer._v_scale_float
        if self._bound is None or self._bound[0] != key:
            stored, scales = float8(self.kv_cache_dtype), {}
            if stored is not None:
                scales = {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
            ours = TreeAttentionLayer(
                kv_cache if stored is None else kv_cache.view(stored),
                self.scale,
                softcap=self.logits_soft_cap,
                window=max(self.sliding_window, 0),
                sinks=self.tree_sinks,
                layout=self.cache_layout(layer, kv_cache),
                **scales,
            )
            self._bound = key, ours
        return self._bound[1]


class TreeCPUAttentionBackend(CPUAttentionBackend):
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_impl_cls() -> type[TreeCPUAttentionImpl]:
        return TreeCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeCPUAttentionMetadataBuilder]:
        return TreeCPUAttentionMetadataBuilder
