# SPDX-License-Identifier: Apache-2.0
"""Numbers for the fake GPU: a CPU computes what a launch, which does nothing, should have computed.

Device memory is host memory, so a CPU tensor can alias a CUDA tensor. Every operator and kernel is
launched as on a GPU, where the driver checks it, and becomes a *job*: a closure over aliases that
computes the same. A job runs at once, or, while a stream is captured, becomes a node of the graph
and runs with each replay, over the buffers of the capture.

    ATen                 the same operator on the aliases; products of half precision in float64
    vLLM's C++ kernels   `arithmetic`; FlashAttention and prompts of gated delta layers too
    our ops              their references
    other Triton         Triton's interpreter
"""

from __future__ import annotations

import collections
import contextlib
import copy
import ctypes
import dataclasses
import functools
import importlib
import pkgutil
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from tests.interpreter import keep_masks_boolean
from tests.rehearsal import arithmetic, lora
from tests.rehearsal.device import FakeDriver

# Operators without numbers of their own: memory, metadata and real copies of the driver.
_NO_NUMBERS = {
    "_local_scalar_dense", "record_stream", "is_pinned", "_pin_memory", "pin_memory", "detach",
    "set_", "resize_", "get_scheduler_metadata", "weak_ref_tensor",
}  # fmt: skip
# Their output's size depends on numbers, so they make the host wait and cannot be captured.
_SIZED_BY_NUMBERS = {
    "nonzero", "masked_select", "unique", "_unique2", "unique_consecutive", "repeat_interleave",
}  # fmt: skip
_HALF = (torch.float16, torch.bfloat16)


class Emulation:
    """Computes what this process launches; one per process, installed before vLLM is imported.

    Args:
        driver: the fake driver.
        interpret: also run the plugin's own kernels in the interpreter, not their references.
    """

    def __init__(self, driver: FakeDriver, interpret: bool = False) -> None:
        self._driver, self._interpret = driver, interpret
        self._jobs: list[tuple[str, Callable[[], None]]] = []
        self._storages: dict[tuple[int, int], Any] = {}
        self._generators: dict[torch.Generator, torch.Generator] = {}
        self._custom_ops: dict[str, Callable[..., Any]] = {}
        self._depth_without = 0
        # Whether numbers are computed: not during profiling runs, which would only take time.
        self.running = True
        self.missing: collections.Counter[str] = collections.Counter()
        self.seconds: collections.Counter[str] = collections.Counter()
        self.errors: list[str] = []

    def install(self) -> None:
        """Patch PyTorch, Triton, vLLM and the ops package."""
        self._driver.on_node(self._replay)
        self._patch_custom_ops()
        self._patch_triton()
        if not self._interpret:
            self._patch_our_ops()
        self._patch_vllm()
        _Dispatch(self).__enter__()

    # ---- jobs -----------------------------------------------------------------------------------

    def add(self, name: str, job: Callable[[], None]) -> None:
        """Run a job, or append it to the graph being captured."""
        if torch._C._cuda_isCurrentStreamCapturing():
            self._jobs.append((name, job))
            stream = torch.cuda.current_stream().cuda_stream
            self._driver.add_node(stream, len(self._jobs) - 1)
        elif self.running:
            self._run(name, job)

    def _replay(self, node: int) -> None:
        if self.running:
            self._run(*self._jobs[node])

    def _run(self, name: str, job: Callable[[], None]) -> None:
        begin = time.perf_counter()
        try:
            with _disable_current_modes(), torch.inference_mode():
                job()
        except Exception as error:  # a callback of the driver could not raise
            self.errors.append(f"{name}: {type(error).__name__}: {error}")
            raise
        finally:
            self.seconds[name] += time.perf_counter() - begin

    @property
    def wanted(self) -> bool:
        """Whether a launch becomes a job now."""
        now = self.running or torch._C._cuda_isCurrentStreamCapturing()
        return not self._depth_without and now

    @contextlib.contextmanager
    def without(self) -> Iterator[None]:
        """Launch only: the caller adds one job for all that is launched inside."""
        self._depth_without += 1
        try:
            yield
        finally:
            self._depth_without -= 1

    # ---- aliases --------------------------------------------------------------------------------

    def alias(self, x: Any) -> Any:
        """`x` with CPU tensors over the memory of its CUDA tensors; containers are copied."""
        if isinstance(x, torch.Tensor):
            return self._alias_tensor(x) if x.is_cuda else x
        if isinstance(x, torch.device):
            return torch.device("cpu")
        if isinstance(x, torch.Generator):
            return self._generators.setdefault(x, torch.Generator().manual_seed(x.initial_seed()))
        if type(x).__module__.partition(".")[0] == "bastion_kernels":
            # What ops take besides tensors: a step, a layer, the states of all layers.
            made, slots = copy.copy(x), dataclasses.is_dataclass(x)
            names = [field.name for field in dataclasses.fields(x)] if slots else vars(x)
            for name in list(names):
                # A frozen dataclass refuses setattr.
                object.__setattr__(made, name, self.alias(getattr(x, name)))
            return made
        if isinstance(x, (tuple, list, dict)):
            return tree_map(lambda leaf: leaf if leaf is x else self.alias(leaf), x)
        return x

    def _alias_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes():
            tensor = tensor.detach()
            storage = tensor.untyped_storage()
            size, address = storage.nbytes(), storage.data_ptr()
            if size == 0 or address == 0:
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            if (address, size) not in self._storages:
                memory = (ctypes.c_char * size).from_address(address)
                held = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
                self._storages[address, size] = held
            place = (tensor.storage_offset(), tensor.size(), tensor.stride())
            return torch.empty(0, dtype=tensor.dtype).set_(self._storages[address, size], *place)

    # ---- PyTorch's operators --------------------------------------------------------------------

    def dispatch(self, mode: TorchDispatchMode, func: Any, args: Any, kwargs: Any) -> Any:
        qualified = func._schema.name
        library, _, name = qualified.partition("::")
        if qualified in self._custom_ops:
            with mode:
                return self._custom_ops[qualified](*args, **kwargs)
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        on_device = any(x.is_cuda for x in given)
        capturing = torch._C._cuda_isCurrentStreamCapturing()
        if name in _SIZED_BY_NUMBERS and on_device and self.running and not capturing:
            found = func(*self.alias(args), **self.alias(kwargs))
            return tree_map(lambda x: x.cuda() if isinstance(x, torch.Tensor) else x, found)
        out = func(*args, **kwargs)
        if not self.wanted:
            return out
        made = [x for x in tree_flatten(out)[0] if isinstance(x, torch.Tensor)]
        writes = any(a.alias_info and a.alias_info.is_write for a in func._schema.arguments)
        if not self._computes(name, args, given, made, writes):
            return out
        compute = self._computation(library, name, func, given)
        if compute is None:
            self.missing[qualified] += 1
            return out
        call_args, call_kwargs = self.alias(args), self.alias(kwargs)
        call_kwargs.pop("pin_memory", None)
        targets = [self.alias(x) for x in made if x.is_cuda]

        def job() -> None:
            found = compute(*call_args, **call_kwargs)
            if not writes:
                results = [x for x in tree_flatten(found)[0] if isinstance(x, torch.Tensor)]
                for target, result in zip(targets, results, strict=True):
                    target.copy_(result)

        self.add(qualified, job)
        return out

    @staticmethod
    def _computes(name: str, args: Any, given: list[Any], made: list[Any], writes: bool) -> bool:
        """Whether an operator's launch leaves numbers on the device that a job must compute."""
        if not any(x.is_cuda for x in given + made):
            return False
        if name.startswith(("empty", "new_empty")) or name in _NO_NUMBERS:
            return False
        if name == "copy_":  # with the host: the driver's own copy
            return bool(args[0].is_cuda and args[1].is_cuda)
        if writes:
            return True
        if made and not any(x.is_cuda for x in made):
            return False  # to the host: the driver's own copy
        if name == "_to_copy" and not any(x.is_cuda for x in given):
            return False  # from the host
        memory = {x.untyped_storage().data_ptr() for x in given if x.untyped_storage().nbytes()}
        is_view = made and all(x.untyped_storage().data_ptr() in memory for x in made)
        return not is_view

    @staticmethod
    def _computation(
        library: str, name: str, func: Any, given: list[Any]
    ) -> Callable[..., Any] | None:
        if library == "aten" and name in arithmetic.PRODUCTS and given[0].dtype in _HALF:
            return arithmetic.PRODUCTS[name]
        if library in ("aten", "prims", "vllm_ir"):
            return func  # type: ignore[no-any-return]
        return arithmetic.KERNELS.get(name)

    def _patch_custom_ops(self) -> None:
        """Run vLLM's Python operators as Python, so that what they launch is seen."""
        import vllm.utils.torch_utils as module

        original = module.direct_register_custom_op

        def register(op_name: str, op_func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._custom_ops[f"vllm::{op_name}"] = op_func
            return original(op_name, op_func, *args, **kwargs)

        for loaded in list(sys.modules.values()):
            if getattr(loaded, "direct_register_custom_op", None) is original:
                loaded.direct_register_custom_op = register

    # ---- Triton ---------------------------------------------------------------------------------

    def _patch_triton(self) -> None:
        import triton.language as tl
        from triton.runtime import interpreter
        from triton.runtime.autotuner import Autotuner
        from triton.runtime.jit import JITFunction

        # By the driver's clock a launch takes no time, so that timing one would never end.
        Autotuner._bench = lambda tuner, *args, config, **meta: [1.0, 1.0, 1.0]
        keep_masks_boolean()
        _interpret_dependent_launches()
        interpreted: dict[int, Any] = {}
        run = JITFunction.run
        both_modules = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

        def interpreted_function(kernel: Any) -> Any:
            if id(kernel) not in interpreted:
                _interpret_imported_builtins(kernel.fn.__globals__)
                interpreted[id(kernel)] = interpreter.InterpretedFunction(kernel.fn)
            return interpreted[id(kernel)]

        def call(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            # A function that an interpreted kernel calls.
            return interpreted_function(kernel).rewrite()(*args, **kwargs)

        def interpret(function: Any, grid: Any, args: Any, kwargs: Any) -> None:
            # Once for a kernel and all functions that it calls, which takes most of the time.
            scope = interpreter._patch_lang(both_modules)
            try:
                function.run(*args, grid=grid, warmup=False, **kwargs)
            finally:
                scope.restore()

        def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            out = run(kernel, *args, grid=grid, warmup=warmup, **kwargs)
            if self.wanted and not warmup:
                function = interpreted_function(kernel)
                given = self.alias(args), self.alias(kwargs)
                self.add(f"triton:{kernel.fn.__name__}", lambda: interpret(function, grid, *given))
            # A bound op would launch it, and nothing would compute the numbers.
            return None if self._interpret else out

        JITFunction.__call__ = call
        JITFunction.run = launch

    # ---- our ops --------------------------------------------------------------------------------

    def _patch_our_ops(self) -> None:
        """Under every name that the package's modules import them by."""
        import bastion_kernels
        from tests.references import OF

        found = pkgutil.walk_packages(bastion_kernels.__path__, "bastion_kernels.")
        modules = [bastion_kernels, *(importlib.import_module(module.name) for module in found)]
        for name, op in declared_ops().items():
            wrapped = self._op(name, op, OF[name])
            for module in modules:
                for attribute, value in list(vars(module).items()):
                    if value is op:
                        setattr(module, attribute, wrapped)
        self._patch_attention()

    def _patch_attention(self) -> None:
        """A layer is called with a step: two objects that hold the tensors."""
        from bastion_kernels import AttentionLayer
        from tests.references import tree_attention

        attend = AttentionLayer.__call__

        def call(layer: Any, step: Any, query: torch.Tensor, out: torch.Tensor) -> None:
            if not (query.is_cuda and self.wanted):
                attend(layer, step, query, out)
                return
            with self.without():
                attend(layer, step, query, out)
            given = self.alias((dataclasses.replace(step, workspaces=None), query, out))
            layer = self.alias(layer)
            self.add("op:AttentionLayer", lambda: tree_attention(layer, *given))

        AttentionLayer.__call__ = call

    def _op(self, name: str, op: Any, reference: Callable[..., None]) -> Callable[..., None]:
        def run(launch: Callable[[], None], args: Any, kwargs: Any) -> None:
            given = tree_flatten((args, kwargs))[0]
            on_device = any(isinstance(x, torch.Tensor) and x.is_cuda for x in given)
            if not (on_device and self.wanted):
                launch()
                return
            with self.without():
                launch()
            call_args, call_kwargs = self.alias(args), self.alias(kwargs)
            self.add(f"op:{name}", lambda: reference(*call_args, **call_kwargs))

        def call(*args: Any, **kwargs: Any) -> None:
            run(lambda: op(*args, **kwargs), args, kwargs)

        def bind(**kept: Any) -> Callable[..., None]:
            bound = op.bind(**kept)

            def call_bound(*args: Any) -> None:
                run(lambda: bound(*args), (), kept | dict(zip(bound.changing, args)))

            return call_bound

        call.__name__ = name  # by which a benchmark finds the reference
        call.triton, call.bind = call, bind  # type: ignore[attr-defined]
        return call

    # ---- vLLM -----------------------------------------------------------------------------------

    def _patch_vllm(self) -> None:
        from vllm.model_executor.layers import logits_processor
        from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn
        from vllm.model_executor.models import registry
        from vllm.v1.attention.backends import flash_attn
        from vllm.v1.sample.ops import topk_topp_sampler
        from vllm.v1.worker.gpu_worker import Worker

        flash, measure = flash_attn.flash_attn_varlen_func, Worker.determine_available_memory
        initialize = Worker.initialize_from_config
        filtered = topk_topp_sampler.apply_top_k_top_p_triton
        prompts = qwen_gdn_linear_attn.fla_chunk_gated_delta_rule
        convolution = qwen_gdn_linear_attn.causal_conv1d_fn

        def attend(**kwargs: Any) -> Any:
            with _disable_current_modes():
                out = flash(**kwargs)
            given = self.alias(kwargs)
            self.add("flash_attn", lambda: arithmetic.varlen_attention(**given))
            return out

        def filter_logits(logits: Any, k: Any, p: Any, *args: Any, **kwargs: Any) -> Any:
            with self.without():
                out = filtered(logits, k, p, *args, **kwargs)
            given, target = self.alias((logits, k, p)), self.alias(out)

            def job() -> None:
                usual = topk_topp_sampler.apply_top_k_top_p_pytorch
                target.copy_(usual(given[0].clone(), *given[1:], allow_cpu_sync=True))

            self.add("top_k_top_p", job)
            return out

        def convolve(x: Any, weight: Any, bias: Any, **kwargs: Any) -> Any:
            with self.without():
                out = convolution(x, weight, bias, **kwargs)
            names = ("conv_states", "query_start_loc", "cache_indices", "has_initial_state")
            given = self.alias({name: kwargs[name] for name in names})
            rows, target = self.alias((x, weight, bias)), self.alias(out)
            self.add(
                "causal_conv1d", lambda: target.copy_(arithmetic.causal_conv1d(*rows, **given))
            )
            return out

        def recurrence(**kwargs: Any) -> Any:
            with self.without():
                out = prompts(**kwargs)
            names = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")
            given, targets = self.alias({name: kwargs[name] for name in names}), self.alias(out)

            def job() -> None:
                for target, result in zip(targets, arithmetic.chunk_gated_delta_rule(**given)):
                    target.copy_(result)

            self.add("chunk_gated_delta_rule", job)
            return out

        def determine_available_memory(worker: Any) -> Any:
            # Weights are loaded with numbers; profiling and warm-up runs go without, until `engine`
            # turns them on again.
            self.running = False
            return measure(worker)

        def initialize_from_config(worker: Any, *args: Any, **kwargs: Any) -> None:
            # What is allocated here is also filled here, and used by every step.
            self.running = True
            initialize(worker, *args, **kwargs)
            self.running = False

        flash_attn.flash_attn_varlen_func = attend
        sys.modules["vllm.vllm_flash_attn"].flash_attn_varlen_func = attend
        topk_topp_sampler.apply_top_k_top_p_triton = filter_logits
        qwen_gdn_linear_attn.fla_chunk_gated_delta_rule = recurrence
        qwen_gdn_linear_attn.causal_conv1d_fn = convolve
        # It would compile its top-k first, for which there is no compiler here.
        logits_processor._flashinfer_topk = lambda: None
        # Otherwise a new process imports vLLM to look at each model's class.
        registry._run_in_subprocess = lambda look: look()
        Worker.determine_available_memory = determine_available_memory
        Worker.initialize_from_config = initialize_from_config
        lora.patch(self)


def declared_ops() -> dict[str, Any]:
    """Every op of the ops package."""
    import bastion_kernels
    from bastion_kernels.op import PublicOp

    return {name: op for name, op in vars(bastion_kernels).items() if isinstance(op, PublicOp)}


class _Dispatch(TorchDispatchMode):
    def __init__(self, emulation: Emulation) -> None:
        super().__init__()
        self._emulation = emulation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._emulation.dispatch(self, func, args, kwargs or {})


def _interpret_dependent_launches() -> None:
    """Let the interpreter pass over the waits of programmatic dependent launches (sm_90)."""
    from triton.language.extra import cuda

    for name in ("gdc_wait", "gdc_launch_dependents"):
        setattr(cuda, name, _in_both_modes(getattr(cuda, name), lambda: None))


def _interpret_imported_builtins(names: dict[str, Any]) -> None:
    """Let the interpreter find builtins that a module imports, as in `exp = tl.exp`.

    It replaces only the attributes of Triton's own modules.
    """
    import triton.language as tl

    for name, value in list(names.items()):
        if tl.core.is_builtin(value) and getattr(tl, value.__name__, None) is value:

            def interpreted(*args: Any, own: str = value.__name__, **kwargs: Any) -> Any:
                return getattr(tl, own)(*args, **kwargs)

            names[name] = _in_both_modes(value, interpreted)


def _in_both_modes(builtin: Any, interpreted: Callable[..., Any]) -> Any:
    """A builtin that also runs without the compiler's `_semantic` argument."""
    from triton.language.core import TRITON_BUILTIN

    @functools.wraps(builtin)
    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        if _semantic is None:
            return interpreted(*args, **kwargs)
        return builtin(*args, _semantic=_semantic, **kwargs)

    setattr(call, TRITON_BUILTIN, True)
    return call
