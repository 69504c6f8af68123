# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.33."""

from __future__ import annotations

from vllm_bastion.versions import Capabilities

_SPEC = "vllm.v1.worker.gpu.spec_decode"
_SAMPLE = "vllm.v1.worker.gpu.sample"
_RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_GPU = "vllm.v1.worker.gpu"
_CORE = "vllm.v1.core.sched"

CAPABILITIES = Capabilities(
    has_xpress_drafter=True,
    returns_admitted_drafts=True,
    pads_grammar_rows=True,
    stages_hidden_states=True,
    worker_requires_triton=True,
    seeds_draft_steps=True,
    absent_kernel_parameters={
        f"{_SPEC}.rejection_sampler_utils:_compute_local_logits_stats_kernel": (
            "num_speculative_steps",
        ),
    },
    fingerprints={
        "vllm.config.speculative:SpeculativeConfig.max_num_new_slots_for_drafting": "18436348",
        f"{_CORE}.async_scheduler:AsyncScheduler._update_after_schedule": "131e68f6",
        f"{_CORE}.scheduler:Scheduler.get_grammar_bitmask": "186cae8d",
        f"{_CORE}.scheduler:Scheduler.make_spec_decoding_stats": "18615d33",
        f"{_CORE}.scheduler:Scheduler.update_draft_token_ids": "2ce05d3b",
        f"{_CORE}.scheduler:Scheduler.update_draft_token_ids_in_output": "f9ae37b8",
        "vllm.v1.structured_output:StructuredOutputManager.grammar_bitmask": "e7c3948f",
        f"{_RUNNER}.execute_model": "2f302eae",
        f"{_RUNNER}.prepare_inputs": "ce45f241",
        f"{_RUNNER}.sample_tokens": "3534013a",
        f"{_SAMPLE}.bad_words:BadWordsState.apply": "27cb5172",
        f"{_SAMPLE}.penalties:PenaltiesState.apply": "ec04a265",
        f"{_SAMPLE}.sampler:Sampler.get_logprobs_dims": "08059e0c",
        f"{_SAMPLE}.thinking_budget:ThinkingBudgetState.apply": "0bb3037a",
        f"{_SPEC}.dflash.speculator:DFlashSpeculator.propose": "a1aa1329",
        f"{_SPEC}.rejection_sampler:RejectionSampler.__call__": "6463beaa",
        f"{_SPEC}.rejection_sampler:RejectionSampler.__init__": "50e72eb5",
        f"{_SPEC}.utils:DraftTokensHandler.set_draft_tokens": "5465e777",
        f"{_GPU}.structured_outputs:StructuredOutputsWorker.apply_grammar_bitmask": "eb9557eb",
        f"{_GPU}.warmup:_warmup_kernels": "4388dbad",
    },
)
