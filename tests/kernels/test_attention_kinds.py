# SPDX-License-Identifier: Apache-2.0
"""Windows by depth, sinks, soft caps and float8, alone and together, against dense attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_batch import (
    DEVICE,
    Batch,
    Request,
    attend,
    chain,
    mixed,
    paths,
    random_parents,
    star,
)

import bastion_kernels.attention.workspace as workspace_module
from bastion_kernels.attention.workspace import TreeAttentionWorkspace

F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOGETHER = {"window": 9, "sinks": True, "softcap": 0.8}
KINDS: dict[str, tuple[list[Request], dict[str, Any]]] = {
    # Windows count depths: by their places in the cache the last siblings would lose the context.
    "siblings": ([Request(20, parents=star(41))], {"page": 1, "window": 8}),
    "together": (mixed(4), {**TOGETHER, "strided": True, "padded_requests": 2}),
    "sinks": (mixed(3), {"sinks": True, "heads": (6, 2)}),
    "float16 sinks": (mixed(3), {"sinks": True, "heads": (6, 2), "dtype": F16}),
    # small enough to bend most scores
    "softcap": (mixed(1), {"dim": 32, "softcap": 0.8}),
    "bfloat16 softcap": (mixed(1), {"dim": 32, "softcap": 0.8, "dtype": BF16}),
}
KINDS |= {
    f"window {n}": (mixed(n), {"heads": (2, 1), "window": n, "seed": n, "padded_requests": 1})
    for n in (1, 2, 5, 16, 33, 10**6)
}


@paths
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_equal_dense_attention(path: str, kind: str) -> None:
    requests, options = KINDS[kind]
    batch = Batch(requests, **options)
    batch.check(getattr(batch, path)())


@paths
def test_sinks_of_nothing_take_nothing(path: str) -> None:
    batch = Batch(mixed(3), heads=(6, 2))
    batch.sinks = torch.full((6,), -torch.inf)
    batch.check(getattr(batch, path)())


FLOAT8 = [(BF16, E4M3), (F32, E5M2), (BF16, E5M2), (F16, E4M3), (F16, E5M2), (F32, E4M3)]


@paths
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [*FLOAT8[:2], *(pytest.param(*kinds, marks=pytest.mark.slow) for kinds in FLOAT8[2:])],
)
def test_fp8_cache_with_scales(path: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    for more in ({}, TOGETHER):
        batch = Batch(mixed(2), dtype=dtype, kv_dtype=kv_dtype, dim=32, **more)
        batch.check(getattr(batch, path)())


@pytest.mark.parametrize("path", ["reference", "triton"])
@pytest.mark.parametrize("softcap", [0.0, 0.8])
def test_fp8_queries_with_a_scale(path: str, softcap: float) -> None:
    batch = Batch(mixed(2), dtype=BF16, kv_dtype=E4M3, query_dtype=E4M3, dim=32, softcap=softcap)
    batch.check(getattr(batch, path)())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("programs", "window"),
    [(13, 16), *(pytest.param(n, 128, marks=pytest.mark.slow) for n in (4, 64))],
)
def test_tiles_before_a_window_are_not_walked(
    programs: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace_module, "_DEFAULT_PROGRAMS", programs)
    g = torch.Generator().manual_seed(programs)
    requests = [
        Request(600, parents=random_parents(33, g)),
        Request(0, chunk=150),
        Request(300, chunk=40, parents=chain(9)),
        Request(333, chunk=1),
    ]
    batch = Batch(requests, heads=(4, 2), window=window, sinks=True, page=16, seed=window)
    # vLLM gives away blocks that no row sees any more
    for r, request in enumerate(requests):
        for column in range(request.cached + 1 - window):
            batch.kv[batch.table[r, column // 16].long(), :, column % 16] = 1e4
    walked = {}
    for some in (0, window):
        workspace = TreeAttentionWorkspace(
            4, 2, 16, torch.float32, 300, 4, DEVICE, window=some, max_tail=33
        )
        workspace.plan(batch.starts.to(DEVICE), batch.lengths.to(DEVICE))
        walked[some] = int((workspace.runs[:, 4] - workspace.runs[:, 3]).clamp(min=0).sum())
    assert walked[window] < walked[0] * (0.3 if window == 16 else 0.7)
    attend(*batch.args(), **batch.kinds(), workspace=workspace, version="triton")
    batch.check(batch.out_on_device.cpu())
    batch.check(batch.reference())
