# SPDX-License-Identifier: Apache-2.0
"""`vllm-bastion explain`: decode some prompts offline, and write the server's page as a file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from vllm_bastion import envs
from vllm_bastion.cli.arguments import engine_arguments
from vllm_bastion.page.document import Snapshot, decoded
from vllm_bastion.telemetry.seen_trees import PER_LOOK

PROMPTS = ("Explain step by step how binary search works.",)


def explain(
    target: str, drafter: str, prompts: Sequence[str], tokens: int, options: Sequence[str]
) -> tuple[list[Snapshot], list[list[int]]]:
    """Decode greedily, one prompt after the other, and look at the engine every few steps.

    Args:
        target: model name or folder.
        drafter: likewise.
        prompts: texts; they get the target's chat template if it has one.
        tokens: to emit for each.
        options: vLLM's own.

    Returns:
        What the page shows, oldest first, and the tokens that each prompt got.
    """
    envs.enable_page()
    engine = LLMEngine.from_engine_args(engine_arguments("explain", target, drafter, options))
    tokenizer: Any = engine.get_tokenizer()
    snapshots: list[Snapshot] = []

    def text(token: int) -> str:
        return str(tokenizer.decode([token], skip_special_tokens=False))

    def look() -> None:
        (first, *_) = engine.collective_rpc("bastion_snapshot")
        if snapshots:
            snapshots[-1]["page"]["trees"] = []  # only the last trees are drawn
        snapshots.append(decoded(first, time.time(), text))

    try:
        emitted: list[list[int]] = []
        look()
        params = SamplingParams(temperature=0.0, max_tokens=tokens)
        for number, prompt in enumerate(prompts):
            engine.add_request(f"prompt {number + 1}", _prompt(tokenizer, prompt), params)
            steps = 0
            outputs: list[Any] = []
            while engine.has_unfinished_requests():
                outputs = engine.step() or outputs
                steps += 1
                if steps % PER_LOOK == 0:
                    look()
            look()
            emitted.append(list(outputs[-1].outputs[0].token_ids))
        return snapshots, emitted
    finally:
        engine.engine_core.shutdown()


def _prompt(tokenizer: Any, text: str) -> Any:
    if not getattr(tokenizer, "chat_template", None):
        return text
    messages = [{"role": "user", "content": text}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return {"prompt_token_ids": list(ids)}
