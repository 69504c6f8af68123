# SPDX-License-Identifier: Apache-2.0
"""Windows by depth, sinks and soft caps, alone and together, against dense masked attention."""

from __future__ import annotations

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


@paths
@pytest.mark.parametrize("window", [1, 2, 5, 16, 33, 10**6])
def test_a_window_counts_depths(path: str, window: int) -> None:
    batch = Batch(mixed(window), heads=(2, 1), window=window, seed=window, padded_requests=1)
    batch.check(getattr(batch, path)())


@paths
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
def test_sinks_take_their_part(path: str, dtype: torch.dtype) -> None:
    batch = Batch(mixed(3), sinks=True, dtype=dtype, heads=(6, 2))
    batch.check(getattr(batch, path)())
    without = Batch(mixed(3), dtype=dtype, heads=(6, 2))
    without.sinks = torch.full((6,), -torch.inf)
    without.check(getattr(without, path)())


@paths
def test_windows_sinks_and_caps_together_on_strided_rows(path: str) -> None:
    batch = Batch(mixed(4), window=9, sinks=True, softcap=0.8, strided=True, padded_requests=2)
    batch.check(getattr(batch, path)())


@paths
def test_siblings_have_one_window(path: str) -> None:
    # by their places in the cache the last of them would have lost the context
    batch = Batch([Request(20, parents=star(41))], page=1, window=8)
    for row in range(2, 41):
        batch.query[row] = batch.query[1]
        batch.kv[batch.table[0, 20 + row]] = batch.kv[batch.table[0, 21]]
    got = getattr(batch, path)()
    batch.check(got)
    torch.testing.assert_close(got[2:41], got[1:2].expand(39, -1, -1))


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
