# SPDX-License-Identifier: Apache-2.0
"""Continuations by the target, which its drafter is trained to predict."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from benchmarks.tiny import data
from benchmarks.tiny.model import Cache, Target

LENGTH = 208
BATCH = 256
# Share of the continuations by source, and how much of each is sampled at T=1 instead of greedy.
# Chat is only sampled: its free choices are then learnt as choices, as in real dialogue, instead
# of the one answer that the argmax would give to all of them.
SHARES = {"stdlib": 0.36, "code": 0.20, "arithmetic": 0.28, "chat": 0.16}
SAMPLED = {"stdlib": 0.2, "code": 0.2, "arithmetic": 0.2, "chat": 1.0}


@torch.inference_mode()
def continue_batch(
    target: Target, prompts: Tensor, length: int, temperature: Tensor, seed: int = 0
) -> Tensor:
    """Extend prompts [B, P] to [B, length]; temperature [B], where 0 means greedy."""
    batch, prompt_len = prompts.shape
    device = prompts.device
    generator = torch.Generator(device=device).manual_seed(seed)
    cache = Cache(target.dims, batch, length, device)
    ids = torch.zeros(batch, length, dtype=torch.int64, device=device)
    ids[:, :prompt_len] = prompts
    mask = torch.ones(prompt_len, prompt_len, dtype=torch.bool, device=device).tril()[None, None]
    positions = torch.arange(prompt_len, device=device)
    scale = temperature.clamp(min=1e-6)[:, None]
    for at in range(prompt_len, length):
        rows = ids[:, positions]
        hidden, _ = target(rows, cache=cache, positions=positions, mask=mask)
        logits = target.logits(hidden[:, -1]).float()
        # Gumbel noise samples; no noise is the argmax.
        noise = torch.empty_like(logits).exponential_(generator=generator).log().neg()
        noisy = logits / scale + noise
        ids[:, at] = torch.where(temperature > 0, noisy.argmax(-1), logits.argmax(-1))
        positions = torch.tensor([at], device=device)
        mask = torch.ones(1, 1, 1, at + 1, dtype=torch.bool, device=device)
    return ids


def make_rollouts(
    target: Target, tok: PreTrainedTokenizerFast, count: int, device: str
) -> dict[str, Tensor]:
    """`count` rows of LENGTH tokens, with what the target computes on them.

    ids int16 [N, L], greedy, chat and code bool [N], first int64 [N] (the first position a draft
    block may start at: the last token of the prompt), hidden bf16 [N, L, H], features bf16
    [N, L, F*H].
    """
    rng = Random(7)
    parts: dict[str, list[Tensor]] = {
        k: [] for k in ("ids", "greedy", "chat", "code", "first", "hidden", "features")
    }
    pools: dict[str, list[list[int]]] = {}
    for name, share in SHARES.items():
        texts = data.openings(name, int(share * count) + 64, rng)
        pools[name] = [i for i in tok(texts)["input_ids"] if len(i) >= 48]
    for number in range(count // BATCH):
        prompt_len = rng.randint(24, 100)
        rows: list[list[int]] = []
        names: list[str] = []
        for name, share in SHARES.items():
            pool = [i for i in pools[name] if len(i) >= prompt_len]
            rows += [i[:prompt_len] for i in rng.sample(pool, int(share * BATCH))]
            names += [name] * (len(rows) - len(names))
        prompts = torch.tensor(rows, device=device)
        sampled = torch.rand(len(rows), generator=torch.Generator().manual_seed(number))
        odds = torch.tensor([SAMPLED[name] for name in names])
        temperature = (sampled < odds).float().to(device)
        ids = continue_batch(target, prompts, LENGTH, temperature, seed=number)
        with torch.inference_mode(), torch.autocast(device, torch.bfloat16):
            hidden, features = target(ids, features=target.feature_layers)
        parts["hidden"].append(hidden.to("cpu", torch.bfloat16))
        parts["features"].append(features.to("cpu", torch.bfloat16))
        parts["ids"].append(ids.to("cpu", torch.int16))
        parts["greedy"].append((temperature == 0).cpu())
        parts["chat"].append(torch.tensor([name == "chat" for name in names]))
        parts["code"].append(torch.tensor([name in ("stdlib", "code") for name in names]))
        parts["first"].append(torch.full((len(rows),), prompt_len - 1))
        if number % 4 == 0:
            print("rollouts", number * BATCH, flush=True)
    return {k: torch.cat(v) for k, v in parts.items()}
