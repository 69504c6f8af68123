# SPDX-License-Identifier: Apache-2.0
"""Whether two different tokens are equally good within rounding, by transformers in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch


class Judge:
    """The target, and how a request turns its logits into a token.

    Args:
        bound: rounding, as a difference of two logits.
    """

    def __init__(self, target: Path, bound: float) -> None:
        self._folder, self._bound = target, bound

    @cached_property
    def _target(self) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def near_tie(
        self, prompt: list[int], made: list[int], one: int, other: int, index: int,
        given: dict[str, Any],
    ) -> bool:  # fmt: skip
        """Whether either token may follow `prompt + made`, for choice `index` of a request.

        Each must win where its own logit is half the bound higher, and its rivals' half the bound
        lower. A rival that is lowered may also leave the nucleus of top_p or of min_p.
        """
        logits = self._target(torch.tensor([[*prompt, *made]])).logits[0, -1].float()

        def score(logits: torch.Tensor) -> torch.Tensor:
            scored = scores(logits.clone(), prompt, made, index, given)
            if not _excludes(given):
                return scored
            # A grammar and the like exclude tokens that are unknown here, but neither of these.
            pair = torch.tensor([one, other])
            return torch.full_like(scored, -torch.inf).index_copy(0, pair, scored[pair])

        return all(_can_win(token, logits, self._bound / 2, score) for token in (one, other))


def _can_win(
    token: int, logits: torch.Tensor, error: float, score: Callable[[torch.Tensor], torch.Tensor]
) -> bool:
    """Whether `token` has the best score if each logit is off by at most `error`."""
    moved = {token}
    logits = logits.clone()
    logits[token] += error
    while True:
        scored = score(logits)
        best = int(scored.argmax())
        if scored[token] == scored[best]:
            return True
        if best in moved:
            return False
        moved.add(best)
        logits[best] -= error


def _excludes(given: dict[str, Any]) -> bool:
    keys = ("structured_outputs", "tools", "bad_words", "min_tokens", "ignore_eos")
    return any(given.get(key) for key in keys)


def scores(
    logits: torch.Tensor, prompt: list[int], made: list[int], index: int, given: dict[str, Any]
) -> torch.Tensor:
    """What vLLM takes the maximum of, [V]: after penalties, temperature, filters and noise."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    from vllm_bastion.cpu.noise import gumbel_row

    vocab = len(logits)
    allowed = given.get("allowed_token_ids")
    if allowed is not None:
        logits = torch.full_like(logits, -torch.inf).index_copy(
            0, torch.tensor(allowed), logits[allowed]
        )
    for token, bias in (given.get("logit_bias") or {}).items():
        logits[int(token)] += bias
    penalty = given.get("repetition_penalty", 1.0)
    seen = torch.tensor(sorted({*prompt, *made}))
    logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    counts = torch.bincount(torch.tensor(made, dtype=torch.int64), minlength=vocab)
    logits = logits - given.get("frequency_penalty", 0.0) * counts
    logits = logits - given.get("presence_penalty", 0.0) * (counts > 0)
    temperature = given["temperature"]
    if temperature == 0:
        return logits
    logits = logits / temperature
    if given.get("min_p"):
        probs = logits.softmax(0)
        logits = logits.masked_fill(probs < given["min_p"] * probs.max(), -torch.inf)
    top_k = torch.tensor([given["top_k"]]) if given.get("top_k", -1) > 0 else None
    top_p = torch.tensor([given["top_p"]]) if given.get("top_p", 1) < 1 else None
    logits = apply_top_k_top_p_pytorch(logits[None], top_k, top_p, allow_cpu_sync=True)[0]
    seed, position = given["seed"] + index % given.get("n", 1), len(prompt) + len(made) - 1
    return logits + torch.from_numpy(gumbel_row(seed, position, vocab))
