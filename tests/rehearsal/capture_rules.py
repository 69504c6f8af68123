# SPDX-License-Identifier: Apache-2.0
"""Whether the fake driver refuses during capture what CUDA refuses: `python -m tests.rehearsal`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class _Things:
    """What the bodies of captures use, made before the capture."""

    device: Any
    pinned: Any
    pageable: Any
    event: Any
    side: Any


def _fork(x: _Things) -> None:
    import torch

    x.side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(x.side):
        x.device.add_(1)


def _fork_and_join(x: _Things) -> None:
    import torch

    _fork(x)
    torch.cuda.current_stream().wait_stream(x.side)


def _wait_for_outside_event(x: _Things) -> None:
    import torch

    torch.cuda.current_stream().wait_event(x.event)


def _synchronise(x: _Things) -> None:
    import torch

    torch.cuda.synchronize()


# What is captured, and whether CUDA accepts it.
_RULES: dict[str, tuple[bool, Callable[[_Things], Any]]] = {
    "a kernel": (True, lambda x: None),
    "a copy to pinned memory": (True, lambda x: x.pinned.copy_(x.device, non_blocking=True)),
    "fork and join": (True, _fork_and_join),
    "item()": (False, lambda x: x.device[0].item()),
    "nonzero()": (False, lambda x: x.device.nonzero()),
    "a blocking copy": (False, lambda x: x.pageable.copy_(x.device)),
    "a copy from pageable memory": (False, lambda x: x.device.copy_(x.pageable, non_blocking=True)),
    "synchronize()": (False, _synchronise),
    "event.synchronize()": (False, lambda x: x.event.synchronize()),
    "event.query()": (False, lambda x: x.event.query()),
    "a wait for an event outside": (False, _wait_for_outside_event),
    "a fork without join": (False, _fork),
}


def _accepted(body: Callable[[_Things], Any]) -> bool:
    import torch

    graph, event = torch.cuda.CUDAGraph(), torch.cuda.Event()
    things = _Things(
        torch.zeros(8, device="cuda"),
        torch.empty(8, pin_memory=True),
        torch.empty(8),
        event,
        torch.cuda.Stream(),
    )
    event.record()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph):
            things.device.add_(1)
            body(things)
    except RuntimeError:
        return False
    return True


def check() -> list[str]:
    """One line for every rule that the fake driver breaks."""
    # Failed captures leave their traces in a process.
    command = [sys.executable, "-c", f"from {__name__} import _main; _main()"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("rule: ")]
    if done.returncode or len(lines) != len(_RULES) + 1:
        return [f"capture rules: {(done.stdout + done.stderr)[-2000:]}"]
    print(f"capture rules: {len(lines)} checked")
    return [line for line in lines if line.endswith("WRONG")]


def _main() -> None:
    for name, (allowed, body) in _RULES.items():
        right = _accepted(body) == allowed
        print(f"rule: {name}: {'right' if right else 'WRONG'}")
    print(f"rule: a grid too large: {'right' if _grid_is_refused() else 'WRONG'}")


def _grid_is_refused() -> bool:
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def store(pointer, value):
        tl.store(pointer, value)

    try:
        store[(1, 70000)](torch.zeros(8, device="cuda", dtype=torch.int32), 3)
    except RuntimeError:
        return True
    return False
