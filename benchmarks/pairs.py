# SPDX-License-Identifier: Apache-2.0
"""The pairs of target and drafter that benchmarks name: tiny, hybrid, smollm2, and wide ones."""

from __future__ import annotations

from pathlib import Path

from bastion_kernels.cpu.cache import root as cache_dir
from benchmarks import TINY
from benchmarks.prompts import DataError

REAL = "smollm2"  # the pair of a real chat model


def pair_folder(name: str) -> Path:
    """A pair of `benchmarks/tiny`, of `benchmarks.smollm2`, or of a shape of `benchmarks.widen`.

    Raises DataError: there is no such pair.
    """
    if name == "tiny":
        return TINY
    if name == "hybrid":
        return TINY / name
    if name == REAL:
        folder = cache_dir() / "pairs" / REAL
        if not (folder / "target").is_dir() or not (folder / "drafter").is_dir():
            raise DataError(f"the pair {REAL} is not there yet: python -m benchmarks.{REAL}")
        return folder
    from benchmarks.widen import SHAPES, pair_of

    if name not in SHAPES:
        raise DataError(f"no pair {name}: choose from tiny, hybrid, {REAL}, {', '.join(SHAPES)}")
    return pair_of(name)


def pair_dtype(name: str) -> str:
    """The type that a pair runs in: the tiny one in float32, so that two runs emit the same.

    vLLM's linear attention on a CPU takes bfloat16 only, so the hybrid pair cannot.
    """
    return "float32" if name == "tiny" else "bfloat16"
