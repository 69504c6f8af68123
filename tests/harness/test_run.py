# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.e2e` with real engines of the tiny pair."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import TINY
from benchmarks.e2e.store import Round, read_rows
from helpers import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels")))}
TEXTS = ("def add(a, b):\n    return", "Tom has 3 apples and buys 4.", "User: hello\nAssistant:")


def decode(folder: Path, *more: str) -> tuple[list[dict[str, Any]], str]:
    """The rounds and the page of a command."""
    rows = [{"id": str(i), "domain": "a", "prompt": text} for i, text in enumerate(TEXTS)]
    rows.append({"id": "talk", "domain": "b", "turns": ["User: hi\nAssistant:", "User: and?"]})
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = folder / "run.jsonl"
    command = [
        sys.executable, "-m", "benchmarks.e2e", "--pair", "tiny", "--tokens", "24", "--eager",
        "--jsonl", str(folder / "own.jsonl"), "--out", str(out), *more,
    ]  # fmt: skip
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = out.with_suffix(".md").read_text()
    assert page in done.stdout
    return [row for row in read_rows(out) if row["kind"] == "round"], page


def test_three_methods_and_another_checkout_decode_every_round(tmp_path: Path) -> None:
    trees = "bastion nodes=16 budget=16 lookup=false"
    rows, page = decode(tmp_path, "--methods", "dflash 7", trees, "--against", str(ROOT))
    by_key = {(Round.of(row), row["method"]): row for row in rows}
    assert len(by_key) == len(rows) == 4 * 5
    for (_, method), row in by_key.items():
        assert row["tokens"] == 24 and row["steps"] > 0 and row["verify_ms"] > 0
        if method == "plain":
            assert row["emitted"] == row["forwards"] == row["tokens"] - 1
        else:
            # Greedy decoding in float32 with the same tokens, and drafts that were accepted.
            assert row["differs"] == {}, row
            assert row["emitted"] > row["forwards"] and row["draft_ms"] > 0
            nodes = 16 if "bastion" in method else 7
            assert row["verified"] / row["forwards"] == pytest.approx(nodes, rel=0.2)
    assert f"| {trees} | " in page and "5/5" in page and "| over |" in page


def test_engines_take_turns_in_groups_with_plain_decoding_at_every_concurrency(
    tmp_path: Path,
) -> None:
    options = ["--temperatures", "1", "--concurrency", "1", "2", "--alive", "3"]
    rows, page = decode(tmp_path, "--methods", "dflash 7", "bastion", *options)
    groups: dict[str, set[str]] = {}
    for row in rows:
        groups.setdefault(row["group"], set()).add(row["method"])
    assert list(groups.values()) == [{"plain", "plain v2", "dflash 7"}, {"plain", "bastion"}]
    # In float32, trees repeat the seeded draws of plain decoding in the same model runner.
    trees = [row for row in rows if row["method"] == "bastion"]
    assert {row["compared_with"] for row in trees} == {"plain v2"}
    assert all(row["differs"] == {} for row in trees) and page.count("| 5/5 |") == 2


def test_near_ties_are_judged_by_gaps_that_transformers_computes_too(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from benchmarks.e2e.judge import Scorer
    from benchmarks.e2e.methods import Target, method_of
    from benchmarks.harness.process import begun

    settings = {"max_model_len": 256, "max_num_seqs": 1, "dtype": "float32", "eager": True}
    engine = method_of("plain", Target("")).engine(str(TINY / "target"), cpu=True, **settings)
    ids = AutoTokenizer.from_pretrained(TINY / "target")(TEXTS[0])["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32)
    with torch.inference_mode():
        best = model(torch.tensor([ids])).logits[0, -1].topk(3)
    with begun(engine) as process:
        process.answer()
        process.start(Scorer, engine)
        process.answer()
        process.call("gaps", ids, [*best.indices.tolist(), 1])  # the mask token is never likely
        gaps = process.answer()
    wanted = (best.values[0] - best.values).tolist()
    assert gaps[:3] == pytest.approx(wanted, abs=1e-3) and gaps[0] == 0
    assert gaps[3] == float("inf")
