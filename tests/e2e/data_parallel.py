# SPDX-License-Identifier: Apache-2.0
"""One data-parallel rank of a mixture of experts: `python -m tests.e2e.data_parallel SPEC OUT`.

The environment names the rank, as in vLLM's offline API. vLLM's CPU build has every part of it but
two exchanges of rows between ranks, which are made here of its collectives for equal sizes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.e2e.costs import install


def exchange_rows() -> None:
    """Give the CPU communicator what a GPU's has for ranks with different numbers of rows."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def gather(self: Any, rows: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        padded = rows.new_zeros(max(sizes), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=self.device_group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def all_gatherv(self: Any, given: list[torch.Tensor], dim: int, sizes: list[int]) -> Any:
        return [gather(self, rows, sizes) for rows in given]

    def reduce_scatterv(self: Any, rows: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
        total = rows.clone()
        torch.distributed.all_reduce(total, group=self.device_group)
        return total.split(sizes)[self.rank_in_group]

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv


def decode(spec: dict[str, Any]) -> dict[str, Any]:
    """Decode the spec's prompts on this rank.

    Returns:
        The replies' tokens, and of every step of the target its rows here, those of all ranks, and
        whether it is a dummy batch.
    """
    from vllm import LLM, SamplingParams
    from vllm.forward_context import get_forward_context

    install(spec)
    llm = LLM(**spec["engine"], distributed_executor_backend="uni")
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    steps: list[dict[str, Any]] = []
    dummy, execute = [False], runner.execute_model

    def forward(*_: Any) -> None:
        ranks = get_forward_context().dp_metadata.num_tokens_across_dp_cpu.tolist()
        steps.append({"ranks": ranks, "dummy": dummy[0]})

    def execute_model(*args: Any, **kwargs: Any) -> Any:
        dummy[0] = kwargs.get("dummy_run", False)
        return execute(*args, **kwargs)

    runner.execute_model = execute_model
    runner.model.register_forward_pre_hook(forward)
    params = SamplingParams(max_tokens=spec["tokens"], temperature=0.0, ignore_eos=True)
    outputs = llm.generate(spec["prompts"], params, use_tqdm=False)
    return {"tokens": [list(o.outputs[0].token_ids) for o in outputs], "steps": steps}


def main(spec: dict[str, Any], out: Path) -> None:
    """Run the rank; the other one must not outlive its collectives."""
    exchange_rows()
    out.write_text(json.dumps(decode(spec)))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
