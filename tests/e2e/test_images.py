# SPDX-License-Identifier: Apache-2.0
"""Prompts with images: positions in three dimensions, and images in several layers of the target.

A prompt's images are processed by vLLM's own code. A tree's nodes come after them, where M-RoPE's
positions are the row's plus an offset that the request's images cause.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import cases
from tests.e2e.compare import Comparison, answers, leaving_the_chain
from tests.e2e.engines import ON_GPU, Batch, Engine, Runner
from tests.e2e.targets import (
    ARGUMENTS,
    IMAGE,
    IMAGES,
    SPEC,
    VISION_END,
    VISION_START,
    make_target,
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(ON_GPU, reason="random weights in fp32"),
]
TARGETS = ("qwen3-vl", "qwen3.5-with-images")


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


@pytest.mark.parametrize("name", TARGETS)
def test_tokens_equal_plain_decoding(
    name: str, runner: Runner, compare: Comparison, tmp_path: Path
) -> None:
    arguments = {key: v for key, v in ARGUMENTS[name].items() if key != "language_model_only"}
    extra = (("model", make_target(name, tmp_path / name)), *(arguments | IMAGES).items())
    plain, batches = Engine(eager=True, num_blocks=160, extra=extra), [with_images()]
    setup = [function for function in SPEC[name]["setup"] if "torchvision" not in function]
    spec_keys = {"images": True, "setup": setup}
    expected = runner.run(plain, batches, **spec_keys)
    oracle = {"answers": answers(expected)}
    lagged = plain.with_bastion(24, 24, budget_timing="lagged").with_async()
    engines = [plain.with_bastion(24, 24), lagged]
    tree, later = runner.all(engines, batches, oracle=oracle, **spec_keys)
    compare.same(f"{name}, images", batches, expected, tree, plain, **spec_keys)
    compare.same(f"{name}, images, lagged", batches, expected, later, plain, **spec_keys)
    paths = tree["batches"][0]["paths"]
    assert leaving_the_chain(paths)
    assert max(map(len, paths)) > 4
    prompts = {key: r["prompt_token_ids"] for key, r in expected["batches"][0]["requests"].items()}
    assert prompts["one"].count(IMAGE) == 6 and prompts["two"].count(IMAGE) == 8 + 4
