# SPDX-License-Identifier: Apache-2.0
"""What the options of `python -m benchmarks.paper` stand for, and what it imports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.paper.arguments import parse, target_of
from benchmarks.paper.methods import Drafter
from helpers import ROOT, run_python


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


def test_an_engine_without_the_plugin_does_not_import_it() -> None:
    code = (
        "import sys, benchmarks.paper.__main__, benchmarks.harness.driver;"
        "print([m for m in sys.modules if m.split('.')[0] in ('vllm_bastion', 'bastion_kernels')])"
    )
    found = run_python(code, cwd=ROOT)
    assert found.stdout.strip() == "[]", found.stderr
