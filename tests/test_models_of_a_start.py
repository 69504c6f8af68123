# SPDX-License-Identifier: Apache-2.0
"""What a start refuses by the drafter's headers, and models that were exchanged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import ROOT, engine_config, is_refused

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


HEADERS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], dict[str, Any], str]] = {
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
        lambda t: None,
        {"draft_vocab_size": 512},
        "no lm_head and no d2t",
    ),
}


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
        for name in [name for name in tensors if "_proj" in name and ".q_proj" not in name]:
            tensors[f"{name}_packed"] = tensors.pop(name)[:, ::2].to(torch.int8)

    drafter = _copy(tmp_path / "packed", packed)
    assert engine_config((str(TINY / "target"), str(drafter)), _READ) is not None


# --- which model is which ---------------------------------------------------------------------


def test_exchanged_models_are_told(pair: tuple[str, str]) -> None:
    said = _refusal(TINY / "drafter", TINY / "target")
    assert "is a drafter (DFlash)" in said and "exchange the two" in said
    assert "exchange the two" in _refusal(TINY / "dspark", TINY / "target")
    said = _refusal(TINY / "target", TINY / "target")
    assert "is of type Qwen3ForCausalLM" in said
    assert "DFlash, Muse Glimmer's assistant, DFlash2" in said and "DraftModel" not in said
