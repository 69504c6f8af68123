# SPDX-License-Identifier: Apache-2.0
"""The vLLM-free parts of the runner adapters, on the CPU; the whole is tested in tests/e2e."""

from __future__ import annotations

import heapq
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm_bastion.engine.verification import BastionVerificationManager
from vllm_bastion.policy.controller import Controller
from vllm_bastion.policy.cost import timing
from vllm_bastion.policy.cost.models import make_latency
from vllm_bastion.policy.cost.table import StepCostTable
from vllm_bastion.policy.host_mirror import HostMirror

from benchmarks.replay.controller import choose_budget as choose_budget_on_host
from tests.trees import grow
from tests.trees import make_trees as trees_of
from vllm_bastion.carriers import StepReport
from vllm_bastion.engine.runtime import Runtime
from vllm_bastion.policy.trees import Trees

DEPTH, TOP_K, NODES, VOCAB, SLOTS = 4, 3, 10, 32, 5
make_trees = partial(trees_of, SLOTS, NODES, DEPTH)


def bind(trees: Trees, slots: list[int] | np.ndarray) -> None:
    trees.bind_rows(torch.tensor(slots), torch.ones(len(slots), dtype=torch.int32))


def logits_of(num_reqs: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(num_reqs * DEPTH, VOCAB, generator=generator)


def best_paths(
    logits: torch.Tensor, tokens: torch.Tensor | None = None
) -> list[tuple[float, tuple[int, ...]]]:
    """The NODES most probable prefixes of one request, by brute force over the lattice.

    logits: [D, V]; or [D, M, M] of `tokens` [D, M] given each one of the depth above.
    """
    prefixes, found = [(0.0, (), 0)], []
    for depth, rows in enumerate(logits.log_softmax(-1)):
        grown = []
        for score, path, last in prefixes:
            best = (rows if tokens is None else rows[last]).topk(TOP_K)
            for value, k in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                token = k if tokens is None else int(tokens[depth, k])
                grown.append((score + value, (*path, token), k))
        prefixes, found = grown, found + grown
    return [(score, path) for score, path, _ in heapq.nlargest(NODES, found)]


def path_of(trees: Trees, row: int, slot: int, node: int) -> tuple[int, ...]:
    path: tuple[int, ...] = ()
    while node:
        path = (int(trees.tokens[row, node - 1]), *path)
        node = int(trees.parents[slot, node - 1])
    return path


def test_scores_that_know_the_candidate_above_grow_the_most_probable_prefixes() -> None:
    """Each node's children by the softmax of its own row, TOP_K of more candidates."""
    width, trees = TOP_K + 2, make_trees(budget=6)
    generator = torch.Generator().manual_seed(0)
    scores = 3 * torch.randn(2, DEPTH, width, width, generator=generator)
    candidates = torch.rand(2, DEPTH, VOCAB, generator=generator).argsort(-1)[..., :width]
    trees.bind_rows(torch.tensor([3, 1]), torch.ones(2, dtype=torch.int32))
    trees.grow_transitions(candidates, scores)
    assert trees.num_verify[[3, 1]].tolist() == [6, 6]
    for row, slot in enumerate((3, 1)):
        for column, (score, path) in enumerate(best_paths(scores[row], candidates[row])):
            assert path_of(trees, row, slot, column + 1) == path
            assert abs(float(trees.log_rho[slot, column]) - score) < 1e-5
        bits = [int(word) for word in trees.bits[slot, :, 0]]
        assert bits[1] == 3 and all(bit & 1 for bit in bits)


@pytest.mark.parametrize("ends", [(13, 26, 32), (1, 31, 32)])
def test_ranks_with_a_slice_of_the_vocabulary_each_grow_the_same_trees(ends: tuple[int]) -> None:
    logits, whole = logits_of(2), make_trees()
    whole.bind_rows(torch.tensor([3, 1]))
    grow(whole, logits, 2)
    starts = (0, *ends[:-1])
    sent: list[torch.Tensor] = []

    def send(keys: torch.Tensor) -> torch.Tensor:
        sent.append(keys.clone())
        return keys.expand(-1, len(ends), -1)

    for start, end in zip(starts, ends, strict=True):
        grow(make_trees(), logits[:, start:end], 2, start, send)
    gathered = torch.cat(sent, dim=1)
    assert gathered.shape == (2 * DEPTH, len(ends), TOP_K + 1)
    for start, end in zip(starts, ends, strict=True):
        trees = make_trees()
        trees.bind_rows(torch.tensor([3, 1]))
        grow(trees, logits[:, start:end], 2, start, lambda keys: gathered)
        for name in ("top_tokens", "tokens", "parents", "size", "num_verify"):
            assert torch.equal(getattr(trees, name), getattr(whole, name)), name
        torch.testing.assert_close(trees.log_rho, whole.log_rho, rtol=0, atol=1e-5)


def test_a_reduced_vocabulary_grows_the_trees_of_its_logits_scattered() -> None:
    """As vLLM scatters them: -inf for a token of the target that the drafter does not have."""
    kept = torch.arange(VOCAB)[torch.arange(VOCAB) % 4 != 3]
    logits, trees, whole = logits_of(2)[:, kept], make_trees(), make_trees()
    everything = torch.full((2 * DEPTH, VOCAB), -torch.inf)
    everything[:, kept] = logits
    for one in (trees, whole):
        bind(one, [2, 0])
    grow(whole, everything, 2)
    grow(trees, logits, 2, draft_id_to_target_id=kept - torch.arange(len(kept)))
    for name in ("top_tokens", "tokens", "parents", "size"):
        assert torch.equal(getattr(trees, name), getattr(whole, name)), name
    torch.testing.assert_close(trees.log_rho, whole.log_rho)


@pytest.mark.parametrize("depth", [1, 2, 3, DEPTH])
def test_trees_are_the_most_probable_prefixes_in_the_rows_of_their_slots(depth: int) -> None:
    """Of a draft that stops early, those of its depths."""
    trees, logits = make_trees(), logits_of(2)
    bind(trees, [3, 1])
    grow(trees, logits_of(2, seed=1), 2)  # what an earlier draft leaves behind
    first = logits.view(2, DEPTH, VOCAB)[:, :depth]
    grow(trees, first.flatten(0, 1), 2)
    for row, slot in enumerate((3, 1)):
        expected = best_paths(first[row])
        size = int(trees.size[slot])
        assert size == len(expected)
        got = [path_of(trees, row, slot, node) for node in range(1, size + 1)]
        assert got == [path for _, path in expected]
        scores = torch.tensor([score for score, _ in expected])
        torch.testing.assert_close(trees.log_rho[slot, :size], scores)
        assert trees.depths[slot, :size].tolist() == [len(path) for path in got]
    assert (trees.parents[[0, 2, 4]] == -1).all()
    # The deepest of the first nodes, by walking every node to its root.
    for nodes in range(size + 1):
        paths = [path_of(trees, row, slot, node) for node in range(1, nodes + 1)]
        expected_depth = max(map(len, paths), default=0)
        assert trees.deepest(np.array([slot]), np.array([nodes])).tolist() == [expected_depth]


def test_a_dummy_batch_leaves_every_tree_alone() -> None:
    trees = make_trees()
    bind(trees, [0, 1, 2, 3, 4])
    grow(trees, logits_of(5), 5)
    before = [t.clone() for t in (trees.parents, trees.depths, trees.log_rho, trees.bits)]
    trees.bind_rows()
    grow(trees, logits_of(5, seed=1), 5)
    after = (trees.parents, trees.depths, trees.log_rho, trees.bits)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_fixed_budget_cuts_every_tree_to_the_number() -> None:
    for top_k, size in ((TOP_K, 6), (1, DEPTH)):
        trees = make_trees(budget=6, top_k=top_k)
        bind(trees, [0, 1])
        grow(trees, logits_of(2), 2)
        assert trees.num_verify[:2].tolist() == [size, size]


@pytest.mark.parametrize("configured", [True, False])
def test_a_chain_is_the_drafters_top_choice_at_every_depth(configured: bool) -> None:
    trees = make_trees(top_k=1 if configured else TOP_K)
    if not configured:  # a custom logits processor is installed
        trees.use_chains()
    assert trees.chains and trees.tree_size == DEPTH
    logits = logits_of(1)
    bind(trees, [2])
    grow(trees, logits, 1)
    assert trees.tokens[0, :DEPTH].tolist() == logits.argmax(-1).tolist()
    assert trees.parents[2, :DEPTH].tolist() == list(range(DEPTH))
    assert int(trees.size[2]) == DEPTH


def test_positions_are_root_plus_depth_in_the_tail_and_linear_before_it() -> None:
    trees = make_trees()
    bind(trees, [3])
    grow(trees, logits_of(1), 1)
    # A prompt chunk of 4 rows in slot 0, then a root with 5 nodes in slot 3.
    positions = torch.tensor([10, 11, 12, 13, 40, 41, 42, 43, 44, 45])
    placed = trees.positions_by_depth(
        positions,
        torch.tensor([0, 3]),
        torch.tensor([0, 4, 10], dtype=torch.int32),
        torch.tensor([0, 1, 7], dtype=torch.int32),
    )
    depths = trees.depths[3, :5].tolist()
    assert placed.tolist() == [10, 11, 12, 13, 40, *(40 + d for d in depths)]
    assert placed.data_ptr() == trees.positions.data_ptr()


def test_only_rows_with_a_tree_have_a_masked_tail() -> None:
    trees = make_trees()
    # a tree, and a lone root whose slot never had one
    cu_num_logits = torch.tensor([0, 4, 5], dtype=torch.int32)
    trees.begin_step(torch.tensor([2, 0]), cu_num_logits)
    assert trees.tail_lens.tolist() == [4, 0, 0, 0, 0]
    assert trees.step_slots.tolist() == [2, 0, -1, -1, -1]
    trees.begin_step(torch.tensor([2, 0]))
    assert not trees.tail_lens.any()


def test_the_host_learns_the_budget_and_what_it_promises() -> None:
    trees = make_trees()
    slots = np.array([4, 0, 2])
    cost = (1.0 + 0.02 * np.arange(65) ** 1.3).astype(np.float32)
    trees.set_cost_ms(cost)
    emitted = torch.tensor([3, 0, 7], dtype=torch.int32)
    trees.bind_rows(torch.tensor(slots), emitted)
    grow(trees, logits_of(3), 3)
    trees.publish(5, slots)
    assert trees.published(4) is None
    news = trees.published(5)
    counts, promised = news.num_verify[slots], news.promised[slots]
    assert news.emitted[slots].tolist() == emitted.tolist()
    assert news.grown_for.tolist() == slots.tolist()
    rho = np.exp(trees.log_rho[slots].numpy())
    expected = choose_budget_on_host(rho, [NODES] * 3, cost, base_rows=3)
    assert counts.tolist() == expected.counts.tolist()
    assert 0 < expected.num_nodes < 3 * NODES
    sums = [row[:n].sum() for row, n in zip(rho, counts, strict=True)]
    np.testing.assert_allclose(promised, sums, rtol=1e-5)


def test_a_step_with_prompt_rows_is_priced_again() -> None:
    trees = make_trees()
    slots = np.array([1, 3])
    cost = (1.0 + 0.02 * np.arange(65) ** 1.3).astype(np.float32)
    trees.set_cost_ms(cost)
    bind(trees, slots)
    grow(trees, logits_of(2), 2)
    trees.publish(0, slots)
    alone = trees.published(0).num_verify[slots].tolist()
    # 40 prompt rows in the step, and the second request has room for one more draft token
    trees.choose_again(slots, np.array([NODES, 1]), base_rows=42)
    rho = np.exp(trees.log_rho[slots].numpy())
    # The prompt's time is no reason for larger trees: a node costs what its row adds to the step.
    added = cost[40:] - cost[42] + cost[2]
    expected = choose_budget_on_host(rho, [NODES, 1], added, base_rows=2)
    trees.publish(0, slots)
    again = trees.published(0).num_verify[slots].tolist()
    assert again == expected.counts.tolist() != alone


class Event:
    """A CUDA event's rules: never recorded counts as done, and has no time."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.at = clock, None

    def record(self, stream: object = None) -> None:
        self.at = self.clock[0]

    def query(self) -> bool:
        return self.at is None or self.at <= self.clock[0] - 2.0  # the device lags behind

    def elapsed_time(self, end: Event) -> float:
        if self.at is None or end.at is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return end.at - self.at


def test_steps_are_timed_when_they_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(timing, "new_mark", lambda device: Event(clock))
    timer = timing.StepTimer(torch.device("cpu"))
    seen = []
    for step in range(40):
        seen += timer.completed()  # as the engine does: in the middle of a step
        if step == 20:
            timer.interrupted()  # a step with prompts, not timed
            clock[0] += 100.0
            continue
        timer.forward_start(8 + step, 2, 100.0)
        clock[0] += 3.0
        timer.logits_ready()
        seen += timer.completed()
        clock[0] += 1.0
        timer.step_done(drafted=step % 2 == 0, spared=step % 3)
        clock[0] += 0.5
    clock[0] += 10.0
    seen += timer.completed()
    assert [one.rows for one in seen] == [8 + step for step in range(40) if step != 20]
    assert {one.forward_ms for one in seen} == {3.0}
    assert [one.drafted for one in seen] == [step % 2 == 0 for step in range(40) if step != 20]
    assert [one.spared for one in seen] == [step % 3 for step in range(40) if step != 20]
    # Verified after a step that did not draft.
    assert [one.rows - 8 for one in seen if one.copies] == [n for n in range(2, 40, 2) if n != 20]
    unknown = [one.rows - 8 for one in seen if one.total_ms is None]
    assert unknown == [0, 21]
    assert {one.total_ms for one in seen if one.total_ms is not None} == {4.5}


def test_steps_that_never_end_are_not_timed() -> None:
    timer = timing.StepTimer(torch.device("cpu"))
    for _ in range(100):  # nothing was verified, or nothing drafted: no mark may be lost
        timer.forward_start(4, 1, 10.0)
        timer.forward_start(4, 1, 10.0)
        timer.logits_ready()
    assert not list(timer.completed())
    timer.forward_start(5, 1, 10.0)
    timer.logits_ready()
    timer.step_done(drafted=True)
    assert [one.rows for one in timer.completed()] == [5]


def test_whole_steps_of_both_kinds_correct_the_costs() -> None:
    clock, installed = [0.0], []
    table = StepCostTable.flat(3.0, max_rows=64, drafter_ms=1.0, aux_ms=0.25)
    buffers: Any = SimpleNamespace(set_cost_ms=installed.append, set_log_kappa=None)
    control = Controller(15, SLOTS, make_latency("ema_table", table), buffers)
    runtime = Runtime(make_trees(), controller=control)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "new_mark", lambda device: Event(clock))
        timer = runtime.timer = timing.StepTimer(torch.device("cpu"))
    reported: list[bool] = []
    control.on_step = lambda verified, *_: reported.append(verified)
    costs = control.price(1, 50.0)
    assert costs.tree_step_ms(9) == installed[-1][9] == pytest.approx(4.25)
    assert costs.plain_ms == 3.25
    for step in range(120):
        plain = step >= 60
        timer.forward_start(1 if plain else 9, 1, 50.0)
        clock[0] += 3.0
        if not plain:
            timer.logits_ready()
            clock[0] += 1.0
        clock[0] += 0.5 if plain else 2.0
        timer.step_done(drafted=not plain)
        runtime.learn()
        assert timer.num_pending < 5
    clock[0] += 10.0
    control.observe(runtime.completed_steps(at_once=True))
    # The very first step has no length. Of plain steps that complete together, the last one counts.
    assert reported.count(True) == 59
    assert 0 < reported.count(False) <= 20
    costs = control.price(1, 50.0)
    # 3 ms forward, 1 ms draft, 2 ms of all the rest; 3 ms and 0.5 ms without a draft
    assert costs.tree_step_ms(9) == pytest.approx(6.0, rel=0.05)
    assert costs.plain_ms == pytest.approx(3.5, rel=0.02)
    # A machine that slows down while nothing is drafted would slow drafts down as well.
    for _ in range(200):
        timer.forward_start(1, 1, 50.0)
        clock[0] += 1.3 * 3.5
        timer.step_done(drafted=False)
        runtime.learn()
    costs = control.price(1, 50.0)
    assert costs.plain_ms == pytest.approx(1.3 * 3.5, rel=0.03)
    assert 1.1 * 6.0 < costs.tree_step_ms(9) < 1.35 * 6.0
    count = len(installed)
    control.price(1, 50.0)
    assert len(installed) == count, "what has not changed is not copied again"


def test_a_mirror_keeps_the_values_of_two_steps_and_never_gives_anothers() -> None:
    source = torch.zeros(3)
    mirror = HostMirror(source)
    for step in (3, 4, 5, 8):
        source.fill_(step)
        mirror.start_copy(step)
    source.fill_(9.0)
    assert [mirror.read(step) is None for step in range(3, 9)] == [1, 1, 0, 1, 1, 0]
    assert mirror.read(5).tolist() == [5.0] * 3
    assert mirror.read(8).tolist() == [8.0] * 3


@pytest.mark.parametrize(("room", "expected"), [(100, 18), (14, 11), (2, 0)])
def test_a_step_verifies_what_vllm_has_memory_for(room: int, expected: int) -> None:
    trees, names = make_trees(budget=6), {"a": 1, "b": 3, "c": 0}
    slots = np.array(list(names.values()))
    bind(trees, slots)
    grow(trees, logits_of(3), 3)
    states = SimpleNamespace(req_id_to_index=names, num_speculative_steps=NODES)
    starts = torch.zeros(SLOTS + 1, dtype=torch.int32)
    manager = BastionVerificationManager(Runtime(trees), states, starts, 1, room)
    drafts = {name: [-1] * NODES for name in names}
    rows = manager.get_num_tokens(dict.fromkeys(names, 1 + NODES), drafts)
    assert rows == 3 + expected
    manager.compact_batch(None, None, np.zeros(4, dtype=np.int32))
    connector = object()
    output: Any = SimpleNamespace(
        get_output=SimpleNamespace, get_kv_connector_output=lambda: connector
    )
    counted = manager.counted(output)
    assert counted.get_kv_connector_output() is connector
    verified = StepReport.of(counted.get_output()).num_verified
    assert sum(verified.values()) == expected
    assert max(verified.values()) - min(verified.values()) <= 1
