# SPDX-License-Identifier: Apache-2.0
"""Wrap a function of vLLM once, and only if it still looks as expected.

A wrapper is called as `wrapper(original, *args, **kwargs)`. It must call the original unless the
engine uses method "bastion", so that other methods behave as without this package.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_bastion.versions import capabilities

_MARK = "__bastion_wrapper__"


class HookError(RuntimeError):
    """A symbol of vLLM is missing or has another signature than the hook was written for."""


def resolve(target: str) -> tuple[Any, str, Any]:
    """Find `package.module:Class.attribute` or `package.module:name`.

    Returns:
        The owner (module or class), the attribute's name, and the raw attribute, descriptors as
        they are.

    Raises:
        HookError: naming what is missing.
    """
    module_name, _, path = target.partition(":")
    try:
        owner: Any = importlib.import_module(module_name)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        return owner, name, inspect.getattr_static(owner, name)
    except (ImportError, AttributeError) as error:
        raise HookError(f"vLLM no longer has {target} ({error})") from error


def _function(attribute: Any) -> Callable[..., Any]:
    """The plain function inside a static or class method, a property or a function."""
    if isinstance(attribute, property):
        assert attribute.fget is not None
        return attribute.fget
    if isinstance(attribute, (staticmethod, classmethod)):
        return attribute.__func__
    function: Callable[..., Any] = attribute
    return function


def signature(function: Callable[..., Any]) -> str:
    """Parameter names in order, e.g. "(self, request, is_stale=)"; annotations are left out."""
    parts = []
    for parameter in inspect.signature(function).parameters.values():
        star = ""
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            star = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
        default = "" if parameter.default is parameter.empty else "="
        parts.append(f"{star}{parameter.name}{default}")
    return f"({', '.join(parts)})"


def wrap(target: str, wrapper: Callable[..., Any], expects: str | None = None) -> None:
    """Replace `target` by `wrapper` around it; a second call with the same wrapper does nothing.

    Args:
        target: `package.module:Class.attribute` or `package.module:name`; a function, a static or
            class method, or a property.
        wrapper: called as `wrapper(original, *args, **kwargs)`.
        expects: the `signature` the wrapper was written for; None skips the check.

    Raises:
        HookError: the target is missing, has another signature, or another wrapper of ours is on
        it.
    """
    owner, name, attribute = resolve(target)
    original = _function(attribute)
    present = getattr(original, _MARK, None)
    if present is wrapper:
        return
    if present is not None:
        raise HookError(f"{target} already has the hook {present.__qualname__}")
    found = signature(original)
    if expects is not None and found != expects:
        raise HookError(f"vLLM's {target} now takes {found}, expected {expects}")

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(hooked, _MARK, wrapper)
    if isinstance(attribute, property):
        setattr(owner, name, property(hooked, attribute.fset, attribute.fdel, attribute.__doc__))
    elif isinstance(attribute, staticmethod):
        setattr(owner, name, staticmethod(hooked))
    elif isinstance(attribute, classmethod):
        setattr(owner, name, classmethod(hooked))
    else:
        setattr(owner, name, hooked)


@dataclass(frozen=True, kw_only=True)
class Hook:
    """A function that `wrap` wraps in one of ours."""

    target: str
    """`package.module:Class.attribute` or `package.module:name`"""
    wrapper: str
    """`module:function` below vllm_bastion.hooks"""
    expects: str
    """The signature that the wrapper was written for, see `signature`.
    `vllm_bastion.versions` may name another one for a version of vLLM."""
    why: str
    """What goes wrong without it."""

    def function(self) -> Callable[..., Any]:
        """The wrapper itself."""
        module, _, name = self.wrapper.partition(":")
        found = getattr(importlib.import_module(f"vllm_bastion.hooks.{module}"), name)
        assert callable(found)
        return found

    def signature(self) -> str:
        """The signature that the installed vLLM must have."""
        return capabilities().signatures.get(self.target, self.expects)

    def install(self) -> None:
        """Wrap the target; a second call does nothing.

        Raises:
            HookError: the target is missing, or has another signature.
        """
        wrap(self.target, self.function(), expects=self.signature())
