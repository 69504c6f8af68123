# SPDX-License-Identifier: Apache-2.0
"""Token ids are those of plain vLLM decoding, whatever is asked for and however it is scheduled.

Every engine decodes the same batches as a plain one with the same settings; see
`tests.e2e.compare` for what counts as the same. `oracle` engines have their drafter's logits
replaced (`tests.e2e.oracle`), so that accepted paths are long and wind through the tree.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import cases
from tests.e2e.compare import Comparison
from tests.e2e.engines import GAMMA, ON_GPU, Batch, Engine, Runner
from vllm_bastion.cost.store import Profile, ProfileKey, write_profile
from vllm_bastion.cost.table import StepCostTable

pytestmark = pytest.mark.e2e

Run = dict[str, Any]
MODES = ("sync", "async")


def batches_of(mode: str, everything: bool = False) -> list[Batch]:
    """One batch for each thing that is easy to get wrong; the default lane does some only once."""
    batches = [cases.chunked(), cases.stops(), cases.aborted(), cases.spines(), cases.structured()]
    if mode == "async" and not everything:
        return [cases.greedy(1), cases.sampled(3), *batches]
    batches += [cases.context_end(Engine().max_model_len), *cases.prefix_cache()]
    return [cases.greedy(6), cases.sampled(6), *batches]


def engine_of(mode: str, eager: bool = False) -> Engine:
    """The plain engine of four requests at once."""
    return Engine(async_scheduling=mode == "async", eager=eager)


def answers(run: Run) -> dict[str, list[int]]:
    """Request id -> tokens, over all batches of a run."""
    return {
        name: result["token_ids"]
        for batch in run["batches"]
        for name, result in batch["requests"].items()
    }


def results(run: Run, prefix: str) -> list[Run]:
    """The results of the requests whose id begins with `prefix`."""
    return [
        result
        for batch in run["batches"]
        for name, result in batch["requests"].items()
        if name.startswith(prefix)
    ]


class Matrix:
    """Plain decoding, the drafter and the oracle, under either scheduler; all started at once."""

    def __init__(self, runner: Runner, everything: bool, eager: bool = False) -> None:
        self._runner = runner
        self._engines = {mode: engine_of(mode, eager) for mode in MODES}
        self.batches = {mode: batches_of(mode, everything) for mode in MODES}
        for mode in MODES:
            plain = self._submit(mode, self._engines[mode])
            self._submit(mode, self._engines[mode].with_bastion(16))
            # The oracle waits for the answers, and nothing waits for the oracle.
            plain.add_done_callback(lambda done, mode=mode: done.exception() or self._oracle(mode))

    def _submit(self, mode: str, engine: Engine, **more: Any) -> Future[Run]:
        return self._runner.submit(engine, self.batches[mode], **more)

    def _oracle(self, mode: str) -> Future[Run]:
        known = {"answers": answers(self.plain(mode))}
        return self._submit(mode, self._engines[mode].with_bastion(16, 16), oracle=known)

    def plain(self, mode: str) -> Run:
        """Plain decoding."""
        return self._submit(mode, self._engines[mode]).result()

    def tree(self, mode: str) -> Run:
        """Method bastion with the real drafter, adaptive budget."""
        return self._submit(mode, self._engines[mode].with_bastion(16)).result()

    def oracle(self, mode: str) -> Run:
        """Method bastion with an oracle for a drafter, all 16 nodes verified."""
        return self._oracle(mode).result()


@pytest.fixture(scope="module")
def matrix(runner: Runner) -> Matrix:
    return Matrix(runner, everything=False)


@pytest.mark.parametrize("mode", MODES)
def test_drafter(matrix: Matrix, compare: Comparison, mode: str) -> None:
    """The pair as it is, adaptive budget."""
    run = matrix.tree(mode)
    compare.same(f"batch 4, {mode}", matrix.batches[mode], matrix.plain(mode), run)
    assert run["info"]["speculator"] == "BastionSpeculator"


@pytest.mark.parametrize("mode", MODES)
def test_oracle(matrix: Matrix, compare: Comparison, mode: str) -> None:
    """Long paths that leave the spine."""
    run = matrix.oracle(mode)
    compare.same(f"batch 4, {mode}, oracle", matrix.batches[mode], matrix.plain(mode), run)
    paths = [path for batch in run["batches"] for path in batch["paths"]]
    branchy = [path for path in paths if path != list(range(len(path)))]
    assert len(branchy) > 60
    assert max(len(path) for path in branchy) > 6


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="compares two ways to run vLLM's kernels on a CPU")
def test_vllms_own_kernels(runner: Runner, compare: Comparison) -> None:
    """Triton's interpreter instead of our native kernels, for plain decoding and for trees."""
    batches = [cases.greedy(3), cases.sampled(3), cases.structured()]
    engines = [Engine(), Engine().with_bastion(16)]
    native = runner.submit(engines[0], batches)
    runs = [runner.submit(engine, batches, interpreted=True) for engine in engines]
    for name, run in zip(("plain", "trees"), runs, strict=True):
        compare.same(f"in the interpreter, {name}", batches, native.result(), run.result())


@pytest.mark.parametrize("mode", MODES)
def test_scheduler(matrix: Matrix, mode: str) -> None:
    """The scheduler asked for is the one that ran."""
    expected = {"sync": "Scheduler", "async": "AsyncScheduler"}[mode]
    assert matrix.tree(mode)["info"]["scheduler"] == expected
    assert matrix.plain(mode)["info"]["scheduler"] == expected


def test_cases_happened(matrix: Matrix) -> None:
    """The edge cases are what they say, in the run with long paths."""
    run = matrix.oracle("sync")
    by_case = dict(zip([b.case for b in matrix.batches["sync"]], run["batches"], strict=True))

    long = results(run, "chunked-")
    assert sum(len(result["prompt_token_ids"]) > 128 for result in long) == 3

    for result in results(run, "end-"):
        total = len(result["prompt_token_ids"]) + len(result["token_ids"])
        assert total == Engine().max_model_len

    for cold, warm in zip(results(run, "cold-"), results(run, "warm-"), strict=True):
        # A hit beyond the cold prompt is on blocks that decoding has filled and compacted.
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


def test_metrics(matrix: Matrix) -> None:
    """vLLM's four counters, against paths and rows read from the target's batches."""
    run = matrix.oracle("sync")["batches"][0]
    depths = [len(path) - 1 for path in run["paths"]]
    metrics = run["metrics"]
    assert metrics["spec_decode_num_drafts"] == len(depths)
    assert metrics["spec_decode_num_draft_tokens"] == sum(run["verified"])
    assert metrics["spec_decode_num_accepted_tokens"] == sum(depths)
    assert metrics["spec_decode_num_accepted_tokens_per_pos"] == [
        sum(depth > position for depth in depths) for position in range(GAMMA)
    ]
    # With an adaptive budget some drafts may have no node at all.
    run = matrix.tree("sync")["batches"][0]
    metrics = run["metrics"]
    assert metrics["spec_decode_num_draft_tokens"] == sum(run["verified"])
    assert metrics["spec_decode_num_accepted_tokens"] == sum(len(p) - 1 for p in run["paths"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
def test_every_case(runner: Runner, compare: Comparison, mode: str, eager: bool) -> None:
    """All edge cases with either scheduler, in vLLM's default mode and without torch.compile."""
    matrix = Matrix(runner, everything=True, eager=eager)
    how = f"{mode}, eager" if eager else mode
    for label, run in (("", matrix.tree(mode)), (", oracle", matrix.oracle(mode))):
        compare.same(f"batch 4, {how}{label}", matrix.batches[mode], matrix.plain(mode), run)


def test_eager(runner: Runner, compare: Comparison) -> None:
    """Without torch.compile, few prompts."""
    plain = Engine(eager=True)
    batches = [cases.greedy(1, tokens=48), cases.sampled(3, tokens=48)]
    futures = [runner.submit(engine, batches) for engine in (plain, plain.with_bastion(16))]
    compare.same("batch 4, eager", batches, *(future.result() for future in futures))


_FULL = [(seqs, nodes, mode) for seqs, nodes in ((1, 63), (2, 32), (4, 16)) for mode in MODES]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("seqs", "nodes", "mode"), _FULL)
def test_all_prompts(runner: Runner, compare: Comparison, seqs: int, nodes: int, mode: str) -> None:
    """T=0 on all 90 prompts, T=0.8 and T=1 on 30; batch 1, 2 and 4, either scheduler."""
    plain = Engine(max_num_seqs=seqs, async_scheduling=mode == "async")
    batches = [cases.greedy(30), cases.sampled(30)]
    futures = [runner.submit(engine, batches) for engine in (plain, plain.with_bastion(nodes))]
    compare.same(f"batch {seqs}, {mode}, {nodes} nodes", batches, *(f.result() for f in futures))


_BUDGETS: list[tuple[str, Engine]] = [
    ("1 node", Engine(eager=True).with_bastion(1, 1)),
    ("8 nodes, fixed", Engine(eager=True).with_bastion(8, 8)),
    ("32 nodes, fixed", Engine(max_num_seqs=2, eager=True).with_bastion(32, 32)),
    ("63 nodes, fixed", Engine(max_num_seqs=1, eager=True).with_bastion(63, 63)),
    ("1 node, adaptive", Engine(eager=True).with_bastion(1)),
    ("none verified", Engine(eager=True).with_bastion(16, 0)),
    ("lagged", Engine(eager=True).with_bastion(16, budget_timing="lagged")),
    ("lagged, fixed", Engine(eager=True).with_bastion(16, 8, budget_timing="lagged")),
    ("lagged, top-1", Engine(eager=True).with_bastion(32, budget_timing="lagged", top_k=1)),
    ("ema_calib", Engine(eager=True).with_bastion(16, latency_model="ema_calib")),
    ("top-1", Engine(eager=True).with_bastion(GAMMA, GAMMA, top_k=1)),
]


@pytest.mark.parametrize(
    ("label", "engine"), _BUDGETS[:4], ids=[label for label, _ in _BUDGETS[:4]]
)
def test_budgets(runner: Runner, compare: Comparison, label: str, engine: Engine) -> None:
    """Fixed budgets, few prompts."""
    batches = [cases.greedy(1, tokens=48), cases.sampled(3, tokens=48)]
    plain = runner.submit(replace(engine, speculative=()), batches)
    tree = runner.submit(engine, batches)
    compare.same(label, batches, plain.result(), tree.result())
    budget = dict(engine.speculative)["bastion_budget"]
    assert max(tree.result()["batches"][0]["verified"]) == budget


def test_lagged(runner: Runner, compare: Comparison, tmp_path: Path) -> None:
    """The timing of a GPU: steps sized by older scores, and shared out on the device."""
    profile = tmp_path / "profile.json"
    # A row costs enough for unequal shares, and not so much that nothing is drafted.
    table = StepCostTable.linear(10.0, 0.4, max_rows=128)
    write_profile(Profile(ProfileKey("", "", "", "", "", 1, ""), table), profile)
    batches = [cases.greedy(2, tokens=48), cases.sampled(3, tokens=48), cases.stops()]
    costs = {"calibration": str(profile), "latency_model": "table", "budget_timing": "lagged"}
    plain = runner.submit(engine_of("async"), batches)
    run = runner.run(engine_of("async").with_bastion(16, **costs), batches)
    compare.same("lagged, batch 4, async", batches, plain.result(), run)
    for outcome in run["batches"]:
        # Request by request and step by step: the even split that the host planned was no count.
        assert outcome["reported"] == outcome["counted"]
        # Nobody counts the step that a request was in when its end became known.
        metrics, ends = outcome["metrics"], max(outcome["verified"]) * len(outcome["requests"])
        drafted = metrics["spec_decode_num_draft_tokens"]
        assert 0 <= sum(outcome["verified"]) - drafted <= ends
        assert metrics["spec_decode_num_accepted_tokens"] <= drafted
    shares = [set(nodes.values()) for out in run["batches"] for nodes in out["counted"]]
    assert sum(max(share) - min(share) > 1 for share in shares) > 10


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("label", "engine"), _BUDGETS, ids=[label for label, _ in _BUDGETS])
def test_all_budgets(runner: Runner, compare: Comparison, label: str, engine: Engine) -> None:
    """Every way to choose the budget, more prompts."""
    batches = [cases.greedy(6), cases.sampled(9)]
    plain = runner.submit(replace(engine, speculative=()), batches)
    tree = runner.submit(engine, batches)
    compare.same(label, batches, plain.result(), tree.result())
    known = {"answers": answers(plain.result())}
    oracle = runner.run(engine, batches, oracle=known)
    compare.same(f"{label}, oracle", batches, plain.result(), oracle)
