# SPDX-License-Identifier: Apache-2.0
"""A worker's data for the page: settings and costs, and trees while the page is open."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_bastion.config import settings_of
from vllm_bastion.engine.runtime import Runtime, runtime_of
from vllm_bastion.policy.trees import Trees
from vllm_bastion.telemetry.seen_trees import SeenTree, SeenTrees


def show_to_page(vllm_config: VllmConfig) -> None:
    """Add the page's part to the worker's snapshots, once its recorder exists."""
    runtime = runtime_of(vllm_config)
    if runtime.recorder is None:
        return
    runtime.seen = SeenTrees()
    runtime.recorder.details["page"] = lambda: _details(vllm_config, runtime)


def _details(vllm_config: VllmConfig, runtime: Runtime) -> dict[str, Any]:
    spec = settings_of(vllm_config)
    assert runtime.seen is not None
    trees, controller = runtime.trees, runtime.controller
    most = len(trees.cost_ms_host) - 1
    rows = [n for n in (1, 2, 3, *(2**i for i in range(2, 24))) if n < most and n <= 512]
    rows.append(min(most, 512))
    return {
        "target": _served_name(vllm_config.model_config),
        "drafter": _name(spec.draft_model_config.model),
        "gamma": trees.gamma,
        "nodes": trees.num_nodes,
        "candidates": trees.top_k,
        "budget": spec.bastion_budget,
        "drafting": runtime.step.announces,
        "kappa": None if controller is None else controller.gains.kappa,
        # Of the batch that was installed last.
        "cost_rows": [] if controller is None else rows,
        "cost_ms": [] if controller is None else [controller.costs.tree_step_ms(n) for n in rows],
        "trees": runtime.seen.look(),
    }


def _served_name(model: Any) -> str:
    """The target's served name if it has one, else its model name."""
    served = model.served_model_name
    return served if served and served != model.model else _name(model.model)


def _name(model: str) -> str:
    """A model's name; of a folder only the last parts, because the page must not show paths."""
    path = Path(model)
    if not path.is_dir():
        return model
    path = path.resolve()
    generic = path.name in ("target", "drafter", "model", "draft")
    return f"{path.parent.name}/{path.name}" if generic else path.name


def keep_tree(
    seen: SeenTrees,
    trees: Trees,
    batch: InputBatch,
    node_ids: torch.Tensor,
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
) -> None:
    """Read one of a step's trees from the device. Call it only if `seen.wanted()`.

    Args:
        node_ids: [L] tokens of the step's roots and nodes.
        sampled: [R, L + 1] tokens that the step emits.
        num_sampled: [R] how many of them.
    """
    with gpu_sync_allowed():
        begins = batch.cu_num_logits[: batch.num_reqs + 1].tolist()
        nodes = [end - begin - 1 for begin, end in pairwise(begins)]
        row = seen.choose(batch.req_ids[: batch.num_reqs], nodes)
        emits = int(num_sampled[row]) if row is not None else 0
        if row is None or not emits:
            return
        copies = trees.copies
        slot, count = int(batch.idx_mapping_np[row]), nodes[row]
        root, *tokens = node_ids[begins[row] : begins[row + 1]].tolist()
        seen.add(
            SeenTree(
                request=batch.req_ids[row],
                root=root,
                tokens=tokens,
                parents=trees.parents[slot, :count].tolist(),
                scores=trees.log_rho[slot, :count].exp().tolist(),
                path=[node for node in trees.path[row].tolist() if node > 0],
                emitted=sampled[row, :emits].tolist(),
                sources=[] if copies is None else copies.sources[slot, :count].tolist(),
            )
        )
