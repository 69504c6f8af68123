# SPDX-License-Identifier: Apache-2.0
"""The CUDA version of gated delta networks in an engine on the CPU, used with `flash_backend`.

The layer's Python is vLLM's own. Convolution, recurrence and commit of trees are our Triton
kernels, in the interpreter. vLLM's kernels for prompts need a GPU and are replaced by a recurrence
in PyTorch, on states in CUDA's layout.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.forward_context import get_forward_context

from tests.e2e.cuda_graphs import kernel
from tests.e2e.gdn_fp32 import recurrence

prompts = kernel(recurrence)


def forward_core(
    self: Any, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: Any
) -> None:
    """Replaces vLLM's kernel: requests without rows of ours."""
    of_layers = get_forward_context().attn_metadata
    if of_layers is not None:
        metadata = of_layers[self.prefix]
        assert metadata.spec_sequence_masks is None
        prompts(self, metadata, mixed_qkv, b, a, core_attn_out)


def install() -> None:
    """Use it in every such layer of this process, together with `cuda_graphs.install`."""
    import vllm.v1.worker.cpu_worker  # noqa: F401  before any module of the V2 runner
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as module

    layer = module.QwenGatedDeltaNetAttention
    init = layer.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self._forward_method = self.forward_cuda

    layer.__init__ = __init__
    layer._forward_core = forward_core
    # The tape then records the launches inside.
    torch.ops.vllm.qwen_gdn_attention_core = module.qwen_gdn_attention_core
