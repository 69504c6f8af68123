# SPDX-License-Identifier: Apache-2.0
"""Additional fields of the attention metadata of the target's layers."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_bastion.policy.trees import Trees
from vllm_bastion.step import Step


@dataclass(kw_only=True)
class TreeMetadata:
    """Mixed into vLLM's metadata class of a backend that reads tree masks."""

    trees: Trees | None = None
    record: Step | None = None
    """Set by `BastionModelState.prepare_attn`; None for a batch that it did not prepare."""
