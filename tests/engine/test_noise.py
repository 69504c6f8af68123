# SPDX-License-Identifier: Apache-2.0
"""The draw on the host is vLLM's own, bit for bit.

vLLM's kernel runs in Triton's interpreter here. With flat logits the noise alone decides.
"""

from __future__ import annotations

import pytest
import torch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from vllm_bastion.cpu.noise import gumbel_argmax, gumbel_noise, gumbel_sample_on_host

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for CPU hosts only")

ROWS, SLOTS = 24, 7


def draws_of_both(logits: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randint(0, SLOTS, (ROWS,), generator=generator)
    temperature = torch.tensor([0.0, 1.0, 1.0, 0.7, 1.0, 0.0, 2.0])
    seeds = torch.randint(-(2**62), 2**62, (SLOTS,), generator=generator)
    pos = torch.randint(0, 4000, (ROWS,), generator=generator)
    kernel = gumbel_sample(
        logits, slots, temperature, seeds, pos, apply_temperature=False, is_drafting=False
    )
    return kernel, gumbel_sample_on_host(logits, slots, temperature, seeds, pos)


@pytest.mark.parametrize("vocab_size", [7, 1024, 1500])
@pytest.mark.parametrize("kind", ["random", "flat", "masked"])
def test_draws_equal_the_kernel(vocab_size: int, kind: str) -> None:
    logits = torch.randn(ROWS, vocab_size, generator=torch.Generator().manual_seed(1))
    logits *= 0.0 if kind == "flat" else 3.0
    if kind == "masked":  # what top-k leaves behind
        logits[:, 1:][logits[:, 1:] < 4.5] = -torch.inf
    kernel, host = draws_of_both(logits, seed=2)
    assert torch.equal(kernel, host)
    assert host.unique().numel() > 3 or kind == "masked"


@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0, 30.0, 1e6])
def test_the_winner_is_found_without_most_of_the_noise(spread: float) -> None:
    """Against logits with the whole noise added, of blocks of tokens."""
    for seed, vocab_size in enumerate((3, 4097, 4160, 5000, 5000, 5000)):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(vocab_size, generator=generator) * spread
        logits[torch.rand(vocab_size, generator=generator) < 0.2] = -torch.inf
        for pos in range(60):
            whole = logits + gumbel_noise(torch.tensor([seed]), torch.tensor([pos]), vocab_size)[0]
            assert gumbel_argmax(logits.numpy(), seed, pos) == int(whole.argmax())


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite(odd: float) -> None:
    row = torch.full((5000,), -torch.inf)
    row[[70, 4999]] = odd
    whole = row + gumbel_noise(torch.tensor([5]), torch.tensor([6]), 5000)[0]
    assert gumbel_argmax(row.numpy(), 5, 6) == int(whole.argmax())
