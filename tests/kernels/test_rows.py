# SPDX-License-Identifier: Apache-2.0
"""Row bookkeeping against plain Python over random batches; outputs are poisoned first."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from op_helpers import DEVICE, POISON, assert_same, poisoned, runs, versions

from bastion_kernels import bind_slots, context_rows
from tests import references


def ints(values: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@runs(bind_slots, bind_slots)
@pytest.mark.parametrize(("mapped", "size"), [([], 3), ([2, 0], 3), ([4, 1, 130], 200)])
def test_slots_of_the_draft(run, mapped, size):
    slots = poisoned(size, dtype=torch.int64).to(DEVICE)
    run(ints(mapped, torch.int64), slots)
    assert slots.tolist() == mapped + [-1] * (size - len(mapped))


@runs(bind_slots, bind_slots)
@pytest.mark.parametrize("size", [5, 128, 300])
def test_tails_of_a_verified_batch(run, size):
    rng = np.random.default_rng(size)
    mapped = rng.permutation(size)[: size // 2 + 1].tolist()
    tails = [int(n) for n in rng.integers(1, 65, len(mapped))]
    tails[0] = 1
    slots = poisoned(size, dtype=torch.int64).to(DEVICE)
    lens = poisoned(size, dtype=torch.int32).to(DEVICE)
    # the runner's buffer is longer than the batch
    cu = ints([0, *np.cumsum(tails).tolist(), 9999])
    run(ints(mapped, torch.int64), slots, lens, cu)
    assert slots.tolist() == mapped + [-1] * (size - len(mapped))
    expected = [0 if n == 1 else n for n in tails]
    assert lens.tolist() == expected + [0] * (size - len(mapped))
    run(ints(mapped, torch.int64), slots, lens.fill_(POISON))
    assert slots.tolist()[: len(mapped)] == mapped and not lens.any()
    run(ints([], torch.int64), slots, lens.fill_(POISON), cu)
    assert (slots == -1).all() and not lens.any()


@pytest.mark.parametrize("run", versions(context_rows.triton, context_rows.cpu))
@pytest.mark.parametrize("caches", [0, 2])
@pytest.mark.parametrize("seed", range(8))
def test_context_rows_are_the_accepted_path(run, seed, caches):
    rng = np.random.default_rng(seed)
    reqs, width, slack = int(rng.integers(1, 6)), int(rng.integers(2, 17)), 3
    prompts = [int(rng.choice([0, 0, 1, 5, 300])) for _ in range(reqs)]
    nodes = [int(rng.integers(0, 40)) for _ in range(reqs)]
    # what the host laid out may be more than what the device verified
    allowed = [min(n + int(rng.integers(0, 4)), width - 1) + 1 for n in nodes]
    starts = np.cumsum([0] + [p + 1 + n for p, n in zip(prompts, nodes, strict=True)])
    kept = np.cumsum([0] + [p + a for p, a in zip(prompts, allowed, strict=True)])
    positions = np.concatenate([1000 * r + np.arange(p + 1 + n) for r, (p, n) in
                                enumerate(zip(prompts, nodes, strict=True))])  # fmt: skip
    paths, sampled, rejected = [], [], []
    for n, most in zip(nodes, allowed, strict=True):
        length = int(rng.integers(0, min(n, most - 1) + 1))
        path = [0, *sorted(rng.permutation(np.arange(1, n + 1))[:length].tolist())]
        paths.append(path + [-1] * (width - len(path)))
        sampled.append(0 if rng.random() < 0.2 else len(path))
        rejected.append(0 if sampled[-1] == 0 else n + 1 - len(path))
    total, cu = int(kept[-1]), np.cumsum([0] + [1 + n for n in nodes])
    mapped = [ints((7 * np.arange(starts[-1]) + c).tolist(), torch.int64) for c in range(caches)]
    results = []
    for version in (references.context_rows, run):
        outs = [poisoned(total + slack, dtype=torch.int64).to(DEVICE) for _ in range(2 + caches)]
        out_rejected = poisoned(reqs, dtype=torch.int32).to(DEVICE)
        version(
            ints(kept.tolist()), ints(prompts), ints(starts.tolist()), ints(cu.tolist()),
            ints([*paths, [-1] * width]), ints(positions.tolist(), torch.int64), ints(sampled),
            ints(rejected), *outs[:2], out_rejected, int(np.diff(kept).max()), mapped, outs[2:],
        )  # fmt: skip
        results.append([*outs, out_rejected])
    assert_same(*results)
