# SPDX-License-Identifier: Apache-2.0
"""Bytes at vLLM's default sizes, beside vLLM's own DFlash, and where they are said."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bastion_kernels.attention.workspace import TreeAttentionWorkspace
from helpers import ROOT
from memory_tables import (
    DEFAULTS,
    GIB,
    GPUS,
    beyond_profile,
    cache_table,
    cache_tokens,
    cached_token,
    defaults_table,
    largest,
    of_hybrid,
    sizes,
    weights,
)
from vllm_bastion.attention.gated_delta import allocate
from vllm_bastion.cli.buffers import buffers, logits, total
from vllm_bastion.cli.memory import attention_bytes
from vllm_bastion.drafters.room import MOST_AT_ONCE
from vllm_bastion.engine.limits import MOST_BITMASK_ROWS

PAIRS = list(DEFAULTS.values())


@pytest.mark.parametrize(("requests", "rows"), PAIRS)
def test_the_four_pairs_of_defaults(requests: int, rows: int) -> None:
    """Each buffer of Qwen3-8B's pair by a formula of its own."""
    one = sizes(requests, rows)
    ours = {part.name: part.ours for part in buffers(one)}
    vllms = {part.name: part.vllms for part in buffers(one)}
    hidden = rows * 5 * 4096 * 2
    assert 0 <= ours["hidden states of accepted rows"] - hidden < 0.01 * hidden
    # [S, N, ...]: tokens (twice, once vLLM's), parents, depths, scores; 8 words a node; candidates
    trees = requests * (255 * (8 + 8 + 4 + 4 + 4) + 256 * 8 * 4 + 15 * 16 * 8)
    assert trees < ours["trees"] < 1.08 * trees + 16 * rows
    assert ours["tree attention"] < 19 * 2**20  # two partial results of 64 x 128 a program
    bitmask = MOST_BITMASK_ROWS * 151_936 // 8
    assert bitmask <= ours["grammar bitmask"] < 1.01 * bitmask
    assert vllms["grammar bitmask"] >= requests * 16 * 151_936 // 8
    drafter = max(rows, requests * 16) * 4096 * 2
    assert drafter < ours["drafter's input"] < 1.05 * drafter
    assert rows * 4096 * 2 < vllms["drafter's input"] < 1.1 * rows * 4096 * 2 + requests * 1024
    assert total(buffers(one)).ours == sum(ours.values())


@pytest.mark.parametrize(("requests", "rows"), PAIRS)
def test_logits_are_bounded_whatever_the_defaults_are(requests: int, rows: int) -> None:
    draft, verified = logits(sizes(requests, rows))
    assert draft.ours == MOST_AT_ONCE * 15 * 151_936 * 2 < 0.28 * GIB
    assert verified.ours <= 1.5 * GIB
    # what they were: the draft of all requests, and N nodes of each that fits the step
    was = min(requests, rows // 257) * 256 * 151_936 * 2
    assert draft.vllms >= 2 * draft.ours and verified.vllms > verified.ours
    assert was > GIB or (requests, rows) == (256, 2048)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("offline", [False, True])
def test_a_start_takes_nothing_that_was_not_profiled(gpu: str, offline: bool) -> None:
    size_gb, processors, large = GPUS[gpu]
    requests, rows = PAIRS[(0 if large else 2) + offline]
    for one in (sizes(requests, rows, processors), of_hybrid(requests, rows)):
        assert beyond_profile(one).ours == 0 < beyond_profile(one).vllms
    ours, vllms = cache_tokens(gpu, offline)
    # Where vLLM's dflash has room for a context, there is room for nearly as many tokens.
    assert ours > 0.6 * vllms > 8000
    peak = total(buffers(one)).ours + largest(logits(one)).ours
    assert weights() + peak + ours * cached_token() < size_gb * 10**9


def test_the_hybrid_of_a_24_gb_gpu_starts_offline() -> None:
    """It ended out of memory: 31 trees of 255 nodes had logits in vLLM's warm-up."""
    one = of_hybrid(256, 8192)
    headroom = 0.08 * 24e9
    warm_up = 31 * 256 * one.vocab * 2 + GIB
    profiled = max(256 * 15, 256) * one.vocab * 2
    assert warm_up - profiled > headroom
    assert logits(one)[1].ours < profiled
    # and its rows for the commit were those of a step beyond all graphs
    recurrent = next(part.ours for part in buffers(one) if "recurrent" in part.name)
    assert recurrent == 512 * one.recurrent_row < 0.48 * (1081 * one.recurrent_row)


def test_the_rows_of_recurrent_layers_are_those_that_are_allocated() -> None:
    layer = SimpleNamespace(
        num_v_heads=32, num_k_heads=16, head_k_dim=128, head_v_dim=128, conv_dim=8192, tp_size=1
    )
    saved = allocate([layer] * 24, 3, torch.bfloat16, torch.device("cpu"))
    held = sum(tensor.nbytes for tensor in saved.tensors())
    assert held == 3 * of_hybrid(256, 8192).recurrent_row


def test_attention_keeps_two_results_for_each_program() -> None:
    held = attention_bytes(32, 8, 128, torch.bfloat16, 132, 8192, 1024)
    workspace = TreeAttentionWorkspace(
        32, 8, 128, torch.bfloat16, 8192, 1024, "cpu", processors=132
    )
    programs = 132 * workspace.tiles.occupancy
    assert workspace.programs == programs
    assert 0 <= held - programs * 2 * 64 * 128 * 4 < 400_000


def test_the_document_has_the_tables() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    for table in (defaults_table(), cache_table()):
        assert table in text, "run `python tests/memory_tables.py`"
