# SPDX-License-Identifier: Apache-2.0
"""Answer three questions inside vLLM as plain, dflash and bastion, and draw a draft tree.

    make demo            or: python -m benchmarks.demo
    python -m benchmarks.demo --pair 0.6B
    python -m benchmarks.demo --pair tiny

Runs vLLM on a CPU with SmolLM2-135M-Instruct and the drafter that this project trained for it
(`benchmarks/smollm2`). The other pairs are toys that continue text: the models of
`benchmarks/tiny`, and the same ones widened to the shape of Qwen3-0.6B (`benchmarks/widen`). If the
real model cannot be had, the tiny pair is used, where a step is mostly Python.
"""
