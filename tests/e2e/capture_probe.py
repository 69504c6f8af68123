# SPDX-License-Identifier: Apache-2.0
"""Asks an engine what it captures: for `test_capture`."""

from __future__ import annotations

import copy
from typing import Any

from vllm.v1.worker.gpu.cudagraph_utils import prepare_inputs_to_capture


def at_the_end(session: Any) -> list[dict[str, Any]]:
    """Probe: what is captured, when all requests have ended."""
    if session.engine.has_unfinished_requests():
        return []
    return [{"captured": captured(session), "graphs": graphs(session)}]


def prepare(session: Any, kind: str) -> Any:
    """Inputs of a graph of two requests, and metadata."""
    runner = session.runner
    return prepare_inputs_to_capture(
        2, 2 if kind == "plain" else 8, runner.model_state, runner.input_buffers,
        runner.block_tables, runner.attn_groups, runner.kv_cache_config,
        full_cudagraph=kind != "piecewise", max_query_len=1 if kind == "plain" else None,
    )  # fmt: skip


def captured(session: Any) -> list[dict[str, Any]]:
    """Batches as vLLM prepares them before a capture, FULL and PIECEWISE, and FULL of plain steps.

    Returns:
        For each: its kind, whether the metadata of every target layer has
        the engine's trees and reads their mask, and the other layers with metadata.
    """
    state, out = session.runner.model_state, []
    for kind in ("trees", "piecewise", "plain"):
        prepared = prepare(session, kind)
        with_trees = {
            name
            for name, metadata in prepared.attn_metadata.items()
            if getattr(metadata, "trees", None) is state.trees
        }
        targets = set(state._target_layers)
        out.append(
            {
                "kind": kind,
                "bound": targets <= with_trees,
                "masked": state.runtime.step.masked,
                "others": sorted(set(prepared.attn_metadata) - targets),
            }
        )
    return out


def graphs(session: Any) -> dict[str, Any]:
    """What vLLM's dispatch finds for every decoding batch, with graphs of up to 16 rows.

    Returns:
        captured: (rows, most rows of a request) of all FULL graphs, in the order of their capture;
        chosen: (requests, rows, longest request), then rows and longest request of the graph that
        it finds; 0 for a step with a prompt.
    """
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu import model_runner

    runner = session.runner
    config = copy.copy(runner.vllm_config)
    config.compilation_config = copy.copy(config.compilation_config)
    config.compilation_config.cudagraph_capture_sizes = [1, 2, 4, 8, 16]
    manager = model_runner.ModelCudaGraphManager(
        config, runner.device, CUDAGraphMode.NONE, runner.decode_query_len, varlen_decode=True
    )
    # With the mode given at once it would ask CUDA for a pool.
    manager.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    manager._init_candidates()
    manager._graphs_captured = True
    chosen = []
    for reqs in range(1, manager.max_num_reqs + 1):
        for rows in range(reqs, 17):
            # A step's longest request as scheduled; its nodes may have been trimmed.
            for longest in (rows - reqs + 1, manager.decode_query_len, None):
                found = manager.dispatch(reqs, rows, None, 0, max_query_len=longest)
                assert found.cg_mode == CUDAGraphMode.FULL
                chosen.append(((reqs, rows, longest or 0), (found.num_tokens, found.max_query_len)))
    full = manager._capture_descs[CUDAGraphMode.FULL]
    return {"captured": [(one.num_tokens, one.max_query_len) for one in full], "chosen": chosen}
