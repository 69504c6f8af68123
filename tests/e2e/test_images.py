# SPDX-License-Identifier: Apache-2.0
"""Prompts with images, which vLLM's own code processes.

A tree's nodes come after them, where M-RoPE's positions are the row's plus an offset that the
request's images cause.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import cases
from tests.e2e.compare import Comparison, assert_winding
from tests.e2e.engines import Batch
from tests.e2e.marks import on_cpu
from tests.e2e.targets import IMAGE, IMAGES, SPEC, VISION_END, VISION_START, engine_of

pytestmark = on_cpu("random weights in fp32", pytest.mark.slow)


def with_images() -> Batch:
    """None, one or two images, at a prompt's begin or inside, next to each other's trees."""
    batch = Batch("images")
    image = [VISION_START, IMAGE, VISION_END]
    code, chat = (
        [token for token in cases.long_prompt(domain, 90) if token < VISION_START]
        for domain in ("code", "chat")
    )
    long = {"max_tokens": 48, "ignore_eos": True}
    batch.add("one", [*code[:9], *image, *code[9:40]], images=[[64, 96]], temperature=0, **long)
    batch.add("two", [*chat[:20], *image, *chat[20:30], *image, *chat[30:]], temperature=0.8,
              images=[[128, 64], [64, 64]], seed=1, **long)  # fmt: skip
    batch.add("none", code[:40], arrive=3, temperature=0, **long)
    batch.add("first", [*image, *chat[:30]], images=[[96, 128]], arrive=6, temperature=0, **long)
    return batch


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen3.5-with-images"])
def test_tokens_equal_plain_decoding(name: str, compare: Comparison, tmp_path: Path) -> None:
    plain = engine_of(name, tmp_path / name).of(language_model_only=False, **IMAGES)
    setup = [function for function in SPEC[name]["setup"] if "torchvision" not in function]
    for timing in ("exact", "lagged"):
        tree = plain.with_bastion(24, 24, budget_timing=timing)
        tree = tree.with_async() if timing == "lagged" else tree
        expected, run = compare.oracle(
            f"{name}, images, {timing}", [with_images()], plain, tree, images=True, setup=setup
        )
        assert_winding(run["batches"][0])
    prompts = {key: r["prompt_token_ids"] for key, r in expected["batches"][0]["requests"].items()}
    assert prompts["one"].count(IMAGE) == 6 and prompts["two"].count(IMAGE) == 8 + 4
