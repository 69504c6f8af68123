# SPDX-License-Identifier: Apache-2.0
"""The model runner of method "bastion", a subclass of vLLM's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

from vllm_bastion.attached import StepPlan
from vllm_bastion.config import settings_of
from vllm_bastion.engine.grammar import encode
from vllm_bastion.engine.limits import max_verified_rows
from vllm_bastion.engine.profile import head_input
from vllm_bastion.engine.runtime import Runtime, runtime_of
from vllm_bastion.platform import current_host
from vllm_bastion.policy.trees import Trees
from vllm_bastion.scheduler.gate import Arm


def adopt(runner: Any) -> None:
    """Turn the runner that vLLM's worker has built into one of ours, before it loads a model.

    vLLM's CPU worker builds it where a subclass has nothing to override.
    """
    base = type(runner)
    runner.__class__ = type(f"Bastion{base.__name__}", (BastionModelRunner, base), {})
    runner.runtime = runtime_of(runner.vllm_config)
    runner.draft_tokens_handler = TreeDraftTokens(runner.runtime.trees, runner.device)


class TreeDraftTokens(DraftTokensHandler):
    """vLLM's channel for draft tokens, with each token's parent encoded into it.

    The engine core checks drafts against grammars, and does not know the drafts' parents.
    """

    def __init__(self, trees: Trees, device: torch.device | None) -> None:
        super().__init__(device)
        self._trees = trees

    def set_draft_tokens(self, input_batch: InputBatch, draft_tokens: torch.Tensor) -> None:
        """draft_tokens: [R, N] int64."""
        if input_batch.has_structured_output_reqs:
            parents = self._trees.parents[input_batch.idx_mapping]
            draft_tokens = encode(draft_tokens, parents[:, : draft_tokens.shape[1]])
        super().set_draft_tokens(input_batch, draft_tokens)


class BastionModelRunner(GPUModelRunner):
    """vLLM's model runner, whose steps have trees."""

    runtime: Runtime

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Pass on the scheduler's plan, and store deferred rows before blocks are copied.

        vLLM copies whole blocks, which lack the drafter's rows that are still deferred.
        """
        runtime = self.runtime
        runtime.scheduled = None if kwargs.get("dummy_run") else scheduler_output
        runtime.plan = StepPlan.find(runtime.scheduled) or StepPlan()
        try:
            if scheduler_output.kv_cache_block_copies and runtime.context is not None:
                runtime.context.flush()
            return super().execute_model(scheduler_output, *args, **kwargs)
        finally:
            runtime.scheduled = None

    def gather_batch_req_state(self, scheduler_output: Any, dummy_run: bool) -> Any:
        """Decide how many nodes the step verifies, once vLLM has its batch in arrays."""
        batch, uniform = super().gather_batch_req_state(scheduler_output, dummy_run)
        manager: Any = self.adaptive_verification
        if manager is None or batch is None or batch.num_draft_tokens_np is None:
            return batch, uniform
        rows = manager.decide(batch)
        return batch._replace(num_tokens=rows), uniform if rows == batch.num_tokens else None

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Attach counts for the scheduler to the step's output, see `hooks.scheduler`."""
        if grammar_output is None and self._is_plain(self.execute_model_state):
            output = self._sample_plain(self.execute_model_state)
        else:
            output = super().sample_tokens(self._rows_in_use(grammar_output))
        manager: Any = self.adaptive_verification
        return output if manager is None else manager.counted(output)

    def _is_plain(self, state: Any) -> bool:
        """Whether a step neither verifies nor drafts, and nobody has to be told so.

        A grammar asks for the drafts of every step, and a connector saves its rows at once.
        """
        step = self.runtime.step
        return (
            step.arm == Arm.PLAIN
            and not step.verifies
            and state is not None
            and bool(state.aux_hidden_states)
            and not state.input_batch.has_structured_output_reqs
            and self.vllm_config.kv_transfer_config is None
        )

    def _sample_plain(self, state: Any) -> Any:
        """Let vLLM sample as without a drafter, which only keeps the step's rows."""
        runner: Any = self
        drafter, steps = runner.speculator, runner.num_speculative_steps
        runner.speculator, runner.num_speculative_steps = None, 0
        try:
            output = super().sample_tokens(None)
        finally:
            runner.speculator, runner.num_speculative_steps = drafter, steps
        drafter.end_plain_step(state)
        self.adaptive_verification.record_confidences(None, state.input_batch)
        runner.draft_tokens_handler.req_ids = []
        runner.draft_tokens_handler.draft_tokens_np = None
        return output

    def _rows_in_use(self, grammar_output: Any) -> Any:
        """Cut a bitmask of N + 1 rows per request to what the largest tree with a grammar needs.

        Only vLLM 0.33's warm-up sends one; its rows are equal.
        """
        if grammar_output is None:
            return None
        mask, names = grammar_output.grammar_bitmask, grammar_output.structured_output_request_ids
        if len(mask) != len(names) * self.decode_query_len:
            return grammar_output
        most = settings_of(self.vllm_config).max_grammar_tokens
        rows = np.minimum(np.arange(most + 1), self.decode_query_len - 1)
        used = mask.reshape(len(names), self.decode_query_len, -1)[:, rows]
        return replace(grammar_output, grammar_bitmask=used.reshape(-1, mask.shape[1]))

    def _set_active_loras(
        self,
        prompt_lora_mapping: tuple[int, ...],
        token_lora_mapping: tuple[int, ...],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Map a trimmed step's own rows and logits instead of the scheduled ones."""
        layout = self._layout(self.runtime.scheduled)
        if layout is not None:
            adapters = np.asarray(prompt_lora_mapping)  # one for each request
            num_rows, num_logits = layout
            token_lora_mapping = tuple(adapters.repeat(num_rows).tolist())
            prompt_lora_mapping = tuple(adapters.repeat(num_logits).tolist())
        super()._set_active_loras(prompt_lora_mapping, token_lora_mapping, *args, **kwargs)

    def _layout(self, scheduled: Any) -> tuple[np.ndarray, np.ndarray] | None:
        """Rows and logits of each request of a step with drafts; None if vLLM's own are right."""
        drafts = {} if scheduled is None else scheduled.scheduled_spec_decode_tokens
        if not drafts:
            return None
        if self.adaptive_verification is not None:
            layout: tuple[np.ndarray, np.ndarray] = self.adaptive_verification.layout
            return layout
        # A step of warm-up verifies all scheduled nodes.
        rows, count = len(next(iter(drafts.values()))) + 1, len(drafts)
        if scheduled.total_num_scheduled_tokens != rows * count:
            return None
        return np.full(count, rows), np.full(count, rows)

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> None:
        """Let the memory profile count the largest step's logits and their float32 copy.

        vLLM's run has one row for each request. On a CPU the KV cache does not depend on memory in
        use.
        """
        super()._dummy_sampler_run(hidden_states)
        if not current_host().runs_ahead:
            return
        logits = self.model.compute_logits(head_input(self, max_verified_rows(self.vllm_config)))
        torch.empty_like(logits, dtype=torch.float32)
