# SPDX-License-Identifier: Apache-2.0
"""This checkout and another one side by side, each over plain decoding: one table.

    git worktree add ../older COMMIT
    python -m benchmarks.compare ../older --out ../compared    # an hour on two cores

Of every pair and drafter in `SET_UPS` three engines take turns (`benchmarks.e2e`): plain decoding,
this checkout's and the other one's. Then all start again in the reversed order, because an engine's
place in that order matters; the geometric mean of both ratios counts. Ratios are of tokens per
second, prompts included with more than one request at a time; replies have 16 to 64 tokens. A CPU
without bf16 products decodes in float32, because older commits have no products of their own.
"""
