# SPDX-License-Identifier: Apache-2.0
"""The cases of a CPU: the ops of a step, attention and products, against vLLM's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from vllm import _custom_ops as vllm_ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from bastion_kernels.cpu.linear import pack_weight
from benchmarks.ops.attention import attention_case
from benchmarks.ops.sizes import ON_CPU, Model
from benchmarks.ops.step import step_cases
from benchmarks.ops.timing import Call, Case, Entry, Rival
from vllm_bastion.cpu.attention import cache_layout
from vllm_bastion.cpu.linear import has_linear

_ROWS = (1, 8, 17, 33, 65)


def product_case(model: Model, rows: int) -> Case:
    """bf16 rows times the widest matrix of every layer, with cold weights."""
    shape = (6 * model.hidden, model.hidden)
    weights = [torch.randn(shape).bfloat16() for _ in range(model.layers)]
    x = torch.randn(rows, model.hidden).bfloat16()

    def check(results: Sequence[Tensor]) -> None:
        for result, weight in zip(results, weights, strict=True):
            torch.testing.assert_close(result, x @ weight.T, rtol=2e-2, atol=1.0)

    packed = [pack_weight(weight) for weight in weights]

    def ours() -> list[Tensor]:
        return [torch.ops.vllm_bastion.linear(x, own, None) for own in packed]

    def build() -> tuple[Sequence[Call], Call]:
        handlers = [vllm_ops.create_onednn_mm(weight.t(), 32) for weight in weights]

        def theirs() -> list[Tensor]:
            return [vllm_ops.onednn_mm(own, x, None) for own in handlers]

        return [theirs], lambda: check(theirs())

    return Case(lambda: check(ours()), [ours], rivals=[Rival("oneDNN", build)])


def cpu_cases() -> list[Entry]:
    """The cases of this machine; one may have no product of ours."""
    current_platform.import_kernels()
    # the first matrix product asks the operating system for AMX, as in an engine
    torch.randn(64, 64).bfloat16() @ torch.randn(64, 64).bfloat16()
    found = []
    for model in ON_CPU:
        isa = _get_attn_isa(model.dtype, model.page, model.head_dim, "auto")
        layout = cache_layout(isa, model.page, model.head_dim, model.dtype)
        found += step_cases(model, "cpu", layout)
        for context in model.contexts:
            for nodes in (15, 63):
                name = f"{model.name} attention N={nodes} context={context}"
                case = partial(attention_case, layout=layout, isa=isa)
                make = partial(case, model, 1, nodes, context, "cpu")
                found.append(Entry("attention", name, make))
    if has_linear():
        wide = ON_CPU[-1]
        for rows in _ROWS:
            name = f"{wide.name} {wide.layers} products of {rows} rows"
            found.append(Entry("product", name, partial(product_case, wide, rows)))
    return [replace(entry, bar=None) for entry in found]
