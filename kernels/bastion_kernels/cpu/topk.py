# SPDX-License-Identifier: Apache-2.0
"""Top-K log-probabilities on a CPU; the kernel is `csrc/topk.cpp`.

The two ops for slices of the vocabulary are plain PyTorch: a CPU host seldom has several ranks.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from bastion_kernels.cpu import library
from bastion_kernels.draft.topk_logprobs import TopkLogprobs, TopkPartial
from bastion_kernels.draft.topk_merge import MAX_TOKEN, NO_KEY, MergeTopk

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


def _flip(ordered: Tensor) -> Tensor:
    """From an fp32's bits to an int32 that sorts like it, and back."""
    return ordered ^ ((ordered >> 31) & 0x7FFFFFFF)


def topk_partial(op: TopkPartial) -> None:
    values, vocab = op.logits.float(), op.logits.shape[1]
    # -0.0 becomes 0.0: equal logits must have equal keys
    bits = (torch.where(values.isnan(), -torch.inf, values) + 0.0).view(torch.int32)
    keys = (_flip(bits).long() << 32) | (MAX_TOKEN - op.vocab_start - torch.arange(vocab))
    best = keys.topk(min(op.k, vocab), dim=1).values
    op.out_keys.fill_(NO_KEY)
    op.out_keys[:, : best.shape[1]] = best
    largest = values.amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    op.out_mass.copy_((values - largest).logsumexp(1))


def merge_topk(op: MergeTopk) -> None:
    best = op.keys.flatten(1).topk(op.out_tokens.shape[1], dim=1).values
    values = _flip((best >> 32).int()).view(torch.float32)
    of_parts = _flip((op.keys[:, :, 0] >> 32).int()).view(torch.float32)
    largest = values[:, :1]
    total = (of_parts - largest + op.mass).logsumexp(1, keepdim=True)
    op.out_tokens.copy_(MAX_TOKEN - (best & MAX_TOKEN))
    op.out_logprobs.copy_(values - largest - total)
