# SPDX-License-Identifier: Apache-2.0
"""The offline API as a user's script has it, with vLLM's own processes: spec in, JSON out.

python -m tests.e2e.offline SPEC.json RESULT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def costs(worker: Any) -> list[float]:
    """What a worker believes a cycle of two requests costs, by rows; a fixed budget asks nobody."""
    from vllm_bastion.step.runtime import runtime_of

    believed = runtime_of(worker.model_runner.vllm_config).costs
    return [] if believed is None else believed.latency.cycle_cost_ms(2, 100).tolist()


def main() -> None:
    """Generate for every prompt of the spec; its counters are vLLM's own."""
    from vllm import LLM, SamplingParams
    from vllm.v1.metrics.reader import Counter

    spec = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(**spec["engine"])
    outputs = llm.generate(
        spec["prompts"], [SamplingParams(**given) for given in spec["params"]], use_tqdm=False
    )
    metrics = llm.get_metrics()
    result = {
        "costs": llm.collective_rpc(costs) if "speculative_config" in spec["engine"] else [],
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "metrics": {m.name: m.value for m in metrics if isinstance(m, Counter)},
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
