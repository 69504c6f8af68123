# SPDX-License-Identifier: Apache-2.0
"""Run one case in this process, and count what every step of the engine asks of the driver."""

from __future__ import annotations

import collections
import os
import time
import traceback
from functools import wraps
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tests.e2e.adapters import make_adapter
from tests.rehearsal import new_weights
from tests.rehearsal.cases import PROMPTS, TINY, Case
from tests.rehearsal.device import FakeDriver
from tests.rehearsal.emulation import Emulation
from vllm_bastion.scheduler.gate import Gate

_MOST_STEPS = 400
# Steps before the steady ones: prompts, and first trees.
_WARM_UP = 4


def run(case: Case, driver: FakeDriver, emulation: Emulation) -> dict[str, Any]:
    """Start the engine and decode; the process ends without stopping it.

    Returns:
        tokens: token ids by prompt, then by second turn, or of two requests more, see `_join`;
        cached: tokens of each second turn that came from the cache; in_graph: whether the target's
        graphs take a prompt that joins; steps: until the first prompt is done; steady: mean counts
        per steady step; waits: calls that waited in the steady steps, by place in the source;
        faults, missing, errors: messages; start_s, decode_s; slowest: emulated seconds by kernel.
    """
    from vllm import EngineArgs, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments, folder = case.engine_arguments(), Path(os.environ["VLLM_BASTION_CACHE"]) / case.name
    weights = None if case.weights is None else new_weights.NewWeights(case, arguments, folder)
    _watch_lengths(emulation.errors)
    if (arm := case.arm) is not None:
        Gate.choose = lambda gate, num_reqs: arm  # type: ignore[method-assign]
    begin = time.perf_counter()
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    started = time.perf_counter()
    emulation.running = True
    if weights is not None:
        weights.update(engine)
    waits: collections.Counter[tuple[bool, str]] = collections.Counter()
    driver.on_wait(lambda kind: waits.update([_waiting(kind)]))
    params = SamplingParams(temperature=0.0, max_tokens=case.tokens, ignore_eos=True)
    adapters = _adapters(folder) if case.adapters else ()
    prompts = [{"prompt_token_ids": ids} for ids in _prompts(engine, case)]
    for i, (prompt, adapter) in enumerate(zip_longest(prompts, adapters)):
        engine.add_request(str(i), prompt, params, lora_request=adapter)
    tokens: dict[str, list[int]] = {}
    steps: list[dict[str, int]] = []
    while engine.has_unfinished_requests() and len(steps) < _MOST_STEPS:
        driver.begin_step()
        waits.clear()
        finished = False
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
            finished |= output.finished
        counts = driver.counters()
        counts["waits:ours"] = sum(n for (ours, _), n in waits.items() if ours)
        counts["waits:vllm"] = sum(n for (ours, _), n in waits.items() if not ours)
        if finished:
            break
        steps.append(counts | {f"at {place}": n for (_, place), n in waits.items()})
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
    first = [tokens[str(i)] for i in range(len(PROMPTS))]
    second, cached = _second_turns(engine, prompts, first, params) if case.long else ([], [])
    joined, in_graph = ([], True) if case.long else _join(engine, prompts, params, case.joins)
    done = time.perf_counter()
    steady = steps[_WARM_UP:]
    names = sorted({name for counts in steady for name in counts})
    means = {name: sum(c.get(name, 0) for c in steady) / len(steady) for name in names}
    return {
        "tokens": first + second + joined,
        "cached": cached,
        "in_graph": in_graph,
        "steps": len(steps),
        "steady_steps": len(steady),
        "steady": {name: mean for name, mean in means.items() if not name.startswith("at ")},
        "waits": {name[3:]: mean for name, mean in means.items() if name.startswith("at ")},
        "faults": driver.faults(),
        "missing": sorted(emulation.missing),
        "errors": emulation.errors,
        "start_s": started - begin,
        "decode_s": done - started,
        "slowest": dict(emulation.seconds.most_common(12)),
    }


def _watch_lengths(errors: list[str]) -> None:
    """Note each step, of the warm-up too, in which a request leaves the model's length.

    Its blocks have no place in the block table then: a GPU writes into other memory.
    """
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    execute = GPUModelRunner.execute_model

    @wraps(execute)
    def execute_model(self: Any, step: Any, *args: Any, **kwargs: Any) -> Any:
        known = step.scheduled_cached_reqs
        computed = dict(zip(known.req_ids, known.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        for name, rows in step.num_scheduled_tokens.items():
            length = computed.get(name, 0) + rows  # dummies start at 0
            if length > self.max_model_len:
                errors.append(f"{name} has {length} tokens, max_model_len is {self.max_model_len}")
        return execute(self, step, *args, **kwargs)

    GPUModelRunner.execute_model = execute_model


def _prompts(engine: Any, case: Case) -> list[list[int]]:
    """Token ids; long ones repeat the prompt, up to lengths of their own."""
    encoded = [engine.get_tokenizer().encode(prompt) for prompt in PROMPTS]
    if not case.long:
        return encoded
    return [(ids * case.long)[: case.long - 5 * i] for i, ids in enumerate(encoded)]


def _second_turns(
    engine: Any, prompts: list[dict[str, Any]], answers: list[list[int]], params: Any
) -> tuple[list[list[int]], list[int]]:
    """Continue every text. Returns the tokens, and how many of each prompt were cached."""
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = prompt["prompt_token_ids"]
        engine.add_request(f"next-{i}", {"prompt_token_ids": ids + answer + ids[:4]}, params)
    outputs: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    found = [outputs[f"next-{i}"] for i in range(len(prompts))]
    return [list(x.outputs[0].token_ids) for x in found], [x.num_cached_tokens for x in found]


def _join(
    engine: Any, prompts: list[dict[str, Any]], params: Any, length: int
) -> tuple[list[list[int]], bool]:
    """A prompt of `length` tokens joins a request that decodes.

    Returns their tokens, and whether that step replayed a graph of the target.
    """
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

    replays = []

    def counted(replay: Any) -> Any:
        @wraps(replay)
        def run(*args: Any) -> Any:
            replays.append(replay)
            return replay(*args)

        return run

    for name in ("run_fullgraph", "run_pw_graph"):
        setattr(ModelCudaGraphManager, name, counted(getattr(ModelCudaGraphManager, name)))
    ids = [token for prompt in prompts for token in prompt["prompt_token_ids"]]
    engine.add_request("decodes", prompts[0], params)
    for _ in range(3):
        engine.step()
    engine.add_request("joins", {"prompt_token_ids": (length * ids)[:length]}, params)
    replays.clear()
    outputs = engine.step()
    in_graph = bool(replays)
    while engine.has_unfinished_requests():
        outputs += engine.step()
    tokens = {output.request_id: list(output.outputs[0].token_ids) for output in outputs}
    return [tokens["decodes"], tokens["joins"]], in_graph


def _adapters(folder: Path) -> list[Any]:
    """One for each of the first two prompts."""
    from vllm.lora.request import LoRARequest

    target = str(TINY / "target")
    paths = [make_adapter(target, folder / name, seed) for seed, name in enumerate("ab", 1)]
    return [LoRARequest(Path(path).name, i, path) for i, path in enumerate(paths, 1)]


def _waiting(kind: str) -> tuple[bool, str]:
    """Whether this plugin asked for a wait, and where."""
    for frame in reversed(traceback.extract_stack()):
        name = frame.filename.replace("\\", "/")
        if "/vllm_bastion/" in name or "/bastion_kernels/" in name or "/vllm/" in name:
            ours = "/vllm/" not in name.rpartition("site-packages")[2]
            short = name.rpartition("site-packages/")[2].rpartition("/")[2]
            return ours, f"{short}:{frame.lineno} {frame.name} ({kind})"
    return False, f"elsewhere ({kind})"
