# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.paper` with real engines of the tiny pair."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.paper.store import Key, read_rows
from helpers import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels")))}
TEXTS = ("def add(a, b):\n    return", "Tom has 3 apples and buys 4.", "User: hello\nAssistant:")


def command(folder: Path, *more: str) -> list[str]:
    rows = [{"id": str(i), "domain": "a", "prompt": text} for i, text in enumerate(TEXTS)]
    rows.append({"id": "talk", "domain": "b", "turns": ["User: hi\nAssistant:", "User: and?"]})
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--pair", "tiny", "--jsonl", str(folder / "own.jsonl"), "--tokens", "24", "--eager"]
    options += ["--methods", "dflash 7", "bastion N=16", "--replay-prompts", "0"]
    out = ["--out", str(folder / "run.jsonl")]
    return [sys.executable, "-m", "benchmarks.paper", *options, *out, *more]


def responses(path: Path) -> list[dict[str, Any]]:
    return [row for row in read_rows(path) if row["kind"] == "response"]


def test_every_response_of_three_methods_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    started = command(tmp_path, "--temperatures", "0", "--replay-prompts", "1")
    done = subprocess.run(started, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    after = responses(path)
    # Each round has plain decoding's and both others' responses.
    assert len({row["round"] for row in after}) == 5
    keys = [Key.of(row) for row in after]
    assert len(keys) == len(set(keys)) == 3 * 5
    by_key = dict(zip(keys, after, strict=True))
    for key, row in by_key.items():
        assert row["tokens"] == 24 and row["steps"] > 0 and row["verify_ms"] > 0
        if key.method == "plain":
            assert row["emitted"] == row["forwards"] == row["tokens"] - 1
        else:
            # Greedy decoding in float32 with the same tokens, and drafts that were accepted.
            assert row["differs_at"] is None, key
            assert row["emitted"] > row["forwards"] and row["draft_ms"] > 0
            assert row["verified"] / row["forwards"] == pytest.approx(
                16 if "bastion" in key.method else 7, rel=0.2
            )
    # Both turns of the conversation, the second after plain decoding's reply to the first.
    talk = {
        key.turn: row for key, row in by_key.items() if (key.method, key.id) == ("plain", "talk")
    }
    assert talk[1]["prompt_len"] > talk[0]["prompt_len"] + 24
    page = path.with_suffix(".md").read_text()
    assert "| bastion N=16 |" in page and "5/5" in page
    # Beam search on the recorded drafts.
    found = {row["policy"]: row for row in read_rows(path) if row["kind"] == "replayed"}
    beam, best = found["beam 4x15 (replayed)"], found["best-first 60 (replayed)"]
    assert beam["tau"] > 1 and beam["nodes"] == best["nodes"] == 60


def test_engines_take_turns_in_groups_with_plain_decoding_at_every_concurrency(
    tmp_path: Path,
) -> None:
    options = ["--temperatures", "1", "--concurrency", "1", "2", "--alive", "3"]
    started = command(tmp_path, *options)
    subprocess.run(started, env=ENVIRONMENT, check=True, capture_output=True)
    rows = responses(tmp_path / "run.jsonl")
    others = [Key.of(row) for row in rows if row["method"] != "plain"]
    assert len(others) == len(set(others)) == 3 * 2 * 5
    rounds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        rounds.setdefault(row["round"], []).append(row)
    for own in rounds.values():
        methods = {row["method"] for row in own}
        keys = {Key.of(row)._replace(method="") for row in own}
        assert "plain" in methods and len(own) == len(methods) * len(keys)
        # Each prompt by itself, or the prompts and turns of a set together.
        assert len(keys) == 1 or {key.concurrency for key in keys} == {2}
    groups = {frozenset(row["method"] for row in own) for own in rounds.values()}
    assert groups == {
        frozenset({"plain", "plain, V2 runner", "dflash 7"}),
        frozenset({"plain", "bastion N=16"}),
    }
    # In float32, trees repeat the seeded draws of plain decoding in the same model runner.
    trees = [row for row in rows if row["method"] == "bastion N=16"]
    assert {row["compared_with"] for row in trees} == {"plain, V2 runner"}
    assert all(row["differs_at"] is None for row in trees)
    page = (tmp_path / "run.md").read_text()
    assert page.count("| 5/5 seeded |") == 2 and "| other draws |" in page


def test_near_ties_are_judged_by_gaps_that_transformers_computes_too(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from benchmarks import TINY
    from benchmarks.harness.decoder import engine_of
    from benchmarks.paper.judge import Scorer
    from benchmarks.paper.methods import Target, methods

    plain = methods(Target(str(TINY / "target"), None, 15), cpu=True)["plain"]
    engine = plain.engine(
        str(TINY / "target"), True, max_model_len=256, max_num_seqs=1, dtype="float32", eager=True
    )
    ids = AutoTokenizer.from_pretrained(TINY / "target")(TEXTS[0])["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32)
    with torch.inference_mode():
        best = model(torch.tensor([ids])).logits[0, -1].topk(3)
    with engine_of(engine, Scorer) as process:
        process.call("gaps", ids, [*best.indices.tolist(), 1])  # the mask token is never likely
        gaps = process.answer()
    wanted = (best.values[0] - best.values).tolist()
    assert gaps[:3] == pytest.approx(wanted, abs=1e-3) and gaps[0] == 0
    assert gaps[3] == float("inf")


def test_vllms_own_eagle3_drafts_with_the_tiny_head(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import TINY
    from benchmarks.harness.decoder import count, run_engine
    from benchmarks.harness.engine import Engine, Request, dflash

    # The runner that a CPU host has by default.
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    requests = [Request(text, text, 32) for text in TEXTS]
    plain = run_engine(Engine(), requests).completions
    drafted = run_engine(Engine(dflash(TINY / "eagle3", 5, "eagle3")), requests).completions
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert count(drafted).tau > 2.5
