# SPDX-License-Identifier: Apache-2.0
"""The paper's evaluation: its data sets and methods on any target, in one table.

    python -m benchmarks.paper --target Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16
    python -m benchmarks.paper --quick                # the tiny pair, in minutes
    python -m benchmarks.paper --pair 0.6B            # a shape of benchmarks.widen
    python -m benchmarks.paper report A.jsonl B.jsonl # tables and figures of several machines
    python -m benchmarks.paper.prompts passages 4096  # prompts of our own: long ones, editing

Each method is an engine in its own process. Every response is appended to a JSONL file, and a
command that was interrupted continues with the responses that are missing. A data set or an engine
that cannot be had is a line and a gap in the table. Plain decoding's replies continue
conversations, and its tokens are what the other methods are compared with.

On a GPU one engine runs at a time. A CPU host's speed drifts, so its engines live side by side and
take turns of a second, in groups that fit into memory and always include plain decoding: each
prompt (with a concurrency above 1: each set) goes to every engine before the next one begins, in an
order that rotates, while the others are stopped (SIGSTOP). A response is then compared with the one
that plain decoding gave in the same round. `--alive 1` runs one engine at a time.

- *speed-up*: plain decoding's time per token over the method's. A response's time per token is
  (end - first token) / (tokens - 1); both sides are means over responses, as in the paper.
- *tokens/s over plain* (with a concurrency above 1): all tokens over the whole time, prompts
  included. A response's own time also depends on which prompts start beside it.
- *tau*: tokens per target forward, over all forwards, and as the mean of the responses' own.
- *N*: verified draft tokens per forward.
- *T_verify*, *T_draft*, *T_aux*: target with its head, drafter with the tree, and the rest of a
  step, over the steps in which no prompt ended. On a GPU the first two are times of the device.
- *same*: at T=0, responses with plain decoding's tokens, and how many of the others first differ at
  a near-tie, by plain decoding's own log-probabilities. Above T=0,
  bastion's seeded draws against plain decoding's in the same model runner (*seeded*); nobody judges
  whether one that differs was a near-tie. vLLM's own methods keep the distribution, but not the
  draws, so nothing is compared (*other draws*).
- Intervals are 95% bootstrap intervals over prompts.
"""
