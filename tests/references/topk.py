# SPDX-License-Identifier: Apache-2.0
"""The K most likely tokens by a stable sort, whole and in slices of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from bastion_kernels.draft.topk_logprobs import TopkLogprobs, TopkPartial
from bastion_kernels.draft.topk_merge import MAX_TOKEN, NO_KEY, MergeTopk
from tests.references.declare import of


def _best(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The K best logits and their tokens; NaN ranks as -inf, and -0.0 is 0.0."""
    values = logits.float()
    values = values.where(~values.isnan(), -torch.inf) + 0.0
    sorted_values, tokens = values.sort(dim=1, descending=True, stable=True)
    return sorted_values[:, :k], tokens[:, :k]


@of(TopkLogprobs)
def topk_logprobs(op: TopkLogprobs) -> None:
    _, tokens = _best(op.logits, op.k)
    op.out_tokens.copy_(tokens)
    op.out_logprobs.copy_(op.logits.double().log_softmax(1).gather(1, tokens))


@of(TopkPartial)
def topk_partial(op: TopkPartial) -> None:
    values, tokens = _best(op.logits, op.k)
    bits = values.contiguous().view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    op.out_keys.fill_(NO_KEY)
    op.out_keys[:, : tokens.shape[1]] = (ordered << 32) | (MAX_TOKEN - op.vocab_start - tokens)
    largest = values[:, :1].clamp(min=torch.finfo(torch.float32).min).double()
    op.out_mass.copy_((op.logits.double() - largest).logsumexp(1))


@of(MergeTopk)
def merge_topk(op: MergeTopk) -> None:
    def value(keys: Tensor) -> Tensor:
        ordered = (keys >> 32).int()
        bits = torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
        return bits.view(torch.float32).double()

    best = op.keys.flatten(1).sort(dim=1, descending=True).values[:, : op.out_tokens.shape[1]]
    # a slice's logits sum to its largest times its mass
    total = (value(op.keys[:, :, 0]) + op.mass).logsumexp(1, keepdim=True)
    op.out_tokens.copy_(MAX_TOKEN - (best & MAX_TOKEN))
    op.out_logprobs.copy_(value(best) - total)
