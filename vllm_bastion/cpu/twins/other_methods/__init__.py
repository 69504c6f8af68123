# SPDX-License-Identifier: Apache-2.0
"""Twins of kernels that method "bastion" never launches.

Model Runner V2 on a CPU host (`VLLM_USE_V2_MODEL_RUNNER=1`) launches them for everything else: the
rejection sampler verifies every chain, the selector drafts the chains of "dflash" with a DFlash2 or
LiLiCorr drafter, and `return_sampling_mask` is an option that method "bastion" refuses. Such an
engine draws the same tokens from the same seeds as method "bastion", so the tests and benchmarks
compare with it.
"""
