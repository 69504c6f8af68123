# SPDX-License-Identifier: Apache-2.0
"""The other half of `benchmarks.engine`: what runs in the engine's own process."""

from __future__ import annotations

import importlib
import os
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine import IMPORTED, STARTED, Completion, Engine, Request, Run


def serve(
    engine: Engine,
    requests: list[Request],
    connection: Any,
    log: Path,
    hold: Sequence[str] = (),
) -> None:
    """Entry point of the process: everything it prints goes to `log`.

    hold: where to wait for a message, see `benchmarks.running`.
    """
    file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        connection.send(("done", _decode(engine, requests, connection, hold)))
    except BaseException as error:
        traceback.print_exc()
        connection.send(("error", f"{type(error).__name__}: {error}"))


def sampling_params(request: Request) -> Any:
    """vLLM's; only a grammar may end a request before its last token."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    given = {"ignore_eos": True, **request.params}
    if "structured_outputs" in given:
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
        given["ignore_eos"] = False
    return SamplingParams(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        seed=request.seed,
        **given,
    )


def _decode(engine: Engine, requests: list[Request], connection: Any, hold: Sequence[str]) -> Run:
    def may_wait(at: str) -> None:
        if at in hold:
            connection.send(("held", at))
            connection.recv()

    begin = time.perf_counter()
    from vllm import LLM

    may_wait(IMPORTED)
    llm = LLM(**engine.arguments())
    result = Run([Completion(request.name) for request in requests])
    result.start_s = time.perf_counter() - begin
    collect = None
    if engine.probe is not None:
        module, _, name = engine.probe.partition(":")
        collect = getattr(importlib.import_module(module), name)(llm)
    may_wait(STARTED)
    if engine.timed:  # memory is touched, code is loaded
        warm_up = Request("warm-up", requests[0].prompt, 24)
        llm.generate([warm_up.prompt], sampling_params(warm_up))
        llm.request_counter.reset()
    total = sum(request.max_tokens for request in requests)
    count_steps(
        llm,
        result.completions,
        lambda n: connection.send(("state", f"decoding, {min(n, total)} of {total} tokens")),
    )
    params = [sampling_params(request) for request in requests]
    begin = time.perf_counter()
    if requests:
        connection.send(("state", f"decoding, 0 of {total} tokens"))
        outputs = llm.generate([request.prompt for request in requests], params, use_tqdm=False)
        for completion, output in zip(result.completions, outputs, strict=True):
            completion.token_ids = list(output.outputs[0].token_ids)
            completion.text = output.outputs[0].text
            completion.prompt_len = len(output.prompt_token_ids)
    result.decode_s = time.perf_counter() - begin
    if collect is not None:
        result.probed = collect()
    return result


def request_index(request_id: str) -> int:
    """Place of a request among those given to `LLM.generate`: its ids are `0-...`, `1-...`."""
    return int(request_id.split("-")[0])


def count_steps(llm: Any, completions: list[Completion], progress: Callable[[int], None]) -> None:
    """Note what every step emits and verifies, where the engine core learns of it."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    update = scheduler.update_from_output
    prefilled: set[str] = set()
    total = 0

    def update_from_output(scheduled: Any, output: Any) -> Any:
        nonlocal total
        verified = getattr(output, "bastion_num_verified", None)
        for row, request_id in enumerate(output.req_ids):
            emitted = len(output.sampled_token_ids[row]) if output.sampled_token_ids else 0
            if not emitted:
                continue  # a part of a prompt
            total += emitted
            if request_id in prefilled:
                drafts = len(scheduled.scheduled_spec_decode_tokens.get(request_id, ()))
                completion = completions[request_index(request_id)]
                completion.emitted.append(emitted)
                completion.verified.append(
                    drafts if verified is None else verified.get(request_id, 0)
                )
            else:
                prefilled.add(request_id)
        progress(total)
        return update(scheduled, output)

    scheduler.update_from_output = update_from_output
