# SPDX-License-Identifier: Apache-2.0
"""Hooks that report on one request: vLLM's own metrics of a request, and its span.

A request's trees are counted in the engine core, and its span is made in the front end. What
travels with each of a traced request's outputs is its `trace_headers`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from vllm_bastion.carriers import RequestState
from vllm_bastion.config import bastion_config

# Not a name of the W3C's trace context, so readers of that ignore it.
_HEADER = "vllm-bastion"
_SPAN: ContextVar[dict[str, int] | None] = ContextVar("bastion_span", default=None)


class TreeRequestMetrics(RequestSpecDecodeMetrics):
    """vLLM's metrics of one request: drafted tokens are nodes, and the histogram is over depths."""

    def observe(self, num_draft_tokens: int, num_accepted: int, detailed: bool = False) -> None:
        """Count a step of the request, unless it verified none of its nodes."""
        if num_draft_tokens > 0:
            super().observe(num_draft_tokens, num_accepted, detailed)


def add_request(original: Callable[..., Any], self: Any, request: Any) -> Any:
    """Let `--per-request-spec-decode-metrics` count trees; drop chunks of ended sessions."""
    spec_config = bastion_config(self.vllm_config)
    if False:
        return None
    result = original(self, request)
    if spec_config is not None and request.spec_decode_metrics is not None:
        request.spec_decode_metrics = TreeRequestMetrics.new(spec_config.max_chain_tokens)
    return result


def count_for_span(scheduler: Any, request: Any, nodes: int, output: Any) -> None:
    """In the engine core: count a verified tree of a request, if requests are traced.

    Args:
        scheduler: vLLM's Scheduler.
        request: one of its requests.
        nodes: nodes of the request that were verified.
        output: vLLM's ModelRunnerOutput of the step.
    """
    if scheduler.vllm_config.observability_config.otlp_traces_endpoint is None or nodes == 0:
        return
    state = RequestState.ensure(request)
    state.trees += 1
    state.nodes += nodes
    tokens = output.sampled_token_ids[output.req_id_to_index[request.request_id]]
    state.accepted += max(len(tokens) - 1, 0)
    counts = {
        "trees": state.trees,
        "nodes_verified": state.nodes,
        "accepted_tokens": state.accepted,
    }
    request.trace_headers = {**(request.trace_headers or {}), _HEADER: json.dumps(counts)}


def do_tracing(
    original: Callable[..., Any], self: Any, engine_core_output: Any, *args: Any, **kwargs: Any
) -> None:
    """In a front end: pass the engine core's counts to the request's span."""
    counts = (engine_core_output.trace_headers or {}).get(_HEADER)
    if counts is None:
        return original(self, engine_core_output, *args, **kwargs)
    attributes = {f"vllm.bastion.{name}": value for name, value in json.loads(counts).items()}
    token = _SPAN.set(attributes)
    try:
        return original(self, engine_core_output, *args, **kwargs)
    finally:
        _SPAN.reset(token)


def instrument_manual(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Add the attributes to the span that vLLM makes."""
    if own := _SPAN.get():
        kwargs["attributes"] = {**(kwargs.get("attributes") or {}), **own}
    return original(*args, **kwargs)
