# SPDX-License-Identifier: Apache-2.0
"""Drive one vLLM engine in this process step by step, and record what its steps verified.

`Session(spec)` builds the engine; `run(batch)` decodes requests. Both take and return JSON values,
so that results can be stored. Use one session per process.
"""

from __future__ import annotations

import time
from pkgutil import resolve_name
from typing import Any

import torch
from vllm import LLM
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.v1.metrics.reader import Counter, Vector

from benchmarks.harness.engine import sampling_params
from benchmarks.harness.steps import reported_nodes
from tests.e2e import costs

_METRICS = ("spec_decode", "num_preemptions", "prefix_cache_hits", "bastion")
# Labels that every metric has.
_COMMON_LABELS = ("model_name", "engine")
# A step may have nothing to run while a grammar is compiled in the background.
_MAX_IDLE_S = 120.0


def allow_async_scheduling() -> None:
    """Keep `async_scheduling` as configured; vLLM's CPU platform switches it off."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def fill_profiled_attention() -> None:
    """Zero the output of vLLM's CPU attention when it has no metadata; vLLM leaves it unwritten.

    It may be NaN when a compiled engine profiles its memory, and then the interpreter's sampling
    kernel fails. An engine with method "bastion" must not need this.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    original = CPUAttentionBackendImpl.forward

    names = ("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = dict(zip(names, args)) | kwargs
        if given["attn_metadata"] is None:
            return given["output"].fill_(0)
        return original(*args, **kwargs)

    CPUAttentionBackendImpl.forward = forward


class Session:
    """An engine and its counters.

    Args:
        spec: `engine`, keyword arguments of `LLM`; optional `setup`, a list of `module:function`
            called before the engine is built; optional `costs`, its step costs; optional `probe`,
            `module:function` called with the session after every engine step of a batch, which
            returns a list to be collected.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        if not torch.cuda.is_available():
            allow_async_scheduling()
            if spec["engine"].get("speculative_config", {}).get("method") != "bastion":
                fill_profiled_attention()
        for name in spec.get("setup", ()):
            resolve_name(name)()
        costs.install(spec)
        self.llm = LLM(**spec["engine"])
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.runner = self.core.model_executor.driver_worker.worker.model_runner
        self.forwards = 0
        self.batch_sizes: list[int] = []  # requests of every forward
        # Every verified tree: its request, its root's position in the request, its number of nodes
        # and the accepted path.
        self.trees: list[tuple[str, int, int, list[int]]] = []
        # For every step with trees, nodes by request: counted on the device, and as reported to the
        # scheduler.
        self.counted: list[dict[str, int]] = []
        self.reported: list[dict[str, int]] = []
        self._steps: list[tuple[list[str], torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._results: dict[str, dict[str, Any]] = {}
        self._count_forwards()
        self._record_trees()
        self._record_reports()
        self._probe = resolve_name(spec["probe"]) if "probe" in spec else None

    def _count_forwards(self) -> None:
        execute = self.runner.execute_model

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if scheduler_output.total_num_scheduled_tokens > 0:
                self.forwards += 1
                self.batch_sizes.append(len(scheduler_output.num_scheduled_tokens))
            return execute(scheduler_output, *args, **kwargs)

        self.runner.execute_model = execute_model

    def _record_trees(self) -> None:
        """Record what was verified, from the target's batch and not the plugin's report."""
        state = self.runner.model_state
        trees = getattr(state, "trees", None)
        if trees is None:
            return
        postprocess = state.postprocess_state

        def postprocess_state(*args: Any, **kwargs: Any) -> None:
            batch = state.runtime.step.batch
            # Count on the device (the root is a row too) and read it after the batch, so that the
            # host stays as far ahead of the device as in production.
            verified = batch.cu_num_logits.diff()[: batch.num_reqs] - 1
            first = batch.logits_indices[batch.cu_num_logits[: batch.num_reqs]]
            path = trees.path[: batch.num_reqs].clone()
            self._steps.append((batch.req_ids, batch.positions[first], verified, path))
            postprocess(*args, **kwargs)

        state.postprocess_state = postprocess_state

    def _record_reports(self) -> None:
        """Record the node counts that each step reports to the scheduler."""
        update = self.scheduler.update_from_output

        def update_from_output(scheduler_output: Any, runner_output: Any) -> Any:
            verified = reported_nodes(runner_output) or {}
            nodes = {_plain_id(name): count for name, count in verified.items() if count}
            if nodes:
                self.reported.append(nodes)
            return update(scheduler_output, runner_output)

        self.scheduler.update_from_output = update_from_output

    def read_steps(self) -> None:
        steps, self._steps = self._steps, []
        for names, *parts in steps:
            rows = zip(map(_plain_id, names), *(part.tolist() for part in parts), strict=True)
            step = [
                (name, root, nodes, [node for node in path if node >= 0])
                for name, root, nodes, path in rows
                if nodes > 0
            ]
            self.trees += step
            if step:
                self.counted.append({name: nodes for name, _, nodes, _ in step})

    def info(self) -> dict[str, Any]:
        return {
            "scheduler": type(self.scheduler).__name__,
            "speculator": type(self.runner.speculator).__name__,
        }

    def free_blocks(self) -> int:
        """KV blocks that no request holds; cached prefixes count as free."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def metrics(self) -> dict[str, Any]:
        """vLLM's counters, without the prefix `vllm:`; per-position counters are lists.

        Values of further labels are appended to the name, with a slash each.
        """
        out: dict[str, Any] = {}
        for metric in self.llm.get_metrics():
            own = [v for k, v in metric.labels.items() if k not in _COMMON_LABELS]
            name = "/".join([metric.name.removeprefix("vllm:"), *own])
            if any(part in name for part in _METRICS):
                if isinstance(metric, Counter):
                    out[name] = metric.value
                elif isinstance(metric, Vector):
                    out[name] = list(metric.values)
        return out

    def run(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Decode all requests of a batch.

        Args:
            batch: `requests`, a list of {`id`, `prompt` (text or token ids), `params`} with
                optional `arrive` (engine step at which it is added, default 0), `abort_after`
                (tokens after which it is aborted), `follow` ({`id`, `tokens`}: use that earlier
                request's prompt and its first `tokens` tokens as the prompt), `images` ([height,
                width] of each image that token ids have a place for), `cache_salt` (with token ids)
                and `lora` ([name, number, folder] of an adapter).
        """
        before, forwards = self.metrics(), self.forwards
        free_before = self.free_blocks()
        self.trees, self.counted, self.reported, self._steps = [], [], [], []
        probed: list[Any] = []
        waiting = sorted(batch["requests"], key=lambda request: request.get("arrive", 0))
        abort_after = {r["id"]: r["abort_after"] for r in waiting if "abort_after" in r}
        results: dict[str, dict[str, Any]] = {}
        step, active = 0, time.monotonic()
        while waiting or self.engine.has_unfinished_requests():
            while waiting and waiting[0].get("arrive", 0) <= step:
                self._add(waiting.pop(0), results)
            outputs = self.engine.step()
            for output in outputs:
                result = results[output.request_id]
                _update(output, result)
                limit = abort_after.get(output.request_id)
                if limit is not None and not output.finished and len(result["token_ids"]) >= limit:
                    self.engine.abort_request([output.request_id])
                    result["finish_reason"] = "abort"
                    del abort_after[output.request_id]
            if self._probe is not None:
                probed += self._probe(self)
            step += 1
            if outputs or waiting:
                active = time.monotonic()
            elif time.monotonic() - active > 0.05:
                time.sleep(0.005)
                assert time.monotonic() - active < _MAX_IDLE_S, "the engine makes no progress"
        self.drain()
        self.read_steps()
        return {
            "requests": results,
            "forwards": self.forwards - forwards,
            "batch_sizes": self.batch_sizes[forwards:],
            "path_requests": [name for name, *_ in self.trees],
            "roots": [root for _, root, *_ in self.trees],
            "verified": [nodes for *_, nodes, _ in self.trees],
            "paths": [path for *_, path in self.trees],
            "counted": self.counted,
            "reported": self.reported,
            "probed": probed,
            "metrics": _difference(self.metrics(), before),
            "free_blocks": [free_before, self.free_blocks()],
        }

    def drain(self) -> None:
        while self.scheduler.has_requests() or self.core.batch_queue:
            self.core.step_fn()

    def _add(self, request: dict[str, Any], results: dict[str, dict[str, Any]]) -> None:
        prompt = request["prompt"]
        if "follow" in request:
            earlier = self._results[request["follow"]["id"]]
            made = earlier["token_ids"][: request["follow"]["tokens"]]
            prompt = earlier["prompt_token_ids"] + made
        if not isinstance(prompt, str):
            prompt = {"prompt_token_ids": prompt}
            if "cache_salt" in request:
                prompt["cache_salt"] = request["cache_salt"]
            if "images" in request:
                prompt["multi_modal_data"] = {"image": list(map(_image, request["images"]))}
        result = {"token_ids": [], "chunks": [], "text": "", "finish_reason": None, "error": None}
        results[request["id"]] = self._results[request["id"]] = result
        more = {"lora_request": LoRARequest(*request["lora"])} if "lora" in request else {}
        try:
            params = sampling_params(request["params"])
            self.engine.add_request(request["id"], prompt, params, **more)
        except (ValueError, VLLMValidationError) as error:
            result["error"] = str(error)


def _image(size: list[int]) -> Any:
    """An RGB image of noise, [height, width]; the same for the same size."""
    from PIL import Image

    generator = torch.Generator().manual_seed(size[0] * 10_000 + size[1])
    pixels = torch.randint(256, (*size, 3), dtype=torch.uint8, generator=generator)
    return Image.fromarray(pixels.numpy())


def _plain_id(name: str) -> str:
    """A request's id without the random suffix that vLLM adds."""
    return name.rsplit("-", 1)[0]


def _update(output: Any, result: dict[str, Any]) -> None:
    """Copy a RequestOutput into `result`; `chunks` are the tokens of each step."""
    for completion in output.outputs:
        if completion.index:  # another one of `n` samples
            others = result.setdefault("samples", {})
            others[str(completion.index)] = list(completion.token_ids)
    completion = output.outputs[0]
    if completion.index:
        return
    new = len(completion.token_ids) - len(result["token_ids"])
    if new:
        result["chunks"].append(new)
    result |= {
        "token_ids": list(completion.token_ids),
        "prompt_token_ids": list(output.prompt_token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "cached_tokens": output.num_cached_tokens,
    }
    if completion.spec_decode_metrics is not None:
        result["spec_decode_metrics"] = completion.spec_decode_metrics.to_dict()
    logprobs = {"logprobs": completion.logprobs, "prompt_logprobs": output.prompt_logprobs}
    for key, found in logprobs.items():
        if found is not None:  # the first position of a prompt has no log-probabilities
            result[key] = [
                {str(token): entry.logprob for token, entry in (position or {}).items()}
                for position in found
            ]


def _difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in after.items():
        if isinstance(value, list):
            old = before.get(name, [0] * len(value))
            out[name] = [a - b for a, b in zip(value, old, strict=True)]
        else:
            out[name] = value - before.get(name, 0)
    return out
