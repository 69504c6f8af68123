# SPDX-License-Identifier: Apache-2.0
"""The command: checks of the driver, the cases, the table and the exit status."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.rehearsal import capture_rules, compiles, environment, report, serving
from tests.rehearsal.cases import CASES, Case

_AT_ONCE = 2
_TIMEOUT_S = 1800


def main(arguments: list[str]) -> int:
    """Rehearse what the arguments say; 0 if nothing went wrong."""
    parser = argparse.ArgumentParser(prog="make rehearse ARGS=...", description=__doc__)
    parser.add_argument(
        "cases", nargs="*", help=f"of: {', '.join(case.name for case in CASES)}; none: all; quarter"
    )
    parser.add_argument("--interpret", action="store_true", help="our kernels, not references")
    parser.add_argument("--verbose", action="store_true", help="logs, counters, waits by place")
    if arguments[:1] in (["quarter"], ["host"], ["compiles"]):
        return _command(arguments)
    given = parser.parse_args(arguments)
    cases = _chosen(parser, given.cases)
    environment.enter(arguments)
    environment.break_graphs()
    folder = Path(os.environ["VLLM_BASTION_CACHE"])
    try:
        failures = []
        if not given.cases:
            failures += capture_rules.check()
        results = _run_all(cases, given, folder)
        if not given.cases:
            failures += serving.check(folder / "serve.log")
            failures += compiles.check()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    table, problems = report.table(cases, results), report.problems(cases, results)
    print("", table, "", sep="\n")
    for failure in (*failures, *problems):
        print(f"FAILED {failure}")
    if not given.cases and not failures and not problems:
        report.write(table)
    return int(bool(failures or problems))


def _command(arguments: list[str]) -> int:
    environment.enter(arguments)
    from tests.rehearsal import compiles, host, quarter

    commands = {"compiles": compiles.report, "host": host.measure, "quarter": quarter.rehearse}
    try:
        return commands[arguments[0]](arguments[1:])
    finally:
        shutil.rmtree(os.environ["VLLM_BASTION_CACHE"], ignore_errors=True)


def _chosen(parser: argparse.ArgumentParser, names: list[str]) -> list[Case]:
    by_name = {case.name: case for case in CASES}
    for name in names:
        if name not in by_name:
            parser.error(f"no case {name!r}: choose from {', '.join(map(repr, by_name))}")
    wanted = set(names) or set(by_name)
    # The tokens of a case are compared with other cases'.
    for _ in by_name:
        wanted |= {by_name[name].plain for name in wanted}
        wanted |= {"plain" for name in wanted if by_name[name].unlike is not None}
    return [case for case in CASES if case.name in wanted]


def _run_all(
    cases: list[Case], given: argparse.Namespace, folder: Path
) -> dict[str, dict[str, Any]]:
    """Every case in a process of its own, forked after the imports; two at a time."""
    from tests.rehearsal.device import FakeDriver
    from tests.rehearsal.emulation import Emulation

    begin = time.perf_counter()
    driver = FakeDriver()
    emulation = Emulation(driver, given.interpret)
    emulation.install()
    print(f"imported vLLM in {time.perf_counter() - begin:.0f} s", flush=True)
    context = multiprocessing.get_context("fork")
    waiting, running = list(cases), dict[Connection, tuple[Case, Any, float]]()
    results: dict[str, dict[str, Any]] = {}
    while waiting or running:
        while waiting and len(running) < _AT_ONCE:
            case = waiting.pop(0)
            ours, theirs = context.Pipe(duplex=False)
            log = None if given.verbose else folder / f"{case.name}.log"
            process = context.Process(
                target=_child, args=(case, driver, emulation, theirs, log), daemon=True
            )
            process.start()
            theirs.close()
            running[ours] = (case, process, time.perf_counter())
        for connection in wait(list(running), timeout=_TIMEOUT_S):
            assert isinstance(connection, Connection)
            case, process, since = running.pop(connection)
            try:
                result = connection.recv()
            except EOFError:
                result = {"failure": "its process ended"}
            process.join()
            results[case.name] = result
            print(f"{case.name}: {time.perf_counter() - since:.0f} s", flush=True)
            if "failure" in result:
                print(result["failure"], _tail(folder / f"{case.name}.log"), sep="\n")
            elif given.verbose:
                print(json.dumps(result, indent=1))
    return results


def _child(
    case: Case, driver: Any, emulation: Any, connection: Connection, log: Path | None
) -> None:
    import torch

    from tests.rehearsal import engine

    # Some import has initialised CUDA, but the fake driver's state survives a fork.
    torch.cuda._is_in_bad_fork = lambda: False
    if log is not None:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    try:
        connection.send(engine.run(case, driver, emulation))
    except BaseException:
        connection.send({"failure": traceback.format_exc()})
    sys.stdout.flush()
    sys.stderr.flush()
    # vLLM's own way out takes seconds.
    os._exit(0)


def _tail(log: Path) -> str:
    if not log.exists():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-25:])
