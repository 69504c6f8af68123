# SPDX-License-Identifier: Apache-2.0
"""The one place that asks whether vLLM runs on a CPU."""

from __future__ import annotations

from functools import cache

from vllm_bastion.host import Host

_GPU = Host()


def current_host() -> Host:
    """The platform interface for vLLM's platform, see `vllm_bastion.host`."""
    from vllm.platforms import current_platform

    return _cpu_host() if current_platform.is_cpu() else _GPU


@cache
def _cpu_host() -> Host:
    # Imported here: it needs Numba, which a GPU's installation may lack.
    from vllm_bastion.cpu.host import CpuHost

    return CpuHost()
