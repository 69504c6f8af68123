# SPDX-License-Identifier: Apache-2.0
"""Asks an engine for what a CUDA graph would capture, for `tests.e2e.test_capture`."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu.cudagraph_utils import prepare_inputs_to_capture


def captured(session: Any) -> list[dict[str, Any]]:
    """Batches as vLLM prepares them before a capture, FULL and PIECEWISE.

    Returns:
        Of each: whether it is a FULL graph's, whether every target layer has the engine's trees in
        its metadata and reads their mask, and whether any draft layer has.
    """
    runner = session.runner
    state = runner.model_state
    out = []
    for full in (True, False):
        prepared = prepare_inputs_to_capture(
            2,
            8,
            state,
            runner.input_buffers,
            runner.block_tables,
            runner.attn_groups,
            runner.kv_cache_config,
            full_cudagraph=full,
        )
        with_trees = {
            name
            for name, metadata in prepared.attn_metadata.items()
            if getattr(metadata, "trees", None) is state.trees
        }
        targets = set(state._target_layers)
        out.append(
            {
                "full": full,
                "bound": targets <= with_trees,
                "masked": state.trees.masking,
                "drafter_bound": bool(with_trees - targets),
            }
        )
    return out
