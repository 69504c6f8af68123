# SPDX-License-Identifier: Apache-2.0
"""Beam search on drafts recorded from the pair itself, because no engine runs it.

The drafts of some prompts are recorded (`benchmarks.replay.record`) and replayed with the step
costs that this machine measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.paper.methods import BEAM
from benchmarks.paper.store import Row
from benchmarks.replay.costs import CostSource
from benchmarks.replay.policies import Adaptive, Beam, Chain, Fixed, Plain
from benchmarks.replay.recording import Recording
from benchmarks.replay.simulation import Corpus, Truth, simulate
from benchmarks.replay.studies import by_domain

BEAMS = 4


def replay(recording: Recording, source: CostSource, temperatures: Sequence[float]) -> list[Row]:
    rows: list[Row] = []
    nodes = BEAMS * recording.depth
    for temperature in temperatures:
        corpus, truth = Corpus(recording, nodes, temperature), Truth(source.table)
        plain = simulate(corpus, Plain(), truth)
        policies = {
            "chain (replayed)": Chain(corpus),
            BEAM.format(depth=recording.depth): Beam(corpus, BEAMS),
            f"best-first {nodes} (replayed)": Fixed(corpus, nodes),
            "adaptive (replayed)": Adaptive(corpus, source.latency("table"), plain=False),
        }
        for name, policy in policies.items():
            result = simulate(corpus, policy, truth)
            for domain, numbers in by_domain(corpus, result, plain).items():
                own = {"kind": "replayed", "policy": name, "temperature": temperature}
                own |= {"set": domain, "prompts": len(corpus.of_domain(domain))}
                rows.append(own | numbers)
    return rows
