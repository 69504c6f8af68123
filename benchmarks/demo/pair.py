# SPDX-License-Identifier: Apache-2.0
"""The pair that the demo decodes with: a real chat model, if it can be had."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks import TINY
from vllm_bastion.envs import cache_dir

REAL = "smollm2"
# The size of its checkpoints, and the demo's peak memory, GB.
_DISK_GB, _MEMORY_GB = 0.6, 4.0
_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class CannotWrite(Exception):
    """A pair could not be written; the text says why."""


@dataclass(frozen=True)
class Pair:
    """A pair in float32, and how it is decoded.

    Args:
        folder: contains `target` and `drafter`.
        name: for the headline.
        note: how to read its seconds.
        chain: the fastest length of vLLM's own chain.
        chat: whether the target answers questions.
        environment: variables of its engines, unless the user has set them.
    """

    folder: Path
    name: str
    note: str
    chain: int
    chat: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    def write(self) -> None:
        """Write the pair to the cache folder, unless it is there or in the repository.

        Raises CannotWrite: there is no room for it, or it cannot be fetched.
        """
        if not self.chat:
            return
        from benchmarks.smollm2.install import pair as real_pair
        from benchmarks.smollm2.target import CannotFetch

        free = _free_memory() / 1e9
        if free < _MEMORY_GB:
            raise CannotWrite(f"{free:.1f} GB of memory are free, {_MEMORY_GB:.1f} GB are needed")
        if not self.folder.exists():
            parent = next(path for path in self.folder.parents if path.exists())
            free = shutil.disk_usage(parent).free / 1e9
            if free < _DISK_GB:
                text = f"{parent} has {free:.1f} GB free, {_DISK_GB:.1f} GB are needed"
                raise CannotWrite(text)
        try:
            real_pair()
        except CannotFetch as error:
            raise CannotWrite(str(error)) from None


def pair_of(name: str) -> Pair:
    """The real pair, or `tiny`."""
    if name == REAL:
        return Pair(
            cache_dir() / "pairs" / REAL,
            "SmolLM2-135M-Instruct",
            "The drafter was trained by this project (benchmarks/smollm2). In float32 all engines"
            " emit the same tokens; in bf16 this target's best two are often equally good.",
            chain=3,
            chat=True,
        )
    return Pair(
        TINY,
        "the tiny pair",
        "With models this small a step is mostly Python, and trees gain little.",
        chain=15,
        # Waking a second thread costs more than it saves.
        environment={"OMP_NUM_THREADS": "1"},
    )


def _free_memory() -> int:
    """Free bytes of the machine, at most the container's limit."""
    free = psutil.virtual_memory().available
    for path in _MEMORY_LIMITS:
        try:
            free = min(free, int(Path(path).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return free
