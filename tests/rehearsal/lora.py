# SPDX-License-Identifier: Apache-2.0
"""vLLM's kernels for adapters, as the emulation needs them."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def patch(emulation: Any) -> None:
    """Patch vLLM's LoRA ops. emulation: an `Emulation`."""
    from vllm.lora.ops.triton_ops import lora_shrink_op
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

    configure, prepare = lora_shrink_op.get_lora_op_configs, LoRAKernelMeta.prepare_tensors

    def in_one_piece(*args: Any, **kwargs: Any) -> dict[str, Any]:
        # Otherwise 64 programs share a sum, and the interpreter runs one after the other.
        return {**configure(*args, **kwargs), "split_k": 1}

    def with_numbers(meta: Any, mapping: Tensor) -> None:
        # Also before a capture: it decides whether the graph has the kernels of adapters.
        usual, emulation.running = emulation.running, True
        try:
            prepare(meta, mapping)
        finally:
            emulation.running = usual

    lora_shrink_op.get_lora_op_configs = in_one_piece
    LoRAKernelMeta.prepare_tensors = with_numbers
