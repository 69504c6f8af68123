# SPDX-License-Identifier: Apache-2.0
"""vLLM's substitutes for pinned memory and events, which must come before its GPU modules."""

import importlib

from vllm.platforms import current_platform

if current_platform.is_cpu():  # as vLLM's CPU worker does first
    importlib.import_module("vllm.v1.worker.cpu.shm")
