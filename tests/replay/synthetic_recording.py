# SPDX-License-Identifier: Apache-2.0
"""A made-up recording for tests of replay: never a source of published numbers.

The target takes a candidate with the drafter's own probability, independently per depth: the
paper's self-verification, in which the path sums are the true expectation.
"""

import numpy as np

from benchmarks.replay.recording import Drafted, Emitted, Recording, recording_of

VOCAB, DEPTH, TOP_K = 500, 7, 6


def synthetic_recording(*, prompts: int = 6, length: int = 60) -> Recording:
    """`prompts` requests per domain; code is easier to draft than chat."""
    rng = np.random.default_rng(0)
    requests, drafts = [], []
    for domain, sharp in (("code", 3.0), ("chat", 0.8)):
        for index in range(prompts):
            name = f"{domain}-{index}"
            total = length + DEPTH + 1
            output = rng.integers(0, VOCAB, total)
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
                drafts.append(Drafted(name, position, tokens, np.log(q[:, :TOP_K])))
            requests.append(Emitted(name, domain, 0.0, np.arange(20 + index), output))
    return recording_of({"synthetic": True}, requests, drafts)
