# SPDX-License-Identifier: Apache-2.0
"""Seconds: plain decoding, vLLM's own DFlash and bastion on the same prompts, inside vLLM.

    python -m benchmarks.speed                        # the tiny pair, everything
    python -m benchmarks.speed --quick                # a few minutes of it
    python -m benchmarks.speed --pair 0.6B --prompts 4 --concurrency 1 2
    python -m benchmarks.speed --drafters benchmarks/tiny/dflash2 --only 15 N=16 adaptive

Every method is an engine in a process of its own. Plain and dflash run with this plugin switched
off (`VLLM_PLUGINS` empty), as vLLM runs them without us; all run in vLLM's default mode (compiled)
and with the threads that the user has set. Engines that fit into memory live together and are
driven in turn: a repeat decodes one cell (temperature, concurrency, domain) with each of them
before the next cell begins, in an order that rotates, and engines that are not driven are stopped
(SIGSTOP), so that none of their threads spins. Where not all fit, they run in groups, each of them
with plain decoding, and every ratio is one of the same repeat in the same group.

Words. *tokens/s*: new tokens over seconds from the first request's arrival to the last one's end,
prompts included; *ms/token* (TPOT): (last token - first token) / (tokens - 1), mean over requests;
*speed-up*: tokens/s over plain decoding's in the same repeat; the median over repeats is given,
with the smallest and largest where a spread is shown. *tau* and *N* are tokens and verified draft
nodes per forward of a request, see `benchmarks.engine`. *T_verify* is the target's forward pass
with its output head, *T_draft* what the drafter's `propose` takes (for bastion, growing the tree
included), *T_aux* the rest of a step: scheduling, sampling, the host. All three are means over the
steps in which no prompt ended. A concurrency of c keeps c requests running while there are any.
"""
