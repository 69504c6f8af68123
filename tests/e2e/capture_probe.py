# SPDX-License-Identifier: Apache-2.0
"""Asks an engine what it captures, compiles and times: for `test_capture`."""

from __future__ import annotations

import copy
from typing import Any

from vllm.v1.worker.gpu.cudagraph_utils import prepare_inputs_to_capture

_BLOCKS: list[int] = []


def watch() -> None:
    """Record the block size of every launch of vLLM's input kernel for DFlash in this process."""
    from vllm.triton_utils import triton
    from vllm.v1.worker.gpu.spec_decode.dflash import speculator

    prepare = speculator.prepare_dflash_inputs

    def prepare_dflash_inputs(*args: Any, **kwargs: Any) -> None:
        batch = next(one for one in args if hasattr(one, "num_scheduled_tokens"))
        longest = int(batch.num_scheduled_tokens.max()) + 16
        _BLOCKS.append(min(256, triton.next_power_of_2(longest)))
        prepare(*args, **kwargs)

    speculator.prepare_dflash_inputs = prepare_dflash_inputs


def every(session: Any) -> list[dict[str, Any]]:
    """Some answers in the first step, and others, which use the buffers of requests, at the end."""
    if not session.engine.has_unfinished_requests():
        return [
            {
                "captured": captured(session),
                "graphs": graphs(session),
                "dummies": dummies(session),
            }
        ]
    if session.forwards > 1:
        return []
    blocks_of_the_start = _BLOCKS[:-1]
    return [
        {
            "input blocks": blocks_of_the_start,
            "idle rank": idle_rank(session),
            "warm-up": warm_up_lengths(session)[0],
        }
    ]


def captured(session: Any) -> list[dict[str, Any]]:
    """Batches as vLLM prepares them before a capture, FULL and PIECEWISE, and FULL of plain steps.

    Returns:
        For each: its kind, whether the metadata of every target layer has
        the engine's trees and reads their mask, and the other layers with metadata.
    """
    runner = session.runner
    state = runner.model_state
    out = []
    for kind, rows in (("trees", 8), ("piecewise", 8), ("plain", 2)):
        prepared = prepare_inputs_to_capture(
            2,
            rows,
            state,
            runner.input_buffers,
            runner.block_tables,
            runner.attn_groups,
            runner.kv_cache_config,
            full_cudagraph=kind != "piecewise",
            max_query_len=1 if kind == "plain" else None,
        )
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
        chosen: (requests, rows, longest request), then the same of the graph that it finds.
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
            longest = rows - reqs + 1
            found = manager.dispatch(reqs, rows, None, 0, longest)
            assert found.cg_mode == CUDAGraphMode.FULL
            chosen.append(((reqs, rows, longest), (found.num_tokens, found.max_query_len)))
    full = manager._capture_descs[CUDAGraphMode.FULL]
    return {"captured": [(one.num_tokens, one.max_query_len) for one in full], "chosen": chosen}


def dummies(session: Any) -> dict[str, Any]:
    """Whether the target's attention reads the mask in dummy batches: in ours, and in vLLM's."""
    from vllm_bastion.engine.profile import tree_step

    runner, state = session.runner, session.runner.model_state
    prepare, masked = state.prepare_attn, []

    def prepare_attn(*args: Any, **kwargs: Any) -> Any:
        metadata = prepare(*args, **kwargs)
        masked.append(state.runtime.step.masked)
        return metadata

    state.prepare_attn = prepare_attn
    tree_step(runner, 8)
    ours, masked[:] = list(masked), []
    runner._dummy_run(8)
    state.prepare_attn = prepare
    return {"tree step": ours, "vLLM's own": masked}


def lengths(step: Any) -> dict[str, int]:
    """Tokens of each request at the end of a step, by its SchedulerOutput; dummies start at 0."""
    known = step.scheduled_cached_reqs
    computed = dict(zip(known.req_ids, known.num_computed_tokens, strict=True))
    computed |= {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
    return {name: computed.get(name, 0) + rows for name, rows in step.num_scheduled_tokens.items()}


def warm_up_lengths(session: Any) -> list[dict[str, int]]:
    """The longest request and the most drafts of vLLM's warm-up steps, run once more."""
    from vllm.v1.worker.gpu import warmup

    runner, found, drafts = session.runner, [0], [0]
    execute = runner.execute_model

    def execute_model(step: Any, *args: Any, **kwargs: Any) -> Any:
        found.extend(lengths(step).values())
        drafts.extend(map(len, step.scheduled_spec_decode_tokens.values()))
        return execute(step, *args, **kwargs)

    # Three requests are decoding.
    seats = runner.scheduler_config.max_num_seqs
    runner.scheduler_config.max_num_seqs = 2
    warmup.warmup_kernels(runner, execute_model, runner.sample_tokens)
    runner.scheduler_config.max_num_seqs = seats
    return [{"longest": max(found), "drafts": max(drafts)}]


def idle_rank(session: Any) -> dict[str, Any]:
    """The batch with which an idle data-parallel rank joins the steps of the others."""
    runner, worker = session.runner, session.core.model_executor.driver_worker.worker
    prepare, propose, found = runner.model_state.prepare_attn, runner.speculator.propose, []

    def prepare_attn(batch: Any, *args: Any, **kwargs: Any) -> Any:
        found.append({"rows": batch.num_tokens, "requests": batch.num_reqs, "drafts": False})
        return prepare(batch, *args, **kwargs)

    def proposed(*args: Any, **kwargs: Any) -> Any:
        found[-1]["drafts"] = kwargs["dummy_run"]
        return propose(*args, **kwargs)

    runner.model_state.prepare_attn, runner.speculator.propose = prepare_attn, proposed
    worker.execute_dummy_batch()
    runner.model_state.prepare_attn, runner.speculator.propose = prepare, propose
    (batch,) = found
    return batch
