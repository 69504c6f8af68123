# SPDX-License-Identifier: Apache-2.0
"""The K most likely tokens by a stable sort."""

from __future__ import annotations

import torch

from bastion_kernels.draft.topk_logprobs import TopkLogprobs
from tests.references.declare import of


@of(TopkLogprobs)
def topk_logprobs(op: TopkLogprobs) -> None:
    values = op.logits.float()
    values = values.where(~values.isnan(), -torch.inf) + 0.0  # -0.0 is 0.0
    tokens = values.sort(dim=1, descending=True, stable=True).indices[:, : op.k]
    op.out_tokens.copy_(tokens)
    op.out_logprobs.copy_(op.logits.double().log_softmax(1).gather(1, tokens))
