# SPDX-License-Identifier: Apache-2.0
"""What a start refuses by models' configs, their classes in vLLM and their files' headers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import ROOT, engine_config, is_refused, write_checkpoint
from vllm_bastion import cli
from vllm_bastion.checkpoints import files
from vllm_bastion.cli.check import check

TINY = ROOT / "benchmarks" / "tiny"
DRAFTERS = ("drafter", "causal", "dflash2", "dspark")
_READ: dict[str, Any] = {"load_format": "auto"}


@pytest.fixture(autouse=True)
def _registered(pair: tuple[str, str]) -> None:
    """Method "bastion" in this process."""


def _refusal(target: str | Path, drafter: str | Path, **arguments: Any) -> str:
    return is_refused((str(target), str(drafter)), arguments=_READ | arguments)


def _copy(
    folder: Path,
    change: Callable[[dict[str, torch.Tensor]], Any] = lambda tensors: None,
    base: str = "drafter",
    **settings: Any,
) -> Path:
    """A tiny drafter with other tensors, or other settings."""
    folder.mkdir()
    config = json.loads((TINY / base / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(TINY / base / "model.safetensors")
    change(tensors)
    save_file({name: one.contiguous() for name, one in tensors.items()}, folder / "a.safetensors")
    return folder


# --- the files' headers -----------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_trained_drafter_fits(name: str) -> None:
    config = engine_config((str(TINY / "target"), str(TINY / name)), _READ)
    assert config.speculative_config.num_speculative_tokens == 32


def test_a_hybrids_drafter_fits() -> None:
    pair = (str(TINY / "hybrid" / "target"), str(TINY / "hybrid" / "drafter"))
    assert engine_config(pair, _READ | {"max_num_batched_tokens": 512}) is not None


def _cut(name: str, **slices: slice) -> Callable[[dict[str, torch.Tensor]], Any]:
    rows, columns = slices.get("rows", slice(None)), slices.get("columns", slice(None))
    return lambda tensors: tensors.update({name: tensors[name][rows, columns]})


HEADERS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], dict[str, Any], str]] = {
    "two of three layers read": (
        _cut("fc.weight", columns=slice(384)), {}, "fc.weight of shape 192 x 384"
    ),
    "fewer heads in the file": (
        _cut("layers.1.self_attn.k_proj.weight", rows=slice(32)), {}, "k_proj.weight of shape 32 x"
    ),
    "an inner size of another config": (lambda t: None, {"intermediate_size": 256}, "gate_proj"),
    "a layer is lost": (
        lambda t: [t.pop(name) for name in list(t) if name.startswith("layers.2.")],
        {},
        "lack layers.2.self_attn.q_proj.weight and 6 others",
    ),
    "more layers than the file": (
        lambda t: None,
        {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4},
        "lack layers.3.",
    ),
    "a reduced vocabulary without its head": (
        lambda t: None, {"draft_vocab_size": 512}, "no lm_head and no d2t"
    ),
    "a head of another vocabulary": (
        lambda t: t.update({"lm_head.weight": torch.zeros(1000, 192)}), {}, "lm_head.weight of"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADERS)
def test_tensors_that_do_not_fit_are_refused(case: str, tmp_path: Path) -> None:
    change, settings, what = HEADERS[case]
    drafter = _copy(tmp_path / "drafter", change, **settings)
    assert what in _refusal(TINY / "target", drafter)


def test_a_drafter_of_another_size_of_hidden_states_is_refused(tmp_path: Path) -> None:
    drafter = _copy(tmp_path / "half", hidden_size=96)
    said = _refusal(TINY / "target", drafter)
    assert "hidden states of size 96" in said and "the target has 192" in said
    # What it reads may differ from its own size, if it has its own embedding and head.
    narrow = _copy(tmp_path / "narrow", hidden_size=96, target_hidden_size=192)
    said = _refusal(TINY / "target", narrow)
    assert "no embed_tokens and no lm_head of its own and hidden_size 96" in said


def test_a_quantised_drafter_is_left_to_vllm(tmp_path: Path) -> None:
    def packed(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "_proj" in name]:
            tensors[name] = tensors[name][:, ::2].to(torch.int8)

    drafter = _copy(tmp_path / "packed", packed)
    assert engine_config((str(TINY / "target"), str(drafter)), _READ) is not None


def test_files_without_weights_are_named(tmp_path: Path, pair: tuple[str, str]) -> None:
    assert "has a config.json and no weights" in _refusal(*pair)
    pointer = tmp_path / "pointer"
    shutil.copytree(TINY / "drafter", pointer)
    (pointer / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "a pointer of Git LFS" in _refusal(TINY / "target", pointer)


def test_headers_are_those_of_the_tensors() -> None:
    found = files.tensors(str(TINY / "drafter"))
    assert found is not None
    loaded = load_file(TINY / "drafter" / "model.safetensors")
    assert {n: one.shape for n, one in found.items()} == {
        n: tuple(t.shape) for n, t in loaded.items()
    }
    assert files.elements(str(TINY / "drafter")) == sum(t.numel() for t in loaded.values())


# --- the target's class -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [("Gemma3ForCausalLM", "gemma3_text"), ("Gemma2ForCausalLM", "gemma2")],
)
def test_a_target_that_hides_its_layers_outputs_is_refused(
    architecture: str, model_type: str, tmp_path: Path, pair: tuple[str, str]
) -> None:
    target = write_checkpoint(
        tmp_path / "target", architectures=[architecture], model_type=model_type
    )
    is_refused((target, pair[1]), target, architecture, "gives no drafter its hidden states")


# --- thinking ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "template", "told"),
    [
        ("Qwen3-8B-DFlash-b16", "{% if enable_thinking is false %}", True),
        ("Qwen3-4B-speculator.dflash2", "{% if enable_thinking is false %}", True),
        ("Qwen3-8B-DFlash-b16", "{{ messages }}", False),
        ("Qwen3.5-9B-DFlash", "{% if enable_thinking is false %}", False),
    ],
)
def test_a_drafter_without_thinking_is_noted_where_the_target_thinks(
    name: str, template: str, told: bool, tmp_path: Path
) -> None:
    target, drafter = tmp_path / "target", tmp_path / name
    shutil.copytree(TINY / "target", target)
    shutil.copytree(TINY / "drafter", drafter)
    (target / "chat_template.jinja").write_text(template)
    notes = [
        text for heading, text in check(str(target), str(drafter), []).lines if heading == "note"
    ]
    assert any('{"enable_thinking": false}' in note for note in notes) == told


# --- which model is which ---------------------------------------------------------------------


def test_exchanged_models_are_told(pair: tuple[str, str]) -> None:
    said = _refusal(TINY / "drafter", TINY / "target")
    assert "is a drafter (DFlash)" in said and "exchange the two" in said
    assert "exchange the two" in _refusal(TINY / "dspark", TINY / "target")
    said = _refusal(TINY / "target", TINY / "target")
    assert "not a drafter that trees are grown from (architecture: Qwen3ForCausalLM)" in said
    assert "DFlash, Muse Glimmer's assistant, DFlash2" in said and "DraftModel" not in said


OTHERS = {
    "MTP": ({"architectures": ["DeepSeekMTPModel"], "model_type": "deepseek_mtp"}, "prediction"),
    "Medusa": ({"architectures": ["MedusaModel"], "model_type": "medusa"}, "is a Medusa drafter"),
    "EAGLE": (
        {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"},
        "is an EAGLE drafter",
    ),
    "nobody's": ({"architectures": ["FooModel"], "model_type": "foo"}, "a FooModel of model_type"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_drafter_of_another_kind_is_refused_by_its_kind(case: str, tmp_path: Path) -> None:
    settings, what = OTHERS[case]
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings | {"hidden_size": 192}))
    said = _refusal(TINY / "target", folder)
    assert what in said and "ransformers" not in said and "pip install" not in said


def test_a_target_that_vllm_does_not_have_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["FooForCausalLM"], "model_type": "f"}')
    said = _refusal(folder, TINY / "drafter")
    assert "a FooForCausalLM of model_type 'f'" in said and "ransformers" not in said


# --- what is no model -------------------------------------------------------------------------


def _file(folder: Path) -> str:
    folder.write_text("text")
    return str(folder)


def _without_config(folder: Path) -> str:
    folder.mkdir()
    shutil.copy(TINY / "drafter" / "model.safetensors", folder)
    return str(folder)


def _broken(folder: Path) -> str:
    folder.mkdir()
    (folder / "config.json").write_text('{"a":')
    return str(folder)


NO_MODELS: dict[str, tuple[Callable[[Path], str], str]] = {
    "a file": (_file, "is a file: give the folder"),
    "no config": (_without_config, "has no config.json"),
    "broken": (_broken, "is not valid JSON"),
    "nothing": (str, "there is no folder"),
    "a name": (lambda folder: "no-such/model", "HF_HUB_OFFLINE forbids its download"),
    "no name": (lambda folder: "no such model", "neither a folder here nor a name"),
}


@pytest.mark.parametrize("role", ["target", "drafter"])
@pytest.mark.parametrize("case", NO_MODELS)
def test_what_is_no_model_is_told(
    case: str, role: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, what = NO_MODELS[case]
    wrong = make(tmp_path / "model")
    is_target = role == "target"
    models = (wrong, str(TINY / "drafter")) if is_target else (str(TINY / "target"), wrong)
    assert cli.main(["check", *models]) == 1
    shown = capsys.readouterr()
    (line,) = [*shown.out.splitlines(), *shown.err.splitlines()]
    assert what in line and role in line and "internet" not in line
    if not (is_target and case in ("nothing", "a name", "no name")):
        # vLLM looks for such a target itself, offline, before any check.
        said = _refusal(*models)
        assert what in said and role in said
