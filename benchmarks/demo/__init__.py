# SPDX-License-Identifier: Apache-2.0
"""Decode three prompts inside vLLM as plain, dflash and bastion, and draw a draft tree.

    make demo            or: python -m benchmarks.demo
    python -m benchmarks.demo --pair tiny

Runs vLLM on a CPU with the small models of `benchmarks/tiny`, widened to the shape of Qwen3-0.6B so
that a step costs what a real model's costs (`benchmarks/widen`). Without room for that pair it uses
the tiny one, where a step is mostly Python.
"""
