# SPDX-License-Identifier: Apache-2.0
"""Question `drafter`: trees of 16 nodes by a drafter as it is stored, and by one in fp8."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.gpu.quarter.job import Job
from benchmarks.gpu.quarter.shapes import folder_of, pair_engine, speculative, texts
from benchmarks.harness.driver import Driver, Response

_LOADS = {1: 6, 16: 48}
_NODES = 16


def ask(job: Job) -> None:
    """Both engines live side by side and decode in turns."""
    loads, tokens = ({1: 1, 2: 2}, 6) if job.small else (_LOADS, 64)
    names = {f"{n} at a time": n for n in loads}
    if not job.lacks(*names):
        return
    folder = folder_of("4B", job.small)
    from vllm import LLM

    engine = pair_engine(folder, job.small, most=max(loads), alive=2, length=384)
    keys = {"bastion_budget": _NODES}
    drivers = {}
    for kind, quantization in (("as stored", None), ("fp8", "fp8")):
        config = speculative(
            "bastion", folder / "drafter", _NODES, **keys, quantization=quantization
        )
        drivers[kind] = Driver(LLM(**replace(engine, speculative=config).arguments()))
    for name in job.lacks(*names):
        n = names[name]
        turns = [*drivers.items()] if job.small else [*drivers.items(), *reversed(drivers.items())]
        for driver in [] if job.small else drivers.values():  # touch memory and load code
            driver.drive(texts(loads[n], tokens), n)
        found: dict[str, list[list[Response]]] = {kind: [] for kind in drivers}
        for kind, driver in turns:
            found[kind].append(driver.drive(texts(loads[n], tokens), n))
        job.note(name, **{kind: _sums(blocks) for kind, blocks in found.items()})


def _sums(blocks: list[list[Response]]) -> dict[str, float]:
    """Means over blocks of responses that were decoded together."""
    all_ = [one for block in blocks for one in block]
    steps, forwards = sum(one.steps for one in all_), sum(one.forwards for one in all_)
    spans = [max(x.end_s for x in block) - min(x.begin_s for x in block) for block in blocks]
    return {
        "tau": sum(one.emitted for one in all_) / max(1, forwards),
        "step_ms": sum(one.step_ms for one in all_) / max(1, steps),
        "draft_ms": sum(one.draft_ms for one in all_) / max(1, steps),
        "ms_a_token": 1e3 * sum(spans) / sum(len(one.token_ids) for one in all_),
    }
