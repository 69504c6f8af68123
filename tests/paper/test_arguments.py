# SPDX-License-Identifier: Apache-2.0
"""What the options of `python -m benchmarks.paper` stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import TINY
from benchmarks.paper.arguments import parse, target_of
from benchmarks.paper.data import DataError, Prompt
from benchmarks.paper.kinds import KINDS
from benchmarks.paper.main import _prompts
from benchmarks.paper.methods import Drafter, Target, methods
from benchmarks.paper.plan import Plan


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


def test_shallow_drafters_have_shorter_chains() -> None:
    def chains(gamma: int) -> list[str]:
        rows = methods(Target("target", "drafter", gamma), cpu=False)
        return [name for name in rows if name.startswith("dflash") and "adaptive" not in name]

    assert chains(15) == ["dflash 4", "dflash 7", "dflash 15"]
    assert chains(7) == ["dflash 2", "dflash 3", "dflash 5", "dflash 7"]


def test_a_pair_decodes_the_sets_that_are_named_or_its_own_prompts() -> None:
    for options, sets in ((["--sets", "mbpp"], ["mbpp"]), (["--data", "gsm8k=a.jsonl"], ["gsm8k"])):
        given = parse(["--pair", "tiny", *options])
        target_of(given)
        assert (given.sets, given.jsonl) == (sets, [])
    given = parse(["--pair", "tiny"])
    target_of(given)
    assert (given.sets, given.jsonl) == ([], [TINY / "prompts.jsonl"])


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


def test_requests_of_a_kind_are_sets_of_their_own() -> None:
    given = parse(["--pair", "tiny", "--samples", "1", "--kinds", "nothing", "JSON"])
    target_of(given)
    prompts, gaps = _prompts(given)
    domains = ("arithmetic", "chat", "code")
    wanted = {f"{domain}, {kind}" for domain in domains for kind in ("nothing", "JSON")}
    assert not gaps and {one.set for one in prompts} == wanted and len(prompts) == 6
    assert all(one.params == KINDS[one.set.split(", ")[1]] for one in prompts)


def test_engines_that_take_turns_serve_every_concurrency() -> None:
    prompts = [Prompt("a", "0", ("x",))]
    assert Plan({}, prompts, [0.0], [1, 4], 8, 0, True).levels() == [[1], [4]]
    assert Plan({}, prompts, [0.0], [1, 4], 8, 0, True, alive=3).levels() == [[1, 4]]
