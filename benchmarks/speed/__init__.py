# SPDX-License-Identifier: Apache-2.0
"""Seconds: plain decoding, vLLM's own DFlash and bastion on the same prompts, inside vLLM.

    python -m benchmarks.speed                        # the tiny pair, everything
    python -m benchmarks.speed --quick                # a few minutes of it
    python -m benchmarks.speed --pair 0.6B --prompts 4 --concurrency 1 2
    python -m benchmarks.speed --drafters benchmarks/tiny/dflash2 --only 15 N=16 adaptive

Every method is an engine in its own process. Plain decoding and dflash run without this plugin
(`VLLM_PLUGINS` empty). All engines run in vLLM's default mode (compiled) and with the user's number
of threads. Engines that fit into memory together are driven in turn: a repeat decodes one cell
(temperature, concurrency, domain) with each of them before the next cell begins, in an order that
rotates. The others are stopped meanwhile (SIGSTOP), so that none of their threads spins. If not all
fit, they run in groups. Each group includes plain decoding, and every ratio is taken within one
repeat of one group.

- *tokens/s*: new tokens over the seconds from the first request's arrival to the last one's end,
  prompts included.
- *ms/token* (TPOT): (last token - first token) / (tokens - 1), mean over requests.
- *speed-up*: tokens/s over plain decoding's in the same repeat; the median over repeats, with the
  smallest and largest where a range is shown.
- *tau* and *N*: tokens and verified draft nodes per forward of a request, as defined in
  `benchmarks.harness.decoder`.
- *T_verify*: the target's forward pass with its output head. *T_draft*: the drafter's `propose`,
  for bastion including the tree. *T_aux*: the rest of a step: scheduling, sampling, the host. All
  three are means over the steps in which no prompt ended.
- A concurrency of c keeps c requests running until none is left.
"""
