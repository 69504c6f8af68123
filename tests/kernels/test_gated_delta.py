# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule over trees against the recurrence in float64 along each root path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_batch import DEVICE, POISON, Batch, Request, chain, mixed, random_parents, star
from op_helpers import refuses, runs
from torch import Tensor

from bastion_kernels.gated_delta.recurrence import gated_delta_commit, gated_delta_tree
from bastion_kernels.gated_delta.states import LayerStates
from tests import references

trees = runs(gated_delta_tree)


class Step:
    """Inputs of a step with the requests of `Batch`, whose rows, tails, slots and bits it has."""

    def __init__(
        self, requests: list[Request], *, heads: tuple[int, int] = (4, 2), dim: int = 16,
        width: int = 32, dtype: torch.dtype = torch.float32, seed: int = 0, padded: int = 1,
    ) -> None:  # fmt: skip
        batch = Batch(requests, padded_requests=padded, seed=seed)
        g = torch.Generator().manual_seed(seed)
        self.requests, rows, (h, hk) = requests, len(batch.query), heads
        self.starts, self.tails = batch.starts, batch.tails
        self.slots, self.bits = batch.slots, batch.bits
        normal = torch.nn.functional.normalize
        # rows of a wider projection, as vLLM has them
        wide = torch.randn(rows, 2 * hk + h, dim + width, generator=g)
        self.query = normal(wide[:, :hk, :dim], dim=-1).to(dtype)
        self.key = normal(wide[:, hk : 2 * hk, :dim], dim=-1).to(dtype)
        self.value = wide.to(dtype)[:, 2 * hk :, :width]
        self.gate = -torch.rand(rows, h, generator=g) * 2
        self.gate[::5] *= 30  # forgets nearly all
        self.beta = torch.rand(rows, h, generator=g)
        places = torch.randperm(len(self.slots) + 3, generator=g)[: len(self.slots)]
        self.places = places.to(torch.int32)
        self.places[len(requests) :] = -1
        self.state = torch.randn(len(self.slots) + 3, h, width, dim, generator=g).mT
        self.scale, self.heads, self.width = dim**-0.5, heads, width

    def run(self, run: Any = references.gated_delta_tree) -> tuple[Tensor, Tensor, Tensor]:
        """Output, updates and decays."""
        rows, h = len(self.query), self.heads[0]
        made = [
            torch.full(shape, POISON, dtype=dtype, device=DEVICE)
            for shape, dtype in (
                ((rows, h, self.width), torch.float32),
                ((rows, h, self.width), torch.float32),
                ((rows, h), torch.float64),
            )
        ]
        given: list[Any] = [
            self.query, self.key, self.value, self.gate, self.beta, self.state, self.places,
            self.starts, self.tails, self.slots, self.bits,
        ]  # fmt: skip
        before = self.state.clone()
        run(*(x.to(DEVICE) for x in given), self.scale, *made)
        assert torch.equal(self.state, before)
        return made[0].cpu(), made[1].cpu(), made[2].cpu()

    def along(self, r: int, rows: list[int]) -> tuple[Tensor, Tensor]:
        """Last output `[H, V]` and state `[H, K, V]` of a recurrence over rows of request r."""
        h, hk = self.heads
        state = self.state[self.places[r]].double()
        first = int(self.starts[r])
        for row in rows:
            at = first + row
            q, k = (x[at].double().repeat_interleave(h // hk, 0) for x in (self.query, self.key))
            state = state * self.gate[at].double().exp()[:, None, None]
            told = torch.einsum("hkv,hk->hv", state, k)
            update = self.beta[at].double()[:, None] * (self.value[at].double() - told)
            state = state + k[..., None] * update[:, None]
        return self.scale * torch.einsum("hkv,hk->hv", state, q), state

    def path_to(self, r: int, row: int) -> list[int]:
        """Rows of the request that a row sees."""
        request = self.requests[r]
        return [c - request.cached for c in request.visible(row) if c >= request.cached]

    def check(self, out: Tensor, tolerance: float) -> None:
        """Every row against the recurrence along its path, to a part of the request's usual row."""
        for r, request in enumerate(self.requests):
            truths = [self.along(r, self.path_to(r, row))[0] for row in range(request.rows)]
            truth, first = torch.stack(truths), int(self.starts[r])
            error = (out[first : first + request.rows].double() - truth).flatten(1).norm(dim=1)
            usual = truth.flatten(1).norm(dim=1).square().mean().sqrt()
            assert error.max() < tolerance * usual, (r, int(error.argmax()), error.max() / usual)
        assert bool((out[int(self.starts[-1]) :] == POISON).all())


@trees
def test_a_mixed_batch(run: Any) -> None:
    step = Step(mixed(), seed=1, padded=2)
    step.check(step.run(run)[0], 1e-5)


WHOLE = pytest.mark.parametrize(
    "run",
    [references.gated_delta_tree, pytest.param(gated_delta_tree.triton, marks=pytest.mark.slow)],
)
SIZES = (1, 2, 15, 16, 17, 33, 65, 130, 512)


@pytest.mark.parametrize(
    ("run", "nodes"),
    [(references.gated_delta_tree, nodes) for nodes in SIZES]
    # a Python loop in the interpreter
    + [
        pytest.param(gated_delta_tree.triton, n, marks=[pytest.mark.slow] * (n not in (2, 17)))
        for n in SIZES
    ],
)
def test_trees_of_any_size(run: Any, nodes: int) -> None:
    g = torch.Generator().manual_seed(nodes)
    heads, dim = ((2, 1), 16) if nodes > 100 else ((2, 2), 24)
    step = Step([Request(5, parents=random_parents(nodes, g))], heads=heads, dim=dim, seed=nodes)
    step.check(step.run(run)[0], 1e-5)


@WHOLE
@pytest.mark.parametrize("shape", [chain, star])
def test_wide_and_deep_trees(run: Any, shape: Any) -> None:
    step = Step([Request(0, parents=shape(70))], seed=3)
    step.check(step.run(run)[0], 1e-5)


@WHOLE
def test_repeated_keys_that_are_wholly_replaced(run: Any) -> None:
    """The hardest system: beta 1, no decay, one key for all rows; products of it would overflow."""
    step = Step([Request(0, chunk=40, parents=chain(60))], seed=4)
    step.key[:] = step.key[:1]
    step.gate.zero_()
    step.beta.fill_(1)
    step.check(step.run(run)[0], 1e-5)


@trees
def test_rows_and_heads_as_large_as_models_have_them(run: Any) -> None:
    g = torch.Generator().manual_seed(5)
    step = Step(
        [Request(3, parents=random_parents(20, g))], heads=(2, 1), dim=128, width=128,
        dtype=torch.bfloat16,
    )  # fmt: skip
    step.check(step.run(run)[0], 1e-5)


@trees
def test_requests_without_a_state_are_left_alone(run: Any) -> None:
    step = Step(mixed(6), seed=6)
    step.places[1] = -1
    out = step.run(run)[0]
    gone = slice(int(step.starts[1]), int(step.starts[2]))
    assert bool((out[gone] == POISON).all())
    out[gone] = 0
    for r in range(len(step.requests)):
        if r == 1:
            continue
        truth, _ = step.along(r, step.path_to(r, 0))
        torch.testing.assert_close(out[int(step.starts[r])].double(), truth, rtol=1e-4, atol=1e-5)


@trees
def test_what_is_not_finite_reaches_the_rows_that_see_it_and_no_others(run: Any) -> None:
    """Nodes of a tree of several blocks, a row of a prompt before another tree, and a query."""
    requests = [Request(3, parents=random_parents(37, torch.Generator().manual_seed(9)))]
    requests += [Request(2, chunk=5, parents=random_parents(9, torch.Generator().manual_seed(3)))]
    step = Step(requests, heads=(1, 1), width=16, seed=9)
    step.gate.clamp_(min=-2)  # a gate that forgets all of a row's past would hide it
    usual = step.run(run)
    hit = {(0, 4): "value", (0, 18): "key", (0, 21): "beta", (0, 30): "query", (1, 7): "gate"}
    for (r, row), name in hit.items():
        getattr(step, name)[step.starts[r] + row] = torch.inf if name == "value" else torch.nan
    got = step.run(run)
    sees = torch.zeros(len(usual[0]), dtype=torch.bool)
    for r, request in enumerate(requests):
        for row in range(request.rows):
            above = {hit.get((r, other)) for other in step.path_to(r, row)} - {None, "query"}
            sees[int(step.starts[r]) + row] = bool(above) or hit.get((r, row)) == "query"
    assert sees.any() and not sees.all()
    for new, old in zip(got, usual, strict=True):
        assert torch.equal(new[~sees], old[~sees])
    assert not got[0][sees].isfinite().any()


@runs(gated_delta_commit)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_moves_along_the_accepted_rows(run: Any, dtype: torch.dtype) -> None:
    step = Step(mixed(7), seed=7)
    _, updates, decays = step.run()
    g = torch.Generator().manual_seed(7)
    tails = [max(1, len(request.parents)) for request in step.requests] + [0]
    logits = torch.tensor([0, *tails], dtype=torch.int32).cumsum(0).to(torch.int32)
    path = torch.full((len(tails), 7), -1, dtype=torch.int32)
    accepted: list[list[int]] = []
    for r, request in enumerate(step.requests):
        last = request.rows - tails[r] + int(torch.randint(0, tails[r], (1,), generator=g))
        rows = step.path_to(r, last)
        nodes = [row - (request.rows - tails[r]) for row in rows if row >= request.rows - tails[r]]
        nodes = nodes[:7]
        path[r, : len(nodes)] = torch.tensor(nodes, dtype=torch.int32)
        accepted.append(
            list(range(request.rows - tails[r])) + [request.rows - tails[r] + n for n in nodes]
        )
    # nothing was accepted of the second, nor is the third ours
    path[1] = -1
    step.places[2] = -1
    state = step.state.to(DEVICE, dtype, copy=True)
    before, first = state.clone(), state.clone()
    # a layer of another group comes before, whose state has nothing to add
    states = LayerStates([first, state], [1, 0])
    kept = (torch.stack([0 * x, x]).to(DEVICE) for x in (step.key, updates, decays))
    places = torch.stack([step.places, step.places.flip(0)])
    tables = (places, places[None], step.starts, logits, path)
    run(*kept, states, *(x.to(DEVICE) for x in tables))
    assert torch.equal(first, before)
    step.state = before.float().cpu()
    touched = set()
    for r in range(len(step.requests)):
        if r in (1, 2):
            continue
        place = int(step.places[r])
        touched.add(place)
        _, truth = step.along(r, accepted[r])
        got = state[place].double().cpu()
        # the updates are those of the state in fp32
        assert (got - truth).norm() / truth.norm() < (1e-5 if dtype == torch.float32 else 1e-2), r
    for place in range(len(state)):
        if place not in touched:
            assert torch.equal(state[place], before[place])


@runs(gated_delta_commit)
def test_the_state_after_any_part_of_a_path(run: Any) -> None:
    """A block may end at every offset: its state goes where the step's state was, or elsewhere."""
    step = Step([Request(3, parents=chain(7))], seed=9, padded=0)
    _, updates, decays = step.run()
    starts, place = step.starts, int(step.places[0])
    kept = [x[None].to(DEVICE) for x in (step.key, updates, decays)]
    other = next(i for i in range(len(step.state)) if i != place)
    rows = int(starts[1])
    path = torch.arange(9, dtype=torch.int32)[None]
    own, into = (torch.tensor(x, dtype=torch.int32) for x in ([[place]], [[[other]], [[place]]]))
    for offset in range(1, rows):
        state, lengths = step.state.to(DEVICE, copy=True), torch.tensor([[rows], [offset]]).int()
        given = (own, into, starts[:2], starts[:2], path, lengths)
        run(*kept, LayerStates([state], [0]), *(x.to(DEVICE) for x in given))
        for at, length in ((other, rows), (place, offset)):
            _, truth = step.along(0, list(range(length)))
            torch.testing.assert_close(state[at].cpu().double(), truth, rtol=1e-4, atol=1e-5)
        untouched = [i for i in range(len(state)) if i not in (place, other)]
        assert torch.equal(state.cpu()[untouched], step.state[untouched])


def test_refusals_name_the_argument() -> None:
    step = Step(mixed(8), seed=8)
    rows, h = len(step.query), step.heads[0]
    made = [torch.zeros(rows, h, step.width), torch.zeros(rows, h, step.width)]
    decays = torch.zeros(rows, h, dtype=torch.float64)
    rest = (step.places, step.starts, step.tails, step.slots, step.bits, 1.0, *made)
    args = (step.query, step.key, step.value, step.gate, step.beta, step.state, *rest)
    refuses("decays must have shape", gated_delta_tree, *args, decays[:2])
    double = *args[:3], step.gate.double(), *args[4:], decays
    refuses("gate must be", gated_delta_tree, *double)
    refuses(
        "4 value heads over 3", gated_delta_tree, *[torch.zeros(rows, 3, 16)] * 2, *args[2:], decays
    )
    states, kept = LayerStates([step.state], [0]), (x[None] for x in (step.key, made[0], decays))
    places = step.places[None]
    tables = places, places[None], step.starts, step.starts, torch.zeros(2, 3).int()
    refuses("state_rows must have shape", gated_delta_commit, *kept, states, *tables)
    refuses("2 states of 2 layouts", LayerStates, [step.state, step.state[1:]], [0, 0])
