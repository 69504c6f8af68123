# SPDX-License-Identifier: Apache-2.0
"""Record the chains that SpecForge, which trains Domino drafters, drafts with the tiny drafter.

    pip install specforge==0.2.0      # in an environment of its own
    python tests/drafters/specforge_chains.py     # writes specforge_chains.json beside it

The target is transformers' Qwen3, in float32. It continues some prompts greedily. At positions of
each continuation SpecForge's own model computes the block from the target's hidden states, and its
own sampler takes the chain, as in its `spec_generate`. `tests/e2e/test_drafter_kinds.py` drafts the
same chains.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path

import torch
from specforge.modeling.draft import DominoDraftModel, extract_context_feature
from transformers import AutoModelForCausalLM, AutoTokenizer

TINY = Path(__file__).resolve().parents[2] / "benchmarks" / "tiny"
EVERY, TOKENS, BLOCKS = 15, 40, 24


@torch.inference_mode()
def main() -> None:
    """Write the recording."""
    target = AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32)
    drafter = DominoDraftModel.from_pretrained(TINY / "domino", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(TINY / "target")
    lines = (TINY / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[::EVERY]
    rows = []
    for row in map(json.loads, lines):
        prompt = torch.tensor([tokenizer(row["prompt"])["input_ids"]])
        length = TOKENS + drafter.block_size
        ids = target.generate(prompt, do_sample=False, min_new_tokens=length, max_new_tokens=length)
        hidden = target(ids, output_hidden_states=True).hidden_states
        features = extract_context_feature(hidden, drafter.target_layer_ids)
        chains, ranks = [], []
        for at in range(prompt.shape[1], prompt.shape[1] + BLOCKS):
            block = torch.full((1, drafter.block_size), drafter.mask_token_id)
            block[:, 0] = ids[:, at]
            states = drafter(
                target_hidden=features[:, :at],
                noise_embedding=target.model.embed_tokens(block),
                position_ids=torch.arange(at + drafter.block_size)[None],
                is_causal=False,
            )
            chain = drafter._sample_draft_tokens(target, states, block)[0]
            logits = target.lm_head(states)[0, 1:]
            above = logits > logits.gather(1, chain[:, None])
            chains.append(chain.tolist())
            ranks.append(int(above.sum(1).max()))
        new = ids[0, prompt.shape[1] :].tolist()
        row = {"id": row["id"], "prompt": prompt[0].tolist(), "tokens": new}
        rows.append(row | {"chains": chains, "ranks": ranks})
    weights = (TINY / "domino" / "model.safetensors").read_bytes()
    made = {
        "specforge": version("specforge"),
        "transformers": version("transformers"),
        "torch": version("torch"),
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
        "rows": rows,
    }
    text = json.dumps(made, separators=(",", ":")).replace('{"id"', '\n{"id"')
    Path(__file__).with_suffix(".json").write_text(text + "\n")


if __name__ == "__main__":
    main()
