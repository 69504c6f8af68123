# SPDX-License-Identifier: Apache-2.0
"""Trees over a head with a state: against brute force, the training library's rule, and each op."""

from __future__ import annotations

import heapq
import itertools

import pytest
import torch
from op_helpers import (
    DEVICE,
    Trees,
    assert_same,
    call,
    poisoned,
    poisoned_trees,
    prefixes,
    refuses,
    using_threads,
    versions,
)
from torch import Tensor, nn

from bastion_kernels import (
    PrefixHead,
    PrefixLattice,
    advance_states,
    expand_best_first,
    extend_frontier,
    recurrent_lattice,
)
from bastion_kernels.cpu import library

VOCAB, HIDDEN, STATE, RANK = 40, 12, 10, 8


class Block:
    """A random head, and a block of random hidden states for it."""

    def __init__(
        self,
        seed: int,
        reqs: int,
        depth: int,
        width: int,
        start: int = 0,
        sizes: tuple[int, int, int] = (HIDDEN, STATE, RANK),
    ) -> None:
        (hidden, state, rank), generator = sizes, torch.Generator().manual_seed(seed)

        def noise(*shape: int, std: float = 1.0) -> Tensor:
            return std * torch.randn(*shape, generator=generator)

        self.start = start
        self.gru = nn.GRU(hidden, state, batch_first=True, bias=False)
        self.first = noise(rank, hidden + state, std=0.5)
        self.last = noise(VOCAB, rank)
        self.embedding = noise(VOCAB, hidden)
        self.hidden = noise(reqs, depth, hidden)
        with torch.no_grad():
            for weight in self.gru.parameters():
                weight.copy_(noise(*weight.shape, std=0.7))
        self.logits = noise(reqs, depth, VOCAB)
        self.anchors = torch.randint(VOCAB, (reqs,), generator=generator)
        best = self.logits.topk(width, dim=-1)
        self.tokens, self.base = best.indices.int(), best.values.contiguous()

    @property
    def head(self) -> PrefixHead:
        weights = (self.gru.weight_ih_l0.detach(), self.gru.weight_hh_l0.detach())
        return PrefixHead(*weights, self.first, self.last, self.start)

    @torch.no_grad()
    def scores(self, req: int, path: tuple[int, ...]) -> Tensor:
        """All logits [V] after the tokens `path`, by the rule of the training library.

        Its GRU runs over the block's tokens, anchor first, from a state of zeros. The position
        after them is corrected by the projections of its hidden state beside the last state.
        """
        depth = len(path)
        logits = self.logits[req, depth]
        if depth < self.start:
            return logits
        tokens = torch.tensor([[int(self.anchors[req]), *path]])
        states, _ = self.gru(self.embedding[tokens])
        features = torch.cat([self.hidden[req, depth], states[0, -1]])
        return logits + self.last @ nn.functional.silu(self.first @ features)

    def lattice(self, width: int, top_k: int, run=recurrent_lattice, kind=torch.float32):
        """What `run` makes of the block with its weights and hidden states of dtype `kind`."""
        head = self.head
        weights = (head.weight_ih, head.weight_hh, head.first, head.last)
        head = PrefixHead(*(weight.to(kind) for weight in weights), head.corrected_from)
        prepared = head.joined() if run is recurrent_lattice.triton else head.prepared()
        embedding = self.embedding.to(kind)
        made = PrefixLattice.empty(
            len(self.tokens), self.tokens.shape[1], width, self.tokens.shape[2], torch.device("cpu")
        )
        made.logprobs.fill_(torch.nan)  # what is left of another step is never read
        made.rows.fill_(-7)
        run(
            head, prepared, lambda ids: embedding[ids], self.anchors, self.tokens, self.tokens,
            self.base, self.hidden.to(kind), top_k, made,
        )  # fmt: skip
        return made

    def trees(self, width: int, top_k: int, limit: int, run=recurrent_lattice) -> Trees:
        """The trees of N = `limit` nodes from a frontier of `width`."""
        made = self.lattice(width, top_k, run)
        reqs = len(self.anchors)
        out = poisoned_trees(reqs, reqs, limit)
        expand_best_first(self.tokens, made.logprobs, top_k, torch.arange(reqs), *out, made.rows)
        return out

    def brute_force(self, req: int, top_k: int, limit: int) -> list[tuple[float, tuple[int, ...]]]:
        """The best prefixes of all, each scored by a run of the GRU over its whole path."""
        depth = self.tokens.shape[1]
        found, heap = [], [(0.0, ())]
        while heap and len(found) <= limit:
            cost, path = heapq.heappop(heap)
            found.append((-cost, path))
            if len(path) == depth:
                continue
            candidates = self.tokens[req, len(path)].long()
            logprobs = self.scores(req, path)[candidates].log_softmax(-1)
            best = logprobs.topk(min(top_k, len(candidates)))
            for value, index in zip(*best, strict=True):
                heapq.heappush(heap, (cost - value.item(), (*path, int(candidates[index]))))
        return found[1:]


CASES = {  # D, M, top-K, N, B, first corrected depth
    "all children": (4, 5, 5, 24, 24, 0),
    "fewer children": (4, 6, 3, 20, 20, 0),
    "an uncorrected start": (5, 4, 4, 24, 24, 2),
    "nothing corrected": (3, 4, 4, 20, 20, 3),
    "everything": (3, 3, 3, 39, 27, 0),
    "one node": (3, 4, 4, 1, 1, 1),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_frontier_that_covers_the_tree_loses_nothing(case: tuple[int, ...]) -> None:
    depth, candidates, top_k, limit, width, start = case
    for seed in range(3):
        block = Block(seed, 2, depth, candidates, start)
        trees = block.trees(width, top_k, limit)
        for req in range(2):
            expected = block.brute_force(req, top_k, limit)
            used = int(trees.num_nodes[req])
            assert used == len(expected)
            scores = torch.tensor([score for score, _ in expected])
            torch.testing.assert_close(trees.log_rho[req, :used], scores, rtol=0, atol=2e-5)
            assert prefixes(trees, req) == [path for _, path in expected]


def test_width_1_is_the_training_librarys_greedy_chain() -> None:
    """Over the whole vocabulary, token by token, wherever the correction begins."""
    for seed, start in itertools.product(range(4), range(3)):
        block = Block(seed, 3, 6, VOCAB, start)
        trees = block.trees(1, 1, 6)
        for req in range(3):
            path: tuple[int, ...] = ()
            for _ in range(6):
                path = (*path, int(block.scores(req, path).argmax()))
            assert trees.num_nodes[req] == 6 and prefixes(trees, req)[-1] == path


def test_a_narrow_frontier_keeps_a_tree_of_true_scores() -> None:
    """Its nodes have the scores of brute force; its total is never above that of a wider one."""
    block = Block(7, 2, 5, 6)
    totals = []
    for width in (1, 2, 4, 8, 24):
        trees = block.trees(width, 6, 24)
        for req in range(2):
            used = int(trees.num_nodes[req])
            paths = prefixes(trees, req)
            assert len(set(paths)) == used == 24
            for score, path in zip(trees.log_rho[req, :used].tolist(), paths, strict=True):
                expected = 0.0
                for length, token in enumerate(path):
                    candidates = block.tokens[req, length].long()
                    row = block.scores(req, path[:length])[candidates].log_softmax(-1)
                    expected += row[candidates.tolist().index(token)].item()
                assert abs(score - expected) < 2e-5
        totals.append(float(trees.log_rho.exp().sum()))
    assert totals == sorted(totals) and totals[0] < totals[-1]


@pytest.mark.parametrize("run", versions(expand_best_first.triton, expand_best_first.cpu))
@pytest.mark.parametrize(
    "size", [(2, 6, 5, 7, 5, 60), (3, 15, 8, 20, 6, 48), (2, 4, 250, 3, 3, 40)]
)
def test_expansion_over_rows_equals_the_reference(run, size) -> None:
    """R, D, P, M, top-K, N; rows are random, and a third of the children have none."""
    reqs, depth, width, candidates, top_k, limit = size
    generator = torch.Generator().manual_seed(limit)
    tokens = torch.randint(1000, (reqs, depth, candidates), generator=generator).int()
    shape = reqs, depth, width, candidates
    logprobs = torch.randn(shape, generator=generator).log_softmax(-1)
    rows = torch.randint(width, shape, generator=generator).int()
    rows[torch.rand(shape, generator=generator) < 0.33] = -1
    inputs = tokens, logprobs, top_k, torch.arange(reqs)
    expected = poisoned_trees(reqs, reqs, limit)
    expand_best_first.reference(*inputs, *expected, rows)
    out = poisoned_trees(reqs, reqs, limit)
    call(run, *inputs, *out, rows)
    assert_same(out, expected)


# --- the two ops of a round ---------------------------------------------------------------------


@pytest.mark.parametrize("size", [(2, 3, 5, 10), (1, 1, 1, 3), (3, 8, 4, 33)])
@pytest.mark.parametrize("version", ["reference", "triton"])
def test_states_advance_as_in_pytorchs_gru(version: str, size: tuple[int, ...]) -> None:
    reqs, width, old, state = size
    generator = torch.Generator().manual_seed(old)
    cell = nn.GRUCell(HIDDEN, state, bias=False)
    embedded = torch.randn(reqs, width, HIDDEN, generator=generator)
    states = torch.randn(reqs, old, state, generator=generator)
    parents = torch.randint(old, (reqs, width), generator=generator).int()
    with torch.no_grad():
        inputs, gates = embedded @ cell.weight_ih.mT, states @ cell.weight_hh.mT
        above = states.gather(1, parents.long()[..., None].expand(-1, -1, state))
        expected = cell(embedded.flatten(0, 1), above.flatten(0, 1)).view(reqs, width, state)
    wider = torch.cat([gates, poisoned(reqs, old, 7, dtype=torch.float32)], dim=-1)
    out = poisoned(reqs, width, state, dtype=torch.float32)
    call(getattr(advance_states, version), inputs, wider, states, parents, out)
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)


def extend(run, base, position, latent, weight, costs, top_k, kept, corrected):
    """The outputs of `extend_frontier`, requests as slices of longer rows."""
    reqs, candidates = base.shape
    prefixes = latent.shape[1]
    shape = reqs, 2, prefixes, candidates
    scores = poisoned(*shape, dtype=torch.float32)
    rows = poisoned(*shape, dtype=torch.int32)
    parents, children = (poisoned(reqs, kept, dtype=torch.int32) for _ in range(2))
    out = poisoned(reqs, kept, dtype=torch.float32)
    made = scores[:, 1], rows[:, 1], parents, children, out
    call(run, base, position, latent, weight, costs, top_k, corrected, *made)
    return made


ROUNDS = {  # R, P, M, E, top-K, B, corrected
    "usual": (2, 8, 16, 24, 16, 8, True),
    "root": (2, 1, 16, 24, 16, 8, True),
    "fewer children": (2, 6, 9, 40, 3, 7, True),
    "uncorrected": (3, 5, 7, 8, 7, 12, False),
    "chain": (2, 1, 200, 16, 1, 1, True),
    "more places than prefixes": (1, 2, 3, 8, 2, 9, True),
}


@pytest.mark.parametrize("run", versions(extend_frontier.reference, extend_frontier.triton))
@pytest.mark.parametrize("case", ROUNDS.values(), ids=ROUNDS)
@pytest.mark.parametrize("ties", [False, True])
def test_a_round_keeps_what_stable_sorts_keep(run, case: tuple[int, ...], ties: bool) -> None:
    reqs, prefixes, candidates, width, top_k, kept, corrected = case
    generator = torch.Generator().manual_seed(kept)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    base, position = noise(reqs, candidates), noise(reqs, width)
    latent, weight = noise(reqs, prefixes, width), noise(reqs, candidates, width)
    if ties:  # equal rows, and candidates in pairs
        base, weight = base.round(), torch.zeros_like(weight)
        base[0, candidates // 2] = float("-inf")
    costs = noise(reqs, prefixes).abs().round()
    costs[-1, prefixes // 2] = float("inf") if prefixes > 1 else 0.0
    given = base, position, latent, weight, costs, top_k, kept, corrected
    expected = extend(extend_frontier.reference, *given)
    actual = extend(run, *given)
    torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=1e-5)
    # The choice is exact for the log-probabilities that the version itself has computed.
    own = (-actual[0]).clamp(min=0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
    places = own.sort(dim=-1, stable=True).indices.argsort(dim=-1)
    totals = (costs[..., None] + own.masked_fill(places >= top_k, torch.inf)).flatten(1)
    for req in range(reqs):
        best = totals[req].sort(stable=True)
        chosen = best.indices[:kept][best.values[:kept].isfinite()].sort().values
        number = len(chosen)
        assert actual[4][req, :number].tolist() == totals[req][chosen].tolist()
        found = actual[2][req, :number] * candidates + actual[3][req, :number]
        assert found.tolist() == chosen.tolist()
        places_of = torch.full((prefixes * candidates,), -1, dtype=torch.int32)
        places_of[chosen] = torch.arange(number, dtype=torch.int32)
        assert_same(actual[1].flatten(1)[req], places_of)
        assert actual[4][req, number:].isinf().all() and not actual[2][req, number:].any()
    if not ties:
        for one, other in zip(actual[1:4], expected[1:4], strict=True):
            assert_same(one, other)


def test_the_triton_ops_grow_the_same_trees() -> None:
    """`recurrent_lattice` with the kernels in place of what a CPU runs."""
    block = Block(11, 2, 4, 8, 1)
    expected = block.trees(6, 5, 20)
    run = recurrent_lattice if DEVICE.type == "cuda" else recurrent_lattice.triton
    actual = block.trees(6, 5, 20, run)
    for name in ("tokens", "parents", "depths", "num_nodes"):
        assert_same(getattr(actual, name), getattr(expected, name), name)
    torch.testing.assert_close(actual.log_rho, expected.log_rho, rtol=0, atol=1e-5)


LATTICES = {  # R, D, M, B, top-K, first corrected depth
    "usual": (2, 6, 20, 16, 16, 0),
    "fewer children": (3, 5, 7, 5, 3, 0),
    "an uncorrected start": (2, 5, 9, 6, 9, 2),
    "nothing corrected": (1, 3, 4, 8, 4, 3),
    "chain": (2, 6, 40, 1, 1, 0),
    "more requests": (20, 3, 33, 12, 16, 1),
}


@pytest.mark.parametrize("case", LATTICES.values(), ids=LATTICES)
@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [(torch.float32, 2e-5), (torch.float16, 2e-2), (torch.bfloat16, 1.5e-1)],
    ids=str,
)
def test_all_rounds_in_one_call_give_the_references_lattice(
    case: tuple[int, ...], kind: torch.dtype, tolerance: float
) -> None:
    """In every dtype of an engine, with sizes that no vector divides.

    The reference rounds its products to the weights' dtype, so in two bytes near ties may end
    otherwise. Scores of float32 are those of the same prefixes to the last bits.
    """
    reqs, depth, candidates, width, top_k, start = case
    block = Block(candidates, reqs, depth, candidates, start)
    expected = block.lattice(width, top_k, recurrent_lattice.reference, kind)
    for threads in (1, 2):
        with using_threads(threads):
            actual = block.lattice(width, top_k, recurrent_lattice.cpu, kind)
        root = expected.logprobs[:, 0, 0]
        torch.testing.assert_close(actual.logprobs[:, 0, 0], root, rtol=0, atol=tolerance)
        if kind == torch.float32:
            written = actual.rows != -7  # rows of prefixes that there are
            assert_same(actual.rows[written], expected.rows[written])
            torch.testing.assert_close(
                actual.logprobs[written], expected.logprobs[written], rtol=0, atol=tolerance
            )
        else:
            number, other = (int((x.rows >= 0).sum()) for x in (actual, expected))
            assert number == other


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's version")
@pytest.mark.parametrize("reqs", [1, 3])
def test_products_on_tile_registers(reqs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that fill tiles, one to 48 rows. Every prefix is kept, so near ties decide nothing."""
    if not library.has_tiles():
        pytest.skip("no tile registers here; the build with emulated ones runs this")
    block = Block(5, reqs, 3, 4, sizes=(64, 96, 32))
    block.gru.weight_ih_l0.data *= 0.3
    block.gru.weight_hh_l0.data *= 0.3
    expected = block.lattice(64, 4, recurrent_lattice.reference, torch.bfloat16)
    on_tiles = block.lattice(64, 4, recurrent_lattice.cpu, torch.bfloat16)
    monkeypatch.setattr(library, "has_tiles", lambda: False)
    by_vectors = block.lattice(64, 4, recurrent_lattice.cpu, torch.bfloat16)
    written = by_vectors.rows != -7  # rows of prefixes that there are
    assert int((on_tiles.rows >= 0).sum()) == reqs * (4 + 16 + 64)
    for other, tolerance in ((by_vectors, 0.1), (expected, 0.3)):
        assert_same(on_tiles.rows[written], other.rows[written])
        torch.testing.assert_close(
            on_tiles.logprobs[written], other.logprobs[written], rtol=0, atol=tolerance
        )


def test_wrong_arguments_are_named() -> None:
    inputs, gates, states = (torch.zeros(1, 2, size) for size in (6, 5, 2))
    ints, given = torch.zeros(1, 2, dtype=torch.int32), (inputs, gates, states)
    refuses("gates must have 3G = 6 columns, got 5", advance_states, *given, ints, states.clone())
    many, costs, scores = (torch.zeros(1, 255, *more) for more in ((2,), (), (255,)))
    given = costs, many[:, 0], many, many, costs, 2, True, scores, scores.int(), ints, ints
    refuses(r"P \* M <= 8192", extend_frontier, *given, torch.zeros(1, 2))
    block = Block(1, 1, 2, 4)
    refuses("top_k >= 1, got 2, 4, 0", block.lattice, 2, 0)
    block.base = block.base.double()
    refuses(r"base must be torch\.float32", block.lattice, 2, 2)
