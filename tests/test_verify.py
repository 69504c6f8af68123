# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.verify`: its verdict on runs made up here, and a run of the tiny pair."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import verify
from benchmarks.prompts import load_jsonl
from helpers import ROOT

TINY = ROOT / "benchmarks" / "tiny"


def _rounds(method: str, seconds: float, *emitted: int) -> list[dict[str, Any]]:
    """A text of each domain, of three forwards that emit so many tokens."""
    rows = []
    for domain, count in zip(("arithmetic", "chat"), emitted, strict=True):
        own = {"kind": "round", "method": method, "set": domain, "seconds": seconds / 2}
        own |= {"responses": 1, "tokens": 3 * count, "emitted": 3 * count, "forwards": 3}
        zeros = dict.fromkeys(
            ("verified", "steps", "step_ms", "verify_ms", "draft_ms", "ttft_ms"), 0
        )
        rows.append({**own, **zeros, "differs": {}})
    return rows


def _verdict(
    bastion: list[dict[str, Any]], errors: int = 0, busy: bool = False, chain: int = 6
) -> tuple[str, bool]:
    bastion[0]["differs"] = {str(number): [0, 1] for number in range(errors + 1)}
    judged = [
        {"kind": "judged", "method": "bastion", "near_tie": number == 0}
        for number in range(errors + 1)
    ]
    rows = [*_rounds("plain", 8.0, 1, 1), *_rounds("dflash", 2.0, chain, 4), *bastion, *judged]
    published = verify.PUBLISHED["Qwen3-8B", "Qwen3-8B-DFlash-b16"]
    lines, passed = verify.verdict(rows, published, busy)
    return "\n".join(lines), passed


def test_a_pair_that_does_what_it_should_passes() -> None:
    text, passed = _verdict(_rounds("bastion", 1.0, 8, 6))
    assert passed and "FAIL" not in text
    assert "1 of 2 texts are plain decoding's, 1 differ at a near-tie, 0 are wrong" in text
    assert "8.00x of plain decoding, 2.00x of vLLM's dflash" in text
    assert "6.51, 8.85" in text and "tau         pass: 7.00, vLLM's dflash 5.00" in text


@pytest.mark.parametrize(
    ("case", "failing"),
    [
        (lambda: _verdict(_rounds("bastion", 1.0, 8, 6), errors=1), "identity    FAIL"),
        (lambda: _verdict(_rounds("bastion", 1.0, 4, 4)), "tau         FAIL"),
        (lambda: _verdict(_rounds("bastion", 3.0, 8, 6)), "speed       FAIL"),
        (
            lambda: _verdict(_rounds("bastion", 1.0, 8, 6), chain=4),
            "below 70% of the published tau in arithm",
        ),
    ],
)
def test_each_criterion_can_fail(case: Callable[[], tuple[str, bool]], failing: str) -> None:
    text, passed = case()
    assert not passed and failing in text


def test_a_busy_machine_is_not_judged_by_its_times() -> None:
    text, passed = _verdict(_rounds("bastion", 3.0, 4, 4), busy=True)
    assert passed and "speed       not judged" in text
    text, passed = _verdict(_rounds("bastion", 3.0, 4, 4), busy=True, chain=4)
    assert not passed and "below 70% of the published tau" in text


def test_its_own_prompts_have_the_published_domains() -> None:
    found = {prompt.set for prompt in load_jsonl(verify.PROMPTS)}
    assert all(found == set(published) for published in verify.PUBLISHED.values())


def test_a_drafter_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """After the prompts were read, which the command has with it."""
    with pytest.raises(SystemExit) as ended:
        verify.main([str(TINY / "target"), "/nonexistent"])
    assert ended.value.code == 2
    assert "no model /nonexistent: no such folder" in capsys.readouterr().err


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="starts CPU engines")
def test_the_tiny_pair_passes() -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "benchmarks.verify", str(TINY / "target"), str(TINY / "drafter"),
            "--file", str(TINY / "prompts.jsonl"), "--samples", "1", "--tokens", "48", "--busy",
            "--dtype", "float32", "--eager",
        ],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "identity    pass: 3 of 3" in done.stdout and "tau         pass" in done.stdout
