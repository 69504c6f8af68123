# SPDX-License-Identifier: Apache-2.0
"""The parts of `make rehearse` without a CUDA build: arithmetic, and what counts as a failure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.rehearsal import arithmetic, report
from tests.rehearsal.cases import CASES
from tests.rehearsal.emulation import declared_ops

PLAIN, LAGGED = (next(c for c in CASES if c.name == name) for name in ("plain", "lagged"))


def _result(**changes: Any) -> dict[str, Any]:
    steady = {"waits:ours": 0.0, "waits:vllm": 1.0, "sync:event": 1.0, "launch": 20.5}
    fine = {"tokens": [[1, 2]], "cached": [], "steady": steady, "steady_steps": 3, "waits": {}}
    return {**fine, "faults": [], "missing": [], "errors": [], **changes}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"tokens": [[1, 3]]}, "other tokens than plain"),
        ({"faults": ["launch of k with grid 0,1,1"]}, "fault: launch of k"),
        ({"missing": ["_C::unknown"]}, "no numbers for _C::unknown"),
        ({"steady": {"waits:ours": 2.0}}, "2.0 waits of ours"),
        ({"steady": {"waits:ours": 0.0, "alloc:device": 0.5}}, "blocks or allocates"),
        ({"steady": {"waits:ours": 0.0, "sync:memcpy": 0.5}}, "blocks or allocates"),
        ({"cached": [0]}, "[0] cached tokens, not []"),
        ({"failure": "Traceback"}, "did not run to its end"),
    ],
)
def test_a_rehearsal_fails_on_each_kind_of_problem(
    changes: dict[str, Any], expected: str | None
) -> None:
    results = {"plain": _result(), "lagged": _result(**changes)}
    found = report.problems([PLAIN, LAGGED], results)
    if expected is None:
        assert not found
        return
    (problem,) = found
    assert problem.startswith("lagged: ") and expected in problem


def test_table_has_a_row_per_case() -> None:
    results = {"plain": _result(), "lagged": _result(tokens=[[1, 3]])}
    *_, plain, lagged = report.table([PLAIN, LAGGED], results).splitlines()
    assert plain.startswith("| plain | yes | 0 | 20.5 | 0 (0) | 0 / 0 / 0 | 1 + 0 |")
    assert lagged.startswith("| adaptive, lagged | NO | 0 |")


def test_every_case_is_compared_with_plain_decoding_of_its_target() -> None:
    by_name = {case.name: case for case in CASES}
    assert len(by_name) == len(CASES)
    for case in CASES:
        # An engine that gets new weights is compared with one that starts with them.
        fresh = by_name[case.plain]
        assert not case.like_fresh or fresh.speculative == case.speculative
        plain = by_name[fresh.plain] if case.like_fresh else fresh
        assert plain.speculative is None and plain.pair == case.pair
        assert plain.adapters == fresh.adapters == case.adapters
        assert plain.long == fresh.long == case.long
        assert plain.arguments == fresh.arguments == case.arguments


def test_emulation_finds_the_ops_that_declare_a_reference() -> None:
    names = set(declared_ops())
    assert {"accept_path", "choose_budget", "gather_rows", "topk_logprobs"} <= names


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_stand_in_sees_what_flash_attention_sees(window: int | None, sinks: bool) -> None:
    torch.manual_seed(0)
    rows, length, heads, key_heads, dim, page = 5, 11, 4, 2, 8, 4
    q = torch.randn(rows, heads, dim)
    k, v = torch.randn(2, 6, page, key_heads, dim)
    table, s_aux = torch.tensor([[4, 1, 3]]), torch.randn(heads) if sinks else None
    out = torch.empty_like(q)
    arithmetic.varlen_attention(
        q=q,
        k=k,
        v=v,
        out=out,
        cu_seqlens_q=torch.tensor([0, rows]),
        seqused_k=torch.tensor([length]),
        block_table=table,
        softmax_scale=0.5,
        causal=True,
        window_size=None if window is None else [window - 1, 0],
        s_aux=s_aux,
    )
    keys, values = (x[table[0]].flatten(0, 1)[:length] for x in (k, v))
    for row in range(rows):
        position = length - rows + row
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(heads):
            seen = slice(first, position + 1), head // (heads // key_heads)
            scores = 0.5 * keys[seen] @ q[row, head]
            if s_aux is not None:
                scores = torch.cat([scores, s_aux[head : head + 1]])
            weights = F.softmax(scores, 0)[: position + 1 - first]
            torch.testing.assert_close(out[row, head], weights @ values[seen])


def test_products_of_float8_are_those_of_the_numbers_they_were_made_from() -> None:
    """Rows and columns with scales of their own, and a row of zeros."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(5, 64, generator=g) * torch.tensor([1e-3, 1.0, 40.0, 0.0, 7.0])[:, None]
    weight, float8 = torch.randn(64, 8, generator=g), torch.float8_e4m3fn
    quantised, scale = torch.empty(5, 64, dtype=float8), torch.empty(5, 1)
    arithmetic.dynamic_per_token_scaled_fp8_quant(quantised, x, scale)
    columns, scales = torch.empty(64, 8, dtype=float8), weight.abs().amax(0) / 448
    arithmetic.static_scaled_fp8_quant(columns, weight, scales)
    out, bias = torch.empty(5, 8, dtype=torch.bfloat16), torch.arange(8.0)
    arithmetic.cutlass_scaled_mm(out, quantised, columns, scale, scales, bias)
    want = x @ weight
    norms = x.norm(dim=1, keepdim=True) * weight.norm(dim=0)
    # 3 bits of mantissa: at most 1/16 off each, and errors of 64 products average out
    assert ((out.float() - bias - want).abs() <= 0.05 * norms + 0.02 * (1 + bias)).all()
    assert torch.equal(out[3].float(), bias)
