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


class _FromDepths:
    """A target for captures: its graph begins with the positions of its batch."""

    def __init__(self, model: Any, state: Any) -> None:
        self._model, self._state = model, state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        self._state.begin_graph(inputs)
        return self._model(**inputs)


class BastionCudaGraphManager(ModelCudaGraphManager):
    """Adds a graph for plain steps to each one that takes any mix of trees.

    A graph holds one attention kernel. In the other graphs that is the tree kernel, which takes
    prompts too; in these it is vLLM's, as with plain decoding. vLLM's dispatch finds them by their
    longest request, and under data parallelism only where no rank verifies a tree.
    """

    # Whether a dummy step runs as a step of trees, in warm-up and the profile.
    profiles = False

    def _init_candidates(self) -> None:
        super()._init_candidates()
        for descs_by_key in (self._candidates, self._capture_descs):
            for key, descs in descs_by_key.items():
                descs_by_key[key] = list(self._with_plain(descs))
        for descs in self._capture_descs.values():
            # The first one captured allocates the output for all.
            descs.sort(key=lambda desc: -desc.num_tokens)

    def _with_plain(
        self, descs: Iterable[BatchExecutionDescriptor]
    ) -> Iterator[BatchExecutionDescriptor]:
        """Put the graph of plain steps first: dispatch takes the first that fits.

        It is captured first too. vLLM profiles the two largest graphs and takes the first one's
        memory as what all share; with FlashAttention 3 that includes the buffers of its splits.
        """
        most = self.max_num_reqs
        sizes = self.compilation_config.cudagraph_capture_sizes or []
        # The largest batch has a graph of its own if it lies between two sizes.
        largest = min((size for size in sizes if size >= most), default=most)
        for desc in descs:
            mixed = desc.cg_mode == CUDAGraphMode.FULL and desc.uniform_token_count is None
            if mixed and desc.num_tokens <= largest:
                rows = min(desc.num_tokens, most)
                yield replace(desc, num_tokens=rows, max_query_len=PLAIN_QUERY_LEN)
            yield desc

    def _takes_prompts(self) -> bool:
        """Whether a step with prompts may replay a graph of trees.

        Gated delta layers run vLLM's kernels for prompts, some connectors wait in each layer, and
        layers that share a cache skip most of a prompt.
        """
        config = self.vllm_config
        shared = config.cache_config.kv_sharing_fast_prefill
        return not (config.model_config.is_hybrid or config.kv_transfer_config or shared)

    def capture(self, model: Any, model_state: Any, *args: Any, **kwargs: Any) -> None:
        """Like vLLM's, with the positions of nodes inside."""
        if self.use_breakable_cg:
            self.init_breakable_cg_runner(model)  # what steps without a FULL graph call
        super().capture(_FromDepths(model, model_state), model_state, *args, **kwargs)

    def dispatch(
        self,
        num_reqs: int,
        num_tokens: int,
        *args: Any,
        max_query_len: int | None = None,
        **kwargs: Any,
    ) -> BatchExecutionDescriptor:
        """Like vLLM's, by the rows that the step has after trimming, not by those scheduled."""
        if self.profiles:  # a dummy request has a single row
            max_query_len = self.decode_query_len
        elif max_query_len is not None and num_tokens == num_reqs and self.dp_size == 1:
            # Other ranks' rows and requests are not this rank's.
            max_query_len = PLAIN_QUERY_LEN
        elif max_query_len is None and self._takes_prompts():
            max_query_len = self.decode_query_len
        return super().dispatch(num_reqs, num_tokens, *args, max_query_len=max_query_len, **kwargs)
