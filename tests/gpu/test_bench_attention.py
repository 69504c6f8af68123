# SPDX-License-Identifier: Apache-2.0
"""The rival of tree attention, FlashAttention 3, gets the batch in the layout that vLLM gives it.

Plain PyTorch with the same signatures stands in for it: wrong pages, lengths, alignment or layout
give a wrong result.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.attention_case import (
    _SPLITS,
    Step,
    causal_tails,
    check_attention,
    dense,
    rival_of,
)
from benchmarks.gpu.harness import FA3, Bar, Call, Case, Ceilings, Entry, Timing, run_entry

REQS, ROWS, LENGTH, PAGE, HEADS, KV_HEADS, DIM = 2, 5, 21, 4, 4, 2, 8


def batch(seed: int = 0) -> tuple[Step, Tensor, list[Tensor]]:
    g = torch.Generator().manual_seed(seed)
    table = torch.randperm(2 * REQS * 6, generator=g)[: REQS * 6].view(REQS, 6).int()
    shape = (2 * REQS * 6, PAGE, KV_HEADS, 2 * DIM)
    caches = [torch.randn(shape, generator=g).transpose(1, 2) for _ in range(2)]
    query = torch.randn(REQS * ROWS, HEADS, DIM, generator=g)
    starts = torch.arange(REQS + 1, dtype=torch.int32) * ROWS
    lengths = torch.full((REQS,), LENGTH, dtype=torch.int32)
    return Step(ROWS, LENGTH, table, starts, lengths), query, caches


def causal_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """`[rows, Hq, d]` over `[length, Hkv, d]`, the last rows aligned."""
    rows, length = len(query), len(keys)
    allowed = torch.ones(rows, length, dtype=torch.bool).tril(length - rows)
    return dense(query, torch.cat([keys, values], dim=-1), allowed, query.dtype)


def paged(keys: Tensor, pages: Tensor, length: Any) -> Tensor:
    """`[length, Hkv, d]` out of `[blocks, page, Hkv, d]`."""
    return keys[pages.long()].flatten(0, 1)[: int(length)]


def by_table(query: Tensor, k: Tensor, v: Tensor, starts: Any, table: Any, used: Any) -> Tensor:
    parts = [
        causal_attention(query[a:b], paged(k, pages, n), paged(v, pages, n))
        for a, b, pages, n in zip(starts[:-1], starts[1:], table, used, strict=True)
    ]
    return torch.cat(parts)


def vllm(*versions: int) -> SimpleNamespace:
    def flash_attn_varlen_func(
        q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, seqused_k, softmax_scale, causal, out,
        block_table, scheduler_metadata, num_splits, fa_version,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        assert causal and softmax_scale == DIM**-0.5 and fa_version in versions
        assert (max_seqlen_q, max_seqlen_k) == (ROWS, LENGTH)
        assert scheduler_metadata == num_splits
        return out.copy_(by_table(q, k, v, cu_seqlens_q, block_table, seqused_k))

    def get_scheduler_metadata(*, num_splits: int, cache_seqlens: Tensor, **sizes: Any) -> int:
        assert sizes["page_size"] == PAGE and sizes["batch_size"] == len(cache_seqlens) == REQS
        assert (sizes["num_heads_q"], sizes["num_heads_kv"]) == (HEADS, KV_HEADS)
        return num_splits

    return SimpleNamespace(
        flash_attn_varlen_func=flash_attn_varlen_func,
        get_scheduler_metadata=get_scheduler_metadata,
        is_fa_version_supported=lambda version: version in versions,
    )


def is_right(name: str) -> None:
    step, query, caches = batch()
    calls, check = rival_of(name, step, query, caches, least=5).build()
    check()
    for call, cache in zip(calls, caches, strict=False):
        check_attention(name, call(), step, query, cache, causal_tails(step))  # type: ignore[arg-type]
    assert len(calls) == 5


@pytest.mark.parametrize("name", _SPLITS)
def test_flash_attention_3_gets_the_batch_in_vllms_layout(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", vllm(3))  # type: ignore[arg-type]
    is_right(name)


def test_a_missing_or_unsupported_flash_attention_3_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module, error in ((vllm(2), RuntimeError), (None, ImportError)):
        monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", module)  # type: ignore[arg-type]
        with pytest.raises(error):
            is_right("FlashAttention 3, free splits")


@pytest.mark.parametrize("spoilt", ["other rows", "NaN"])
def test_a_rival_with_a_wrong_result_is_not_timed(
    spoilt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = vllm(3)
    right = package.flash_attn_varlen_func
    wrong = {
        "other rows": lambda **given: right(**given).flip(0),
        "NaN": lambda **given: right(**given) * float("nan"),
    }
    package.flash_attn_varlen_func = wrong[spoilt]
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", package)  # type: ignore[arg-type]

    def timer(calls: list[Call], replays: int) -> Timing:
        return Timing(10.0, 10.0, 10.0)

    step, query, caches = batch()
    rival = rival_of("FlashAttention 3, free splits", step, query, caches, least=5)
    case = Case(lambda: None, [lambda: None], rivals=[rival])
    entry = Entry("attention", "attention", lambda: case, Bar(FA3, 1.15))
    row = run_entry(entry, Ceilings(4000.0, 800.0), 10, timer)  # type: ignore[arg-type]
    assert row.timing is not None and row.judge == ""
    assert row.verdict == "FA3 failed here: not judged"
    assert row.rivals[0]["error"].startswith("AssertionError: FlashAttention 3, free splits: error")
