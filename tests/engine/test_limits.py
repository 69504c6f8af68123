# SPDX-License-Identifier: Apache-2.0
"""The runner: how many rows of a step have logits, also in warm-up and profiling; copied blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.gpu import warmup
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

from vllm_bastion.config import BastionSpeculativeConfig
from vllm_bastion.engine.limits import max_verified_rows
from vllm_bastion.engine.runtime import Runtime
from vllm_bastion.hooks import model_runner, runner

QWEN3, QWEN3_5, GEMMA = 151_936, 248_320, 262_144
# vLLM's defaults of `max_num_seqs` and `max_num_batched_tokens`
DEFAULTS = ((1024, 8192), (1024, 16384), (256, 2048), (256, 8192))


def config_of(tokens: int, reqs: int, nodes: int, vocab: int, graph: int = 512) -> Any:
    spec = object.__new__(BastionSpeculativeConfig)
    spec.num_speculative_tokens = nodes
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=tokens, max_num_seqs=reqs),
        speculative_config=spec,
        model_config=SimpleNamespace(
            get_vocab_size=lambda: vocab, get_hidden_size=lambda: 64, is_hybrid=False,
            dtype=torch.bfloat16, get_max_encoder_len=None,
        ),
        compilation_config=SimpleNamespace(
            max_cudagraph_capture_size=graph,
            cudagraph_mode=CUDAGraphMode.FULL if graph else CUDAGraphMode.NONE,
        ),
        is_mm_encoder_only=False,
        num_lookahead_tokens=16,
    )  # fmt: skip


def test_rows_with_logits_are_those_that_can_be_verified() -> None:
    def rows(*sizes: int, **more: Any) -> int:
        return max_verified_rows(config_of(*sizes, **more))

    assert rows(8192, 4, 63, 152_000) == 256
    assert rows(128, 4, 63, 152_000) == 128
    assert rows(8192, 256, 63, 152_000) == 512
    assert rows(8192, 256, 63, 152_000, graph=0) == 2**28 // 152_000
    assert rows(8192, 2048, 63, 152_000) == 2048  # roots alone


class Runner:
    """As much of a model runner as vLLM's warm-up reads; notes the steps that it is given."""

    def __init__(self, config: Any, blocks: int = 10**6) -> None:
        self.vllm_config, self.model_config = config, config.model_config
        self.scheduler_config = config.scheduler_config
        self.num_speculative_steps = config.speculative_config.num_speculative_tokens
        self.decode_query_len = 1 + self.num_speculative_steps
        self.is_pooling_model = self.is_encoder_decoder = False
        self.is_last_pp_rank, self.max_model_len = True, 40_960
        self.speculator = self.kv_block_zeroer = self.lora_config = None
        self.dcp_size = self.cp_interleave = 1
        self.model_state = SimpleNamespace()
        self.kv_connector = SimpleNamespace(set_disabled=lambda flag: None)
        spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
        groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["a"])]
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=groups, num_blocks=blocks)
        self.device, self.steps = torch.device("cpu"), list[int]()

    def execute(self, output: Any) -> None:
        if output.scheduled_spec_decode_tokens:
            rows = output.num_scheduled_tokens
            self.steps.append(sum(rows[name] for name in output.scheduled_spec_decode_tokens))


@pytest.mark.parametrize("vocab", [QWEN3, QWEN3_5, GEMMA])
@pytest.mark.parametrize(("requests", "tokens"), DEFAULTS)
def test_warm_up_verifies_no_more_than_a_step_that_is_served(
    requests: int, tokens: int, vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    ours: Any = Runner(config_of(tokens, requests, 255, vocab))
    original = getattr(warmup._warmup_kernels, "__wrapped__", warmup._warmup_kernels)
    runner.warm_up_kernels(original, ours, ours.execute, lambda grammar: None)
    # several requests, with and without drafts
    assert 256 < max(ours.steps) <= max(512, requests) and len(ours.steps) > 2
    assert ours.scheduler_config.max_num_seqs == requests
    ours.steps.clear()
    original(ours, ours.execute, lambda grammar: None)
    assert max(ours.steps) > get_max_chunk_logits(vocab)  # what vLLM itself would run


def test_the_profiling_run_has_the_logits_of_the_largest_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, seen = config_of(8192, 1024, 255, QWEN3), list[tuple[str, int]]()

    def compute_logits(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(("logits", len(hidden)))
        return torch.empty(len(hidden), 10, dtype=hidden.dtype)

    ours = object.__new__(model_runner.BastionModelRunner)
    vars(ours).update(vars(Runner(config)), model=SimpleNamespace(compute_logits=compute_logits))
    monkeypatch.setattr(model_runner, "current_host", lambda: SimpleNamespace(runs_ahead=True))
    monkeypatch.setattr(
        GPUModelRunner, "_dummy_sampler_run", lambda _, hidden: seen.append(("own", len(hidden)))
    )
    ours._dummy_sampler_run(torch.zeros(512, 64))
    assert seen == [("own", 512), ("logits", 1024)]


def test_rows_that_wait_are_stored_before_vllm_copies_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, order = object.__new__(model_runner.BastionModelRunner), []
    monkeypatch.setattr(GPUModelRunner, "execute_model", lambda *_: order.append("runs"))
    runtime = ours.runtime = Runtime(SimpleNamespace())
    runtime.context = SimpleNamespace(flush=lambda: order.append("stored"))
    for copies in (None, [object()]):
        output = SchedulerOutput.make_empty()
        output.kv_cache_block_copies = copies
        ours.execute_model(output)
    assert order == ["runs", "stored", "runs"]
