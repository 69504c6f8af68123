# SPDX-License-Identifier: Apache-2.0
"""Top-K log-probabilities against a stable sort and a float64 log-softmax."""

from __future__ import annotations

import pytest
import torch
from op_helpers import assert_same, call, poisoned, runs, versions
from torch import Tensor

from bastion_kernels import topk_logprobs
from tests import references


def top(run, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Run into slices of wider, poisoned outputs and return the result."""
    tokens, logprobs = (poisoned(len(logits), k + 3, dtype=t) for t in (torch.int32, torch.float32))
    call(run, logits, k, tokens[:, :k], logprobs[:, :k])
    assert tokens[:, k:].eq(-7777).all() and logprobs[:, k:].isnan().all()
    return tokens[:, :k], logprobs[:, :k]


def assert_top(result: tuple[Tensor, Tensor], logits: Tensor) -> None:
    """Tokens exactly as by a stable sort; log-probabilities within twice PyTorch's fp32 error."""
    tokens, logprobs = result
    logits = logits.float()
    expected = logits.sort(dim=1, descending=True, stable=True).indices[:, : tokens.shape[1]]
    assert_same(tokens, expected.int(), "tokens")
    truth = logits.double().log_softmax(1).gather(1, expected)
    torch_error = (logits.log_softmax(1).gather(1, expected) - truth).abs().nan_to_num().max()
    finite = truth.isfinite()
    assert torch.equal(logprobs.isfinite(), finite)
    error = (logprobs - truth)[finite].abs().max() if finite.any() else torch.zeros(())
    assert error <= 2 * torch_error + 1e-5
    assert logprobs[finite].le(0).all()


CASES = {  # M, V, K, dtype
    "one logit": (1, 1, 1, torch.float32),
    "all of them": (2, 8, 8, torch.float32),
    "odd vocabulary": (3, 257, 5, torch.float16),
    "bf16": (4, 1024, 8, torch.bfloat16),
    "two chunks": (2, 2049, 16, torch.float32),
    "large K": (1, 5000, 33, torch.bfloat16),
    "a real vocabulary": (1, 151_936, 4, torch.bfloat16),
}


@runs(topk_logprobs, topk_logprobs)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_against_sort(run, case) -> None:
    rows, vocab, k, dtype = case
    logits = 4 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab))
    logits = logits.to(dtype)
    assert_top(top(run, logits, k), logits)


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # NumPy, of log 0
@runs(topk_logprobs)
def test_ties_go_to_the_lower_token(run) -> None:
    generator = torch.Generator().manual_seed(1)
    rounded = torch.randn(3, 3000, generator=generator).round()
    rounded[0] = 0.0
    rounded[0, ::2] = -0.0  # equal to 0.0, so token 0 is still the first
    rounded[1, 100:] = float("-inf")
    rounded[2, :2500] = float("-inf")
    assert_top(top(run, rounded, 12), rounded)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy, of overflow and log 0
@runs(topk_logprobs)
def test_extreme_logits(run) -> None:
    logits = torch.randn(5, 3000, generator=torch.Generator().manual_seed(2))
    logits[0] *= 1e4
    logits[1] = float("-inf")
    logits[1, 7] = -3.0
    logits[2] += 1e30
    logits[3, 100:] = torch.finfo(torch.float32).min  # as some mask what must not be drawn
    logits[4] = torch.finfo(torch.float32).min
    assert_top(top(run, logits, 4), logits)


@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")
@runs(topk_logprobs)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nan_counts_as_minus_infinity(run, sign: float) -> None:
    nan = torch.tensor(float("nan")).copysign(torch.tensor(sign))
    logits = torch.randn(3, 2500, generator=torch.Generator().manual_seed(6))
    logits[0] = nan
    logits[1, ::2] = nan
    logits[2, 3:] = nan
    logits[2, 1] = float("-inf")
    tokens, logprobs = top(run, logits, 7)
    clean = logits.nan_to_num(nan=float("-inf"), neginf=float("-inf"))
    expected = clean.sort(dim=1, descending=True, stable=True).indices[:, :7]
    assert_same(tokens, expected.int())
    assert logprobs.isnan().all()


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        *(pytest.param(d, marks=pytest.mark.slow) for d in (torch.float32, torch.float16)),
    ],
)
def test_hard_rows_equal_the_references(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    cases = {
        "one value": torch.full((1, 2100), 1.5),  # more equals than a segment holds
        "few values": torch.randn(2, 4200, generator=generator).round(),
        "all in one segment": torch.randn(2, 4200, generator=generator),
        "descending": torch.arange(2100, 0, -1.0)[None] / 16,
        "ascending": torch.arange(2100.0)[None] / 16,
        "nothing": torch.full((1, 2100), float("-inf")),
    }
    cases["all in one segment"][:, 2130:2170] += 100
    for name, logits in cases.items():
        k = 70 if name == "one value" else 20
        logits, results = logits.to(dtype), []
        for run in versions(references.topk_logprobs, topk_logprobs.triton, topk_logprobs.cpu):
            results.append(top(run, logits, k))
        for tokens, logprobs in results[1:]:
            assert_same(tokens, results[0][0], name)
            torch.testing.assert_close(
                logprobs, results[0][1], rtol=1e-6, atol=2e-6, equal_nan=True
            )


@runs(topk_logprobs)
def test_strided_logits(run) -> None:
    logits = torch.randn(600, 6, generator=torch.Generator().manual_seed(3))
    assert_top(top(run, logits.t()[::2], 6), logits.t()[::2])
    assert_top(top(run, logits[:3, 1:5], 3), logits[:3, 1:5])


@runs(topk_logprobs)
def test_no_rows(run) -> None:
    assert top(run, torch.zeros(0, 9), 2)[0].shape == (0, 2)
