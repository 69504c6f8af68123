# SPDX-License-Identifier: Apache-2.0
"""The tiny pair with quantised weights, in the formats that checkpoints come in.

Linear layers of the decoder are quantised by rounding to the nearest value; embeddings and the
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
_SHIFTS = 4 * torch.arange(8)  # of eight values in a word

# A linear layer's weight [N, K] -> its tensors, by the suffix that the format gives them.
Quantiser = Callable[[Tensor], dict[str, Tensor]]


def _pack(values: Tensor) -> Tensor:
    """Integers of 4 bits [..., 8 n], lowest bits first -> int32 [..., n]."""
    words = (values.long().unflatten(-1, (-1, 8)) << _SHIFTS).sum(-1)
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


def multiply_w4a16() -> None:
    """Give vLLM's CPU build the product with 4-bit weights that it has with AVX-512 only."""
    from vllm import _custom_ops as ops

    def product(input: Tensor, q_weight: Tensor, scales: Tensor, **_: Any) -> Tensor:
        # Words of the values of eight outputs, [N / 16, K, 2].
        values = (q_weight.view(len(q_weight), -1, 2, 1) >> _SHIFTS) & 15
        weight = values.flatten(2).transpose(0, 1).flatten(1) - 8
        weight = weight * scales.float().repeat_interleave(_GROUP, 0)
        return (input.float() @ weight).to(input.dtype)

    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        ops.cpu_gemm_wna16 = product


def make_quantised(
    name: str, folder: Path, model: str = TARGET, layers: tuple[str, ...] = ("_proj",)
) -> str:
    """Write the tiny target, or a drafter, in one of `FORMATS` to a folder.

    layers: ends of the names of the quantised ones; the others are listed, as llm-compressor does.
    """
    quantise, settings = FORMATS[name]
    weights: dict[str, Tensor] = {}
    ignore = ["lm_head"]
    for key, weight in load_file(Path(model) / "model.safetensors").items():
        layer = key.removesuffix(".weight")
        if not layer.endswith(layers):
            weights[key] = weight
            ignore += [layer] if weight.ndim == 2 else []
            continue
        for suffix, tensor in quantise(weight.float()).items():
            weights[f"{layer}.{suffix}"] = tensor
    return write_quantised(weights, settings | {"ignore": ignore}, folder, model)
