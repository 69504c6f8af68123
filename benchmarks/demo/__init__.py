# SPDX-License-Identifier: Apache-2.0
"""Answer three questions inside vLLM as plain, dflash and bastion, and draw a draft tree.

    make demo            or: python -m benchmarks.demo

Runs vLLM on a CPU with SmolLM2-135M-Instruct and the drafter that this project trained for it
(`benchmarks/smollm2`): in bfloat16 for the speed, and one question in float32 for the tokens.
"""
