# SPDX-License-Identifier: Apache-2.0
"""Soak test of `vllm serve`: random HTTP requests with trees, then the same without.

    python -m benchmarks.soak --server --minutes 10

`requests` draws them, `client` sends them, `judge` tells near-ties from errors, `run` compares.
"""
