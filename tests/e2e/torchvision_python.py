# SPDX-License-Identifier: Apache-2.0
"""torchvision's Python without its compiled operators, for targets whose modules import it.

Its wheel on the package index is built for CUDA: on a CPU its library does not load, and its
modules need the schemas of two operators from it. Requests use neither, with images or without.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.helpers import inspect_models_here


def install() -> None:
    """Make it importable in this process. Call before vLLM inspects the target.

    Processors of images and videos also need it before transformers is imported.
    """
    for op in ("nms", "qnms"):
        torch.library.define(f"torchvision::{op}", "(Tensor d, Tensor s, float t) -> Tensor")
    # It has a folder of its own (.ci/setup), or transformers would find it and fail.
    sys.path.append(str(Path(torch.__file__).resolve().parents[1] / "torchvision_python"))
    from transformers.utils import import_utils

    import_utils.is_torchvision_available.cache_clear()
    # vLLM inspects models in another process, which would not find it.
    inspect_models_here()
