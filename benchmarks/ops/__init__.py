# SPDX-License-Identifier: Apache-2.0
"""Check every op of bastion_kernels, then time it, on this machine's GPU.

    python -m benchmarks.ops [--op attention] [--replays 100]
    python -m benchmarks.ops --quick     # only cases with a bar: minutes

For each case: median, 20th and 80th percentile in microseconds, GB/s, the clock of the
multiprocessors, the fastest rival's time (FlashAttention 3), and the bar as measured over allowed
(met if at most 1). A case whose check fails is not timed.

At least 5 calls are captured one after another into one CUDA graph. This excludes host time, shares
the start of a replay among the calls, and lets each call use its own data (a layer's cache, say)
that the calls before it have evicted from the L2 cache. A call's time is a replay's over the number
of calls; it includes gaps between kernels, as in a model.
"""
