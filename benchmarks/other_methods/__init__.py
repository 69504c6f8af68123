# SPDX-License-Identifier: Apache-2.0
"""CPU replacements of kernels that method "bastion" never launches.

On a CPU host with `VLLM_USE_V2_MODEL_RUNNER=1`, Model Runner V2 launches them for vLLM's own
methods: the rejection sampler verifies every chain, and the selector drafts the chains of "dflash"
with a DFlash2 or LiLiCorr drafter. Such an engine draws the same tokens from the same seeds as
method "bastion", so tests and benchmarks compare with it. Importing this package before the engine
is built registers them.
"""

from benchmarks.other_methods import rejection, selector  # noqa: F401
