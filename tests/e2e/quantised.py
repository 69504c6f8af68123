# SPDX-License-Identifier: Apache-2.0
"""The tiny target with quantised weights, in the formats that checkpoints come in.

Every linear layer of the decoder is quantised by rounding to the nearest value; embeddings and the
output head stay as they are, as in published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.e2e.engines import TARGET
from tests.e2e.targets import write_quantised

_GROUP = 32  # inputs that share a scale, in 4-bit formats

# A linear layer's weight [N, K] -> its tensors, by the suffix that the format gives them.
Quantiser = Callable[[Tensor], dict[str, Tensor]]


def _pack(values: Tensor) -> Tensor:
    """Integers of 4 bits [..., 8 n], lowest bits first -> int32 [..., n]."""
    shifts = 4 * torch.arange(8, dtype=torch.int64)
    words = (values.long().unflatten(-1, (-1, 8)) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _symmetric(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Values of 0 to 15 around 8, [N, K], and a scale for each group, [N, K / group]."""
    groups = weight.unflatten(1, (-1, _GROUP))
    scale = groups.abs().amax(-1, keepdim=True) / 7
    values = (groups / scale).round().clamp(-8, 7) + 8
    return values.flatten(1), scale[..., 0]


def _int8(weight: Tensor) -> dict[str, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def _float8(weight: Tensor) -> dict[str, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def _w4a16(weight: Tensor) -> dict[str, Tensor]:
    values, scale = _symmetric(weight)
    return {
        "weight_packed": _pack(values),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> Any:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def _numbers(kind: str, bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    given = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True}
    return {**given, "dynamic": strategy == "token", **more}


# name -> what quantises a layer, and the checkpoint's quantization_config
_ROWS = {"int": _numbers("int", 8, "token"), "float": _numbers("float", 8, "token")}
FORMATS: dict[str, tuple[Quantiser, dict[str, Any]]] = {
    "w8a8": (_int8, _compressed("int-quantized", _numbers("int", 8, "channel"), _ROWS["int"])),
    "fp8-per-channel": (
        _float8,
        _compressed("float-quantized", _numbers("float", 8, "channel"), _ROWS["float"]),
    ),
    "w4a16": (
        _w4a16,
        _compressed("pack-quantized", _numbers("int", 4, "group", group_size=_GROUP), None),
    ),
}


def make_quantised(name: str, folder: Path) -> str:
    """Write the tiny target in one of `FORMATS` to a folder."""
    quantise, settings = FORMATS[name]
    weights: dict[str, Tensor] = {}
    for key, weight in load_file(Path(TARGET) / "model.safetensors").items():
        if not key.endswith("_proj.weight"):
            weights[key] = weight
            continue
        for suffix, tensor in quantise(weight.float()).items():
            weights[f"{key.removesuffix('weight')}{suffix}"] = tensor
    return write_quantised(weights, settings, folder)
