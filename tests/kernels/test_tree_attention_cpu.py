# SPDX-License-Identifier: Apache-2.0
"""What the CPU's attention has of its own: long chunks, contexts in parts, the bits of a path."""

from __future__ import annotations

import pytest
import torch
from attention_batch import POISON, Batch, Request, random_parents

import bastion_kernels.attention.cpu as cpu_module
from bastion_kernels.attention.cpu import write_kv_cpu
from bastion_kernels.attention.tree_attention import write_kv, write_kv_reference

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's version")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("columns", "in_cache"), [(2**15, 2**20), (11, 0), (16, 2**20)])
def test_cpu_parts_of_long_prompts_and_contexts(
    dtype: torch.dtype, columns: int, in_cache: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_module, "_COLUMNS", columns)
    monkeypatch.setattr(cpu_module, "_IN_CACHE", in_cache)
    g = torch.Generator().manual_seed(12)
    requests = [
        Request(37, chunk=100),
        Request(0, chunk=130),
        Request(19, chunk=70, parents=random_parents(9, g)),
        Request(150, chunk=1),
        Request(0, chunk=1),
        Request(61, parents=random_parents(40, g)),
    ]
    for strided in (False, True):
        batch = Batch(requests, heads=(6, 2), dim=32, dtype=dtype, strided=strided)
        batch.check(batch.cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_gives_a_path_the_bits_of_a_chain_of_as_many_rows(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(13)
    requests = [Request(300, parents=random_parents(16, g))]
    tree = Batch(requests, heads=(4, 2), dim=64, page=16, dtype=dtype)
    chained = Batch([Request(300, chunk=16)], heads=(4, 2), dim=64, page=16, dtype=dtype)
    got, request = tree.cpu(), tree.requests[0]
    context = torch.arange(300)
    for node in range(16):
        path = [c - 300 for c in request.visible(node)[300:]]
        order = torch.tensor(path + [n for n in range(16) if n not in path])
        chained.query[:16] = tree.query[order]
        for rows, sources in ((context, context), (300 + torch.arange(16), 300 + order)):
            source = tree.kv[tree.table[0, sources // 16].long(), :, sources % 16]
            chained.kv[chained.table[0, rows // 16].long(), :, rows % 16] = source
        assert torch.equal(got[path], chained.cpu()[: len(path)])


@pytest.mark.parametrize("run", [write_kv, write_kv_reference, write_kv_cpu])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_kv_versions_agree(run, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(11)
    cache = torch.full((9, 3, 8, 20), POISON, dtype=dtype)
    qkv = torch.randn(30, 9, 10, generator=g).to(dtype)
    key, value = qkv[:, 3:6], qkv[:, 6:]  # as vLLM has them: slices of the projection
    slots = torch.randperm(72, generator=g)[:27]
    slots[::5] = -1
    expected = cache.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // 8, :, slot % 8] = torch.cat([key[row], value[row]], 1)
    run(key, value, cache, slots)
    assert torch.equal(cache, expected)
