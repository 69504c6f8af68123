# SPDX-License-Identifier: Apache-2.0
"""The variants of vLLM's input kernel for DFlash that an engine launches: for `test_capture`."""

from __future__ import annotations

from typing import Any

_SEEN: list[int] = []


def watch() -> None:
    """Record the block size of every launch in this process."""
    from vllm.triton_utils import triton
    from vllm.v1.worker.gpu.spec_decode.dflash import speculator

    prepare = speculator.prepare_dflash_inputs

    def prepare_dflash_inputs(*args: Any, **kwargs: Any) -> None:
        batch = next(one for one in args if hasattr(one, "num_scheduled_tokens"))
        longest = int(batch.num_scheduled_tokens.max()) + 16
        _SEEN.append(min(256, triton.next_power_of_2(longest)))
        prepare(*args, **kwargs)

    speculator.prepare_dflash_inputs = prepare_dflash_inputs


def seen(session: Any) -> list[list[int]]:
    """The block sizes of the engine's start, without that of the first step."""
    return [_SEEN[:-1]]
