# SPDX-License-Identifier: Apache-2.0
"""The ledger: what this package changes in vLLM, and why.

`apply_all` wraps the functions in the table below in each vLLM process. Three more tables belong to
the ledger: `hooks.runner`, `hooks.warm_up` and `hooks.gated_delta`, which
`worker.install_adapters` installs in a worker of method "bastion".
tests/e2e/assigned.py lists what is changed without a wrapper, and tests/e2e/test_ledger.py compares
running engines with all of it.
"""

from __future__ import annotations

from vllm_bastion import compat
from vllm_bastion.hooks.ledger import Hook
from vllm_bastion.hooks.wrap import HookError, is_wrapped, resolve, signature, wrap

__all__ = [
    "HOOKS",
    "Hook",
    "HookError",
    "apply_all",
    "is_wrapped",
    "require_all",
    "resolve",
    "signature",
    "wrap",
]

_ARGS = "vllm.engine.arg_utils:EngineArgs"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"

# The entry is installed on every vLLM, so that a request for the method gets our message.
ENTRY = Hook(
    target=f"{_ARGS}.create_speculative_config",
    wrapper="engine_args:create_speculative_config",
    expects="(self, target_model_config, target_parallel_config)",
    why='the schema of SpeculativeConfig has neither method "bastion" nor its keys',
    what="builds a BastionSpeculativeConfig, which vLLM treats as its drafter's method",
    upstream="a registry of speculative methods",
)

HOOKS: tuple[Hook, ...] = (
    ENTRY,
    Hook(
        target=f"{_ARGS}.create_engine_config",
        wrapper="engine_args:create_engine_config",
        expects="(self, usage_context=, headless=)",
        why="only the finished configuration shows what trees cannot serve",
        what="refuses it in one sentence, and selects FlashAttention on a GPU by default",
        upstream="a validation hook for plugins",
    ),
    Hook(
        target=f"{_ARGS}.add_cli_args",
        wrapper="engine_args:add_cli_args",
        expects="(parser)",
        why="the parser refuses --spec-method bastion",
        what="adds it to the choices",
        upstream="a registry of speculative methods",
    ),
    Hook(
        target="vllm.config.vllm:VllmConfig.num_lookahead_tokens",
        wrapper="engine_args:num_lookahead_tokens",
        expects="(self)",
        why="vLLM reserves N + 1 KV slots per request for a drafter that writes gamma + 1",
        what="returns gamma + 1",
        upstream="the property reads the speculative configuration",
    ),
    Hook(
        target="vllm.config.vllm:VllmConfig.use_v2_model_runner",
        wrapper="engine_args:use_v2_model_runner",
        expects="(self)",
        why="vLLM selects the V1 runner on a CPU host without a Triton back end",
        what="selects V2, whose kernels have native twins; for other methods only with "
        "VLLM_USE_V2_MODEL_RUNNER=1, which vLLM would refuse there",
        upstream="V2 without Triton on CPU hosts",
    ),
    Hook(
        target="vllm.config.vllm:VllmConfig._validate_v2_model_runner",
        wrapper="engine_args:validate_v2_model_runner",
        expects="(self)",
        why="it refuses V2 without Triton",
        what="keeps its other checks",
        upstream="V2 without Triton on CPU hosts",
    ),
    Hook(
        target="vllm.sampling_params:SamplingParams.verify",
        wrapper="requests:verify",
        expects="(self, model_config, speculative_config, structured_outputs_config, tokenizer)",
        why="vLLM does not look into `extra_args`",
        what='refuses a "bastion_budget" that is not a whole number from 0 to N',
        upstream="a per-request number of speculative tokens",
    ),
    Hook(
        target="vllm.v1.engine.input_processor:InputProcessor.process_inputs",
        wrapper="requests:process_inputs",
        expects=(
            "(self, request_id, prompt, params, supported_tasks, arrival_time=, lora_request=, "
            "tokenization_kwargs=, trace_headers=, priority=, data_parallel_rank=, resumable=, "
            "session_id=, kv_hints=)"
        ),
        why="V2's worker raises on sampling parameters that exceed its tables, and the engine ends",
        what="refuses such a request before it reaches the engine core",
        upstream="the same limits in SamplingParams.verify",
    ),
    Hook(
        target="vllm.sampling_params:SamplingParams._validate_spec_decode",
        wrapper="requests:validate_spec_decode",
        expects="(self, speculative_config)",
        why="it refuses min_p and logit_bias with any speculative decoding",
        what="accepts them: a tree's rows are processed as plain decoding's are",
        upstream="a property of the speculative method",
    ),
    Hook(
        target=f"{_SCHEDULER}.update_from_output",
        wrapper="scheduler:update_from_output",
        expects="(self, scheduler_output, model_runner_output)",
        why="the engine core knows only how many draft tokens it scheduled",
        what="subtracts the nodes that were not verified, notes the placeholders in use, and sends "
        "what was recorded to a front end",
        upstream="adaptive verification reports what it verified",
    ),
    Hook(
        target=f"{_SCHEDULER}._update_request_with_output",
        wrapper="scheduler:update_request_with_output",
        expects="(self, request, new_token_ids, is_stale=)",
        why="a path may cross a block's end, and vLLM frees that block's state before caching it",
        what="caches blocks once their tokens are known",
        upstream="the synchronous scheduler caches emitted tokens as the asynchronous one does",
    ),
    Hook(
        target=f"{_SCHEDULER}.make_spec_decoding_stats",
        wrapper="scheduler:make_spec_decoding_stats",
        expects=(
            "(self, spec_decoding_stats, num_draft_tokens, num_accepted_tokens, "
            "num_invalid_spec_tokens, request_id)"
        ),
        why="its lists have N positions, walked for every request, and trees raise an index error; "
        "a request without a verified node counts as a draft",
        what="makes positions depths, and counts trees that were verified",
        upstream="statistics that know trees",
    ),
    Hook(
        target="vllm.v1.spec_decode.metrics:SpecDecodingProm.__init__",
        wrapper="scheduler:prometheus_init",
        expects="(self, speculative_config, labelnames, per_engine_labelvalues, is_diffusion=)",
        why="it creates N counters, and reads them from lists with one entry per depth",
        what="creates one counter per depth",
        upstream="statistics that know trees",
    ),
    Hook(
        target="vllm.v1.metrics.loggers:StatLoggerManager.__init__",
        wrapper="telemetry:stat_logger_manager_init",
        expects=(
            "(self, vllm_config, engine_idxs=, custom_stat_loggers=, enable_default_loggers=, "
            "aggregate_engine_logging=, client_count=)"
        ),
        why="vLLM's statistics have no place for trees, and its plugins for loggers are loaded by "
        "the server only",
        what="adds our logger, which takes our sums out of the statistics",
        upstream="statistics that know trees; logger plugins offline too",
    ),
    Hook(
        target="vllm.v1.engine.core:EngineCore.shutdown",
        wrapper="telemetry:shutdown",
        expects="(self)",
        why="an offline run logs nothing about what was drafted, or why nothing was",
        what="logs one line on the whole run",
        upstream="statistics at the end of an offline run",
    ),
    Hook(
        target="vllm.v1.structured_output:StructuredOutputManager.__init__",
        wrapper="scheduler:structured_output_init",
        expects="(self, vllm_config)",
        why="it sizes bitmask memory and grammar rollback for N tokens per request",
        what="sizes both by gamma, the depth of a tree",
        upstream="a per-request number of speculative tokens",
    ),
    Hook(
        target=f"{_SCHEDULER}.schedule",
        wrapper="scheduler:schedule",
        expects="(self, throttle_prefills=)",
        why="N placeholders for each of many requests use up a step's tokens, even if nothing is "
        "drafted; with a grammar each is a bitmask row",
        what="gives each request its share, at most 63 with a grammar, and none while nothing is "
        "drafted; lists the nodes that a grammar has left",
        upstream="a per-request number of speculative tokens",
    ),
    Hook(
        target=f"{_SCHEDULER}.add_request",
        wrapper="scheduler:add_request",
        expects="(self, request)",
        why="a request's own metrics have N + 1 positions, and a step without nodes counts there",
        what="makes positions depths, and counts trees that were verified",
        upstream="statistics that know trees",
    ),
    Hook(
        target=f"{_SCHEDULER}.update_draft_token_ids",
        wrapper="grammar:update_draft_token_ids",
        expects="(self, draft_token_ids)",
        why="it shows a grammar the drafts as one linear sequence",
        what="shows it the tree, and schedules the nodes that it allows",
        upstream="draft tokens with parents",
    ),
    Hook(
        target=f"{_SCHEDULER}.update_draft_token_ids_in_output",
        wrapper="grammar:update_draft_token_ids_in_output",
        expects="(self, draft_token_ids, scheduler_output)",
        why="the same with async scheduling",
        what="shows it the tree that is being verified",
        upstream="draft tokens with parents",
    ),
    Hook(
        target="vllm.v1.structured_output:StructuredOutputManager.grammar_bitmask",
        wrapper="grammar:grammar_bitmask",
        expects=("(self, requests, structured_output_request_ids, scheduled_spec_decode_tokens)"),
        why="its rows are for one linear sequence of drafts",
        what="returns the rows of the tree",
        upstream="draft tokens with parents",
    ),
    Hook(
        target="vllm.v1.worker.worker_base:WorkerWrapperBase.init_device",
        wrapper="worker:init_device",
        expects="(self)",
        why="the runner builds its parts by functions, without a registry",
        what="installs the runner adapters just before the runner is built",
        upstream="registries of speculators and model states",
    ),
    Hook(
        target="vllm.triton_utils.dispatcher:_rebind_kernels",
        wrapper="worker:rebind_kernels",
        expects="(overrides)",
        why="it calls vars() on every module's globals and breaks on llvmlite's library: on a CPU "
        "host no engine starts in a process that has imported Numba, as an earlier engine has",
        what="gives llvmlite's library an empty __dict__ first",
        upstream="a scan that ignores a __dict__ that is not a dict",
    ),
)


def apply_all(only_entry: bool = False) -> None:
    """Install the ledger in this process; a second call changes nothing.

    A hook that does not fit is remembered with `compat.disable`: method "bastion" is then refused
    with that reason, and everything else goes on.

    Args:
        only_entry: on an unsupported vLLM, wrap only the entry, without checks.
    """
    if only_entry:
        wrap(ENTRY.target, ENTRY.function())
        return
    for hook in HOOKS:
        try:
            hook.install()
        except Exception as error:
            compat.disable(f"{error}; install a vLLM in the range {compat.SUPPORTED_VLLM}")


def require_all() -> None:
    """Raise unless the whole ledger is in place in this process."""
    missing = [hook.target for hook in HOOKS if not is_wrapped(hook.target)]
    if missing:
        compat.disable(f"the hook on {missing[0]} is not in place")
    compat.require()
