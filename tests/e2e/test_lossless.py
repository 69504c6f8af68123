# SPDX-License-Identifier: Apache-2.0
"""Token ids equal those of plain vLLM decoding for every kind of request and scheduler.

Every engine decodes the same batches as a plain one with the same settings; see
`tests.e2e.compare` for what counts as the same. `oracle` engines have their drafter's logits
replaced (`tests.e2e.oracle`), so that accepted paths are long and wind through the tree.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import torch

from tests.e2e import cases
from tests.e2e.compare import Comparison, answers, leaving_the_chain
from tests.e2e.engines import GAMMA, ON_GPU, Batch, Engine, Runner

pytestmark = pytest.mark.e2e

Run = dict[str, Any]
MODES = ("sync", "async")
KINDS_CASE = "requests of every kind"
EVERY_KIND = cases.KINDS | cases.GRAMMARS


def batches_of(everything: bool = False) -> list[Batch]:
    """One batch per thing that is easy to get wrong."""
    number = 6 if everything else 1
    return [
        cases.greedy(number),
        cases.sampled(number if everything else 3),
        cases.chunked(),
        cases.stops(),
        cases.aborted(),
        cases.wishes(KINDS_CASE, EVERY_KIND, cases.some(4, first=16), 32 if everything else 24),
        cases.context_end(Engine().max_model_len),
        *cases.prefix_cache(),
    ]


def results(run: Run, prefix: str) -> list[Run]:
    every = (batch["requests"].items() for batch in run["batches"])
    return [result for some in every for name, result in some if name.startswith(prefix)]


def wide(outcome: dict[str, Any]) -> set[str]:
    """The requests that were verified with more nodes than a chain has."""
    rows = zip(outcome["path_requests"], outcome["verified"], strict=True)
    return {name for name, nodes in rows if nodes > GAMMA}


def assert_trees(outcome: dict[str, Any], batch: Batch) -> None:
    """Every request had a tree, unless a grammar may have ended it early."""
    free = [one["id"] for one in batch.requests if "structured" not in str(one["params"])]
    asked = {name for name in free if len(outcome["requests"][name]["token_ids"]) > 2}
    assert asked <= wide(outcome)


class Matrix:
    """Plain decoding, the drafter and the oracle under one scheduler; all start at once."""

    def __init__(
        self, runner: Runner, mode: str, everything: bool = False, eager: bool = False
    ) -> None:
        self._runner, self.batches = runner, batches_of(everything)
        engine = Engine(async_scheduling=mode == "async", eager=eager)
        # Only the slow lane compiles plain decoding, and the oracle, which is no real drafter.
        self._known = engine if everything else engine.with_eager()
        self._plain = runner.submit(self._known, self.batches)
        measured: dict[str, Any] = {"costs": None} if everything else {}
        self._tree = runner.submit(engine.with_bastion(16, **measured), self.batches)
        # The oracle needs plain decoding's answers first.
        self._plain.add_done_callback(lambda done: done.exception() or self._oracle())

    def _oracle(self) -> Future[Run]:
        known = {"answers": answers(self.plain())}
        return self._runner.submit(self._known.with_bastion(63, 24), self.batches, oracle=known)

    def every_arm(self) -> Run:
        """Trees, n-gram drafts and plain steps follow each other, whatever pays."""
        setup = ["tests.e2e.plain_steps:every_arm"]
        return self._runner.run(self._known.with_bastion(16), self.batches, setup=setup)

    def plain(self) -> Run:
        return self._plain.result()

    def tree(self) -> Run:
        return self._tree.result()

    def oracle(self) -> Run:
        return self._oracle().result()


@pytest.fixture
def matrix(runner: Runner) -> Matrix:
    """vLLM's default scheduler; `test_every_case` has both."""
    return Matrix(runner, "async")


def test_drafter(matrix: Matrix, compare: Comparison) -> None:
    """The tiny pair with an adaptive budget."""
    run = matrix.tree()
    compare.same("batch 4, async", matrix.batches, matrix.plain(), run)
    assert run["info"]["speculator"] == "BastionSpeculator"
    assert matrix.plain()["info"]["scheduler"] == "AsyncScheduler"
    assert run["info"]["scheduler"] == "BastionAsyncScheduler"


def test_oracle(matrix: Matrix, compare: Comparison) -> None:
    """Long paths that leave the chain of best candidates."""
    run = matrix.oracle()
    compare.same("batch 4, async, oracle", matrix.batches, matrix.plain(), run)
    branchy = leaving_the_chain([path for batch in run["batches"] for path in batch["paths"]])
    assert len(branchy) > 60
    assert max(len(path) for path in branchy) > 6


def test_every_arm(matrix: Matrix, compare: Comparison) -> None:
    run = matrix.every_arm()
    compare.same("batch 4, async, every arm", matrix.batches, matrix.plain(), run)
    steps = [name for batch in run["batches"] for name in batch["metrics"] if "_steps/" in name]
    assert {name.split("/")[1] for name in steps} >= {"tree", "n-gram", "plain"}


def test_the_edge_cases_happened(matrix: Matrix) -> None:
    run = matrix.oracle()
    by_case = dict(zip([b.case for b in matrix.batches], run["batches"], strict=True))

    long = results(run, "chunked-")
    assert sum(len(result["prompt_token_ids"]) > 128 for result in long) == 3

    for result in results(run, "end-"):
        total = len(result["prompt_token_ids"]) + len(result["token_ids"])
        assert total == Engine().max_model_len

    for cold, warm in zip(results(run, "cold-"), results(run, "warm-"), strict=True):
        # A hit beyond the first prompt reads blocks that decoding has filled and compacted.
        assert warm["cached_tokens"] > len(cold["prompt_token_ids"])

    cut = by_case["stop strings and max_tokens inside a path"]
    emitted = {name: len(result["token_ids"]) for name, result in cut["requests"].items()}
    offered = dict.fromkeys(emitted, 1)  # the first token comes from the prompt
    for name, path in zip(cut["path_requests"], cut["paths"], strict=True):
        offered[name] += len(path)
    inside = [name for name in emitted if offered[name] > emitted[name]]
    assert {name.partition("-")[0] for name in inside} >= {"limit", "stop"}

    for prefix, reason, least in (("stop-", "stop", 5), ("abort-", "abort", 2),
                                  ("choice-", "stop", 2)):  # fmt: skip
        found = [result["finish_reason"] for result in results(run, prefix)].count(reason)
        assert found >= least, prefix


def test_every_kind_of_request_has_trees(matrix: Matrix) -> None:
    """Of 24 nodes, with a grammar of 16, on long paths that leave the chain."""
    at = [batch.case for batch in matrix.batches].index(KINDS_CASE)
    outcome = matrix.oracle()["batches"][at]
    assert_trees(outcome, matrix.batches[at])
    kinds = {name.split("-")[0] for name in wide(outcome)}
    assert kinds >= {"json", "regex", "penalised", "scored"}
    rows = zip(outcome["path_requests"], outcome["paths"], strict=True)
    branchy = {name for name, path in rows if leaving_the_chain([path])}
    assert len(branchy) > len(cases.KINDS)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
def test_every_case(compare: Comparison, mode: str, eager: bool) -> None:
    """All edge cases with either scheduler, in vLLM's default mode and without torch.compile."""
    matrix = Matrix(compare, mode, everything=True, eager=eager)
    how = f"{mode}, eager" if eager else mode
    expected = {"sync": "Scheduler", "async": "AsyncScheduler"}[mode]
    assert matrix.plain()["info"]["scheduler"] == expected
    assert matrix.tree()["info"]["scheduler"] == f"Bastion{expected}"
    runs = {"": matrix.tree(), ", oracle": matrix.oracle(), ", every arm": matrix.every_arm()}
    for label, run in runs.items():
        compare.same(f"batch 4, {how}{label}", matrix.batches, matrix.plain(), run)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("seqs", "nodes"), [(1, 63), (2, 32), (4, 16)])
def test_all_prompts(compare: Comparison, seqs: int, nodes: int, mode: str) -> None:
    """T=0 on all 90 prompts, T=0.8 and T=1 on 30; batch 1, 2 and 4, either scheduler."""
    plain = Engine(max_num_seqs=seqs, async_scheduling=mode == "async")
    batches = [cases.greedy(30), cases.sampled(30)]
    label = f"batch {seqs}, {mode}, {nodes} nodes"
    compare.both(label, batches, plain, plain.with_bastion(nodes))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seqs", [1, 4])
@pytest.mark.parametrize("mode", MODES)
def test_every_kind_on_many_prompts(compare: Comparison, seqs: int, mode: str) -> None:
    """15 prompts of each kind at T=0 and 15 at T=0.8, with the real drafter and the oracle."""
    prompts = cases.some(10)
    merged = Batch("requests of every kind, 30 prompts each")
    for i in range(0, 30, 2):
        batch = cases.wishes("", EVERY_KIND, prompts[i:] + prompts[:i], 48)
        for request in batch.requests:
            merged.requests.append({**request, "id": f"{i}-{request['id']}"})
    plain = Engine(max_num_seqs=seqs, eager=True, async_scheduling=mode == "async")
    tree = plain.with_bastion(63, 24)
    _, run = compare.both(f"batch {seqs}, {mode}", [merged], plain, tree)
    assert_trees(run["batches"][0], merged)
    compare.oracle(f"batch {seqs}, {mode}, oracle", [merged], plain, tree)


def poison() -> None:
    """Setup: fill every uninitialised tensor, also in TorchInductor's code, with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    # Compile as usual, so that cached code can be loaded.
    torch._inductor.config.deterministic = False
    # Compiled code allocates its buffers here, and not with PyTorch's ops.
    guards: Any = torch._C._dynamo.guards
    allocate = guards._empty_strided_cpu

    def poisoned(*args: Any) -> torch.Tensor:
        out = allocate(*args)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    guards._empty_strided_cpu = poisoned


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="poisons a CPU's memory")
def test_nothing_reads_uninitialised_memory(compare: Comparison) -> None:
    """This includes the profiling run, which has no attention metadata."""
    batches = [cases.greedy(1), cases.chunked()]
    setup = ["tests.e2e.test_lossless:poison"]
    # As many nodes as above, so that compiled models are loaded.
    tree = compare.submit(Engine().with_bastion(16, 8), batches, setup=setup)
    plain = compare.run(Engine(eager=True), batches)
    compare.same("NaN in fresh memory", batches, plain, tree.result())
    assert max(map(len, tree.result()["batches"][0]["paths"])) > 4
