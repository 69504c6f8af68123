# SPDX-License-Identifier: Apache-2.0
"""A gated delta layer on a CPU against the ops that a GPU runs one after the other."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from attention_batch import POISON, Batch, Request, chain, mixed, random_parents
from torch import Tensor

from bastion_kernels.cpu.gated_delta import gated_delta_layer
from tests import references

HALF = [torch.bfloat16, torch.float16]


class Layer:
    """A layer's tensors and the rows of a step, of the requests of `Batch`."""

    def __init__(
        self, requests: list[Request], *, heads: tuple[int, int] = (4, 2), dim: int = 24,
        width: int = 40, taps: int = 4, dtype: torch.dtype = torch.float32,
        state_dtype: torch.dtype = torch.float32, values_last: bool = True, seed: int = 0,
    ) -> None:  # fmt: skip
        self.batch = Batch(requests, padded_requests=1, seed=seed)
        g = torch.Generator().manual_seed(seed)
        self.heads, self.dim, self.width = heads, dim, width
        (h, hk), rows, slots = heads, len(self.batch.query), len(self.batch.slots)
        channels = 2 * hk * dim + h * width
        # rows of a wider projection, as vLLM has them
        wide = torch.randn(rows, channels + 2 * h + 3, generator=g).to(dtype)
        self.mixed = wide[:, :channels]
        self.b, self.a = wide[:, channels : channels + h], wide[:, -h:]
        self.weight = (torch.randn(channels, taps, generator=g) / taps).to(dtype)
        places = slots + 3
        self.conv_state = torch.randn(places, taps - 1, channels, generator=g).to(dtype).mT
        shape = (places, h, dim, width) if values_last else (places, h, width, dim)
        state = torch.randn(*shape, generator=g).to(state_dtype)
        self.state = state if values_last else state.mT
        self.decay_log, self.decay_bias = torch.randn(h, generator=g), torch.randn(h).to(dtype)
        self.places = torch.randperm(places, generator=g)[:slots].int()
        self.places[len(requests) :] = -1
        self.parents = self.batch.parents()
        self.scale = dim**-0.5

    def made(self, rows: int | None = None) -> tuple[Tensor, ...]:
        """Saved inputs and keys, updates and decays, before a step."""
        (h, hk), dtype = self.heads, self.mixed.dtype
        rows = len(self.mixed) + 2 if rows is None else rows
        return (
            torch.full((rows, self.mixed.shape[1]), POISON, dtype=dtype),
            torch.full((rows, hk, self.dim), POISON, dtype=dtype),
            torch.full((rows, h, self.width), POISON),
            torch.full((rows, h), POISON, dtype=torch.float64),
        )

    def run(self, step_rows: Tensor | None = None) -> tuple[Tensor, ...]:
        """The output and what is saved, by the kernel."""
        saved, batch = self.made(), self.batch
        out = torch.full((len(self.mixed), self.heads[0], self.width), POISON)
        out = out.to(self.mixed.dtype)
        gated_delta_layer(
            self.weight, self.decay_log, self.decay_bias, self.conv_state, self.state, saved,
            self.scale, (self.places, batch.starts, batch.tails, batch.slots, self.parents),
            step_rows, self.mixed, self.b, self.a, out,
        )  # fmt: skip
        return out, *saved

    def expected(self) -> tuple[Tensor, ...]:
        """The same by the references, and PyTorch in between."""
        (h, hk), batch, saved = self.heads, self.batch, self.made()
        rows = len(self.mixed)
        where = (self.places, batch.starts, batch.tails, batch.slots)
        convolved = torch.full_like(self.mixed, POISON)
        references.short_conv_tree(
            self.mixed, self.weight, self.conv_state, *where, self.parents, convolved
        )
        keys = hk * self.dim
        query, key, value = convolved.split([keys, keys, h * self.width], dim=1)
        query, key = (x.unflatten(1, (hk, self.dim)) for x in (query, key))
        query, key = (
            (x * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
            for x in (query, key)
        )
        gate = -self.decay_log.exp() * F.softplus(self.a.float() + self.decay_bias.float())
        out = torch.full((rows, h, self.width), POISON).to(self.mixed.dtype)
        references.gated_delta_tree(
            query, key, value.unflatten(1, (h, self.width)), gate, self.b.float().sigmoid(),
            self.state, *where, batch.bits, self.scale, out, *saved[2:],
        )  # fmt: skip
        for place, (first, last) in zip(
            self.places.tolist(), pairwise(batch.starts.tolist()), strict=True
        ):
            if place >= 0:
                saved[0][first:last], saved[1][first:last] = self.mixed[first:last], key[first:last]
        return out, *saved


def _compare(layer: Layer, tolerance: float) -> None:
    for got, truth in zip(layer.run(), layer.expected(), strict=True):
        assert got.dtype == truth.dtype
        torch.testing.assert_close(got.double(), truth.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("values_last", [True, False])
@pytest.mark.parametrize("taps", [2, 4])
def test_a_mixed_batch(taps: int, values_last: bool) -> None:
    _compare(Layer(mixed(1), taps=taps, values_last=values_last, seed=1), 2e-5)


@pytest.mark.parametrize("nodes", [1, 2, 15, 16, 17, 33, 65, 255])
def test_trees_of_any_size(nodes: int) -> None:
    parents = random_parents(nodes, torch.Generator().manual_seed(nodes))
    _compare(Layer([Request(5, parents=parents)], dim=16, width=16, seed=nodes), 2e-5)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", HALF)
def test_heads_as_large_as_models_have_them(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    parents = random_parents(20, torch.Generator().manual_seed(5))
    layer = Layer(
        [Request(3, parents=parents), Request(9, parents=[-1])], heads=(2, 1), dim=128, width=128,
        dtype=dtype, state_dtype=state_dtype,
    )  # fmt: skip
    # A number next to the half of two others is rounded either way.
    _compare(layer, 5e-2 if dtype == torch.bfloat16 else 1e-2)


def test_requests_without_a_state_are_left_alone() -> None:
    layer = Layer(mixed(6), seed=6)
    layer.places[1] = -1
    first, last = layer.batch.starts[1:3].tolist()
    for made in layer.run():
        assert bool((made[first:last] == POISON).all())
    _compare(layer, 2e-5)


def test_tree_rows_among_those_of_prompts() -> None:
    """Rows of the step that are not of a tree are neither read nor written."""
    layer = Layer(mixed(7), seed=7)
    out, *saved = layer.run()
    count = int(layer.batch.starts[-1])
    total = 2 * len(layer.mixed)
    rows = torch.randperm(total, generator=torch.Generator().manual_seed(7))[:count]
    for name in ("mixed", "b", "a"):
        old = getattr(layer, name)
        new = torch.full((total, old.shape[1]), torch.nan)
        new[rows] = old[:count]
        setattr(layer, name, new)
    spread = layer.run(rows)
    others = torch.ones(total, dtype=torch.bool)
    others[rows] = False
    assert torch.equal(spread[0][rows], out[:count])
    assert bool((spread[0][others] == POISON).all())
    for got, truth in zip(spread[1:], saved, strict=True):
        assert torch.equal(got[:count], truth[:count])


def test_a_path_gets_the_same_bits_in_any_tree() -> None:
    parents = random_parents(40, torch.Generator().manual_seed(8))
    tree = Layer([Request(4, parents=parents)], seed=8, dtype=torch.bfloat16)
    request = tree.batch.requests[0]
    path = [c - 4 for c in request.visible(39) if c >= 4]
    alone = Layer([Request(4, parents=chain(len(path)))], seed=8, dtype=torch.bfloat16)
    for name in ("weight", "conv_state", "state", "decay_log", "decay_bias"):
        setattr(alone, name, getattr(tree, name))
    alone.places = tree.places.clone()
    for name in ("mixed", "b", "a"):
        getattr(alone, name)[: len(path)] = getattr(tree, name)[path]
    of_tree, of_chain = tree.run(), alone.run()
    for got, truth in zip(of_tree, of_chain, strict=True):
        assert torch.equal(got[path], truth[: len(path)])
