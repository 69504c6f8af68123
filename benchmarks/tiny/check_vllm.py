# SPDX-License-Identifier: Apache-2.0
"""Check that vLLM's own chain drafts the same tokens as this folder's drafter.

Runs vLLM's `method: dflash` (`dspark` for such a drafter) for some prompts, records what its
speculator proposes at every step, and compares each proposal with the offline drafter at the same
position. Prints the counts. Without a GPU it needs vllm-bastion, whose native kernels let vLLM's
Model Runner V2 run on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
from checkpoints import load_target
from drafter import load_drafter
from evaluate import HERE, NEW_TOKENS, Drafts, draft, walk
from heads import Markov
from rollouts import continue_batch
from transformers import AutoTokenizer

if not torch.cuda.is_available():
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

Proposal = tuple[int, list[int]]  # (position of the first guess, guesses)


def catch_proposals(gamma: int) -> list[Proposal]:
    """Record the proposals of vLLM's speculator, for one request at a time."""
    import vllm.v1.worker.gpu.spec_decode.dflash.speculator as module

    caught: list[Proposal] = []
    original = module.DFlashSpeculator.propose

    def propose(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        drafts = original(self, *args, **kwargs)
        if not kwargs.get("dummy_run"):
            caught.append((int(self.sample_pos[0]), drafts[0, :gamma].tolist()))
        return drafts

    module.DFlashSpeculator.propose = propose
    return caught


def main() -> None:
    """Compare every `--stride`-th prompt."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=HERE / "target")
    parser.add_argument("--drafter", type=Path, default=HERE / "drafter")
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts.jsonl")
    parser.add_argument("--stride", type=int, default=15)
    args = parser.parse_args()
    target, drafter = load_target(args.target), load_drafter(args.drafter)
    gamma = drafter.block_size - 1

    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(args.target),
        dtype="float32",
        max_model_len=512,
        max_num_batched_tokens=128,
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        speculative_config={
            "method": "dspark" if isinstance(drafter.head, Markov) else "dflash",
            "model": str(args.drafter),
            "num_speculative_tokens": gamma,
        },
    )
    caught = catch_proposals(gamma)
    tok = AutoTokenizer.from_pretrained(args.target)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    agree = total = 0
    for line in args.prompts.read_text().splitlines()[:: args.stride]:
        row = json.loads(line)
        caught.clear()
        output = llm.generate([row["prompt"]], params, use_tqdm=False)[0]
        prompt = torch.tensor([tok(row["prompt"])["input_ids"]])
        start = prompt.shape[1]
        ids = continue_batch(target, prompt, start + NEW_TOKENS + 2 * gamma, torch.zeros(1))[0]
        same = ids[start : start + NEW_TOKENS].tolist() == list(output.outputs[0].token_ids)
        drafts = Drafts(draft(target, drafter, ids, start))
        steps = 0
        for position, guesses in caught:
            anchor = position - 1 - start
            if 0 <= anchor < NEW_TOKENS - 1:
                mine = drafts.chains[anchor]
                agree += sum(a == b for a, b in zip(mine, guesses, strict=True))
                total += gamma
                steps += 1
        print(
            f"{row['id']}: same text {same}, forwards {steps} in vLLM, "
            f"{walk(drafts, ids.tolist(), start, None)[1]} offline",
            flush=True,
        )
    print(f"guesses that agree: {agree} of {total}")


if __name__ == "__main__":
    main()
