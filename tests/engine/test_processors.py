# SPDX-License-Identifier: Apache-2.0
"""A node's logits are processed as plain decoding's are after the same text.

Every node of random trees goes through the plugin's sampler, and through vLLM's own as a request
whose output has the node's ancestors in it: logits to the bit, accepted tokens, log-probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

from tests.trees import make_trees
from vllm_bastion.engine import logprobs as path_logprobs
from vllm_bastion.engine.runtime import Runtime
from vllm_bastion.engine.sampler import TreeRejectionSampler

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's state on the host"),
    pytest.mark.usefixtures("pytorch_top_k"),
]

VOCAB, DEPTH, NODES, CPU = 24, 5, 14, torch.device("cpu")
# Few tokens, so that words and markers are met all the time.
ALPHABET = 4
REASONING = SimpleNamespace(
    reasoning_start_token_ids=[1, 2],
    natural_reasoning_end_token_ids=[2, 2, 3],
    reasoning_end_token_ids=[3, 0, 1, 1],
)


def _params(**given: Any) -> SamplingParams:
    params = SamplingParams(**({"temperature": 0.8, "seed": 7} | given))
    if "bad_words" in given:  # made by the tokenizer in service
        params._bad_words_token_ids = [[2], [0, 1], [1, 1, 3], [0, 2, 1, 3], [3, 3, 3, 3, 3, 3, 3]]
    return params


KINDS: dict[str, SamplingParams] = {
    "plain": _params(),
    "greedy": _params(temperature=0, logprobs=2),
    "presence": _params(presence_penalty=0.6),
    "frequency": _params(frequency_penalty=-0.7, logprobs=0),
    "repetition": _params(repetition_penalty=1.4, logprobs=3),
    "all penalties": _params(repetition_penalty=0.8, frequency_penalty=0.4, presence_penalty=-1),
    "bad words": _params(bad_words=["made above"], logprobs=1),
    "thinking": _params(thinking_token_budget=3),
    "no thinking": _params(thinking_token_budget=0),
    "min tokens": _params(min_tokens=4, stop_token_ids=[0, 2, 3]),
    "bias": _params(logit_bias={1: 2.0, 5: -3.0}, logprobs=1),
    "min p": _params(min_p=0.2, logprobs=1),
    "bias, min p and penalties": _params(
        logit_bias={1: 2.0, 5: -3.0}, min_p=0.1, presence_penalty=0.6, top_p=0.9
    ),
    "allowed": _params(allowed_token_ids=list(range(8)), top_k=5),
    "everything": _params(
        temperature=1.1, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.6,
        bad_words=["made above"], thinking_token_budget=5, min_tokens=5, stop_token_ids=[2],
        logprobs=4,
    ),
}  # fmt: skip


@dataclass
class Request:
    """A text, a tree of drafts after it, and the token that each row feeds."""

    params: SamplingParams
    text: list[int]
    parents: list[int]
    tokens: list[int]

    def paths(self) -> list[list[int]]:
        """Ancestors of the root and of every node."""
        paths = [list[int]()]
        for parent, token in zip(self.parents, self.tokens, strict=True):
            paths.append([*paths[parent], token])
        return paths


PROMPT = 3


def random_request(params: SamplingParams, rng: np.random.Generator) -> Request:
    text = rng.integers(0, ALPHABET, PROMPT + int(rng.integers(1, 9))).tolist()
    depths, parents = [0], []
    for column in range(int(rng.integers(0, NODES + 1))):
        parent = int(rng.integers(0, column + 1))
        parent = 0 if depths[parent] == DEPTH else parent
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return Request(params, text, parents, rng.integers(0, ALPHABET, len(parents)).tolist())


def vllm_sampler(
    texts: list[list[int]], params: list[SamplingParams], mode: str = "raw_logprobs"
) -> tuple[Sampler, np.ndarray]:
    """vLLM's sampler holding requests with these texts so far, and their slots."""
    states = RequestState(len(texts), 64, 64, NODES, VOCAB, CPU)
    settings = SimpleNamespace(reasoning_config=REASONING)
    sampler = Sampler(settings, len(texts), VOCAB, CPU, states, logprobs_mode=mode)
    for i, text in enumerate(texts):
        states.add_request(str(i), PROMPT, text, 0, 32)
    slots = np.array([states.req_id_to_index[str(i)] for i in range(len(texts))])
    states.apply_staged_writes()
    for slot, own in zip(slots.tolist(), params, strict=True):
        sampler.add_request(slot, own)
    sampler.apply_staged_writes()
    return sampler, slots


class Step:
    """The rows of a batch of requests, as the rejection sampler is given them."""

    def __init__(self, requests: list[Request], mode: str, seed: int) -> None:
        self.requests = requests
        texts, params = [r.text for r in requests], [r.params for r in requests]
        sampler, self.slots = vllm_sampler(texts, params, mode)
        trees = make_trees(len(requests), NODES, DEPTH, top_k=4, rows=512)
        rows: list[tuple[int, int, int, int]] = []
        starts = [0]
        for slot, request in zip(self.slots.tolist(), requests, strict=True):
            trees.parents[slot, : len(request.parents)] = torch.tensor(
                request.parents, dtype=torch.int32
            )
            fed = [request.text[-1], *request.tokens]
            for node, (token, path) in enumerate(zip(fed, request.paths(), strict=True)):
                rows.append((slot, node, token, len(request.text) - 1 + len(path)))
            starts.append(len(rows))
        self.row_slots, self.nodes, self.fed, self.places = torch.tensor(rows).T.contiguous()
        self.starts = torch.tensor(starts, dtype=torch.int32)
        generator = torch.Generator().manual_seed(seed)
        self.logits = 2 * torch.randn(len(rows), VOCAB, generator=generator)
        self.logits[:, :ALPHABET] += 2
        for start, request in zip(starts, requests, strict=False):
            for parent, token in zip(request.parents, request.tokens, strict=True):
                self.logits[start + parent, token] += 1.5
        settings = SimpleNamespace(
            num_speculative_tokens=NODES, enable_adaptive_verification=False,
            rejection_sample_method="standard", fly_entropy_threshold=0.3, fly_entropy_top_k=3,
            bastion_budget="adaptive", bastion_budget_timing="exact",
        )  # fmt: skip
        self.sampler = TreeRejectionSampler(Runtime(trees), sampler, settings, CPU)

    def verify(self, lazily: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]:
        """Processed logits, tokens, counts and log-probabilities."""
        self.sampler._every_row = not lazily
        self.sampler.begin(self.starts)
        self.sampler._logprobs.begin(self.slots)
        slots = torch.from_numpy(self.slots)
        result = self.sampler._verify(
            self.logits.clone(), None, self.fed, self.places, self.starts, slots, self.slots,
            self.row_slots, self.nodes, np.full(len(slots), 64), self.fed,
        )  # fmt: skip
        return (*result, self.sampler._logprobs.tensors())

    def plainly(self, mode: str) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """The same rows as requests of their own: processed logits, tokens, log-probabilities."""
        texts = [[*r.text, *path] for r in self.requests for path in r.paths()]
        params = [r.params for r in self.requests for _ in r.paths()]
        sampler, slots = vllm_sampler(texts, params, mode)
        rows, zeros = torch.from_numpy(slots), torch.zeros(len(slots), dtype=torch.int64)
        last = torch.tensor([text[-1] for text in texts])
        sampled, processed = sampler.sample(
            self.logits.clone(), rows, rows, slots, self.places, last, zeros,
            np.full(len(slots), 64), return_logprobs=True,
        )  # fmt: skip
        dims = sampler.get_logprobs_dims(slots)
        scored = None
        if dims is not None:
            scored = compute_topk_scores(
                processed if "processed" in mode else self.logits, dims[0], sampled,
                logits_mode=mode == "processed_logits",
            )  # fmt: skip
        return processed, sampled, scored


def check(requests: list[Request], seed: int, mode: str = "raw_logprobs") -> int:
    """Compare one batch; returns how many nodes were accepted."""
    step = Step(requests, mode, seed)
    processed, sampled, scored = step.plainly(mode)
    every, *eager = step.verify(lazily=False)
    torch.testing.assert_close(every, processed, rtol=0, atol=0)
    accepted = 0
    for tokens, counts, logprobs in (eager, step.verify(lazily=True)[1:]):
        for r, request in enumerate(requests):
            first, count = int(step.starts[r]), int(counts[r])
            children = {
                (parent, token): node
                for node, (parent, token) in reversed(
                    list(enumerate(zip(request.parents, request.tokens, strict=True), start=1))
                )
            }
            node, path = 0, [0]
            while (child := children.get((node, int(sampled[first + node])))) is not None:
                path.append(node := child)
            rows = [first + node for node in path]
            assert tokens[r, :count].tolist() == sampled[rows].tolist()
            accepted += count - 1
            if request.params.logprobs is None:
                continue
            got = logprobs.logprobs[logprobs.cu_num_generated_tokens[r] :][:count]
            ids = logprobs.logprob_token_ids[logprobs.cu_num_generated_tokens[r] :][:count]
            ranks = logprobs.selected_token_ranks[logprobs.cu_num_generated_tokens[r] :][:count]
            assert torch.equal(ids, scored.logprob_token_ids[rows])
            torch.testing.assert_close(got, scored.logprobs[rows], rtol=0, atol=1e-6)
            assert torch.equal(ranks, scored.selected_token_ranks[rows])
    return accepted


@pytest.mark.usefixtures("replacements")
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind(kind: str) -> None:
    rng = np.random.default_rng(sorted(KINDS).index(kind))
    accepted = 0
    for seed in range(3):
        accepted += check([random_request(KINDS[kind], rng) for _ in range(3)], seed)
    assert accepted > 1


@pytest.mark.usefixtures("replacements")
@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits"])
def test_all_kinds_in_one_batch_with_other_log_probabilities(mode: str) -> None:
    rng = np.random.default_rng(3)
    assert check([random_request(params, rng) for params in KINDS.values()], 1, mode) > 5


@pytest.mark.thorough
def test_with_vllms_own_kernels() -> None:
    """In the interpreter; `tests.cpu.test_replacements` compares each replacement with them."""
    rng = np.random.default_rng(3)
    some = ("greedy", "no thinking", "bias, min p and penalties", "allowed", "everything")
    assert check([random_request(KINDS[kind], rng) for kind in some], 1) > 5


def test_a_request_that_asks_for_nothing_gets_no_log_probabilities() -> None:
    rng = np.random.default_rng(4)
    step = Step([random_request(KINDS["plain"], rng)], "raw_logprobs", 0)
    assert step.verify(lazily=False)[-1] is None


@pytest.mark.usefixtures("replacements")
def test_a_gpu_scores_no_more_rows_than_a_request_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host does not know how long the paths are; plain steps scored a tree's depth of rows."""
    monkeypatch.setattr(path_logprobs, "current_host", lambda: SimpleNamespace(runs_ahead=True))
    rng = np.random.default_rng(6)
    requests = [random_request(KINDS["greedy"], rng) for _ in range(3)]
    check(requests, 2)
    plain = [Request(r.params, r.text, [], []) for r in requests]
    scored = Step(plain, "raw_logprobs", 0).verify(lazily=False)[-1]
    assert len(scored.logprobs) == len(plain)
    few = [replace(requests[0], parents=[0, 0], tokens=[1, 2]), *plain[1:]]
    scored = Step(few, "raw_logprobs", 0).verify(lazily=False)[-1]
    assert len(scored.logprobs) == 3 * 3


def test_named_tokens_are_scored() -> None:
    """`logprob_token_ids`, which vLLM's own rejection sampler forgets."""
    rng = np.random.default_rng(5)
    requests = [
        random_request(params, rng)
        for params in (KINDS["plain"], _params(logprob_token_ids=[5, 9]), KINDS["repetition"])
    ]
    step = Step(requests, "raw_logprobs", 0)
    _, tokens, counts, logprobs = step.verify(lazily=True)
    first, count = logprobs.cu_num_generated_tokens[1], int(counts[1])
    row = int(step.starts[1])
    expected = step.logits[row].log_softmax(-1)
    assert logprobs.logprob_token_ids[first, 1:3].tolist() == [5, 9]
    wanted = torch.stack([expected[tokens[1, 0]], expected[5], expected[9]])
    torch.testing.assert_close(logprobs.logprobs[first, :3], wanted)
    assert logprobs.cu_num_generated_tokens[2] - first == count
