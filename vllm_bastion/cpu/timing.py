# SPDX-License-Identifier: Apache-2.0
"""vLLM's step timings on a CPU, where its platform replaces CUDA events by stubs."""

from __future__ import annotations

from vllm.v1.worker.gpu.async_utils import StepTimingCollector, StepTimingEvents

from vllm_bastion.policy.cost.timing import HostMark


class HostStepTimingCollector(StepTimingCollector):
    """vLLM's collector with marks on the host's clock."""

    def forward_start(self) -> None:
        if self._collecting:
            self._step = StepTimingEvents(HostMark(), HostMark(), HostMark(), HostMark())
            self._step.forward_start.record()
