# SPDX-License-Identifier: Apache-2.0
"""Answer three questions inside vLLM as plain, dflash and bastion, and draw a draft tree.

    make demo            or: python -m benchmarks.demo
    python -m benchmarks.demo --pair tiny

Runs vLLM on a CPU with SmolLM2-135M-Instruct and the drafter that this project trained for it
(`benchmarks/smollm2`). If it cannot be had, the tiny pair (`benchmarks/tiny`) continues texts; its
steps are mostly Python.
"""
