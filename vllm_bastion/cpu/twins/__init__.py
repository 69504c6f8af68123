# SPDX-License-Identifier: Apache-2.0
"""Native twins of the Triton kernels that Model Runner V2 launches on a CPU host.

Without a Triton back end vLLM's kernels are plain functions that nothing can launch. `install` puts
a function of the same arguments in the place of each, in every module that has it, for engines
that run V2 on such a host. A kernel whose parameters are not its twin's is refused at start-up.
`WITHOUT` lists the kernels that have none, because what launches them is refused: method "bastion"
cannot serve it, or vLLM's CPU build does not.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

from vllm_bastion.cpu.twins import (  # noqa: F401  (each registers its twins)
    batch,
    blocks,
    dflash,
    gumbel,
    logprobs,
    rejection,
    sampling,
    selector,
    state,
    thinking,
)
from vllm_bastion.cpu.twins.launch import TWINS, Twin

__all__ = ["TWINS", "WITHOUT", "Twin", "TwinError", "install", "parameters"]

_GPU = "vllm.v1.worker.gpu"
WITHOUT: dict[str, tuple[str, ...]] = {
    # options that a tree cannot serve
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
    f"{_GPU}.spec_decode.rejection_sampler_utils": (
        "_compute_cumulative_log_p_kernel",
        "_compute_local_residual_mass_kernel",
    ),
    # other methods' drafters
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
    # recurrent layers with a cache of aligned states
    f"{_GPU}.model_states.recoverssm": ("_postprocess_recoverssm_align_kernel",),
}
"""Module -> its kernels that are launched and have no twin"""


class TwinError(RuntimeError):
    """A kernel of the installed vLLM is not the one its twin was written for."""


def parameters(kernel: Any) -> tuple[str, ...]:
    """Parameter names of a kernel, decorated by Triton or not."""
    return tuple(inspect.signature(getattr(kernel, "fn", kernel)).parameters)


def install() -> None:
    """Put every twin in its kernel's place; a second call changes nothing.

    Raises:
        TwinError: a kernel is gone or has other parameters than its twin.
    """
    found: dict[int, Twin] = {}
    for target, own in TWINS.items():
        module, _, name = target.partition(":")
        kernel = getattr(importlib.import_module(module), name, None)
        if isinstance(kernel, Twin):
            continue
        if kernel is None or not own.fits(parameters(kernel)):
            raise TwinError(
                f"vLLM's kernel {target} is not the one that its native twin was written for: "
                "install a vLLM that this vllm-bastion supports"
            )
        found[id(kernel)] = own
    for name, holder in list(sys.modules.items()):
        if name.partition(".")[0] == "vllm":
            for attribute, value in list(vars(holder).items()):
                if id(value) in found:
                    setattr(holder, attribute, found[id(value)])
    for module, names in WITHOUT.items():
        for name in names if module in sys.modules else ():  # not in every vLLM
            setattr(sys.modules[module], name, _Missing(f"{module}:{name}"))
    _complete_placeholder()


class _Missing:
    """In the place of a kernel without a twin: says so when it is launched."""

    def __init__(self, target: str) -> None:
        self.target = target

    def __getitem__(self, grid: Any) -> Any:
        raise TwinError(
            f"vLLM's kernel {self.target} has no native twin on CPU hosts: leave out what needs "
            "it, or set VLLM_BASTION_TRITON_INTERPRETER=1, which is very slow"
        )


def _complete_placeholder() -> None:
    """Give vLLM's stand-in for Triton the helper that launches of V2 call."""
    from vllm.triton_utils import HAS_TRITON, triton
    from vllm.utils.math_utils import next_power_of_2

    if not HAS_TRITON:
        triton.next_power_of_2 = next_power_of_2
