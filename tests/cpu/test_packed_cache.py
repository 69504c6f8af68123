# SPDX-License-Identifier: Apache-2.0
"""vLLM's own CPU kernels write and read the cache that our ops read and move rows in."""

from __future__ import annotations

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from bastion_kernels import AttentionLayer, AttentionStep, KVCaches, compact_caches
from bastion_kernels.attention.kv_layout import OTHER
from tests import references
from tests.references.kv_layout import unpacked
from vllm_bastion.attention.kv_cache import float8
from vllm_bastion.cpu.attention import cache_layout

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="the CPU's kernels")
PAGE, HEADS, KV_HEADS = 32, 4, 2


@pytest.mark.parametrize(
    ("dtype", "dim", "kind"),
    [
        (torch.float32, 64, "auto"), (torch.bfloat16, 64, "auto"), (torch.float32, 80, "auto"),
        (torch.float32, 64, "fp8"), (torch.bfloat16, 64, "fp8"), (torch.float16, 32, "fp8_e5m2"),
    ],
)  # fmt: skip
def test_our_ops_agree_with_vllms_kernels(dtype: torch.dtype, dim: int, kind: str) -> None:
    current_platform.import_kernels()
    torch.cpu._init_amx()  # as an engine's first matrix product does
    torch.manual_seed(0)
    held = float8(kind) or dtype
    if held != dtype and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM's float8 caches need AVX-512")
    isa = _get_attn_isa(dtype, PAGE, dim, kind)
    layout = cache_layout(isa, PAGE, dim, dtype, kind)
    if dim == 64 and isa in ("amx", "vec"):
        assert layout.kind != OTHER, "vLLM's format has changed: it is read slowly"
    # a chain of 20 rows, a chunk of 100, one row
    rows, lengths = [20, 100, 1], [320, 100, 77]
    pages = [-(-length // PAGE) for length in lengths]
    table = torch.zeros(3, max(pages), dtype=torch.int32)
    order = torch.randperm(sum(pages)).int()
    slots, total = [], 0
    for r, count in enumerate(pages):
        table[r, :count] = order[total : total + count]
        total += count
        places = torch.arange(lengths[r])
        slots.append(table[r, places // PAGE].long() * PAGE + places % PAGE)
    shape = (sum(pages), KV_HEADS, PAGE, 2 * dim)
    cache = torch.zeros(shape, dtype=dtype if held == dtype else torch.uint8)
    scales = {} if held == dtype else {"k_scale": 0.7, "v_scale": 1.7, "kv_cache_dtype": kind}
    keys, values = cache.view(shape[0], KV_HEADS, 2 * PAGE, dim).chunk(2, dim=2)
    kv = torch.randn(2, sum(lengths), KV_HEADS, dim).to(dtype)
    ops.cpu_attn_reshape_and_cache(kv[0], kv[1], keys, values, torch.cat(slots), isa, **scales)
    found = unpacked(cache, layout).transpose(1, 2).flatten(0, 1)[torch.cat(slots)]
    if held == dtype:
        assert torch.equal(found, torch.cat([kv[0], kv[1]], 2))
    else:
        factors = torch.tensor([0.7, 1.7])[:, None, None, None]
        # vLLM drops bits that do not fit
        error = 2 ** -(3 if held == torch.float8_e4m3fn else 2)
        found = torch.stack(found.view(held).float().chunk(2, dim=2)) * factors
        torch.testing.assert_close(found, kv.float(), rtol=error, atol=5e-3)
    starts = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32)
    seq_lens, scale = torch.tensor(lengths, dtype=torch.int32), dim**-0.5
    query = torch.randn(sum(rows), HEADS, dim).to(dtype)
    got, want, exact = (torch.empty_like(query) for _ in range(3))
    plan = ops.cpu_attn_get_scheduler_metadata(
        3, HEADS, KV_HEADS, dim, seq_lens, dtype, starts, True, -1, isa, True,
        kv_cache_dtype=kind,
    )  # fmt: skip
    ops.cpu_attention_with_kv_cache(
        query, keys, values, want, starts, seq_lens, scale, True, None, -1, table, 0.0, plan,
        None, **scales,
    )  # fmt: skip
    nothing = torch.zeros(3, dtype=torch.int32)
    factors = {k: torch.tensor([v]) for k, v in scales.items() if k != "kv_cache_dtype"}
    no_bits = torch.zeros(1, 1, 1, dtype=torch.int32)
    step = AttentionStep(table, starts, seq_lens, nothing, torch.full((3,), -1), no_bits)
    attend = AttentionLayer(cache.view(held), scale, layout=layout, **factors)
    attend(step, query, got)
    references.tree_attention(attend, step, query, exact)
    error = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 2e-5}[dtype]
    torch.testing.assert_close(got, exact, atol=error, rtol=error)
    # vLLM's matrix registers multiply float8 keys and values as bf16, before they are scaled.
    error = 5e-2 if isa == "amx" and held != dtype else error
    torch.testing.assert_close(want, exact, atol=error, rtol=error)

    # the accepted path of the first: rows 0, 2, 7 of its tail become its first three
    step = torch.cat([torch.cat(slots)[300:320], torch.zeros(1, dtype=torch.int64)])[None]
    one = torch.tensor([0, 20], dtype=torch.int32)
    path = torch.tensor([[0, 2, 7, -1]], dtype=torch.int32)
    before = unpacked(cache, layout).transpose(1, 2).flatten(0, 1)
    compact_caches(KVCaches([cache], [0], [layout]), step, one, one, path)
    after = unpacked(cache, layout).transpose(1, 2).flatten(0, 1)
    want = before.clone()
    want[slots[0][301]], want[slots[0][302]] = before[slots[0][302]], before[slots[0][307]]
    assert torch.equal(after, want)
