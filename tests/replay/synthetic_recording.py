# SPDX-License-Identifier: Apache-2.0
"""A made-up recording for tests of replay: never a source of published numbers.

The drafter's distribution at depth d is a random one, and the target takes rank k with exactly the
probability that the drafter gives it (times `honesty`), independently per depth: the paper's
self-verification model, in which A-hat is the true expectation.
"""

import numpy as np

from benchmarks.replay.recording import Drafted, Emitted, Recording, recording_of

VOCAB = 500


def synthetic_recording(
    *,
    prompts: int = 6,
    length: int = 60,
    depth: int = 7,
    top_k: int = 6,
    seed: int = 0,
    sharpness: dict[str, float] | None = None,
    honesty: float = 1.0,
) -> Recording:
    """`prompts` requests per domain; a higher sharpness makes a domain easier to draft."""
    rng = np.random.default_rng(seed)
    requests, drafts = [], []
    for domain, sharp in (sharpness or {"code": 3.0, "chat": 0.8}).items():
        for index in range(prompts):
            name = f"{domain}-{index}"
            total = length + depth + 1
            output = rng.integers(0, VOCAB, total)
            for position in range(1, length):
                weights = rng.gamma(1.0 / sharp, size=(depth, top_k + 4)) + 1e-6
                q = -np.sort(-weights / weights.sum(1, keepdims=True), axis=1)
                tokens = np.stack([rng.permutation(VOCAB)[:top_k] for _ in range(depth)])
                for d in range(depth):
                    truth = int(output[position + d])
                    tokens[d][tokens[d] == truth] = VOCAB + 1
                    rank = int(np.searchsorted(np.cumsum(q[d]), rng.random()))
                    hit = rank < top_k and rng.random() < honesty
                    if hit:
                        tokens[d, rank] = truth
                drafts.append(Drafted(name, position, tokens, np.log(q[:, :top_k])))
            requests.append(Emitted(name, domain, 0.0, np.arange(20 + index), output))
    return recording_of({"synthetic": True, "seed": seed}, requests, drafts)
