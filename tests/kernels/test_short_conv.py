# SPDX-License-Identifier: Apache-2.0
"""The short convolution over trees against a plain convolution of each root path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_batch import DEVICE, POISON, Batch, Request, mixed, random_parents
from op_helpers import refuses, runs
from torch import Tensor

from bastion_kernels.gated_delta.short_conv import short_conv_commit, short_conv_tree
from bastion_kernels.gated_delta.states import LayerStates

CHANNELS = 150


class Step:
    """Inputs of a convolution for the rows, tails and slots of a `Batch`."""

    def __init__(self, requests: list[Request], taps: int = 4, seed: int = 0) -> None:
        batch = Batch(requests, padded_requests=1, seed=seed)
        g = torch.Generator().manual_seed(seed)
        self.requests, self.starts, self.tails = requests, batch.starts, batch.tails
        self.slots, slots = batch.slots, len(batch.slots)
        self.parents = batch.parents()
        self.x = torch.randn(len(batch.query), CHANNELS + 7, generator=g)[:, 3 : 3 + CHANNELS]
        self.weight = torch.randn(CHANNELS, taps, generator=g)
        self.places = torch.randperm(slots + 2, generator=g)[:slots].int()
        self.places[len(requests) :] = -1
        self.state = torch.randn(slots + 2, taps - 1, CHANNELS, generator=g).mT

    def text(self, r: int, row: int) -> Tensor:
        """Inputs up to a row, the state's first: `[n, C]`."""
        request = self.requests[r]
        rows = [c - request.cached for c in request.visible(row) if c >= request.cached]
        return torch.cat([self.state[self.places[r]].T, self.x[int(self.starts[r]) :][rows]])


@runs(short_conv_tree)
@pytest.mark.parametrize("taps", [2, 4])
def test_a_row_is_convolved_with_its_ancestors(run: Any, taps: int) -> None:
    g = torch.Generator().manual_seed(taps)
    step = Step([*mixed(taps), Request(2, chunk=2, parents=random_parents(40, g))], taps, taps)
    step.places[2] = -1
    out = torch.full(step.x.shape, POISON, device=DEVICE)
    given = (
        step.x, step.weight, step.state, step.places, step.starts, step.tails, step.slots,
        step.parents,
    )  # fmt: skip
    run(*(t.to(DEVICE) for t in given), out)
    for r, request in enumerate(step.requests):
        for row in range(request.rows):
            got = out[int(step.starts[r]) + row].cpu()
            total = (step.text(r, row)[-taps:] * step.weight.T).sum(0)
            expected = torch.nn.functional.silu(total)
            if r == 2:
                expected = torch.full_like(got, POISON)
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert bool((out[int(step.starts[-1]) :] == POISON).all())


@runs(short_conv_commit)
def test_the_last_inputs_of_the_accepted_text_are_kept(run: Any) -> None:
    step = Step(mixed(9), seed=9)
    tails = [max(1, len(request.parents)) for request in step.requests] + [0]
    logits = torch.tensor([0, *tails]).cumsum(0).int()
    path = torch.full((len(tails), 16), -1, dtype=torch.int32)
    expected = step.state.clone()
    for r, request in enumerate(step.requests):
        before = request.rows - tails[r]
        rows = [c - request.cached for c in request.visible(request.rows - 1)]
        nodes = [row - before for row in rows if row >= before]
        path[r, : len(nodes)] = torch.tensor(nodes, dtype=torch.int32)
        if r == 1:
            path[r] = -1
        else:
            expected[step.places[r]] = step.text(r, request.rows - 1)[-3:].T
    state = step.state.to(DEVICE, copy=True)
    # a layer of another group comes before, whose requests have no state
    first = state.clone()
    places = torch.stack([step.places, torch.full_like(step.places, -1)])
    given = (places, places[None], step.starts, logits, path)
    x = torch.stack([torch.zeros_like(step.x), step.x]).to(DEVICE)
    run(x, LayerStates([first, state], [1, 0]), *(t.to(DEVICE) for t in given))
    assert torch.equal(state.cpu(), expected)
    assert torch.equal(first.cpu(), step.state)


@runs(short_conv_commit)
def test_the_inputs_before_any_part_of_a_path(run: Any) -> None:
    """A block may end at every offset: its state goes where the step's state was, or elsewhere."""
    step = Step([Request(2, parents=[-1, 0, 1, 2, 3, 4])], seed=10)
    place, rows = int(step.places[0]), int(step.starts[1])
    other = next(i for i in range(len(step.state)) if i != place)
    path = torch.arange(8, dtype=torch.int32)[None]
    own, into = (torch.tensor(x, dtype=torch.int32) for x in ([[place]], [[[other]], [[place]]]))
    for offset in range(1, rows):
        state, lengths = step.state.to(DEVICE, copy=True), torch.tensor([[rows], [offset]]).int()
        given = (own, into, step.starts[:2], step.starts[:2], path, lengths)
        x = step.x[None].to(DEVICE)
        run(x, LayerStates([state], [0]), *(t.to(DEVICE) for t in given))
        for at, length in ((other, rows), (place, offset)):
            assert torch.equal(state[at].cpu(), step.text(0, length - 1)[-3:].T)


def test_refusals_name_the_argument() -> None:
    step = Step([Request(0, parents=[-1, 0])])
    rest = (step.places, step.starts, step.tails, step.slots, step.parents, step.x.clone())
    wrong = step.x, step.weight, step.state[:, :, :1], *rest
    refuses("state must have shape", short_conv_tree, *wrong)
    wrong = step.x, step.weight[:-1], step.state, *rest
    refuses("weight must have shape", short_conv_tree, *wrong)
