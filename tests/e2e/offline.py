# SPDX-License-Identifier: Apache-2.0
"""The offline API as in a user's script: the engine core and its workers are processes."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

from tests.e2e.costs import install

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # for `collective_rpc(decisions)`
}


def record_sizes() -> None:
    """Let every worker forked from here remember what its steps verify."""
    from vllm_bastion.engine.budget import TreeBudgetManager

    original = TreeBudgetManager.decide

    def decide(self: Any, batch: Any) -> int:
        rows = original(self, batch)
        vars(self).setdefault("sizes", []).append(self._num_verify.tolist())
        return rows

    TreeBudgetManager.decide = decide  # type: ignore[method-assign]


def decisions(worker: Any) -> dict[str, Any]:
    """A worker's cost tables, None with a fixed budget, and the nodes of each request and step."""
    manager = worker.model_runner.adaptive_verification
    costs = manager.cost_tables and [table.tolist() for table in manager.cost_tables]
    return {"costs": costs, "sizes": vars(manager).get("sizes", [])}


def fork() -> None:
    """Fork vLLM's processes; on a CPU it spawns them, and then each imports vLLM again."""
    original = multiprocessing.get_context

    def get_context(method: str | None = None) -> Any:
        return original("fork" if method == "spawn" else method)

    multiprocessing.get_context = get_context  # type: ignore[assignment]


def generate(spec: dict[str, Any]) -> dict[str, Any]:
    """Generate for every request of the spec's only batch; the counters are vLLM's own.

    spec: that of `tests.e2e.worker.work`; with `spawn` vLLM spawns its processes as usual, with
        `in_process` the engine core is none.
    """
    os.environ.update(ENVIRONMENT)
    if spec.get("in_process"):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if not spec.get("spawn"):
        fork()
    from vllm import LLM, SamplingParams
    from vllm.v1.metrics.reader import Counter

    (batch,) = spec["batches"]
    install(spec)
    with_bastion = spec["engine"].get("speculative_config", {}).get("method") == "bastion"
    if with_bastion:
        record_sizes()
    llm = LLM(**spec["engine"])
    prompts = [request["prompt"] for request in batch["requests"]]
    params = [SamplingParams(**request["params"]) for request in batch["requests"]]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    result = {
        "workers": llm.collective_rpc(decisions) if with_bastion else [],
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "metrics": {m.name: m.value for m in llm.get_metrics() if isinstance(m, Counter)},
    }
    llm.llm_engine.engine_core.shutdown()
    return result
