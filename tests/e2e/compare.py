# SPDX-License-Identifier: Apache-2.0
"""Compare the output of two engines: what counts as a difference, and what as a near-tie.

Two engines that batch differently round differently. If the target's two best tokens are closer
than this rounding, either may win. Such a *near-tie* is the only mismatch allowed: at the first
difference the target's top-2 logits must differ by less than 1e-4. If a request samples, its logits
are those that vLLM takes the maximum of: after temperature, top-k, top-p and the seeded noise.
Every mismatch is counted and printed, allowed or not.

In bfloat16, as on a GPU, logits have a spacing of 1/16 between 8 and 16. The bound is four such
steps: one for each of the two logits in each of the two engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.e2e.engines import ON_GPU, Batch, Engine, Runner
from tests.e2e.report import Row, Tally

NEAR_TIE_BF16 = 0.25
NEAR_TIE = NEAR_TIE_BF16 if ON_GPU else 1e-4


def answers(run: dict[str, Any]) -> dict[str, list[int]]:
    """Request id -> tokens, over all batches of a run."""
    every = (batch["requests"].items() for batch in run["batches"])
    return {name: result["token_ids"] for requests in every for name, result in requests}


def leaving_the_chain(paths: Sequence[list[int]]) -> list[list[int]]:
    """The accepted paths that are not the first nodes one after the other."""
    return [path for path in paths if path != list(range(len(path)))]


def assert_winding(batch: dict[str, Any], longer_than: int = 4) -> None:
    """Assert that accepted paths of a batch leave the chain, and how long they become."""
    assert leaving_the_chain(batch["paths"])
    assert max(map(len, batch["paths"])) > longer_than


def _logprobs_differ(left: list[dict[str, float]], right: list[dict[str, float]]) -> str | None:
    """Describe how the log-probabilities of the same tokens differ, or None if they agree.

    The reported tokens may differ at the end of the list, where two can be equally likely.
    """
    if len(left) != len(right):
        return f"{len(left)} log-probabilities became {len(right)}"
    for at, (one, other) in enumerate(zip(left, right, strict=True)):
        for token in one.keys() & other.keys():
            if abs(one[token] - other[token]) > NEAR_TIE:
                return f"log-probability {one[token]} at {at} became {other[token]}"
        if len(one) != len(other) or (one and not one.keys() & other.keys()):
            return f"log-probabilities of {sorted(one)} at {at} became those of {sorted(other)}"
    return None


class Comparison(Runner):
    """Runs engines, and fails on any difference from plain decoding that is not a near-tie."""

    def __init__(self, folder: Path, tally: Tally) -> None:
        super().__init__(folder, cpu_s=tally.cpu_s)
        self._tally = tally

    def both(
        self, label: str, batches: Sequence[Batch], plain: Engine, tree: Engine, **spec_keys: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Run both engines at the same time and compare."""
        expected, run = self.all([plain, tree], batches, **spec_keys)
        self.same(label, batches, expected, run, plain, **spec_keys)
        return expected, run

    def oracle(
        self, label: str, batches: Sequence[Batch], plain: Engine, tree: Engine, **spec_keys: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Run `plain`, then `tree` with an oracle that knows the answers, and compare the two."""
        own = {key: value for key, value in spec_keys.items() if key != "probe"}
        expected = self.run(plain, batches, **own)
        run = self.run(tree, batches, oracle={"answers": answers(expected)}, **spec_keys)
        self.same(label, batches, expected, run, plain, **own)
        return expected, run

    def same(
        self,
        label: str,
        batches: Sequence[Batch],
        plain: dict[str, Any],
        other: dict[str, Any],
        engine: Engine | None = None,
        near_tie: float = NEAR_TIE,
        **spec_keys: Any,
    ) -> None:
        """Assert that both runs have the same result for every request of every batch.

        Tokens, finish reason, text and log-probabilities are compared; for an aborted request, the
        tokens that both emitted.

        Args:
            label: the engine's name in the result table.
            plain: the worker's result for `batches` with plain decoding.
            other: the worker's result to compare.
            engine: decodes plainly to measure the gap of a tie, with `spec_keys` of its spec; by
                default the tiny pair's target.
            near_tie: the gap below which a mismatch is allowed.
        """
        problems = []
        self._asked, self._near_tie = (engine or Engine(), spec_keys), near_tie
        for batch, left, right in zip(batches, plain["batches"], other["batches"], strict=True):
            row = self._tally.row(batch.case, label)
            for request in batch.requests:
                one, two = (run["requests"][request["id"]] for run in (left, right))
                row.requests += 1
                row.tokens += len(two["token_ids"])
                problem = self._difference(request, one, two, row)
                if problem:
                    problems.append(f"{batch.case}, {label}, request {request['id']}: {problem}")
            blocks = right["free_blocks"]
            if blocks[0] != blocks[1]:
                problems.append(f"{batch.case}, {label}: free KV blocks {blocks}")
        assert not problems, "\n".join(problems)

    def _difference(
        self, request: dict[str, Any], left: dict[str, Any], right: dict[str, Any], row: Row
    ) -> str | None:
        tokens, others = left["token_ids"], right["token_ids"]
        if "abort_after" in request:
            shared = min(len(tokens), len(others))
            tokens, others = tokens[:shared], others[:shared]
        if tokens == others:
            return None if "abort_after" in request else _rest_differs(left, right)
        row.mismatches += 1
        pairs = enumerate(zip(tokens, others, strict=False))
        shorter = min(len(tokens), len(others))
        at = next((i for i, (a, b) in pairs if a != b), shorter)
        gap = float("inf")
        if at < shorter:
            gap = self._gap(request, left["prompt_token_ids"], tokens[:at])
        text = (
            f"token {at} of {len(tokens)}: {tokens[at : at + 1]} became {others[at : at + 1]}, "
            f"gap {gap:.2e}"
        )
        print(f"mismatch in {row.case}, {row.engine}, request {request['id']}: {text}")
        if gap < self._near_tie:
            row.near_ties += 1
            return None
        return text

    def _gap(self, request: dict[str, Any], prompt: list[int], made: list[int]) -> float:
        """How much the target prefers its best token after `prompt + made` to the second best."""
        engine, spec_keys = self._asked
        batch = Batch("gap")
        own = {key: request[key] for key in ("images", "lora") if key in request}
        # An image's place is one token in a prompt that is given as tokens.
        given = request["prompt"] if "images" in request else prompt
        batch.add("gap", given + made, temperature=0, max_tokens=1, logprobs=-1, **own)
        asked = replace(engine, max_num_seqs=1).of(max_logprobs=-1)
        result = self.run(asked, [batch], **spec_keys)["batches"][0]["requests"]["gap"]
        values = result["logprobs"][0]
        logits = torch.tensor([values[str(token)] for token in range(len(values))])
        position = len(prompt) + len(made) - 1
        best = _scores(logits, made, position, request["params"]).topk(2).values
        return float(best[0] - best[1])


def _scores(
    logits: torch.Tensor, made: list[int], position: int, params: dict[str, Any]
) -> torch.Tensor:
    """What vLLM takes the maximum of, [V]: after penalties, temperature, filters and noise."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    from vllm_bastion.cpu.noise import gumbel_row

    vocab = len(logits)
    for token, bias in (params.get("logit_bias") or {}).items():
        logits[int(token)] += bias
    counts = torch.bincount(torch.tensor(made, dtype=torch.int64), minlength=vocab)
    logits = logits - params.get("frequency_penalty", 0.0) * counts
    logits = logits - params.get("presence_penalty", 0.0) * (counts > 0)
    temperature = params.get("temperature", 1.0)
    if temperature == 0:
        return logits
    logits = logits / temperature
    probs = logits.softmax(0)
    logits = logits.masked_fill(probs < params.get("min_p", 0.0) * probs.max(), -torch.inf)
    top_k = torch.tensor([params["top_k"]]) if "top_k" in params else None
    top_p = torch.tensor([params["top_p"]]) if "top_p" in params else None
    logits = apply_top_k_top_p_pytorch(logits[None], top_k, top_p, allow_cpu_sync=True)[0]
    return logits + torch.from_numpy(gumbel_row(params["seed"], position, vocab))


def _rest_differs(left: dict[str, Any], right: dict[str, Any]) -> str | None:
    for key in ("finish_reason", "stop_reason", "text", "error"):
        if left.get(key) != right.get(key):
            return f"{key} {left.get(key)!r} became {right.get(key)!r}"
    for key in ("logprobs", "prompt_logprobs"):
        problem = _logprobs_differ(left.get(key, []), right.get(key, []))
        if problem:
            return f"{key}: {problem}"
    return None
