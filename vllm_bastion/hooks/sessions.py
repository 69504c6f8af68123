# SPDX-License-Identifier: Apache-2.0
"""Hooks for streaming-input sessions: requests that continue with another chunk of input.

A turn may end inside an accepted path. vLLM drops the tokens after the cut, but still counts their
positions as computed: the next chunk's first tokens, and those that a connector sends to another
engine, would get the keys and values of the dropped tokens.

A session may also outgrow `max_model_len`, which vLLM checks for each chunk alone. Its tokens would
be written past the end of their row in the worker. Such a session ends with an error instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_bastion.carriers import SchedulerState
from vllm_bastion.config import bastion_config
from vllm_bastion.logger import init_logger

logger = init_logger(__name__)

_ENDED = "Streaming-input session ended: "


def handle_stopped_request(original: Callable[..., bool], self: Any, request: Any) -> bool:
    """Count no token after the cut as computed; end a session whose next chunk does not fit."""
    if bastion_config(self.vllm_config) is None:
        return original(self, request)
    if not self.has_mamba_layers:  # a recurrent state cannot be rolled back: all tokens count
        computed = request.num_computed_tokens - request.num_output_placeholders
        # The last token is computed in the next step.
        request.num_computed_tokens = min(computed, request.num_tokens - 1)
        request.num_output_placeholders = 0
    if request.resumable and request.streaming_queue:
        update = request.streaming_queue[0]
        if update is not None and _does_not_fit(self, request, update.prompt_token_ids):
            from vllm.v1.request import RequestStatus

            request.status = RequestStatus.FINISHED_ERROR
            return True
    return original(self, request)


def takes_chunk(scheduler: Any, request: Any) -> bool:
    """Whether the scheduler should get this request: not if it is a chunk of an ended session.

    A session that waits for this chunk is ended here if the two together do not fit.
    """
    if request.request_id in SchedulerState.ensure(scheduler).ended:
        return False
    session = scheduler.requests.get(request.request_id)
    if session is None or not request.resumable or session.streaming_queue is None:
        return True
    from vllm.v1.request import RequestStatus

    waits = session.status == RequestStatus.WAITING_FOR_STREAMING_REQ
    if waits and _does_not_fit(scheduler, session, request.prompt_token_ids):
        scheduler.finish_requests(session.request_id, RequestStatus.FINISHED_ERROR)
        return False
    return True


def _does_not_fit(scheduler: Any, session: Any, chunk: list[int] | None) -> bool:
    """Whether a chunk leaves no room for a token. If so, stores the session's error."""
    # All tokens but the last are kept.
    kept, added, most = session.num_tokens - 1, len(chunk or ()), scheduler.max_model_len
    if kept + added < most:
        return False
    sentence = (
        f"{_ENDED}with a chunk of {added} tokens after {kept} it has no room for an answer within "
        f"max_model_len {most}"
    )
    logger.warning("%s (request %s)", sentence, session.request_id)
    state = SchedulerState.ensure(scheduler)
    state.ended[session.request_id] = None
    state.endings.append((session.client_index, session.request_id, sentence))
    return True


def send_endings(scheduler: Any, outputs: dict[int, Any]) -> None:
    """Add the error of each session that has ended to a step's outputs."""
    state = SchedulerState.ensure(scheduler)
    if not state.endings:
        return
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    for client, request_id, sentence in state.endings:
        output = EngineCoreOutput(
            request_id, [], finish_reason=FinishReason.ERROR, stop_reason=sentence
        )
        outputs.setdefault(client, EngineCoreOutputs()).outputs.append(output)
    state.endings.clear()


def process_outputs(
    original: Callable[..., Any], self: Any, engine_core_outputs: list[Any], *args: Any, **kw: Any
) -> Any:
    """In the front end: end the session on such an error, which would only end the turn."""
    begin, results = 0, []
    for at, output in enumerate(engine_core_outputs):
        if not str(output.stop_reason).startswith(_ENDED):
            continue
        # The previous turn may end in the same step.
        results.append(original(self, engine_core_outputs[begin:at], *args, **kw))
        begin = at
        session = self.request_states.get(output.request_id)
        if session is not None:
            session.streaming_input = False
            if session.queue is not None:
                session.queue.close()  # takes no more chunks
    result = original(self, engine_core_outputs[begin:], *args, **kw)
    for earlier in reversed(results):
        result.request_outputs[:0] = earlier.request_outputs
        result.reqs_to_abort[:0] = earlier.reqs_to_abort
    return result
