# SPDX-License-Identifier: Apache-2.0
"""The division of a step's attention among programs, checked tile by tile."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch
from op_helpers import DEVICE

import bastion_kernels.attention.workspace as workspace_module
from bastion_kernels.attention.workspace import Tiles, TreeAttentionWorkspace

HEADS, GROUP = 8, 4
# request, q-block within it, key head, tile
Work = tuple[int, int, int, int]
# (rows, cached rows before them) of each request
Step = list[tuple[int, int]]


class Plan:
    """A planned step, read back from the workspace's buffers as the attention kernel reads it."""

    def __init__(self, workspace: TreeAttentionWorkspace, step: Step) -> None:
        self.workspace, self.step = workspace, step
        starts = torch.tensor([0] + [rows for rows, _ in step]).cumsum(0).int()
        self.starts = starts.tolist()
        lengths = torch.tensor([rows + cached for rows, cached in step]).int()
        workspace.plan(starts.to(DEVICE), lengths.to(DEVICE), self.starts[-1])
        self.chunk, self.busy = workspace.header.tolist()
        self.runs = workspace.runs.tolist()
        self.bundles = workspace.bundles.tolist()
        self.walks = [self.walk(p) for p in range(workspace.programs)]

    def tiles(self, request: int, block: int) -> int:
        rows, cached = self.step[request]
        seen = cached + min((block + 1) * self.workspace.block_q, rows)
        return -(-seen // self.workspace.tiles.block_n)

    def walk(self, program: int) -> list[Work | None]:
        """What a program does, None where its q-block has no tile but a team mate's has."""
        bundle, member, _, line, stop = self.runs[program][:5]
        steps: list[Work | None] = []
        if line < stop:
            assert self.runs[program][8:15] == self.bundles[bundle][:7]
        while line < stop:
            request, row, before, tiles, *of_request = self.bundles[bundle][:7]
            assert of_request == [self.starts[request], *self.step[request]]
            first = before * self.workspace.kv_heads
            head = (line - first) // tiles
            start = first + head * tiles
            block = row // self.workspace.block_q + member
            end = min(stop, start + tiles)
            own = self.tiles(request, block)
            steps += [
                (request, block, head, t) if t < own else None
                for t in range(line - start, end - start)
            ]
            line = end
            bundle += line == first + tiles * self.workspace.kv_heads
        return steps

    def expected(self) -> Counter[Work]:
        return Counter(
            (r, b, h, t)
            for r, (rows, _) in enumerate(self.step)
            for b in range(-(-rows // self.workspace.block_q))
            for h in range(self.workspace.kv_heads)
            for t in range(self.tiles(r, b))
        )

    def check(self) -> None:
        done = Counter(work for walk in self.walks for work in walk if work is not None)
        assert done == self.expected()
        assert max(map(len, self.walks), default=0) <= self.chunk
        assert all(not walk for walk in self.walks[self.busy :])
        self.check_teams()
        self.check_cuts()

    def check_teams(self) -> None:
        """The members of a team are neighbours and read the same tile at the same time."""
        program = 0
        while program < self.busy:
            members = self.runs[program][2]
            team = self.walks[program : program + members]
            assert [run[1] for run in self.runs[program : program + members]] == list(
                range(members)
            )
            for together in zip(*team, strict=True):
                mates = {(w[0], w[2], w[3]) for w in together if w is not None}
                assert len(mates) <= 1  # none in what rounds a bundle up to whole runs
            program += members
        assert program == self.busy

    def check_cuts(self) -> None:
        """What the kernel computes about cuts: its parts, where they are, who counts them."""
        parts: dict[tuple[int, ...], list[int]] = {}
        for program, walk in enumerate(self.walks):
            for block in dict.fromkeys(work[:3] for work in walk if work is not None):
                parts.setdefault(block, []).append(program)
        places, counters = set(), set()
        for block, programs in parts.items():
            if len(programs) == 1:
                continue
            members = self.runs[programs[0]][2]
            assert all(b - a == members for a, b in pairwise(programs))
            counters.add(programs[0])
            places |= {programs[0] * 2 + 1} | {p * 2 for p in programs[1:]}
            firsts = [t for w in self.walks[programs[0]] if w and w[:3] == block for t in w[3:]]
            assert firsts[0] == 0
        cut = [p for p in parts.values() if len(p) > 1]
        assert len(counters) == len(cut)
        assert len(places) == sum(map(len, cut))


def make(
    monkeypatch: pytest.MonkeyPatch, programs: int, tiles: Tiles, rows: int, requests: int
) -> TreeAttentionWorkspace:
    monkeypatch.setattr(workspace_module, "_DEFAULT_PROGRAMS", programs)
    workspace = TreeAttentionWorkspace(
        HEADS * GROUP, HEADS, 128, torch.bfloat16, rows, requests, "cpu", tiles
    )
    for name in ("header", "bundles", "runs", "arrived"):
        setattr(workspace, name, getattr(workspace, name).to(DEVICE))
    return workspace


USUAL = Tiles(128, 64, num_warps=8, stages=5, occupancy=1)
SMALL = Tiles(16, 16, num_warps=4, stages=2, occupancy=1)


@pytest.mark.parametrize("programs", [1, 4, 20, 132, 264])
def test_every_tile_of_every_block_is_done_once_in_random_steps(
    monkeypatch: pytest.MonkeyPatch, programs: int
) -> None:
    g = torch.Generator().manual_seed(programs)
    workspace = make(monkeypatch, programs, SMALL, 1024, 24)
    for _ in range(8):
        num = int(torch.randint(1, 25, (1,), generator=g))
        most = int(torch.tensor([2, 11, 42])[torch.randint(0, 3, (1,), generator=g)])
        rows = torch.randint(0, most, (num,), generator=g).tolist()
        cached = torch.randint(0, 400, (num,), generator=g).tolist()
        Plan(workspace, list(zip(rows, cached, strict=True))).check()


@pytest.mark.parametrize(
    "step",
    [
        pytest.param([(0, 0)] * 3, id="nothing but padding"),
        pytest.param([(1, 0)], id="one row"),
        pytest.param([(8192, 0)], id="long prefill"),
        pytest.param([(4096, 5000), (65, 900), (17, 40), (1, 3000)], id="prefill among trees"),
        pytest.param([(65, 1024 + 37 * i) for i in range(64)], id="64 trees"),
        pytest.param([(1 + 7 * i % 90, 50 * i) for i in range(63)] + [(0, 0)], id="64 mixed"),
        pytest.param([(257, 3000), (65, 3000), (16, 3000)] + [(0, 0)] * 61, id="padded to 64"),
    ],
)
def test_every_tile_of_every_block_is_done_once(
    monkeypatch: pytest.MonkeyPatch, step: Step
) -> None:
    Plan(make(monkeypatch, 132, USUAL, 8192, 64), step).check()


@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize("context", [1024, 8192, 32768])
def test_trees_of_64_nodes_are_balanced(
    monkeypatch: pytest.MonkeyPatch, requests: int, context: int
) -> None:
    plan = Plan(make(monkeypatch, 132, USUAL, 65 * 8, 8), [(65, context)] * requests)
    plan.check()
    # three q-blocks of 260 packed rows: within 3 % of an equal share of 132 programs, where that is
    # not so small that merging or beginning a second q-block would cost more
    shortest = (-(-(context + 65) // 64)) ** 0.5
    fair = -(-len(plan.expected()) // 132)
    assert plan.chunk <= max(1.03 * fair + 1, shortest + 1, fair + workspace_module._SECOND)


def test_a_plan_is_as_large_as_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With vLLM's 1024 requests and 8192 rows every step had 2,048 places, be it of one request."""
    workspace = TreeAttentionWorkspace(
        32, 8, 128, torch.bfloat16, 8192, 1024, "cpu", processors=132
    )
    assert workspace.capacities == [64, 128, 256, 512, 1024, 2048]
    used: list[int] = []
    monkeypatch.setattr(workspace, "_plan", lambda starts, lengths, size: used.append(size))
    none = torch.zeros(1025, dtype=torch.int32)
    for requests, rows in ((1, 256), (16, 256), (64, 64), (256, 512), (1024, 8192)):
        workspace.plan(none[: requests + 1], none[:requests], rows)
    workspace.plan(none[:2], none[:1])
    assert used == [64, 64, 64, 512, 2048, 128]
    used.clear()
    workspace.warm_up()
    assert used == workspace.capacities
