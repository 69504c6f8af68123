# SPDX-License-Identifier: Apache-2.0
"""What this plugin has changed in an engine's process, found by looking at everything.

`survey` is a probe of a `Session`. After the last step it looks through every module and class of
vLLM, PyTorch and Triton, and every object of such a class. A value is ours if it, or what it wraps,
or an item of it, comes from a module of ours.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

OURS = ("vllm_bastion", "bastion_kernels")
THEIRS = ("vllm", "torch", "triton", "sys", "importlib")
# Of every class or module, made by Python itself.
_OF_PYTHON = {
    "__dict__", "__weakref__", "__annotations__", "__doc__", "__module__", "__spec__",
    "__loader__", "__file__", "__cached__", "__builtins__", "__path__", "__all__",
}  # fmt: skip


def _root(name: Any) -> str:
    return name.partition(".")[0] if isinstance(name, str) else ""


def _function(value: Any) -> Any:
    """The plain function in a property, method, partial, decorated or compiled function."""
    for _ in range(8):
        inner = None
        if isinstance(value, property):
            inner = value.fget
        elif isinstance(value, (staticmethod, classmethod, MethodType)):
            inner = value.__func__
        elif isinstance(value, functools.partial):
            inner = value.func
        elif type(value).__module__.startswith("numba"):
            inner = inspect.getattr_static(value, "py_func", None)
        if inner is None:
            break
        value = inner
    return value


def is_ours(value: Any, items: bool = True) -> bool:
    """Whether a value comes from this plugin; see the module docstring."""
    value = _function(value)
    if isinstance(value, FunctionType):
        # The file, because functools.wraps copies the name of the original's module.
        return any(f"/{name}/" in value.__code__.co_filename for name in OURS)
    if isinstance(value, type):
        return _root(value.__module__) in OURS
    if isinstance(value, ModuleType):
        return False
    if _root(type(value).__module__) in OURS:
        return True
    if not items:
        return False
    if type(value) is dict:
        if not all(isinstance(key, str) for key in list(value)):
            return False  # a cache
        return any("BASTION" in key or is_ours(one, False) for key, one in list(value.items()))
    if type(value) in (list, tuple, set, frozenset):
        return any(is_ours(one, False) for one in list(value))
    return False


def holders() -> Iterator[tuple[str, Any]]:
    """Every loaded module and class of theirs, as `module` or `module:Class`."""
    seen: set[int] = set()
    modules = [(n, m) for n, m in list(sys.modules.items()) if _root(n) in THEIRS]
    # What vLLM has in place of Triton where there is none.
    if (stand_in := sys.modules.get("vllm.triton_utils")) is not None:
        modules.append(("vllm.triton_utils:triton", stand_in.triton))
    for name, module in modules:
        if not hasattr(module, "__dict__") or id(module) in seen:
            continue
        seen.add(id(module))
        yield name, module
        for value in list(vars(module).values()):
            theirs = isinstance(value, type) and _root(value.__module__) in THEIRS
            if theirs and id(value) not in seen:
                seen.add(id(value))
                yield f"{value.__module__}:{value.__qualname__}", value


def target(holder: str, attribute: str) -> str:
    return f"{holder}.{attribute}" if ":" in holder else f"{holder}:{attribute}"


def _extends(value: Any) -> bool:
    """Whether a class, or that of an object, extends one of theirs."""
    kind = value if isinstance(value, type) else type(value)
    theirs = [base for base in kind.__mro__ if _root(base.__module__) in THEIRS]
    return bool(theirs) and not isinstance(value, FunctionType)


def changed_objects() -> list[str]:
    """`module:Class.attribute` of objects of theirs that hold something of ours.

    An object of ours in the place of one of vLLM's, of a class that extends vLLM's, is what a hook
    has built and not a change.
    """
    gc.unfreeze()
    found = set()
    for one in gc.get_objects():
        kind = type(one)
        if _root(kind.__module__) not in THEIRS or isinstance(one, (type, ModuleType)):
            continue
        if kind.__module__.startswith("triton.runtime."):
            continue  # what Triton makes of a kernel of ours
        try:
            attributes = list(vars(one).items())
        except TypeError:
            continue
        for name, value in attributes:
            items = value if type(value) in (list, tuple) else [value]
            if is_ours(value) and not all(map(_extends, items)):
                found.add(f"{kind.__module__}:{kind.__qualname__}.{name}")
    return sorted(found)


def _tables() -> dict[int, str]:
    """Targets of the patch table that are dicts or kernels' stand-ins, by identity."""
    found: dict[int, str] = {}
    if "vllm_bastion.hooks" not in sys.modules:
        return found
    from tests.e2e.assigned import every_change

    for row in every_change():
        holder, _, name = row.target.partition(":")
        value = vars(sys.modules[holder]).get(name) if holder in sys.modules else None
        if isinstance(value, dict) or type(value).__name__ == "Replacement":
            found[id(value)] = row.target
    return found


def survey(session: Any) -> list[dict[str, Any]]:
    """`ours`: changed attributes of modules and classes, each with the row that it belongs to if
    that has another name; `objects`: those of objects.
    """
    if session.engine.has_unfinished_requests():
        return []
    homes, ours = _tables(), dict[str, str]()
    for holder, owner in holders():
        for name, value in list(vars(owner).items()):
            if name not in _OF_PYTHON and is_ours(value):
                # A table or a kernel's stand-in is where its row says, under whatever name and in
                # whatever module it was imported.
                ours[target(holder, name)] = homes.get(id(value), "")
    if any(op.startswith("bastion::") for op in torch._C._dispatch_get_all_op_names()):
        ours["torch.ops:bastion"] = ""
    return [{"ours": ours, "objects": changed_objects()}]
