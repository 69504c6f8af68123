# SPDX-License-Identifier: Apache-2.0
"""Top-K log-probabilities on a CPU; the kernel is `csrc/topk.cpp`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from bastion_kernels.cpu import library

__all__ = ["topk_logprobs_cpu"]

TopKArgs = library.struct(
    "TopKArgs",
    "threads rows vocab k half *logits logits_row *tokens tokens_row *logprobs logprobs_row",
)


def topk_logprobs_cpu(logits: Tensor, k: int, out_tokens: Tensor, out_logprobs: Tensor) -> None:
    """See `topk_logprobs`. Rows are distributed over PyTorch's threads."""
    rows, vocab = logits.shape
    if logits.dtype == torch.float16 or logits.stride(1) != 1:
        logits = logits.to(torch.float32).contiguous()
    args = TopKArgs(
        torch.get_num_threads(), rows, vocab, k, logits.dtype == torch.bfloat16, logits.data_ptr(),
        logits.stride(0), out_tokens.data_ptr(), out_tokens.stride(0), out_logprobs.data_ptr(),
        out_logprobs.stride(0),
    )  # fmt: skip
    library.load().bastion_top_k(ctypes.byref(args))
