# SPDX-License-Identifier: Apache-2.0
"""The K likeliest tokens of every drafted position, with their log-probabilities.

    out_logprobs[m, i] = logits[m, out_tokens[m, i]] - log sum_v exp(logits[m, v])

sorted by logit, descending; equal logits in order of token id. Under tensor parallelism each rank
holds a slice of the vocabulary: `topk_partial` gives its K best as sortable 64-bit keys and its
log-sum-exp, the ranks exchange these (M * (8 K + 4) bytes), and `merge_topk` gives what one rank
with the whole vocabulary would have.

A key is (logit as an order-preserving int32) << 32 | (2^31 - 1 - token), so that larger is better
and no two keys are equal: the order is total, and any grouping of the work gives the same tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bastion_kernels.checks import check

__all__ = [
    "merge_topk",
    "merge_topk_reference",
    "topk_logprobs",
    "topk_logprobs_reference",
    "topk_partial",
    "topk_partial_reference",
]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MAX_TOKEN = 2**31 - 1
_NO_KEY = -(2**63)  # below every real key


def topk_partial_reference(
    logits: Tensor, k: int, vocab_start: int, out_keys: Tensor, out_lse: Tensor
) -> None:
    """Keys of the `k` best of one vocabulary slice; see `topk_partial`."""
    values = logits.float() + 0.0  # -0.0 becomes 0.0: equal logits must have equal keys
    bits = values.view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    token = torch.arange(vocab_start, vocab_start + logits.shape[1], device=logits.device)
    best = ((ordered << 32) | (_MAX_TOKEN - token)).topk(min(k, logits.shape[1]), dim=1).values
    out_keys.fill_(_NO_KEY)
    out_keys[:, : best.shape[1]] = best
    out_lse.copy_(values.logsumexp(1))


def merge_topk_reference(
    keys: Tensor, lse: Tensor, out_tokens: Tensor, out_logprobs: Tensor
) -> None:
    """The best of several slices' keys, normalised; see `merge_topk`."""
    best = keys.flatten(1).topk(out_tokens.shape[1], dim=1).values
    ordered = (best >> 32).int()
    values = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)
    out_tokens.copy_(_MAX_TOKEN - (best & _MAX_TOKEN))
    out_logprobs.copy_(values - lse.logsumexp(1, keepdim=True))


def topk_logprobs_reference(
    logits: Tensor, k: int, out_tokens: Tensor, out_logprobs: Tensor
) -> None:
    """One slice that is the whole vocabulary; see `topk_logprobs`."""
    keys = torch.empty((logits.shape[0], 1, k), dtype=torch.int64, device=logits.device)
    lse = torch.empty((logits.shape[0], 1), dtype=torch.float32, device=logits.device)
    topk_partial_reference(logits, k, 0, keys[:, 0], lse[:, 0])
    merge_topk_reference(keys, lse, out_tokens, out_logprobs)


def topk_partial(
    logits: Tensor, k: int, vocab_start: int, out_keys: Tensor, out_lse: Tensor
) -> None:
    """Reduce one slice of the vocabulary to what `merge_topk` needs of it.

    Args:
        logits: `[M, V]` fp32, bf16 or fp16, any strides: tokens vocab_start .. vocab_start + V - 1.
            A slice padded for even sharding must be cut to its real tokens.
        k: candidates to keep; a slice of fewer tokens fills up with keys that never win.
        vocab_start: global id of the slice's first token.
        out_keys: `[M, K]` int64, written, best first.
        out_lse: `[M]` fp32, log-sum-exp over the slice, written.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together.
    """
    op = "topk_partial"
    check(op, "logits", logits, (None, None), *_FLOATS)
    check(op, "out_keys", out_keys, (logits.shape[0], k), torch.int64)
    check(op, "out_lse", out_lse, (logits.shape[0],), torch.float32)
    topk_partial_reference(logits, k, vocab_start, out_keys, out_lse)


def merge_topk(keys: Tensor, lse: Tensor, out_tokens: Tensor, out_logprobs: Tensor) -> None:
    """Merge the slices' keys into the K best tokens of the whole vocabulary.

    Args:
        keys: `[M, P, K]` int64, from `topk_partial` of P slices, with one K at least the number
            wanted.
        lse: `[M, P]` fp32, their log-sum-exps.
        out_tokens: `[M, K]` int32, global token ids, written.
        out_logprobs: `[M, K]` fp32, over the whole vocabulary, written.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together.
    """
    op, (rows, parts, _), k = "merge_topk", keys.shape, out_tokens.shape[1]
    check(op, "keys", keys, (rows, parts, k), torch.int64)
    check(op, "lse", lse, (rows, parts), torch.float32)
    check(op, "out_tokens", out_tokens, (rows, k), torch.int32)
    check(op, "out_logprobs", out_logprobs, (rows, k), torch.float32)
    merge_topk_reference(keys, lse, out_tokens, out_logprobs)


def topk_logprobs(logits: Tensor, k: int, out_tokens: Tensor, out_logprobs: Tensor) -> None:
    """Write the K likeliest tokens of every row and their log-probabilities.

    Args:
        logits: `[M, V]` fp32, bf16 or fp16, any strides; sums are taken in fp32.
        k: how many to keep, at most V.
        out_tokens: `[M, K]` int32, by descending logit, then ascending id, written.
        out_logprobs: `[M, K]` fp32, their log-softmax over V, written.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together, or k > V.
    """
    op = "topk_logprobs"
    check(op, "logits", logits, (None, None), *_FLOATS)
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"{op}: k must be in 1..{logits.shape[1]} (vocabulary), got {k}")
    check(op, "out_tokens", out_tokens, (logits.shape[0], k), torch.int32)
    check(op, "out_logprobs", out_logprobs, (logits.shape[0], k), torch.float32)
    topk_logprobs_reference(logits, k, out_tokens, out_logprobs)
