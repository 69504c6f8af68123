# SPDX-License-Identifier: Apache-2.0
"""Imported by the fork server, so that every engine's process starts with vLLM imported.

vLLM collects garbage about ten times while it starts, each time over all imported modules. That
would be most of an eager engine's start, so imported objects are frozen.
"""

from __future__ import annotations

import gc
from importlib import import_module

from tests.helpers import inspect_models_here

gc.disable()
for _name in (
    "compressed_tensors",
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.cpp",
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.qwen3_dflash",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu.model_runner",
    "vllm.v1.worker.cpu_worker",
    # Imported, not installed: engines without this method keep vLLM's kernels.
    "vllm_bastion.cpu.replacements",
    "vllm_bastion.engine.profile",
):
    import_module(_name)
inspect_models_here()
gc.collect()
gc.freeze()
gc.enable()
