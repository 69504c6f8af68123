# SPDX-License-Identifier: Apache-2.0
"""Packed copies of weights on a CPU, after the weights have been updated in place.

vLLM packs a layer again when it loads its weight, and `install_linear` then writes to the packed
weight that the layer has. Heads remain: they share their weight with the embeddings, and vLLM loads
it there only.
"""

from __future__ import annotations

from torch import Tensor, nn
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from vllm_bastion.cpu.int8 import int8_product, is_int8
from vllm_bastion.cpu.linear import forget_shared, install_linear


def repack(*models: nn.Module) -> None:
    """Pack the weights that layers of these models have kept.

    vLLM's configuration must be the current one, as while a model is loaded.
    """
    forget_shared()
    for model in models:
        for layer in model.modules():
            weight = getattr(layer, "weight", None)
            if "cpu_linear" not in vars(layer) or not isinstance(weight, Tensor):
                continue
            if weight.numel() == 0:  # packed when it was loaded
                continue
            if is_int8(layer):
                vars(layer)["cpu_linear"] = int8_product(weight.data)
            elif not install_linear(layer, remove_weight=False):
                dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
