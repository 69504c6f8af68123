# SPDX-License-Identifier: Apache-2.0
"""What the hooks for streaming-input sessions rely on."""

from __future__ import annotations

from tests.contract.reliance import Reliance

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"

SESSIONS: tuple[Reliance, ...] = (
    Reliance(
        f"{_SCHEDULER}._handle_stopped_request",
        files="hooks/sessions.py",
        why="a session goes on from here, and its next chunk is the queue's first",
        body=(
            "if not request.resumable:",
            "request.num_computed_tokens - request.num_output_placeholders",
            "request.streaming_queue.popleft()",
        ),
    ),
    Reliance(
        f"{_SCHEDULER}._update_request_as_session",
        files="hooks/sessions.py",
        why="all tokens but the last are kept, and the chunk follows",
        body=("session._output_token_ids.clear()", "update.prompt_token_ids"),
    ),
    Reliance(
        f"{_SCHEDULER}.add_request",
        files="hooks/sessions.py hooks/tracing.py",
        why="a chunk waits in the queue, or its session goes on",
        body=("RequestStatus.WAITING_FOR_STREAMING_REQ", "streaming_queue.append(update)"),
    ),
    Reliance(
        _SCHEDULER,
        files="hooks/sessions.py",
        methods=("finish_requests(self, request_ids, finished_status)",),
        names="has_mamba_layers max_model_len requests",
    ),
    Reliance(
        "vllm.v1.request:Request",
        files="hooks/sessions.py",
        names=(
            "client_index num_computed_tokens num_output_placeholders num_tokens resumable "
            "streaming_queue"
        ),
    ),
    Reliance(
        "vllm.v1.engine.output_processor:OutputProcessor",
        files="hooks/sessions.py",
        names="request_states",
    ),
    Reliance(
        "vllm.v1.engine.output_processor:RequestState",
        files="hooks/sessions.py",
        names="queue streaming_input",
    ),
    Reliance(
        "vllm.v1.engine.output_processor:RequestOutputCollector",
        files="hooks/sessions.py",
        methods=("close(self)",),
    ),
)
