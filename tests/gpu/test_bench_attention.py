# SPDX-License-Identifier: Apache-2.0
"""The rivals of tree attention: which are found, and that each gets the batch in its own layout.

PyTorch's SDPA runs here as it is. The CUDA packages cannot, so plain PyTorch with their signatures
stands in for them: wrong pages, lengths, alignment or layout give a wrong result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmarks.gpu import attention_baseline
from benchmarks.gpu.attention_baseline import Offer, Step, offers
from benchmarks.gpu.attention_case import causal_tails, check_attention, dense, rival_of
from benchmarks.gpu.harness import FA3, Bar, Call, Case, Ceilings, Entry, Timing, run_entry

REQS, ROWS, LENGTH, PAGE, HEADS, KV_HEADS, DIM = 2, 5, 21, 4, 4, 2, 8


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    offers.cache_clear()
    yield
    offers.cache_clear()


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
        assert scheduler_metadata == (num_splits if fa_version == 3 else None)
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


def with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, causal: bool,
    page_table: Tensor | None = None, scheduler_metadata: object = None,
) -> Any:  # fmt: skip
    assert causal and q.shape == (REQS, ROWS, HEADS, DIM)
    if page_table is None:
        assert k_cache.shape == (REQS, LENGTH, KV_HEADS, DIM) and k_cache.is_contiguous()
        return torch.stack(
            [causal_attention(*each) for each in zip(q, k_cache, v_cache, strict=True)]
        )
    starts = range(0, REQS * ROWS + 1, ROWS)
    out = by_table(q.flatten(0, 1), k_cache, v_cache, starts, page_table, cache_seqlens)
    return out.view(q.shape), "sums"


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, q_starts: Tensor, k_starts: Tensor | None,
    max_q: int, max_k: int, seqused_k: Tensor | None = None, block_table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    assert (max_q, max_k) == (ROWS, LENGTH)
    if block_table is not None:
        assert k_starts is None and key.shape[1] == 256
        return by_table(query, key, value, q_starts, block_table, seqused_k)
    assert k_starts is not None and q_starts.dtype == k_starts.dtype == torch.int32
    spans = zip(q_starts, q_starts[1:], k_starts, k_starts[1:], strict=False)
    return torch.cat([causal_attention(query[a:b], key[c:d], value[c:d]) for a, b, c, d in spans])


def varlen_2_10(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None
):  # type: ignore[no-untyped-def]
    assert is_causal
    return _varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)


def varlen_later(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
    window_size=(-1, -1),
):  # type: ignore[no-untyped-def]  # fmt: skip
    assert window_size == (-1, 0)
    return _varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)


def varlen_2_12(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
    window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # type: ignore[no-untyped-def]  # fmt: skip
    assert window_size == (-1, 0) and enable_gqa
    return _varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, seqused_k, block_table)


def found(probe: str, module: str, stand_in: Any, patch: pytest.MonkeyPatch) -> list[Offer]:
    patch.setitem(sys.modules, module, stand_in)
    return attention_baseline._PROBES[probe]()


def is_right(offer: Offer) -> None:
    step, query, caches = batch()
    calls, check = rival_of(offer, step, query, caches, least=5).build()
    check()
    for call, cache in zip(calls, caches, strict=False):
        out = call().reshape(query.shape)  # type: ignore[attr-defined]
        check_attention(offer.name, out, step, query, cache, causal_tails(step))
    assert len(calls) == 5


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_pytorchs_sdpa_computes_causal_attention_of_the_same_rows(backend: SDPBackend) -> None:
    is_right(Offer("SDPA", partial(attention_baseline._sdpa, backend)))


def test_vllms_versions_are_offered_if_the_device_supports_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "vllm.vllm_flash_attn"
    for versions, threes, twos in (((2, 3), 2, 1), ((3,), 2, 0), ((2,), 0, 1)):
        offered = found(name, name, vllm(*versions), monkeypatch)
        assert [offer.fa3 for offer in offered] == [True] * threes + [False] * twos
        for offer in offered:
            is_right(offer)
    with pytest.raises(RuntimeError, match="neither FlashAttention 3 nor 2"):
        found(name, name, vllm(4), monkeypatch)


def test_the_flash_attention_packages_get_pages_or_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    probe, module = "flash_attn_interface (FA3)", "flash_attn_interface"
    package = SimpleNamespace(flash_attn_with_kvcache=with_kvcache)
    assert len(found(probe, module, package, monkeypatch)) == 1
    package.get_scheduler_metadata = lambda **sizes: "schedule"
    threes = found(probe, module, package, monkeypatch)
    assert [offer.fa3 for offer in threes] == [True, True]
    twos = found("flash_attn", "flash_attn", package, monkeypatch)
    assert [offer.fa3 for offer in twos] == [False]
    for offer in threes + twos:
        is_right(offer)


@pytest.mark.parametrize(
    ("signature", "forms"), [(varlen_2_10, 1), (varlen_later, 1), (varlen_2_12, 2)]
)
def test_pytorchs_varlen_is_called_as_its_signature_allows(
    signature: Callable[..., Any], forms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "torch.nn.attention.varlen"
    offered = found(name, name, SimpleNamespace(varlen_attn=signature), monkeypatch)
    assert len(offered) == forms and not any(offer.fa3 for offer in offered)
    for offer in offered:
        is_right(offer)


def test_missing_and_broken_rivals_are_listed_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken:
        def __getattr__(self, name: str) -> None:
            raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setitem(sys.modules, "flash_attn", Broken())  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "flash_attn_3.flash_attn_interface", None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", vllm(3))  # type: ignore[arg-type]
    offered, missing = offers()
    assert {"vLLM FA3, paged, free splits", "torch SDPA flash, unpaged"} <= {
        offer.name for offer in offered
    }
    assert missing["flash_attn"] == "OSError: libcudart.so.13: cannot open shared object file"
    assert missing["flash_attn_interface (FA3)"].startswith("ModuleNotFoundError")
    assert "vllm.vllm_flash_attn" not in missing


@pytest.mark.parametrize("spoilt", ["other rows", "NaN"])
def test_a_rival_with_a_wrong_result_is_not_timed(spoilt: str) -> None:
    def prepare(step: Step, query: Tensor, kv_cache: Tensor) -> Callable[[], Tensor]:
        right = attention_baseline._sdpa(SDPBackend.MATH, step, query, kv_cache)
        wrong = {"other rows": lambda: right().flip(1), "NaN": lambda: right() * float("nan")}
        return wrong[spoilt]

    def timer(calls: list[Call], replays: int) -> Timing:
        return Timing(10.0, 10.0, 10.0)

    step, query, caches = batch()
    rival = rival_of(Offer("theirs", prepare, fa3=True), step, query, caches, least=5)
    case = Case(lambda: None, [lambda: None], rivals=[rival])
    entry = Entry("attention", "attention", lambda: case, Bar(FA3, 1.15))
    row = run_entry(entry, Ceilings(4000.0, 800.0), 10, timer)  # type: ignore[arg-type]
    assert row.timing is not None and row.baseline == ""
    assert row.verdict == "FA3 failed here: not judged"
    assert row.rivals[0]["error"].startswith("AssertionError: theirs: error")
