# SPDX-License-Identifier: Apache-2.0
"""What the options of `python -m benchmarks.paper` stand for, and what it imports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import TINY
from benchmarks.paper.arguments import parse, target_of
from benchmarks.paper.methods import Drafter
from benchmarks.prompts import DataError
from helpers import ROOT, run_python


def test_a_pairs_own_drafters_are_named_and_read_from_their_checkpoints() -> None:
    given = parse(["--pair", "tiny", "--drafters", "dflash2", "dspark", "causal", "domino"])
    what = target_of(given)
    assert what.gamma == 15 and what.drafter == str(TINY / "drafter")
    assert what.others == (
        Drafter(str(TINY / "dflash2"), 15, "dflash", first_runner=False),
        Drafter(str(TINY / "dspark"), 15, "dspark", first_runner=False),
        Drafter(str(TINY / "causal"), 15, "dflash"),
        Drafter(str(TINY / "domino"), 15, None, first_runner=False),
    )
    with pytest.raises(DataError, match="eagle3 has no drafter that method bastion supports"):
        target_of(parse(["--pair", "tiny", "--drafters", "eagle3"]))


def test_what_cannot_be_had_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        DataError, match=r"no pair nope: choose from tiny, hybrid, smollm2, 0\.6B, "
    ):
        target_of(parse(["--pair", "nope"]))
    with pytest.raises(DataError, match="no model dflsh2: no such folder, and the Hub does not"):
        target_of(parse(["--pair", "tiny", "--drafters", "dflsh2"]))


def test_the_real_pair_is_a_chat_model_and_needs_its_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = parse(["--pair", "smollm2", "--data", "gsm8k=a.jsonl", "humaneval=b.jsonl"])
    monkeypatch.setenv("VLLM_BASTION_CACHE", str(tmp_path))
    with pytest.raises(DataError, match=r"^the pair smollm2 is not there yet: python -m benchm"):
        target_of(given)
    assert (given.raw, given.ignore_eos) == (False, False)
    assert (given.sets, given.jsonl) == ([], [])


def test_a_random_drafter_is_a_pairs_own_without_its_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BASTION_CACHE", str(tmp_path))
    for pair in ("tiny", "hybrid"):
        what = target_of(parse(["--pair", pair, "--drafters", "random"]))
        (random,) = what.others
        assert random == Drafter(random.name, what.gamma) and Path(random.name).name == "random"
        ours, theirs = (
            load_file(Path(folder) / "model.safetensors") for folder in (random.name, what.drafter)
        )
        assert ours.keys() == theirs.keys()
        for name, weight in theirs.items():
            if weight.ndim == 2:
                cosine = torch.cosine_similarity(ours[name].flatten(), weight.flatten(), 0)
                assert abs(float(cosine)) < 0.1, name
            else:
                assert torch.equal(ours[name], weight), name


def test_a_longer_context_is_a_copy_of_the_pair_with_more_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BASTION_CACHE", str(tmp_path))
    what = target_of(parse(["--pair", "tiny", "--max-model-len", "4096"]))
    assert what.target == str(TINY / "target")
    what = target_of(parse(["--pair", "tiny", "--max-model-len", "6000"]))
    for one, name in ((what.target, "target"), (what.drafter, "drafter")):
        config = json.loads(Path(one, "config.json").read_text())
        assert config["max_position_embeddings"] == 6000
        weights = Path(one, "model.safetensors").resolve()
        assert weights == (TINY / name / "model.safetensors").resolve()


def test_an_engine_without_the_plugin_does_not_import_it() -> None:
    code = (
        "import sys, benchmarks.paper.__main__, benchmarks.harness.driver;"
        "print([m for m in sys.modules if m.split('.')[0] in ('vllm_bastion', 'bastion_kernels')])"
    )
    found = run_python(code, cwd=ROOT)
    assert found.stdout.strip() == "[]", found.stderr
