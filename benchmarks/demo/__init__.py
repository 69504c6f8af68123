# SPDX-License-Identifier: Apache-2.0
"""Decode three prompts inside vLLM as plain, dflash and bastion, and draw a draft tree.

    make demo            or: python -m benchmarks.demo
    python -m benchmarks.demo --pair tiny

Runs on a CPU: vLLM's own code with the small models of `benchmarks/tiny`, widened to the shape of
Qwen3-0.6B, so that a step takes what a real model's takes (`benchmarks/widen`). Where there is no
room for that pair the tiny one decodes, on which a step is mostly Python.
"""
