# SPDX-License-Identifier: Apache-2.0
"""The settings of method "bastion": a SpeculativeConfig of vLLM with a few keys of its own.

vLLM sees its drafter's method, `dflash` or `dspark`, which brings drafter loading, auxiliary hidden
states and KV look-ahead. `num_speculative_tokens` is the node budget N (the most draft nodes of a
request verified in a step, without the root). The drafted depth, gamma, is read from the drafter's
checkpoint: for DFlash one less than its block.

The engine's child processes unpickle this module before they load plugins: it must import without
any hook in place, and must not import `vllm.v1.worker.gpu`.
"""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter
from vllm.config import VllmConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config

from vllm_bastion.checkpoints.drafter_types import (
    architectures_of,
    candidates_of,
    gamma_of,
    restore_settings,
)
from vllm_bastion.checkpoints.weights import name_whole_layers
from vllm_bastion.platform import current_host

PREFIX = "bastion_"
# In a request's `extra_args`: the most nodes of its tree verified in a step.
REQUEST_BUDGET = "bastion_budget"

# Rotary embeddings (`rope_type`) whose max_position_embeddings only sets the length of a cache.
_CACHE_ONLY_ROPE_TYPES = frozenset({"default", "linear", "llama3", "ntk", "proportional"})

# With a vocabulary of 152k, 63 nodes cost the engine core 11 ms a step, and some grammars 171 ms.
_MAX_GRAMMAR_NODES = 16
# Most tokens of an n-gram draft: with its root it fills 32 rows.
NGRAM_DEPTH = 31


@config(repr=False)
class BastionSpeculativeConfig(SpeculativeConfig):
    """vLLM's speculative configuration with the settings of method "bastion"."""

    bastion_budget: Literal["adaptive"] | Annotated[int, Field(ge=0)] = "adaptive"
    """Nodes verified per request and step: chosen each step from the measured cost, or a number
    from 0, plain decoding, to N."""
    bastion_top_k: Annotated[int, Field(ge=1, le=32)] = 16
    """Candidate tokens kept at each drafted depth, 1 to 32, and no more than the drafter's own head
    scores."""
    bastion_lookup: bool = True
    """N-gram drafts (prompt lookup): what followed the same words earlier, in the prompt or the
    reply, is a branch of the tree; never with `bastion_top_k` 1."""
    bastion_ngram_cache: Annotated[int, Field(ge=0, le=2**24)] = 0
    """Tokens of ended replies that are kept: n-gram drafts come from them, too, for requests with
    the same `cache_salt` and adapter."""
    bastion_budget_timing: Literal["auto", "exact", "lagged"] = "auto"
    """exact: a step is sized by its own scores, for which the host waits. lagged: by the previous
    step's. auto: lagged on CUDA, exact on a CPU or with LoRA."""
    bastion_latency_model: Literal["profile", "static", "ema", "ema_calib"] = "profile"
    """What a step costs by its rows; leave as is. profile: as vLLM's own passes were timed at the
    start. The paper's estimators: static (a calibrated roofline), ema (a bare one, corrected in
    service), ema_calib (both)."""
    bastion_drafter_weights: Literal["auto", "checkpoint"] = "auto"
    """auto: int8 on a CPU that multiplies it (AVX-512 BF16 and VNNI) for a bf16 model, else
    unchanged. checkpoint: unchanged."""

    bastion_gamma: int = Field(default=0, init=False)
    """Drafted depth (gamma), read from the drafter's checkpoint; not a setting."""
    worker_runtime: Any = Field(default=None, init=False)
    """The worker's `engine.runtime.Runtime`, which adapters find by this config; None elsewhere."""

    def __post_init__(self) -> None:
        super().__post_init__()
        drafter = self.draft_model_config.hf_config
        restore_settings(drafter, self.draft_model_config.model, self.draft_model_config.revision)
        name_whole_layers(drafter, self.target_model_config.get_total_num_hidden_layers())
        if architectures_of(drafter) != list(drafter.architectures):
            # vLLM loads by name, and the checkpoint's name does not say which model it is.
            drafter.architectures = architectures_of(drafter)
            self.update_arch_()
        gamma = gamma_of(drafter)
        assert gamma is not None  # `validate.models.check_drafter` has checked it
        self.bastion_gamma = gamma
        self.bastion_top_k = min(self.bastion_top_k, candidates_of(drafter) or self.bastion_top_k)
        if self.bastion_top_k == 1:  # the user wants the drafter's plain chain
            self.bastion_lookup = False
        if self.rope_only_sizes_cache():
            # The drafter gets the target's positions, and reading past its rotary cache is not
            # checked. vLLM 0.33 extends the cache itself; 0.32 does so for EAGLE drafters only.
            self._maybe_override_draft_max_position_embeddings(
                self.draft_model_config.hf_config, self.target_model_config.max_model_len
            )

    def compute_hash(self) -> str:
        """vLLM's hash of what a compiled model depends on, with what this host adds."""
        own = current_host().compile_factors(self.bastion_drafter_weights)
        return "-".join((super().compute_hash(), *own))

    def rope_only_sizes_cache(self) -> bool:
        """Whether the drafter's rotary frequencies do not depend on its max_position_embeddings."""
        rope = getattr(self.draft_model_config.hf_config, "rope_parameters", None) or {}
        # One set of parameters, or one for each type of layer.
        sets = [value for value in rope.values() if isinstance(value, dict)] or [rope]
        return all(each.get("rope_type", "default") in _CACHE_ONLY_ROPE_TYPES for each in sets)

    @property
    def max_num_new_slots_for_drafting(self) -> int:
        """Tokens of a step that vLLM reserves for each request's draft: none.

        vLLM's drafter shares buffers of one step's tokens. Ours are sized for `max_num_seqs`
        requests that draft.
        """
        return 0

    def use_eagle_block_drop(self) -> bool:
        """Whether the last block of a prefix is computed again: never, as in vLLM 0.33.

        A drafter's keys and values follow from the target's hidden state at their own position.
        """
        return False

    @property
    def tree_depth(self) -> int:
        """Depth of a tree with as many nodes as it needs: gamma, or more with an n-gram draft."""
        if not self.bastion_lookup:
            return self.bastion_gamma
        return max(self.bastion_gamma, min(NGRAM_DEPTH, self.num_speculative_tokens))

    @property
    def max_chain_tokens(self) -> int:
        """Most draft tokens on one path of a tree."""
        return min(self.tree_depth, self.num_speculative_tokens)

    @property
    def max_grammar_tokens(self) -> int:
        """Most draft tokens of a request with a grammar: each is a bitmask row of V / 8 bytes."""
        return min(_MAX_GRAMMAR_NODES, self.num_speculative_tokens)


def bastion_config(vllm_config: Any) -> BastionSpeculativeConfig | None:
    """The settings of an engine, or None where it does not use method "bastion"."""
    spec_config = getattr(vllm_config, "speculative_config", None)
    return spec_config if isinstance(spec_config, BastionSpeculativeConfig) else None


def settings_of(vllm_config: Any) -> BastionSpeculativeConfig:
    """The settings of an engine that uses method "bastion"."""
    settings = bastion_config(vllm_config)
    assert settings is not None
    return settings


def default_nodes(keys: dict[str, Any], drafter: Any, limit: int) -> int:
    """The default of N: the host's, or less where no step can use as many nodes.

    vLLM sizes its buffers by N before any step has been timed, so N cannot depend on step costs;
    N*, which does, is at most N.

    Args:
        keys: the user's keys, checked.
        drafter: the drafter's Hugging Face config, checked.
        limit: the smaller of the user's `max_num_batched_tokens`, if any, and `max_model_len`.
    """
    defaults = BastionSpeculativeConfig
    budget = keys.get("bastion_budget", defaults.bastion_budget)
    if budget != "adaptive":
        return max(int(budget), 1)
    gamma = gamma_of(drafter)
    assert gamma is not None
    top_k = keys.get("bastion_top_k", defaults.bastion_top_k)
    top_k = min(top_k, candidates_of(drafter) or top_k)
    nodes = current_host().default_nodes
    if top_k == 1:
        nodes = min(nodes, gamma)  # a chain has no more
    return max(min(nodes, limit - 1 - gamma), 1)


def request_budget(sampling_params: Any, most: int) -> int:
    """Most nodes of a request verified in a step: its own limit, `most` without one.

    Args:
        sampling_params: vLLM's SamplingParams of the request, or None.
        most: `num_speculative_tokens`.
    """
    given = (getattr(sampling_params, "extra_args", None) or {}).get(REQUEST_BUDGET)
    return most if given is None else int(given)


def chain_view_of(vllm_config: VllmConfig, num_tokens: int | None = None) -> VllmConfig:
    """A VllmConfig with `num_speculative_tokens` = gamma, for code of vLLM that counts depths.

    Args:
        vllm_config: returned as it is if it does not use method "bastion".
        num_tokens: in place of gamma.
    """
    spec_config = bastion_config(vllm_config)
    if spec_config is None:
        return vllm_config
    # Plain copies: vLLM's `replace` validates again and rejects what `__post_init__` has set.
    view = copy.copy(vllm_config)
    view.speculative_config = copy.copy(spec_config)
    depth = spec_config.bastion_gamma if num_tokens is None else num_tokens
    view.speculative_config.num_speculative_tokens = depth
    return view


def user_keys() -> tuple[str, ...]:
    """Names of the bastion_* settings, in the order of the class."""
    names = (field.name for field in fields(BastionSpeculativeConfig) if field.init)
    return tuple(name for name in names if name.startswith(PREFIX))


def standard_keys() -> tuple[str, ...]:
    """Names of vLLM's own settings that a user may give."""
    engine_made = {"target_model_config", "target_parallel_config"}
    names = (field.name for field in fields(SpeculativeConfig))
    return tuple(name for name in names if name not in engine_made)


def default_of(name: str) -> Any:
    """vLLM's own default of one of its settings."""
    default = next(field.default for field in fields(SpeculativeConfig) if field.name == name)
    return getattr(default, "default", default)


def key_adapter(name: str) -> TypeAdapter[Any]:
    """Validates values of a bastion_* setting, without converting them."""
    hint = get_type_hints(BastionSpeculativeConfig, include_extras=True)[name]
    return TypeAdapter(hint, config=ConfigDict(strict=True))


def is_lagged(config: BastionSpeculativeConfig) -> bool:
    """Whether the scores of the previous step size a step. False for a fixed budget."""
    if config.bastion_budget != "adaptive":
        return False
    if config.bastion_budget_timing != "auto":
        return config.bastion_budget_timing == "lagged"
    return current_host().runs_ahead
