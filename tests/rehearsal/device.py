# SPDX-License-Identifier: Apache-2.0
"""The fake driver as Python sees it: what it counted, what it refused, and two callbacks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

_WaitCallback = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)
_NodeCallback = ctypes.CFUNCTYPE(None, ctypes.c_int64)


class FakeDriver:
    """`libcuda.so.1` of this process. Raises AttributeError: a real driver is loaded."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        for name in ("fakecuda_counters", "fakecuda_faults"):
            getattr(self._library, name).restype = ctypes.c_char_p
        self._library.fakecuda_add_node.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        # ctypes callbacks must outlive their registration.
        self._callbacks: list[Any] = []

    def counters(self) -> dict[str, int]:
        """Calls by kind since the last `begin_step`."""
        lines = self._library.fakecuda_counters().decode().splitlines()
        return {name: int(value) for name, value in (line.split("\t") for line in lines)}

    def begin_step(self) -> None:
        """Set all counters to 0. From the first step on, the device is one step behind the host."""
        self._library.fakecuda_begin_step()

    def faults(self) -> list[str]:
        return list(self._library.fakecuda_faults().decode().splitlines())

    def on_wait(self, callback: Callable[[str], None]) -> None:
        """Call `callback(kind)` whenever the host waits for the device."""
        wrapped = _WaitCallback(lambda kind, detail: callback(kind.decode()))
        self._callbacks.append(wrapped)
        self._library.fakecuda_set_sync_hook(wrapped)

    def on_node(self, callback: Callable[[int], None]) -> None:
        """Call `callback(id)` when a replay reaches a node of `add_node`."""
        wrapped = _NodeCallback(callback)
        self._callbacks.append(wrapped)
        self._library.fakecuda_set_node_hook(wrapped)

    def add_node(self, stream: int, node: int) -> None:
        """Append a callback node to the graph that `stream` is captured into."""
        self._library.fakecuda_add_node(stream, node)
