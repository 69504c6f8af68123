# SPDX-License-Identifier: Apache-2.0
"""Beam search on drafts recorded from the pair itself, because no engine runs it.

The drafts of some prompts are recorded (`benchmarks.replay.record`) and replayed with the step
costs that this machine measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness.decoder import run_engine
from benchmarks.harness.engine import Request, UserEngine, bastion
from benchmarks.paper.methods import BEAM
from benchmarks.paper.store import Row
from benchmarks.replay.costs import CostSource, from_profile
from benchmarks.replay.policies import Adaptive, Beam, Chain, Fixed, Plain
from benchmarks.replay.record import collect
from benchmarks.replay.recording import Recording
from benchmarks.replay.simulation import Corpus, Truth, simulate

BEAMS = 4
_ROWS = 1025


def measure_costs(engine: UserEngine, drafter: str, nodes: int, path: Path) -> CostSource:
    """This machine's step costs for the pair; measured where the file is missing."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        speculative = bastion(Path(drafter), nodes, "adaptive", calibration=f"write:{path}")
        run_engine(replace(engine, speculative=speculative), [])
    return from_profile("this machine", path, _ROWS)


def record(
    engine: UserEngine, drafter: str, requests: dict[str, tuple[Request, str]], progress: Any
) -> Recording:
    """The drafts at every position of `requests`: name -> request and its set."""
    probing = replace(
        engine,
        speculative=bastion(Path(drafter), 1, 1, lookup=False),
        eager=True,
        probe="benchmarks.probes:drafts",
    )
    done = run_engine(probing, [request for request, _ in requests.values()], progress)
    return collect(done, requests, {})


def replay(
    recording: Recording, source: CostSource, temperatures: Sequence[float], nodes: int
) -> list[Row]:
    """Rows of kind `replayed`."""
    rows: list[Row] = []
    for temperature in temperatures:
        corpus = Corpus(recording, max(nodes, BEAMS * recording.depth), temperature)
        truth = Truth(source.table)
        plain = simulate(corpus, Plain(), truth)
        beam = BEAM.format(depth=recording.depth)
        best_first = Fixed(corpus, BEAMS * recording.depth)
        policies = {
            "chain (replayed)": Chain(corpus),
            beam: Beam(corpus, BEAMS),
            f"best-first {BEAMS * recording.depth} (replayed)": best_first,
            "adaptive (replayed)": Adaptive(corpus, source.latency("table"), plain=False),
        }
        for name, policy in policies.items():
            result = simulate(corpus, policy, truth)
            for domain in corpus.domains:
                own = [request for request in corpus.requests if request.domain == domain]
                part = result.of(own)
                rows.append(
                    {
                        "kind": "replayed",
                        "policy": name,
                        "temperature": temperature,
                        "set": domain,
                        "prompts": len(own),
                        "speedup": plain.of(own).ms / part.ms,
                        "tau": part.tau,
                        "nodes": part.mean_nodes,
                    }
                )
    return rows
