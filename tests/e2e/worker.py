# SPDX-License-Identifier: Apache-2.0
"""One engine in its own process: a spec in, JSON results in a file, the engine's log in another."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def work(spec: dict[str, Any], result: str, log: str) -> None:
    """Entry of the process; an error ends it with 1 and the traceback at the end of `log`.

    spec: that of `tests.e2e.session.Session`, with a list `batches`, decoded one after the other.
    `result` gets `{"info": ..., "batches": [...]}`; where `spec["may_fail"]` and the engine could
    not be built, `{"error": "Type: text"}`; with `spec["offline"]` what `offline.generate` returns;
    with `spec["command"]` what vLLM's command line of these words prints, as `{"output": "..."}`.
    And the CPU seconds of the process and of those it has started.
    """
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    before = _cpu_s()
    answer = _run(spec) if "command" not in spec else _command(spec["command"], Path(log))
    Path(result).write_text(json.dumps({**answer, "cpu_s": _cpu_s() - before}))


def _cpu_s() -> float:
    return sum(os.times()[:4])


def _try_instructions() -> None:
    """Have PyTorch find out what the compiler can do, in the folder of the whole session.

    vLLM gives each model's compilation a folder of its own, where PyTorch would begin anew.
    """
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    valid_vec_isa_list()


def _command(words: list[str], log: Path) -> dict[str, Any]:
    from vllm.entrypoints.cli.main import main

    sys.argv = ["vllm", *words]
    main()
    sys.stdout.flush()
    return {"output": log.read_text(errors="replace")}


def _run(spec: dict[str, Any]) -> dict[str, Any]:
    if spec.get("offline"):
        from tests.e2e.offline import generate

        return generate(spec)
    from tests.e2e.session import Session

    engine = spec["engine"]
    if not (engine["enforce_eager"] or "compilation_config" in engine):
        _try_instructions()
    try:
        session = Session(spec)
    except Exception as error:
        if spec.get("may_fail"):
            return {"error": f"{type(error).__name__}: {error}"}
        raise
    batches = [session.run(batch) for batch in spec["batches"]]
    return {"info": session.info(), "batches": batches}
