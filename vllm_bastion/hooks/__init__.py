# SPDX-License-Identifier: Apache-2.0
"""What this package changes in vLLM.

`table` lists every function that is wrapped; the other modules hold the wrappers, one module for
each area. `scheduler`, `worker`, `cpu_worker` and `model_runner` are no wrappers: they subclass
vLLM's.
"""

from __future__ import annotations

from vllm_bastion import compat
from vllm_bastion.hooks.hook import wrap
from vllm_bastion.hooks.table import ENTRY, PLUGIN_HOOKS


def apply_all(only_entry: bool = False) -> None:
    """Install the hooks of every process; a second call changes nothing.

    A hook that does not fit is remembered with `compat.disable`: method "bastion" is then refused
    with that reason, and everything else goes on.

    Args:
        only_entry: on an unsupported vLLM, wrap only the entry, without checks.
    """
    if only_entry:
        wrap(ENTRY.target, ENTRY.function())
        return
    for hook in PLUGIN_HOOKS:
        try:
            hook.install()
        except Exception as error:
            compat.disable(f"{error}; install a vLLM in the range {compat.SUPPORTED_VLLM}")
