# SPDX-License-Identifier: Apache-2.0
"""The patch table against the installed vLLM, and the helper that wraps."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
from vllm.platforms import current_platform

from vllm_bastion import plugin
from vllm_bastion.hooks.hook import Hook, HookError, resolve, signature, wrap
from vllm_bastion.hooks.table import HOOKS
from vllm_bastion.versions import capabilities_of


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    plugin.register()
    if current_platform.is_cpu():  # what the CPU worker does before it loads the runner
        importlib.import_module("vllm.v1.worker.cpu.shm")


# --- the contract -----------------------------------------------------------------------------

VERSIONS = [capabilities_of(version) for version in ("0.32", "0.33")]


def accepted(hook: Hook) -> tuple[str, ...]:
    """The signatures the hook was written for, one per version of vLLM."""
    return tuple(version.signatures.get(hook.target, hook.expects) for version in VERSIONS)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target.rpartition(":")[2])
def test_vllm_still_has_the_hooked_symbol_as_expected(hook: Hook) -> None:
    _, _, attribute = resolve(hook.target)
    function = getattr(attribute, "fget", None) or getattr(attribute, "__func__", attribute)
    original = inspect.unwrap(function)
    assert signature(original) == hook.signature(), f"vLLM's {hook.target} changed"
    assert hook.why


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target.rpartition(":")[2])
def test_wrapper_takes_the_original_and_its_arguments(hook: Hook) -> None:
    parameters = list(inspect.signature(hook.function()).parameters.values())
    assert parameters[0].name == "original"
    for written_for in accepted(hook):
        expected = written_for.strip("()").replace("=", "").split(", ")
        for given, name in zip(parameters[1:], expected, strict=False):
            variadic = given.kind in (given.VAR_POSITIONAL, given.VAR_KEYWORD)
            assert variadic or given.name == name


# --- the wrap helper --------------------------------------------------------------------------


class Sample:
    """Stands for a class of vLLM; the tests wrap a fresh subclass each."""

    def method(self, a: int, b: int = 2) -> int:
        return a + b

    @staticmethod
    def static(a: int) -> int:
        return a

    @classmethod
    def made(cls, a: int) -> tuple[str, int]:
        return cls.__name__, a

    @property
    def value(self) -> int:
        return 3


@pytest.fixture
def sample(monkeypatch: pytest.MonkeyPatch) -> type[Sample]:
    fresh = type("Sample", (), {k: v for k, v in vars(Sample).items() if k != "__dict__"})
    monkeypatch.setattr(__import__(__name__), "Sample", fresh)
    return fresh


def _add_hundred(original: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    return (result[0], result[1] + 100) if isinstance(result, tuple) else result + 100


@pytest.mark.parametrize("name", ["method", "static", "made", "value"])
def test_wrapping_keeps_the_kind_of_attribute(name: str, sample: type[Sample]) -> None:
    target = f"{__name__}:Sample.{name}"
    wrap(target, _add_hundred)
    kind = type(inspect.getattr_static(Sample, name))
    assert type(inspect.getattr_static(sample, name)) is kind
    instance = sample()
    calls = {
        "method": lambda: (instance.method(1), instance.method(1, b=5)) == (103, 106),
        "static": lambda: sample.static(1) == instance.static(1) == 101,
        "made": lambda: sample.made(1) == ("Sample", 101),
        "value": lambda: instance.value == 103,
    }
    assert calls[name]()


def test_wrapping_twice_wraps_once(sample: type[Sample]) -> None:
    target = f"{__name__}:Sample.method"
    wrap(target, _add_hundred, expects="(self, a, b=)")
    first = vars(sample)["method"]
    wrap(target, _add_hundred, expects="(self, a, b=)")
    assert vars(sample)["method"] is first
    assert signature(first.__wrapped__) == "(self, a, b=)"
    assert sample().method(1) == 103
    with pytest.raises(HookError, match="already has the hook _add_hundred"):
        wrap(target, lambda original, *args: original(*args))


def test_a_changed_signature_is_told_in_both_forms(sample: type[Sample]) -> None:
    with pytest.raises(HookError) as caught:
        wrap(f"{__name__}:Sample.method", _add_hundred, expects="(self, a)")
    assert "now takes (self, a, b=), expected (self, a)" in str(caught.value)
    assert sample().method(1) == 3
    wrap(f"{__name__}:Sample.method", _add_hundred, expects="(self, a, b=)")
    assert sample().method(1) == 103


@pytest.mark.parametrize("target", ["vllm.nowhere:f", "vllm.config:Nothing.f", "vllm.config:f"])
def test_a_missing_symbol_is_named(target: str) -> None:
    with pytest.raises(HookError, match="no longer has") as caught:
        wrap(target, _add_hundred)
    assert target in str(caught.value)
