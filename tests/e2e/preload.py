# SPDX-License-Identifier: Apache-2.0
"""What every engine's process has before it is forked: vLLM, imported, and nothing to collect.

vLLM collects garbage some ten times while it starts, each time over all that was imported: most of
an eager engine's start, were it not frozen.
"""

from __future__ import annotations

import gc
from importlib import import_module

from tests.helpers import look_at_models_here

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
):
    import_module(_name)
look_at_models_here()
gc.collect()
gc.freeze()
gc.enable()
