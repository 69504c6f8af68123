# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs for an engine on the CPU.

A captured graph is a list of launches with their arguments. A replay runs no Python and sees no new
tensor or number, only the current content of the same buffers. A `Tape` behaves this way for
PyTorch's operators and for Triton kernels in the interpreter. Like a capture, it refuses work whose
size or control flow the host would have to read from the device. vLLM's own graph managers capture
and replay with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

# Operators that make the host wait for the device, which is an error in a capture.
_SYNCHRONISES = ("item", "_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")
_recording: Tape | None = None


class Tape(TorchDispatchMode):
    """Replaces `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        super().__init__()
        self._launches: list[Callable[[], Any]] = []
        self.kernels: set[str] = set()
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        with torch.inference_mode():
            for launch in self._launches:
                launch()

    def add(self, name: str, launch: Callable[[], Any]) -> Any:
        """Record and run a kernel's launch, which writes only to its arguments."""
        self.kernels.add(name)
        self._launches.append(launch)
        with _disable_current_modes():
            return launch()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        masks = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name in _SYNCHRONISES or masks:
            raise RuntimeError(f"{func} makes the host wait while a graph is captured")
        out = func(*args, **kwargs)
        if name.startswith(("empty", "new_empty")):
            return out  # uninitialised memory
        if any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments):
            self._launches.append(lambda: func(*args, **kwargs))
            return out
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        made = tree_flatten(out)[0]
        if all(one.untyped_storage().data_ptr() in given for one in made):
            return out  # a view: the same memory

        def again() -> None:
            fresh = tree_flatten(func(*args, **kwargs))[0]
            for old, new in zip(made, fresh, strict=True):
                old.copy_(new)

        self._launches.append(again)
        return out


@contextmanager
def capture(graph: Tape, *_: Any, **__: Any) -> Iterator[None]:
    """Replaces `torch.cuda.graph`."""
    global _recording
    _recording = graph
    try:
        with graph:
            yield
    finally:
        _recording = None


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that represents one kernel: its inner operators are not recorded."""

    def launch(*args: Any, **kwargs: Any) -> Any:
        if _recording is None:
            return function(*args, **kwargs)
        name = getattr(args[0], "fn", function).__name__ if args else function.__name__
        return _recording.add(name, lambda: function(*args, **kwargs))

    return launch


def replays(session: Any) -> list[dict[str, Any]]:
    """A probe: the graphs of target and drafter, and how often each was replayed."""
    runner = session.runner
    managers = {
        "target": runner.cudagraph_manager,
        "drafter": runner.speculator.query_cudagraph_manager,
    }
    return [
        {
            "of": name,
            "rows": description.num_tokens,
            "replays": graph.replays,
            "kernels": sorted(graph.kernels),
        }
        for name, manager in managers.items()
        for description, graph in manager.graphs.items()
    ]


def install() -> None:
    """Let engines of this process use the configured `cudagraph_mode`."""
    from triton.runtime.interpreter import GridExecutor
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu import cudagraph_utils, model_runner

    check = CpuPlatform.check_and_update_config.__func__
    measure_memory = CPUWorker.determine_available_memory
    warm_up = CPUWorker.compile_or_warm_up_model

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        sizes = vllm_config.compilation_config.cudagraph_capture_sizes
        check(cls, vllm_config)
        vllm_config.compilation_config.cudagraph_capture_sizes = sizes

    # As in the GPU worker: graphs are captured once to measure their memory, with a temporary KV
    # cache, and then captured again.
    def determine_available_memory(self: Any) -> Any:
        available = measure_memory(self)
        self.model_runner.profile_cudagraph_memory()
        return available

    def compile_or_warm_up_model(self: Any) -> Any:
        times = warm_up(self)
        self.model_runner.capture_model()
        return times

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    CPUWorker.determine_available_memory = determine_available_memory
    CPUWorker.compile_or_warm_up_model = compile_or_warm_up_model
    CpuPlatform.support_static_graph_mode = classmethod(lambda cls: True)
    # A layer then calls its attention directly, and the tape records its launches.
    CpuPlatform.opaque_attention_op = classmethod(lambda cls: False)
    CpuPlatform.get_global_graph_pool = classmethod(lambda cls: None)
    CpuPlatform.graph_pool_handle = classmethod(lambda cls: None)
    GridExecutor.__call__ = kernel(GridExecutor.__call__)
    cudagraph_utils.capture_pool = lambda *args: nullcontext()
    cudagraph_utils.graph_capture = lambda device: nullcontext()
    cudagraph_utils.current_stream = lambda: None
    model_runner.lock_workspace = lambda: None
    torch.cuda.CUDAGraph = Tape
    torch.cuda.graph = capture
    torch.cuda.is_current_stream_capturing = lambda: _recording is not None
    torch.accelerator.empty_cache = lambda: None
    torch.accelerator.get_memory_info = lambda: (0, 0)
