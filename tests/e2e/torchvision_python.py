# SPDX-License-Identifier: Apache-2.0
"""torchvision's Python without its compiled operators, for targets whose modules import it.

Its wheel on the package index is built for CUDA: on a CPU its library does not load, and without
two operators' schemas its modules do not either. Nothing that a text asks for needs either.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch


def install() -> None:
    """Make it importable in this process; before vLLM looks at the target."""
    from transformers.utils import import_utils
    from vllm.model_executor.models import registry

    for op in ("nms", "qnms"):
        torch.library.define(f"torchvision::{op}", "(Tensor d, Tensor s, float t) -> Tensor")
    # Apart from all other packages (.ci/setup): elsewhere transformers would find it and fail.
    sys.path.append(str(Path(torch.__file__).resolve().parents[1] / "torchvision_python"))
    import_utils.is_torchvision_available.cache_clear()
    # vLLM looks at a model in another process, which would not have it.
    registry._run_in_subprocess = lambda look: look()
