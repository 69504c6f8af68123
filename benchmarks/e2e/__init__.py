# SPDX-License-Identifier: Apache-2.0
"""Engines end to end: methods on given prompts or sets, in turns, with every ratio to plain.

    python -m benchmarks.e2e --pair tiny --methods "dflash 7" bastion "bastion budget=16"
    python -m benchmarks.e2e --pair smollm2 --data humaneval=FILE gsm8k=FILE --concurrency 1 8
    python -m benchmarks.e2e --pair 0.6B --methods bastion --against ../older-checkout
    python -m benchmarks.e2e --paper --target Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16

Each method is an engine in its own process; `benchmarks.e2e.methods` has the words that name them.
Plain decoding's replies continue conversations, and its tokens are what the others are compared
with. On a CPU host, whose speed drifts, engines live side by side, as many as fit into memory, and
decode a *round* (with a concurrency above 1: four times as many prompts, see --round) in turns of a
second, while the others are stopped (SIGSTOP). So both sides of a ratio are of the same seconds.
--alive 1 runs one engine at a time, as a GPU does by default.

With --against each bastion method also runs the package of another checkout, such as `git worktree
add ../older COMMIT`, which has its own caches: "bastion @ COMMIT". Of engines with the same code
those that start later can be faster by a tenth, so use --starts 2: all start again in the reversed
order, and the geometric mean of both ratios counts.

With --out every round is appended to a JSONL file, a command that was interrupted continues with
the rounds that are missing, and the page is written beside it. `--report FILE` prints the page of a
file again.

- *over plain*: plain decoding's cost of a token over the method's, the mean of the sets. With one
  request at a time that is (end - first token) / (tokens - 1), as in the paper; else the time,
  prompts included, over the tokens while all of them are in flight. Intervals are bootstrap
  intervals over rounds; *median* is of the rounds' own ratios.
- *tau*: tokens per target forward. *N*: verified draft tokens per forward.
- *T_verify*, *T_draft*, *T_aux*: target with its head, drafter with the tree, and the rest of a
  step, over the steps in which no prompt ended. On a GPU the first two are times of the device.
- *same*: at T=0, replies with plain decoding's tokens, and how many of the others first differ at
  a near-tie, by plain decoding's own log-probabilities. Above T=0, bastion's seeded draws against
  plain decoding's in the same model runner. vLLM's own methods keep the distribution, but not the
  draws, so nothing is compared.
"""
