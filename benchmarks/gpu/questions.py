# SPDX-License-Identifier: Apache-2.0
"""The questions, in the order in which they are asked."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import RESULTS, ROOT
from benchmarks.e2e.store import Row
from benchmarks.gpu import trace


@dataclass(frozen=True)
class Question:
    """One question.

    Args:
        title: the question; `decides`: what its answer decides.
        needs_s: expected seconds, an estimate; it is not begun with less than half of that left.
        limit_s: it is interrupted after so long.
        ask: finds the answer, in the question's process; called with the folder of results, and
            whether the models are small. It goes on with what `NAME.jsonl` there lacks.
        page: Markdown of the rows of `NAME.jsonl`; None: the end of what it prints is the answer.
    """

    name: str
    title: str
    decides: str
    needs_s: float
    limit_s: float
    ask: Callable[[Path, bool], None]
    page: Callable[[Sequence[Row]], str] | None = None


def ask(find: Callable[[Path, bool], None], out: Path, small: bool) -> None:
    """Entry point of a question's process."""
    os.chdir(ROOT)
    os.environ.pop("TRITON_INTERPRET", None)
    find(out, small)


# Requests at a time; a round has four times as many prompts, see `benchmarks.e2e`.
_LOADS, _TOKENS, _LENGTH = (1, 4, 16, 64), 128, 1024
_METHODS = (
    "dflash 7 adaptive",  # vLLM's chain, sized by its confidence
    "bastion budget=8 lookup=false",
    "bastion lookup=false",
    "bastion",
)


def real(out: Path, small: bool) -> None:
    """SmolLM2 widened to 4B's cost decodes the recording's prompts: `benchmarks.e2e`."""
    from benchmarks.e2e import main as e2e

    words = ["--methods", *_METHODS, "--temperatures", "0", "1", "--alive", "5"]
    words += ["--out", str(out / "real.jsonl")]
    if small:
        words += ["--pair", "tiny", "--samples", "1", "--tokens", "6", "--concurrency", "1", "2"]
        words += ["--dtype", "float16", "--cudagraphs", "FULL_DECODE_ONLY", "--rows", "2048"]
    else:
        # One set, so that it fills the largest load.
        prompts, number = out / "prompts.jsonl", 4 * max(_LOADS)
        lines = [json.dumps(row) + "\n" for row in recorded(number)]
        prompts.write_text("".join(lines))
        words += ["--pair", "smollm2-4B", "--jsonl", str(prompts), "--samples", str(number)]
        words += ["--tokens", str(_TOKENS), "--max-model-len", str(_LENGTH), "--rows", "8192"]
        words += ["--concurrency", *map(str, _LOADS), "--seconds", "25"]
    e2e.run(e2e.parse(words), words, judged=False)


def recorded(number: int) -> Iterator[Row]:
    """Prompts of the recording's sets in turn, again and again, as `--jsonl` has them.

    Replies have a quarter to five quarters of the tokens. If all had one length, those of plain
    decoding alone would end together, and its prompts would come in few steps.
    """
    from transformers import AutoTokenizer

    from benchmarks.pairs import pair_folder
    from benchmarks.replay.recording import load_recording

    known = load_recording(RESULTS / "recordings" / "smollm2.npz")
    tokenizer = AutoTokenizer.from_pretrained(pair_folder("smollm2-4B") / "target")
    sets: dict[str, list[str]] = {}
    lengths, begin = random.Random(5), 0
    for domain, length in zip(known.domains, known.prompt_lens.tolist(), strict=True):
        text = tokenizer.decode(known.prompts[begin : begin + length])  # with its chat template
        sets.setdefault(domain, []).append(text)
        begin += length
    for i in range(number):
        texts = list(sets.values())[i % len(sets)]
        tokens = lengths.randint(_TOKENS // 4, _TOKENS * 5 // 4)
        params = {"max_tokens": tokens, "ignore_eos": False}
        yield {"prompt": texts[i // len(sets) % len(texts)], "params": params}


def real_page(rows: Sequence[Row]) -> str:
    """That of `benchmarks.e2e`, as a part of another."""
    from benchmarks.e2e.report import page

    return page(rows).replace("\n## ", "\n### ").partition("\n\n")[2]


def tokens(out: Path, small: bool) -> None:
    """End-to-end tests of tokens against plain decoding."""
    import pytest

    capture = "tests/e2e/test_capture.py::test_full_graphs_capture_the_mask"
    chosen = [capture] if small else ["tests/e2e/test_lossless.py", capture]
    status = pytest.main(["-v", "-m", "not slow", "-k", "not sync or async or capture", *chosen])
    if status != pytest.ExitCode.OK:
        raise RuntimeError(f"pytest ended with {status!r}")


def ops(out: Path, small: bool) -> None:
    """Cases of `benchmarks.ops` that have a bar."""
    import torch

    from benchmarks.ops.__main__ import main

    words = ["--small", "--replays", "2"] if small else ["--replays", "50"]
    with torch.inference_mode():
        if main(["--quick", *words]):
            raise RuntimeError("an op failed its check")


QUESTIONS = (
    Question("trace", "What do device and host do in a step of the 4B shape?",
        "which work of the host to remove next: the device's gaps by what the host did in them",
        220, 300, trace.answer, trace.page),
    Question("real", "Do trees pay with a real chat model on real text, and do n-gram drafts?",
        "README's GPU table, and whether lookup may stay on by default on a GPU",
        400, 560, real, real_page),
    Question("tokens", "Are the tokens plain decoding's, with graphs and asynchronous scheduling?",
        "whether any time here is worth anything", 140, 150, tokens),
    Question("ops", "Which ops miss their bars?",
        "which kernels to tune", 80, 120, ops),
)  # fmt: skip
