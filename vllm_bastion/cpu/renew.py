# SPDX-License-Identifier: Apache-2.0
"""Packed copies of weights on a CPU, after the weights have been updated in place.

vLLM packs a layer again when it loads its weight, and `install_linear` then writes to the packed
weight that the layer has. Heads remain: they share their weight with the embeddings, and vLLM loads
it there only.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from bastion_kernels.cpu.linear import pack_weight
from vllm_bastion.cpu.int8 import Int8Head, is_int8
from vllm_bastion.cpu.linear import packed_weight


def repack(*models: nn.Module) -> None:
    """Pack the weights that layers of these models have kept.

    vLLM's configuration must be the current one, as while a model is loaded.
    """
    done: set[int] = set()
    for model in models:
        for layer in model.modules():
            weight = getattr(layer, "weight", None)
            if "cpu_linear" not in vars(layer) or not isinstance(weight, Tensor):
                continue
            if id(layer) in done or weight.numel() == 0:  # packed when it was loaded
                continue
            done.add(id(layer))
            _repack_layer(layer, weight.data, done)


def _repack_layer(layer: Any, weight: Tensor, done: set[int]) -> None:
    if is_int8(layer):
        layer.cpu_linear = Int8Head(weight)
        return
    packed = packed_weight(layer)
    if packed is None:
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    elif packed.data_ptr() not in done:  # a head and its embeddings share one
        done.add(packed.data_ptr())
        fresh = pack_weight(weight)
        assert fresh is not None  # it was packed before
        packed.copy_(fresh)
