# SPDX-License-Identifier: Apache-2.0
"""FULL CUDA graphs of the target: those that hold the tree kernel, and those of plain steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager

# Most rows of a request in a graph of plain steps.
PLAIN_QUERY_LEN = 1


class BastionCudaGraphManager(ModelCudaGraphManager):
    """Adds a graph for plain steps to each one that takes any mix of trees.

    A graph holds one attention kernel. In the other graphs that is the tree kernel; in these it is
    vLLM's, as with plain decoding. vLLM's dispatch finds them by their longest request, and under
    data parallelism only where no rank verifies a tree.
    """

    # Whether steps of trees are timed before the first request.
    profiles = False

    def _init_candidates(self) -> None:
        super()._init_candidates()
        for descs_by_key in (self._candidates, self._capture_descs):
            for key, descs in descs_by_key.items():
                descs_by_key[key] = list(self._with_plain(descs))

    def _with_plain(
        self, descs: Iterable[BatchExecutionDescriptor]
    ) -> Iterator[BatchExecutionDescriptor]:
        """Put the graph of plain steps first: dispatch takes the first that fits.

        It is captured first too. vLLM profiles the two largest graphs and takes the first one's
        memory as what all share; with FlashAttention 3 that includes the buffers of its splits.
        """
        for desc in descs:
            mixed = desc.cg_mode == CUDAGraphMode.FULL and desc.uniform_token_count is None
            if mixed and desc.num_tokens <= self.max_num_reqs:
                yield replace(desc, max_query_len=PLAIN_QUERY_LEN)
            yield desc

    def dispatch(self, *args: Any, **kwargs: Any) -> BatchExecutionDescriptor:
        """While steps are timed, the graphs of trees: a dummy request has a single row."""
        if self.profiles:
            kwargs["max_query_len"] = self.decode_query_len
        return super().dispatch(*args, **kwargs)
