# SPDX-License-Identifier: Apache-2.0
"""Weights that change while the engine runs: reloaded, or sent by a trainer.

vLLM loads new values into a model's own tensors, so code that reads those needs no update. What was
derived from weights at the start is derived again here: a host's packed copies, and the tensors in
which a drafter has joined the keys' and values' weights of its layers. All are written in place,
because CUDA graphs and compiled code hold their addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.compilation.backends import set_model_tag

from vllm_bastion.platform import current_host


@contextmanager
def loading_drafter(drafter: Any, method: str) -> Iterator[None]:
    """Load weights into a drafter as at the start, with the drafter's own products.

    vLLM joins the layers' weights whenever some have been loaded. That is too early: others may be
    missing, and on a CPU the loaded ones are packed. `weights_changed` does it at the end.
    """
    drafter.model._build_fused_kv_buffers = lambda: None
    try:
        with set_model_tag(f"{method}_head"):
            yield
    finally:
        del drafter.model._build_fused_kv_buffers


@torch.no_grad()
def weights_changed(target: Any, drafter: Any) -> None:
    """Renew what was derived from the weights of the two models."""
    _join(drafter.model)
    current_host().weights_changed(target, drafter)


def _join(model: Any) -> None:
    """Write the layers' weights to where vLLM's DFlash model has joined them."""
    weight, bias = getattr(model, "_fused_kv_weight", None), getattr(model, "_fused_kv_bias", None)
    for index, layer in enumerate(model.layers):
        attn = layer.self_attn
        model._k_norm_weights[index].copy_(attn.k_norm.weight)
        for joined, name in ((weight, "weight"), (bias, "bias")):
            part = getattr(attn.qkv_proj, name, None)  # packed 4-bit weights have another name
            if joined is None or part is None or joined.ndim != part.ndim or part.numel() == 0:
                continue  # quantised: nothing is joined; or packed: `take_rows` has copied it
            rows = part[attn.q_size :]
            joined[index * len(rows) : (index + 1) * len(rows)].copy_(rows)
