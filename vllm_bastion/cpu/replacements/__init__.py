# SPDX-License-Identifier: Apache-2.0
"""CPU replacements of the Triton kernels that Model Runner V2 launches on a CPU host.

Without a Triton back end, vLLM's kernels are plain functions that cannot be launched. For engines
that run V2 on such a host, `install` replaces each of them, in every module of vLLM that has it, by
a function of the same arguments. It refuses a kernel whose parameters differ from the function's.

`REPLACEMENTS` has every replacement by its kernel's name. `WITHOUT` lists the kernels without one:
the options and methods that launch them are refused or do not run on vLLM's CPU build.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

import torch

from vllm_bastion.cpu.replacements import (  # noqa: F401  (each registers its replacements)
    batch,
    blocks,
    dflash,
    gumbel,
    logprobs,
    sampling,
    state,
    thinking,
)
from vllm_bastion.cpu.replacements.launch import REPLACEMENTS, Replacement

__all__ = ["REPLACEMENTS", "WITHOUT", "Replacement", "ReplacementError", "install", "parameters"]

_GPU = "vllm.v1.worker.gpu"

WITHOUT: dict[str, tuple[str, ...]] = {
    # options that method "bastion" refuses
    f"{_GPU}.sample.batch_shard": (
        "_build_shard_plan_kernel",
        "_pack_sampler_output_kernel",
        "_unpack_gathered_output_kernel",
        "_pack_logprobs_kernel",
        "_unpack_logprobs_kernel",
    ),
    f"{_GPU}.sample.watermark": (
        "_repeated_context_mask_kernel",
        "_philox_gumbel_kernel",
        "_draft_step_kernel",
    ),
    f"{_GPU}.spec_decode.acceptance_estimator": (
        "_accumulate_kernel",
        "_refit_kernel",
        "_local_max_sumexp_kernel",
        "_predict_kernel",
    ),
    f"{_GPU}.sample.output": ("_compact_sampling_mask_kernel",),
    # other methods: how they verify, and their drafters
    f"{_GPU}.spec_decode.rejection_sampler": (
        "_flatten_sampled_kernel",
        "_gather_draft_sampled_kernel",
    ),
    f"{_GPU}.spec_decode.rejection_sampler_utils": (
        "_compute_local_logits_stats_kernel",
        "_rejection_kernel",
        "_resample_kernel",
        "_insert_resampled_kernel",
        "_compute_cumulative_log_p_kernel",
        "_compute_local_residual_mass_kernel",
    ),
    f"{_GPU}.spec_decode.dflash2.speculator": (
        "_selector_walk_kernel",
        "_cache_draft_logits_kernel",
    ),
    f"{_GPU}.spec_decode.multi_module_mtp.speculator": (
        "_prepare_input_buffers_kernel",
        "_prepare_input_hidden_states_and_embeddings_kernel",
        "_pad_trailing_draft_slots_kernel",
        "_cache_inputs_kernel",
        "_shift_input_ids_kernel",
        "_shift_input_embeds_kernel",
    ),
    f"{_GPU}.spec_decode.ngram.speculator": ("_ngram_scan_kernel", "_ngram_finalize_kernel"),
    f"{_GPU}.spec_decode.xpress.kernels": (
        "_xpress_latent_kernel",
        "_xpress_add_argmax_partial_kernel",
        "_xpress_add_argmax_reduce_to_blk_kernel",
        "_xpress_topc_argmax_to_blk_kernel",
    ),
    f"{_GPU}.spec_decode.standalone_ar.speculator": ("_prepare_prefill_inputs_kernel",),
    f"{_GPU}.spec_decode.target_dependent_ar.speculator": (
        "_prepare_prefill_inputs_kernel",
        "_prepare_decode_inputs_kernel",
        "_update_draft_inputs_kernel",
    ),
    # decode context parallelism, which vLLM's attention for CPUs does not support
    f"{_GPU}.cp_utils": ("_dcp_local_seq_lens_kernel",),
    # CUDA devices only, and Model Runner V1
    "vllm.v1.worker.mamba_utils": (
        "get_aligned_state_indices_multi_group_kernel",
        "batch_memcpy_kernel",
    ),
    # other recurrent layers with prefix caching
    f"{_GPU}.model_states.recoverssm": ("_postprocess_recoverssm_align_kernel",),
}
"""Module -> the kernels that it launches and that have no replacement"""


class ReplacementError(RuntimeError):
    """A kernel of the installed vLLM is not the one that its replacement was written for."""


def parameters(kernel: Any) -> tuple[str, ...]:
    """Parameter names of a kernel, decorated by Triton or not."""
    return tuple(inspect.signature(getattr(kernel, "fn", kernel)).parameters)


def install() -> None:
    """Replace every kernel by its replacement; a second call changes nothing.

    Raises:
        ReplacementError: a kernel is missing, or its parameters differ from its replacement's.
    """
    from vllm.triton_utils.dispatcher import KernelOverride

    found: dict[int, Replacement] = {}
    for target, own in REPLACEMENTS.items():
        module, _, name = target.partition(":")
        kernel = getattr(importlib.import_module(module), name, None)
        if isinstance(kernel, Replacement):
            continue
        if kernel is None or not own.fits(parameters(kernel)):
            raise ReplacementError(
                f"vLLM's kernel {target} is not the one that its CPU replacement was written for: "
                "install a vLLM that this vllm-bastion supports"
            )
        found[id(kernel)] = own
    for name, holder in list(sys.modules.items()):
        if name.partition(".")[0] == "vllm":
            for attribute, value in list(vars(holder).items()):
                if id(value) in found:
                    setattr(holder, attribute, found[id(value)])
    for module, names in WITHOUT.items():
        for name in names if module in sys.modules else ():  # some are in vLLM 0.33 only
            # vLLM's own replacement of a kernel runs, and Model Runner V1 may launch it.
            # Replacements of other methods may have been registered.
            known = getattr(sys.modules[module], name, None)
            if not isinstance(known, KernelOverride | Replacement):
                setattr(sys.modules[module], name, _Missing(f"{module}:{name}"))
    _complete_placeholder()
    _share_buffers()


class _Missing:
    """Replaces a kernel without a replacement: raises when it is launched."""

    def __init__(self, target: str) -> None:
        self.target = target

    def __getitem__(self, grid: Any) -> Any:
        raise ReplacementError(
            f"vLLM's kernel {self.target} has no native version on CPU hosts: "
            "switch off the option or the method that needs it"
        )


def _complete_placeholder() -> None:
    """Add the Triton function that V2's launches call to vLLM's placeholder for Triton."""
    from vllm.triton_utils import HAS_TRITON, triton
    from vllm.utils.math_utils import next_power_of_2

    if not HAS_TRITON:
        triton.next_power_of_2 = next_power_of_2


def _share_buffers() -> None:
    """Let kernels read requests' parameters where the host writes them.

    vLLM copies each of them in every step, so that a GPU that is a step behind reads the old ones.
    On a CPU, kernels have finished when the host continues.
    """
    from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor

    def copy_to_uva(self: UvaBackedTensor, n: int | None = None) -> torch.Tensor:
        self.gpu = self.cpu if n is None else self.cpu[:n]
        return self.gpu

    UvaBackedTensor.copy_to_uva = copy_to_uva
