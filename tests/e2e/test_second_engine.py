# SPDX-License-Identifier: Apache-2.0
"""A process that has imported Numba, as an engine does, can start another engine."""

from __future__ import annotations

import json

import pytest
import torch

from helpers import run_python
from tests.e2e.engines import DRAFTER, ROOT, TARGET, Runner
from vllm_bastion import plugin
from vllm_bastion.cpu.build import is_cpu_build

_CODE = """
import numba
from vllm import LLM, SamplingParams

usual = dict(model=TARGET, dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=3,
             kv_cache_memory_bytes=1 << 26)
tree = dict(method="bastion", model=DRAFTER, num_speculative_tokens=16, bastion_calibration="off")
for speculative in (tree, tree, None):
    llm = LLM(**usual, speculative_config=speculative)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    (output,) = llm.generate(["def fibonacci(n):"], params, use_tqdm=False)
    print("TOKENS" + str(list(output.outputs[0].token_ids)), flush=True)
    llm.llm_engine.engine_core.shutdown()
"""


def test_vllms_scan_of_all_modules_gets_past_llvmlite() -> None:
    pytest.importorskip("numba")
    from llvmlite.binding import ffi
    from vllm.triton_utils import dispatcher

    plugin.register()
    ffi.lib._fntab.pop("__dict__", None)
    with pytest.raises(AttributeError, match="_lib_fn_wrapper"):
        dispatcher._rebind_kernels.__wrapped__([])  # vLLM's own
    ffi.lib._fntab.pop("__dict__", None)
    dispatcher._rebind_kernels([])


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available() or not is_cpu_build(), reason="for CPU hosts")
def test_engines_start_one_after_another_in_one_process(runner: Runner) -> None:
    result = run_python(
        f"TARGET, DRAFTER = {json.dumps(TARGET)}, {json.dumps(DRAFTER)}\n{_CODE}",
        cwd=ROOT,
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        TRITON_INTERPRET=None,
        VLLM_USE_V2_MODEL_RUNNER=None,
        **runner.caches,
    )
    tokens = [line for line in result.stdout.splitlines() if line.startswith("TOKENS")]
    assert len(tokens) == 3, result.stderr[-4000:]
    assert len(set(tokens)) == 1
