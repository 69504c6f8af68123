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
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # for `collective_rpc(costs)`
}


def _controller(worker: Any) -> Any:
    from vllm_bastion.engine.runtime import runtime_of

    return runtime_of(worker.model_runner.vllm_config).controller


def costs(worker: Any) -> list[float]:
    """A worker's cost of a cycle of two requests, by rows; empty with a fixed budget."""
    control = _controller(worker)
    return [] if control is None else control.latency.estimate(2, 100).tree_ms.tolist()


def correction(worker: Any) -> dict[str, float]:
    """What a worker has learned of batches of two requests from real steps."""
    control = _controller(worker)
    return {} if control is None else control.latency.correction(2)


def slow_down(worker: Any) -> None:
    """From now on the first worker's clock shows three times as long; others have no timer."""
    from vllm_bastion.policy.cost.timing import HostMark

    elapsed = HostMark.elapsed_time
    HostMark.elapsed_time = lambda self, end: 3.0 * elapsed(self, end)  # type: ignore[method-assign]


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
    llm = LLM(**spec["engine"])

    def decode() -> list[list[int]]:
        prompts = [request["prompt"] for request in batch["requests"]]
        params = [SamplingParams(**request["params"]) for request in batch["requests"]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    tokens = decode()
    result = {
        "corrections": [],
        "costs": llm.collective_rpc(costs) if "speculative_config" in spec["engine"] else [],
        "token_ids": tokens,
        "metrics": {m.name: m.value for m in llm.get_metrics() if isinstance(m, Counter)},
    }
    if spec.get("slows_down"):
        before = llm.collective_rpc(correction)
        llm.collective_rpc(slow_down)
        assert decode() == tokens
        result["corrections"] = [before, llm.collective_rpc(correction)]
    llm.llm_engine.engine_core.shutdown()
    return result
