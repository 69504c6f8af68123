# SPDX-License-Identifier: Apache-2.0
"""Entry points: what vLLM calls in every one of its processes.

Both functions may run many times, import nothing that touches a device, and never raise: vLLM does
not guard the call, so an exception here would stop every vLLM command, ours or not.
"""

from __future__ import annotations

from functools import partial

from vllm_bastion import compat, envs


def register() -> None:
    """`vllm.general_plugins`: add method "bastion" to vLLM; other methods are unchanged.

    On an unsupported vLLM only the place that reads the user's configuration is touched, so that a
    request for method "bastion" gets the reason instead of a schema error.
    """
    try:
        problem = compat.version_problem(compat.vllm_version())
        if problem is not None:
            compat.disable(problem)
        from vllm_bastion import hooks

        hooks.apply_all(only_entry=problem is not None)
        _announce_variables()
    except Exception as error:
        compat.disable(f"its hooks could not be installed ({type(error).__name__}: {error})")


def cpu_platform() -> None:
    """`vllm.platform_plugins`: let vLLM's command line find the version of a CPU build.

    vLLM calls this before its command line asks. It provides no platform: it always returns None.
    """
    try:
        from vllm_bastion.cpu import build as cpu_build

        cpu_build.answer_to_vllm()
    except Exception as error:
        compat.disable(f"its CPU build could not be found ({type(error).__name__}: {error})")


def _announce_variables() -> None:
    """Add our variables to vLLM's list: it warns about names that it does not know."""
    from vllm import envs as vllm_envs

    for name in envs.VARIABLES:
        vllm_envs.environment_variables.setdefault(name, partial(envs.value_of, name))
