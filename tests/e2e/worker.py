# SPDX-License-Identifier: Apache-2.0
"""What runs in an engine's process: a spec in, JSON results out."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests import interpreter
from tests.e2e import torchvision_python


def work(spec: dict[str, Any], log: str) -> dict[str, Any]:
    """Run one engine.

    Args:
        spec: that of `Session`, with a list `batches` that are decoded one after the other, and
            optionally `oracle`, arguments of `tests.e2e.oracle.install`, and `images`, whether
            requests have images.
        log: the file that this process prints to.

    Returns:
        `{"info": ..., "batches": [...]}`; with `spec["offline"]` the result of `offline.generate`;
        with `spec["command"]` what `vllm` prints for these words, as `{"output": "..."}`. And
        `cpu_s`, the CPU seconds of this process and its children.
    """
    before = _cpu_s()
    if spec.get("images"):
        torchvision_python.install()
    if spec.get("interpreted"):
        interpreter.enable()
        interpreter.sample_without_triton()
    answer = _run(spec) if "command" not in spec else _command(spec["command"], Path(log))
    return {**answer, "cpu_s": _cpu_s() - before}


def _cpu_s() -> float:
    return sum(os.times()[:4])


def _command(words: list[str], log: Path) -> dict[str, Any]:
    from vllm.entrypoints.cli.main import main

    sys.argv = ["vllm", *words]
    main()
    sys.stdout.flush()
    return {"output": log.read_text(errors="replace")}


def _run(spec: dict[str, Any]) -> dict[str, Any]:
    engine = spec["engine"]
    if spec.get("offline"):
        from tests.e2e.offline import generate

        return generate(spec)
    from tests.e2e.session import Session

    if not (engine["enforce_eager"] or "compilation_config" in engine):
        # PyTorch would look for the compiler's instruction sets anew in each model's cache folder.
        from torch._inductor.cpu_vec_isa import valid_vec_isa_list

        valid_vec_isa_list()
    session = Session(spec)
    if "oracle" in spec:
        from tests.e2e import oracle

        oracle.install(session.runner, **spec["oracle"])
    batches = [session.run(batch) for batch in spec["batches"]]
    return {"info": session.info(), "batches": batches}
