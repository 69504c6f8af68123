# SPDX-License-Identifier: Apache-2.0
"""Functions of vLLM that our code was written beside, with the fingerprint of each body.

`test_contract.fingerprint` makes one from a function's tokens.
"""

from __future__ import annotations

_GPU = "vllm.v1.worker.gpu"
_GRAMMAR = f"{_GPU}.structured_outputs:StructuredOutputsWorker"
_CONFIG = "vllm.config.speculative:SpeculativeConfig"
_SPEC, _SAMPLE = f"{_GPU}.spec_decode", f"{_GPU}.sample"
_RUNNER = f"{_GPU}.model_runner:GPUModelRunner"
_CORE = "vllm.v1.core.sched"

MINORS = ("0.32", "0.33")
# Function -> its fingerprint in each of MINORS.
FINGERPRINTS: dict[str, tuple[str, ...]] = {
    f"{_CONFIG}.max_num_new_slots_for_drafting": ("437e6c68", "18436348"),
    f"{_CORE}.async_scheduler:AsyncScheduler._update_after_schedule": ("131e68f6", "131e68f6"),
    f"{_CORE}.scheduler:Scheduler.get_grammar_bitmask": ("186cae8d", "186cae8d"),
    f"{_CORE}.scheduler:Scheduler.make_spec_decoding_stats": ("18615d33", "18615d33"),
    f"{_CORE}.scheduler:Scheduler.update_draft_token_ids": ("2ce05d3b", "2ce05d3b"),
    f"{_CORE}.scheduler:Scheduler.update_draft_token_ids_in_output": ("f9ae37b8", "f9ae37b8"),
    "vllm.v1.structured_output:StructuredOutputManager.grammar_bitmask": ("5407e59e", "e7c3948f"),
    f"{_RUNNER}.execute_model": ("7bc3f419", "2f302eae"),
    f"{_RUNNER}.prepare_inputs": ("c4b46110", "ce45f241"),
    f"{_RUNNER}.sample_tokens": ("3a52b1c8", "3534013a"),
    f"{_SAMPLE}.bad_words:BadWordsState.apply": ("27cb5172", "27cb5172"),
    f"{_SAMPLE}.penalties:PenaltiesState.apply": ("ec04a265", "ec04a265"),
    f"{_SAMPLE}.sampler:Sampler.get_logprobs_dims": ("08059e0c", "08059e0c"),
    f"{_SAMPLE}.thinking_budget:ThinkingBudgetState.apply": ("0bb3037a", "0bb3037a"),
    f"{_SPEC}.dflash.speculator:DFlashSpeculator.propose": ("7a00c4e1", "a1aa1329"),
    f"{_SPEC}.rejection_sampler:RejectionSampler.__call__": ("6463beaa", "6463beaa"),
    f"{_SPEC}.rejection_sampler:RejectionSampler.__init__": ("2ec86a83", "50e72eb5"),
    f"{_SPEC}.utils:DraftTokensHandler.set_draft_tokens": ("5465e777", "5465e777"),
    f"{_GRAMMAR}.apply_grammar_bitmask": ("cbaa23dc", "eb9557eb"),
    f"{_GPU}.warmup:_warmup_kernels": ("08e5ddcd", "4388dbad"),
}
