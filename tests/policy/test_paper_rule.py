# SPDX-License-Identifier: Apache-2.0
"""vLLM's adaptive verification, fed with path scores, decides as the paper's Algorithm 1 does.

With confidences conf[r, j] = rho_j / rho_(j-1) of a tree's sorted nodes, vLLM's survival
probability is the path score rho_j, and its trimmed draft is the tree of the best nodes.
"""

import heapq
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

from benchmarks.replay.recording import load_recording
from benchmarks.replay.trees import best_first, target_ranks
from helpers import ROOT
from vllm_bastion.policy.cost import DeviceSpec, Estimator, ModelShape

MOST = 64
DRAFT_MS = 3.06
QWEN3_8B = ModelShape(36, 4096, 32, 8, 128, 12288, 151936)


def confidences(rho):
    """[R, N] float32, as vLLM keeps them; 0 beyond a row's nodes."""
    before = np.concatenate([np.ones((len(rho), 1)), rho[:, :-1]], axis=1)
    return np.divide(rho, before, out=np.zeros_like(rho), where=before > 0).astype(np.float32)


def vllms_budget(conf, scheduled, draft_ms, verify_ms):
    """Draft nodes of a batch, by `get_num_tokens` of a manager without a device."""
    names, far = [str(r) for r in range(len(conf))], np.iinfo(np.int32).max
    tokens = {name: 1 + int(n) for name, n in zip(names, scheduled)}
    drafts = {name: [0] * int(n) for name, n in zip(names, scheduled)}
    states = SimpleNamespace(
        req_id_to_index={name: slot for slot, name in enumerate(names)},
        num_computed_tokens_np=np.zeros(len(names), dtype=np.int32),
        prefill_len=SimpleNamespace(np=np.ones(len(names), dtype=np.int32)),
    )
    manager = SimpleNamespace(
        cost_tables=(draft_ms, verify_ms), req_states=states, num_bonus_tokens=1,
        num_speculative_steps=conf.shape[1], _max_total_logits=far, _stale_idx=0,
        _stale_confidences=[SimpleNamespace(np=conf)],
    )  # fmt: skip
    total = AdaptiveVerificationManager.get_num_tokens(manager, tokens, drafts)
    return total - sum(tokens.values()) + int(np.sum(scheduled))


# --- the recording -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recording():
    return load_recording(ROOT / "benchmarks" / "results" / "recordings" / "tiny.npz")


def expansion(logprobs):
    """The paper's best-first expansion: (rho, path of ranks) of one node after the other."""
    q = np.exp(logprobs.astype(np.float64))
    depth, top_k = q.shape
    heap = [(-q[0, 0], 0, (0,))]
    pushed = 1
    while heap:
        negative, _, path = heapq.heappop(heap)
        yield -negative, path
        d, rank = len(path), path[-1]
        if d < depth:
            heapq.heappush(heap, (negative * q[d, 0], pushed, (*path, 0)))
        if rank + 1 < top_k:
            sibling = negative / q[d - 1, rank] * q[d - 1, rank + 1]
            heapq.heappush(heap, (sibling, pushed + 1, (*path[:-1], rank + 1)))
        pushed += 2


def algorithm_1(logprobs, verify_ms):
    """The paths of T*: nodes are added until one does not improve S. The root costs a row, too."""
    accepted, best, tree = 1.0, -np.inf, []
    for rho, path in islice(expansion(logprobs), MOST):
        accepted += rho
        speed = accepted / (DRAFT_MS + verify_ms[1 + len(tree) + 1])
        if speed <= best:
            break
        best, tree = speed, [*tree, path]
    return tree


def walk(tree, truth):
    """Draft tokens accepted of a tree, given the ranks of the target's next tokens."""
    nodes, path = set(tree), ()
    while len(path) < len(truth) and (*path, truth[len(path)]) in nodes:
        path = (*path, truth[len(path)])
    return len(path)


def forwards(recording, accepted):
    """Target passes of every request, if the step at a position accepts `accepted(step)`."""
    passes = []
    for request in range(len(recording.request_ids)):
        first, end = np.searchsorted(recording.step_requests, [request, request + 1])
        step, count = int(first), 0
        while step < end:
            step, count = step + 1 + accepted(step), count + 1
        passes.append(count)
    return passes


@pytest.mark.parametrize("nodes", [1, 4, 16, MOST])
def test_a_fixed_budget_takes_the_papers_forwards(recording, nodes):
    ranks = target_ranks(recording)

    def papers(step):
        grown = expansion(recording.topk_logprobs[step])
        return walk([path for (_, path), _ in zip(grown, range(nodes))], ranks[step].tolist())

    def ours(step):
        return best_first(recording.topk_logprobs[step], ranks[step], MOST).accepted(nodes)

    passes = forwards(recording, papers)
    assert forwards(recording, ours) == passes
    assert sum(passes) < len(recording.step_requests)


@pytest.mark.parametrize("dearer", [8, 40])
def test_the_adaptive_budget_takes_the_papers_forwards(recording, dearer):
    """On a curve calibrated on the paper's A100, with nodes dear enough to bind."""
    ranks, budgets = target_ranks(recording), []
    samples = [(n, 22.0 + max(0, n - 32) * 33.9 / 992) for n in (1, 8, 32, 64, 128, 512, 1024)]
    a100 = DeviceSpec(312e12, 1935e9)
    verify_ms = Estimator("static", QWEN3_8B, a100, samples, 1 + MOST, 64.0).verify_ms(1, 64)
    verify_ms = verify_ms[1] + dearer * (verify_ms - verify_ms[1])

    def papers(step):
        tree = algorithm_1(recording.topk_logprobs[step], verify_ms)
        budgets.append(len(tree))
        return walk(tree, ranks[step].tolist())

    def ours(step):
        tree = best_first(recording.topk_logprobs[step], ranks[step], MOST)
        conf = confidences(tree.rho[None])
        return tree.accepted(vllms_budget(conf, [len(tree.rho)], [0, DRAFT_MS], verify_ms))

    passes = forwards(recording, papers)
    assert forwards(recording, ours) == passes
    assert 2 < np.mean(budgets) < MOST - 2, "the costs bind"
