# SPDX-License-Identifier: Apache-2.0
"""XPress's scores of every candidate after every one above, against vLLM's own head, asked one by
one."""

from __future__ import annotations

import pytest
import torch

models = pytest.importorskip("vllm.model_executor.models.qwen3_xpress", reason="of vLLM 0.33")

from vllm_bastion.drafters.xpress import Refiner  # noqa: E402

VOCAB, HIDDEN, RANK, BLOCK, REQUESTS, KEPT = 40, 24, 8, 6, 3, 5


def test_a_token_above_is_exchanged_for_every_candidate() -> None:
    g = torch.Generator().manual_seed(0)
    head = models.XPressRefinerHead(VOCAB, HIDDEN, BLOCK, RANK, 16).double()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=g))
        head.fold_from_raw_(torch.randn(RANK, BLOCK, BLOCK, generator=g).double())
        block = torch.randn(REQUESTS, BLOCK, HIDDEN, generator=g).double()
        before = torch.randint(VOCAB, (REQUESTS, BLOCK), generator=g)
        order = torch.rand(REQUESTS, BLOCK - 1, VOCAB, generator=g).argsort(-1)
        refiner = Refiner(head, block, head.w2.weight[order])
        cache = head.hidden_cache(block)
        want = head.refine_bias(before, cache)[:, 1:].gather(2, order)
        torch.testing.assert_close(refiner.bias(before), want)

        kept = torch.rand(REQUESTS, BLOCK - 1, VOCAB, generator=g).argsort(-1)[..., :KEPT]
        candidates = order.gather(2, kept)
        above = torch.randint(VOCAB, (REQUESTS, BLOCK - 1, KEPT), generator=g)
        got = refiner.bias_after(before, above, kept)
        for depth in range(BLOCK - 1):
            for parent in range(KEPT):
                changed = before.clone()
                changed[:, 1 + depth] = above[:, depth, parent]
                bias = head.refine_bias(changed, cache)[:, 1 + depth]
                want = bias.gather(1, candidates[:, depth])
                torch.testing.assert_close(got[:, depth, parent], want)
