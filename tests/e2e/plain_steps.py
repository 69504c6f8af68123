# SPDX-License-Identifier: Apache-2.0
"""What an engine does in steps without drafts, and near the end of replies."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention

from vllm_bastion.scheduler.gate import Arm, Gate

# Steps with drafts; then plain ones, more than the rows of a request may wait, or n-gram drafts.
DRAFTED, PLAIN, NGRAM = 5, 70, 12


def in_turns() -> None:
    """Let the gate choose trees and plain steps in turns, whatever they are worth."""
    _choose([Arm.TREE] * DRAFTED + [Arm.PLAIN] * PLAIN)


def ngram_in_turns() -> None:
    """The same, with n-gram drafts in place of plain steps."""
    _choose([Arm.TREE] * DRAFTED + [Arm.NGRAM] * NGRAM)


def every_arm() -> None:
    """Let each arm follow each other one within a few steps."""
    order = (Arm.TREE, Arm.TREE, Arm.NGRAM, Arm.NGRAM, Arm.PLAIN, Arm.TREE, Arm.PLAIN, Arm.NGRAM)
    _choose(order)


def _choose(plan: Sequence[Arm]) -> None:
    arms = itertools.cycle(plan)
    Gate.choose = lambda self, num_reqs: next(arms)  # type: ignore[method-assign]
    # A CPU must not take n-gram drafts in place of a tree.
    Gate.ngram_tokens = lambda self, num_reqs: None  # type: ignore[method-assign]


def at_once() -> None:
    """Store the drafter's context in every step."""
    from vllm_bastion.engine.context import DraftContext

    DraftContext._may_wait = lambda *_: False  # type: ignore[method-assign]


def context(session: Any) -> list[dict[str, Any]]:
    """Sums over every block of the drafter's cache that holds only computed tokens.

    A step in which rows wait is left out: those of the next one are compared.
    """
    runner = session.runner
    waiting = runner.speculator.context.num_rows
    layers = get_layers_from_vllm_config(runner.vllm_config, Attention)
    size = session.scheduler.cache_config.block_size
    out = []
    for request in session.scheduler.running:
        ids = session.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        full = request.num_computed_tokens // size
        sums = []
        for group, spec in enumerate(runner.kv_cache_config.kv_cache_groups):
            for name in spec.layer_names:
                if name in layers and getattr(layers[name], "is_draft_layer", False):
                    blocks = layers[name].kv_cache[torch.tensor(ids[group][:full])].double()
                    weights = torch.cos(torch.arange(blocks[0].numel(), dtype=torch.float64))
                    sums.append((blocks.reshape(full, -1) @ weights).tolist())
        out.append(
            {
                "request": request.request_id.rsplit("-", 1)[0],
                "computed": request.num_computed_tokens,
                "emitted": request.num_output_tokens,
                "prompt": request.num_prompt_tokens,
                "waiting": waiting,
                "sums": sums,
            }
        )
    return out
