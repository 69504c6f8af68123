# SPDX-License-Identifier: Apache-2.0
"""The pair that the demo decodes with: a real chat model, if it can be had."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from safetensors import SafetensorError

from benchmarks import TINY
from benchmarks.progress import Progress
from vllm_bastion.envs import cache_dir

REAL, SHAPE = "smollm2", "0.6B"
# The sizes of their checkpoints, and the demo's peak memory, GB.
_DISK_GB = {REAL: 0.6, SHAPE: 2.0}
_MEMORY_GB = {REAL: 4.0, SHAPE: 8.0}
_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class CannotWrite(Exception):
    """A pair could not be written; the text says where and why."""


@dataclass(frozen=True)
class Pair:
    """A pair, and how it is decoded.

    Args:
        folder: contains `target` and `drafter`.
        name: for the headline.
        note: how to read its seconds.
        dtype: of its engines.
        chain: the fastest length of vLLM's own chain.
        chat: whether the target answers questions.
        environment: variables of its engines, unless the user has set them.
    """

    folder: Path
    name: str
    note: str
    dtype: str = "bfloat16"
    chain: int = 7
    chat: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    def write(self) -> None:
        """Write the pair to the cache folder, unless it is there or comes from elsewhere.

        Raises CannotWrite: writing failed; the partial pair is removed.
        """
        if self.chat:
            from benchmarks.smollm2.install import pair as real_pair
            from benchmarks.smollm2.target import CannotFetch

            try:
                real_pair()
            except CannotFetch as error:
                raise CannotWrite(str(error)) from None
        elif self.folder == cache_dir() / "pairs" / SHAPE:
            # Imported here, because it imports PyTorch.
            from benchmarks.widen import pair_of as wide_pair_of

            progress, where = Progress("models"), shown(self.folder)
            if not self.folder.exists():
                progress(f"writing the tiny pair in Qwen3-{SHAPE}'s shape to {where}")
            try:
                wide_pair_of(SHAPE)
            except (OSError, SafetensorError) as error:
                shutil.rmtree(self.folder.with_name(f"{SHAPE}.part"), ignore_errors=True)
                raise CannotWrite(f"{where} cannot be written ({error})") from None


TINY_PAIR = Pair(
    TINY,
    "the tiny pair",
    "With models this small a step is mostly Python, and trees gain little.",
    "float32",
    15,
    # Waking a second thread costs more than it saves.
    environment={"OMP_NUM_THREADS": "1"},
)


def pair_of(name: str) -> Pair:
    """The pair `tiny`, the real one, the one in Qwen3-0.6B's shape, or the one in a folder.

    Without room for such a pair, prints a sentence and returns the tiny pair.
    """
    if name == "tiny":
        return TINY_PAIR
    if name not in (REAL, SHAPE):
        return Pair(Path(name), f"the pair in {name}", "")
    folder = cache_dir() / "pairs" / name
    reason = _no_room(name, folder)
    if reason is not None:
        return tiny_pair(reason)
    if name == REAL:
        return Pair(
            folder,
            "SmolLM2-135M-Instruct",
            "The drafter was trained by this project (benchmarks/smollm2). In float32 all engines"
            " emit the same tokens; in bf16 this target's best two are often equally good.",
            "float32",
            chain=3,
            chat=True,
        )
    return Pair(
        folder,
        f"the tiny pair in Qwen3-{SHAPE}'s shape",
        f"The models are toys in the shape of a real one: a step costs what Qwen3-{SHAPE}'s would,"
        " and the drafter is right about as often as real ones.",
    )


def tiny_pair(reason: str) -> Pair:
    """The tiny pair, after telling the user why."""
    print(f"Using the tiny pair, which does not have the cost of a real model: {reason}.")
    return TINY_PAIR


def shown(folder: Path) -> str:
    """A folder's name, shortened if it is in the user's home."""
    home = Path.home()
    return f"~/{folder.relative_to(home)}" if folder.is_relative_to(home) else str(folder)


def _no_room(name: str, folder: Path) -> str | None:
    """Why a pair cannot be used here, or None if it can."""
    free = _free_memory() / 1e9
    if free < _MEMORY_GB[name]:
        return f"{free:.1f} GB of memory are free, {_MEMORY_GB[name]:.1f} GB are needed"
    if not folder.exists():
        parent = next(path for path in folder.parents if path.exists())
        free = shutil.disk_usage(parent).free / 1e9
        if free < _DISK_GB[name]:
            return f"{shown(parent)} has {free:.1f} GB free, {_DISK_GB[name]:.1f} GB are needed"
    return None


def _free_memory() -> int:
    """Free bytes of the machine, at most the container's limit."""
    free = psutil.virtual_memory().available
    for path in _MEMORY_LIMITS:
        try:
            free = min(free, int(Path(path).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return free
