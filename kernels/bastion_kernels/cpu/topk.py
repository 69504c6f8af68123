# SPDX-License-Identifier: Apache-2.0
"""Top-K log-probabilities on a CPU; the kernel is `csrc/topk.cpp`."""

from __future__ import annotations

import ctypes

import torch

from bastion_kernels.cpu import library
from bastion_kernels.draft.topk_logprobs import TopkLogprobs

_Args = library.struct("TopKArgs")


def topk_logprobs(op: TopkLogprobs) -> None:
    """Distribute the rows over PyTorch's threads."""
    logits, tokens, logprobs = op.logits, op.out_tokens, op.out_logprobs
    rows, vocab = logits.shape
    if logits.dtype == torch.float16 or logits.stride(1) != 1:
        logits = logits.to(torch.float32).contiguous()
    args = _Args(
        torch.get_num_threads(), rows, vocab, op.k, logits.dtype == torch.bfloat16,
        logits.data_ptr(), logits.stride(0), tokens.data_ptr(), tokens.stride(0),
        logprobs.data_ptr(), logprobs.stride(0),
    )  # fmt: skip
    library.load().bastion_top_k(ctypes.byref(args))
