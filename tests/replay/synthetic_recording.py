# SPDX-License-Identifier: Apache-2.0
"""A made-up recording for tests of replay: never a source of published numbers.

The target takes a candidate with the drafter's own probability, independently per depth: the
paper's self-verification, in which the path sums are the true expectation.
"""

import numpy as np

from benchmarks.replay.recording import Recording

VOCAB, DEPTH, TOP_K = 500, 7, 6


def synthetic_recording(*, prompts: int = 6, length: int = 60) -> Recording:
    """`prompts` requests per domain; code is easier to draft than chat."""
    rng = np.random.default_rng(0)
    domains = ["code"] * prompts + ["chat"] * prompts
    outputs = rng.integers(0, VOCAB, (len(domains), length + DEPTH + 1))
    topk_tokens, topk_logprobs = [], []
    for domain, output in zip(domains, outputs, strict=True):
        sharp = {"code": 3.0, "chat": 0.8}[domain]
        for position in range(1, length):
            weights = rng.gamma(1.0 / sharp, size=(DEPTH, TOP_K + 4)) + 1e-6
            q = -np.sort(-weights / weights.sum(1, keepdims=True), axis=1)
            tokens = np.stack([rng.permutation(VOCAB)[:TOP_K] for _ in range(DEPTH)])
            for d in range(DEPTH):
                truth = int(output[position + d])
                tokens[d][tokens[d] == truth] = VOCAB + 1
                rank = int(np.searchsorted(np.cumsum(q[d]), rng.random()))
                if rank < TOP_K:
                    tokens[d, rank] = truth
            topk_tokens.append(tokens)
            topk_logprobs.append(np.log(q[:, :TOP_K]))
    steps = len(domains) * (length - 1)
    return Recording(
        [str(q) for q in range(len(domains))],
        domains,
        np.zeros(len(domains), dtype=np.float32),
        np.zeros(len(domains), dtype=np.int32),
        np.zeros(0, dtype=np.int32),
        np.arange(len(domains) + 1) * outputs.shape[1],
        outputs.ravel(),
        np.arange(steps) // (length - 1),
        np.arange(steps) % (length - 1) + 1,
        np.array(topk_tokens),
        np.array(topk_logprobs),
    )
