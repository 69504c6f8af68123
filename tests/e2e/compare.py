# SPDX-License-Identifier: Apache-2.0
"""Is the output of two engines the same? What is a difference, and what a near-tie.

Two engines that batch differently round differently, and where the target's two best tokens are
closer than that rounding either may win. Such a *near-tie* is the only mismatch that is allowed:
at the first divergence the target's top-2 logits must differ by less than 1e-4. For a request
that samples, the logits are those that vLLM takes the maximum of (temperature, top-k, top-p and the
seeded noise applied). Every mismatch is counted and printed, allowed or not. On a GPU the logits
are bfloat16, 1/16 apart where they are 8 to 16: the bound is four such steps, one for each of the
two logits in each of the two engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tests.e2e.engines import ON_GPU, Batch, Engine, Runner
from tests.e2e.report import Row, Tally

NEAR_TIE = 0.25 if ON_GPU else 1e-4


def answers(run: dict[str, Any]) -> dict[str, list[int]]:
    """Request id -> tokens, over all batches of a run."""
    return {
        name: result["token_ids"]
        for batch in run["batches"]
        for name, result in batch["requests"].items()
    }


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _logprobs_differ(left: list[dict[str, float]], right: list[dict[str, float]]) -> str | None:
    """What is wrong with the log-probabilities of the same tokens; None where nothing is.

    The tokens that are reported may differ at the end of the list, where two are as good.
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


class Comparison:
    """Compares runs with plain ones and fails on what no near-tie explains."""

    def __init__(self, runner: Runner, tally: Tally) -> None:
        self._runner, self._tally = runner, tally

    def same(
        self,
        label: str,
        batches: Sequence[Batch],
        plain: dict[str, Any],
        other: dict[str, Any],
        engine: Engine | None = None,
        **more: Any,
    ) -> None:
        """Assert that every request of every batch came out the same.

        `engine` decodes plainly and is asked how near a tie was, with `more` keys of its spec; the
        tiny pair's unless given.

        Tokens, finish reason and text are compared; of a request that was aborted, the tokens that
        both had got. `plain` and `other` are results of the worker for `batches`.
        """
        problems = []
        self._asked = (engine or Engine(), more)
        for batch, left_run, right_run in zip(
            batches, plain["batches"], other["batches"], strict=True
        ):
            row = self._tally.row(batch.case, label)
            for request in batch.requests:
                left, right = (run["requests"][request["id"]] for run in (left_run, right_run))
                row.requests += 1
                row.tokens += len(right["token_ids"])
                problem = self._difference(request, left, right, row)
                if problem:
                    problems.append(f"{batch.case}, {label}, request {request['id']}: {problem}")
            blocks = right_run["free_blocks"]
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
        at = _first_difference(tokens, others)
        if at == len(tokens) == len(others):
            if "abort_after" in request:
                return None
            for key in ("finish_reason", "stop_reason", "text", "error"):
                if left.get(key) != right.get(key):
                    return f"{key} {left.get(key)!r} became {right.get(key)!r}"
            for key in ("logprobs", "prompt_logprobs"):
                problem = _logprobs_differ(left.get(key, []), right.get(key, []))
                if problem:
                    return f"{key}: {problem}"
            return None
        row.mismatches += 1
        prefix = left["prompt_token_ids"] + tokens[:at]
        gap = self._gap(request, prefix, tokens[at : at + 1], others[at : at + 1])
        text = (
            f"token {at} of {len(tokens)}: {tokens[at : at + 1]} became {others[at : at + 1]}, "
            f"gap {gap:.2e}"
        )
        print(f"mismatch in {row.case}, {row.engine}, request {request['id']}: {text}")
        if gap < NEAR_TIE:
            row.near_ties += 1
            return None
        return text

    def _gap(
        self, request: dict[str, Any], prefix: list[int], one: list[int], other: list[int]
    ) -> float:
        """How much the target prefers its best token to the runner-up after `prefix`."""
        if not one or not other:
            return float("inf")
        engine, more = self._asked
        engine = replace(engine, max_num_seqs=1, extra=(*engine.extra, ("max_logprobs", -1)))
        batch = Batch("gap")
        batch.add("gap", prefix, temperature=0, max_tokens=1, logprobs=-1)
        result = self._runner.run(engine, [batch], **more)["batches"][0]["requests"]["gap"]
        values = result["logprobs"][0]
        logits = torch.tensor([[values[str(token)] for token in range(len(values))]])
        scores = _scores(logits, request["params"], position=len(prefix) - 1)
        best = scores[0].topk(2).values
        return float(best[0] - best[1])


def _scores(logits: torch.Tensor, params: dict[str, Any], position: int) -> torch.Tensor:
    """What vLLM takes the maximum of: [1, V] logits after temperature, top-k, top-p and noise."""
    if params.get("temperature", 1.0) == 0:
        return logits
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    from vllm_bastion.cpu.noise import gumbel_noise

    logits = logits / params.get("temperature", 1.0)
    top_k = torch.tensor([params["top_k"]]) if "top_k" in params else None
    top_p = torch.tensor([params["top_p"]]) if "top_p" in params else None
    logits = apply_top_k_top_p_pytorch(logits, top_k, top_p, allow_cpu_sync=True)
    seed, place = torch.tensor([params["seed"]]), torch.tensor([position])
    return logits + gumbel_noise(seed, place, logits.shape[1])
