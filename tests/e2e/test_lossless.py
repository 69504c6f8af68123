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

from tests.e2e import cases
from tests.e2e.compare import Comparison, answers, leaving_the_chain
from tests.e2e.engines import ON_GPU, Batch, Engine, Runner

pytestmark = pytest.mark.e2e

Run = dict[str, Any]
MODES = ("sync", "async")


def batches_of(mode: str, everything: bool = False) -> list[Batch]:
    """One batch per thing that is easy to get wrong; the default lane runs some of them once."""
    batches = [cases.chunked(), cases.stops(), cases.aborted(), cases.wishes(), cases.structured()]
    if mode == "sync" or everything:
        batches += [cases.context_end(Engine().max_model_len), *cases.prefix_cache()]
    few = [cases.greedy(1), cases.sampled(3)]
    return [*([cases.greedy(6), cases.sampled(6)] if everything else few), *batches]


def engine_of(mode: str, eager: bool = False) -> Engine:
    """The plain engine of four requests at once."""
    return Engine(async_scheduling=mode == "async", eager=eager)


def results(run: Run, prefix: str) -> list[Run]:
    """The results of the requests whose id begins with `prefix`."""
    return [
        result
        for batch in run["batches"]
        for name, result in batch["requests"].items()
        if name.startswith(prefix)
    ]


class Matrix:
    """Plain decoding, the drafter and the oracle under one scheduler; all start at once."""

    def __init__(
        self, runner: Runner, mode: str, everything: bool = False, eager: bool = False
    ) -> None:
        self._runner = runner
        self._engine = engine_of(mode, eager)
        self.batches = batches_of(mode, everything)
        # Only the slow lane compiles plain decoding, and the oracle, which is no real drafter.
        expected = self._knowing = self._engine if everything else self._engine.with_eager()
        self._plain = self._submit(expected)
        measured = {"calibration": "auto"} if everything else {}
        self._tree = self._submit(self._engine.with_bastion(16, **measured))
        # The oracle needs plain decoding's answers first.
        self._plain.add_done_callback(lambda done: done.exception() or self._oracle())

    def _submit(self, engine: Engine, **spec_keys: Any) -> Future[Run]:
        return self._runner.submit(engine, self.batches, **spec_keys)

    def _oracle(self) -> Future[Run]:
        known = {"answers": answers(self.plain())}
        return self._submit(self._knowing.with_bastion(16, 16), oracle=known)

    def plain(self) -> Run:
        """Plain decoding."""
        return self._plain.result()

    def tree(self) -> Run:
        """Method bastion with the real drafter, adaptive budget."""
        return self._tree.result()

    def oracle(self) -> Run:
        """Method bastion with an oracle as its drafter; all 16 nodes are verified."""
        return self._oracle().result()


@pytest.fixture
def matrix(runner: Runner, mode: str) -> Matrix:
    """The engines of one scheduler; each runs once a session."""
    return Matrix(runner, mode)


@pytest.mark.parametrize("mode", MODES)
def test_drafter(matrix: Matrix, compare: Comparison, mode: str) -> None:
    """The tiny pair with an adaptive budget."""
    run = matrix.tree()
    compare.same(f"batch 4, {mode}", matrix.batches, matrix.plain(), run)
    assert run["info"]["speculator"] == "BastionSpeculator"


@pytest.mark.parametrize("mode", MODES)
def test_oracle(matrix: Matrix, compare: Comparison, mode: str) -> None:
    """Long paths that leave the chain of best candidates."""
    run = matrix.oracle()
    compare.same(f"batch 4, {mode}, oracle", matrix.batches, matrix.plain(), run)
    paths = [path for batch in run["batches"] for path in batch["paths"]]
    branchy = leaving_the_chain(paths)
    assert len(branchy) > 60
    assert max(len(path) for path in branchy) > 6


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="compares two ways to run vLLM's kernels on a CPU")
def test_vllms_own_kernels(runner: Runner, compare: Comparison) -> None:
    """Plain decoding and trees in Triton's interpreter instead of on our native twins."""
    batches = [cases.greedy(3), cases.sampled(3), cases.structured()]
    engines = [Engine(), Engine().with_bastion(16)]
    native = runner.submit(engines[0], batches)
    runs = [runner.submit(engine, batches, interpreted=True) for engine in engines]
    for name, run in zip(("plain", "trees"), runs, strict=True):
        compare.same(f"in the interpreter, {name}", batches, native.result(), run.result())


@pytest.mark.parametrize("mode", MODES)
def test_the_scheduler_that_ran(matrix: Matrix, mode: str) -> None:
    """The engine ran the scheduler that was asked for."""
    expected = {"sync": "Scheduler", "async": "AsyncScheduler"}[mode]
    assert matrix.tree()["info"]["scheduler"] == expected
    assert matrix.plain()["info"]["scheduler"] == expected


@pytest.mark.parametrize("mode", ["sync"])
def test_the_edge_cases_happened(matrix: Matrix) -> None:
    """The edge cases really happened in the run with long paths."""
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

    stopped = [result["finish_reason"] for result in results(run, "stop-")]
    assert stopped.count("stop") >= 5
    cut = by_case["stop strings and max_tokens inside a path"]
    emitted = {name: len(result["token_ids"]) for name, result in cut["requests"].items()}
    offered = dict.fromkeys(emitted, 1)  # the first token comes from the prompt
    for name, path in zip(cut["path_requests"], cut["paths"], strict=True):
        offered[name] += len(path)
    inside = [name for name in emitted if offered[name] > emitted[name]]
    assert any(name.startswith("limit") for name in inside)
    assert any(name.startswith("stop") for name in inside)

    aborted = [result["finish_reason"] for result in results(run, "abort-")]
    assert aborted.count("abort") == 2
    grammars = [result["finish_reason"] for result in results(run, "grammar-")]
    assert grammars.count("stop") >= 4


@pytest.mark.parametrize("mode", ["sync"])
def test_metrics(matrix: Matrix) -> None:
    """vLLM's four counters against the paths and rows seen in the target's batches."""
    run = matrix.oracle()["batches"][0]
    depths = [len(path) - 1 for path in run["paths"]]
    metrics = run["metrics"]
    assert metrics["spec_decode_num_drafts"] == len(depths)
    assert metrics["spec_decode_num_draft_tokens"] == sum(run["verified"])
    assert metrics["spec_decode_num_accepted_tokens"] == sum(depths)
    assert metrics["spec_decode_num_accepted_tokens_per_pos"] == [
        sum(depth > position for depth in depths) for position in range(16)
    ]
    run = matrix.tree()["batches"][0]
    metrics = run["metrics"]
    assert metrics["spec_decode_num_drafts"] == sum(nodes > 0 for nodes in run["verified"])
    assert metrics["spec_decode_num_draft_tokens"] == sum(run["verified"])
    assert metrics["spec_decode_num_accepted_tokens"] == sum(len(p) - 1 for p in run["paths"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
def test_every_case(runner: Runner, compare: Comparison, mode: str, eager: bool) -> None:
    """All edge cases with either scheduler, in vLLM's default mode and without torch.compile."""
    matrix = Matrix(runner, mode, everything=True, eager=eager)
    how = f"{mode}, eager" if eager else mode
    for label, run in (("", matrix.tree()), (", oracle", matrix.oracle())):
        compare.same(f"batch 4, {how}{label}", matrix.batches, matrix.plain(), run)


@pytest.mark.slow
def test_eager(runner: Runner, compare: Comparison) -> None:
    """Without torch.compile, few prompts."""
    plain = Engine(eager=True)
    batches = [cases.greedy(1, tokens=48), cases.sampled(3, tokens=48)]
    compare.same("batch 4, eager", batches, *runner.all([plain, plain.with_bastion(16)], batches))
