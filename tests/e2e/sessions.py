# SPDX-License-Identifier: Apache-2.0
"""Streaming-input sessions of `AsyncLLM`, and the ordinary requests that they must equal.

A session's history is its chunks and, of each turn before, all emitted tokens but the last.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from typing import Any

from tests.e2e.costs import install
from tests.e2e.offline import ENVIRONMENT, fork
from tests.e2e.session import allow_async_scheduling


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Run the spec's sessions, all at the same time.

    Args:
        spec: `engine`, arguments of an engine; `sessions`, a list of {`id`, `turns`: a list of
            {`chunk`: token ids, `params`}, `ahead`: whether chunks are sent before the turns before
            them have ended}; `ordinary`: decode each turn as a request of its own; `continued`:
            prompts by id, decoded as ordinary requests once all sessions have ended.

    Returns:
        `sessions` and `continued`, by id: `token_ids` of all turns, the `reasons` for which they
        ended, (reason, stop_reason) each, `error`, the text of the exception that ended it, and of
        ordinary turns the `history`. `prompts` are those of `continued`, and `metrics` vLLM's
        counters.
    """
    os.environ.update(ENVIRONMENT)
    fork()
    allow_async_scheduling()
    install(spec)
    return asyncio.run(_run(spec))


_CONTINUED = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}


async def _run(spec: dict[str, Any]) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**spec["engine"]))
    decode = _ordinary if spec.get("ordinary") else _session
    names = [one["id"] for one in spec["sessions"]]
    prompts = spec.get("continued", {})
    try:
        results = await asyncio.gather(*(decode(engine, one) for one in spec["sessions"]))
        if isinstance(prompts, list):
            histories = [result["history"] + prompts for result in results]
            prompts = dict(zip(names, histories, strict=True))
        continued = [
            {"id": f"{name}, continued", "turns": [{"chunk": prompt, "params": _CONTINUED}]}
            for name, prompt in prompts.items()
        ]
        more = await asyncio.gather(*(_ordinary(engine, one) for one in continued))
        await engine.check_health()
    finally:
        engine.shutdown()
    return {
        "sessions": dict(zip(names, results, strict=True)),
        "continued": dict(zip(prompts, more, strict=True)),
        "prompts": prompts,
        "metrics": {m.name: m.value for m in get_metrics_snapshot() if isinstance(m, Counter)},
        "async": engine.vllm_config.scheduler_config.async_scheduling,
    }


def _params(turn: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(output_kind=RequestOutputKind.DELTA, **turn["params"])


async def _decode(engine: Any, name: str, prompt: Any, params: Any, ended: Any) -> dict[str, Any]:
    result: dict[str, Any] = {"token_ids": [], "reasons": [], "error": None}
    try:
        async for output in engine.generate(prompt, params, name):
            (one,) = output.outputs
            result["token_ids"] += one.token_ids
            if one.finish_reason is not None:
                result["reasons"].append([one.finish_reason, one.stop_reason])
                ended.set()
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
    ended.set()
    return result


async def _session(engine: Any, session: dict[str, Any]) -> dict[str, Any]:
    from vllm.engine.protocol import StreamingInput

    ended = asyncio.Event()

    async def chunks() -> AsyncGenerator[StreamingInput, None]:
        for turn in session["turns"]:
            prompt = {"prompt_token_ids": turn["chunk"]}
            yield StreamingInput(prompt=prompt, sampling_params=_params(turn))
            if not session["ahead"]:
                await ended.wait()
                ended.clear()

    first = _params(session["turns"][0])
    return await _decode(engine, session["id"], chunks(), first, ended)


async def _ordinary(engine: Any, session: dict[str, Any]) -> dict[str, Any]:
    history: list[int] = []
    whole: dict[str, Any] = {"token_ids": [], "reasons": [], "error": None}
    for number, turn in enumerate(session["turns"]):
        history += turn["chunk"]
        prompt, name = {"prompt_token_ids": list(history)}, f"{session['id']}-{number}"
        done = await _decode(engine, name, prompt, _params(turn), asyncio.Event())
        whole["token_ids"] += done["token_ids"]
        whole["reasons"] += done["reasons"]
        if done["error"]:
            return whole | {"error": done["error"]}
        history += done["token_ids"][:-1]
    return whole | {"history": history}
