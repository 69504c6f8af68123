# SPDX-License-Identifier: Apache-2.0
"""What the questions decode: engines side by side, and their requests."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, TINY
from benchmarks.harness.engine import Engine, Request

# Without torch.compile, whose code the simulated GPU cannot run, and in the type that Triton's
# interpreter multiplies rightly.
SMALL: dict[str, Any] = {
    "dtype": "float16",
    "memory": 0.02,
    "more": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
}


@dataclass(frozen=True)
class Engines:
    """Engines side by side, by the words of `benchmarks.e2e.methods`.

    Args:
        shape: a pair of `benchmarks.pairs`, or "experts".
        loads: requests at a time -> prompts, at least twice as many as decode together.
        texts: what they decode: a function of the number of prompts, tokens and temperature.
    """

    shape: str
    modes: tuple[str, ...]
    loads: dict[int, int]
    texts: Callable[[int, int, float], list[Request]]
    tokens: int = 64
    length: int = 384
    temperatures: tuple[int, ...] = (0,)

    def parts(self, small: bool) -> dict[str, list[Request]]:
        """The requests of each part, by its name."""
        loads, tokens = ({1: 1, 2: 2}, 6) if small else (self.loads, self.tokens)
        ask_for = held_out if small and self.texts is recorded else self.texts
        return {
            f"{n} at a time, T={t}": ask_for(prompts, tokens, t)
            for t in self.temperatures
            for n, prompts in loads.items()
        }

    def engine(self, mode: str, small: bool, folder: Path) -> Engine:
        """The engine of a mode; `folder` has a pair."""
        from benchmarks.e2e.methods import Target, gpu_share, method_of

        what, words = Target(str(folder / "target"), str(folder / "drafter")), mode
        most = max(2 if small else n for n in self.loads)
        if small and words.startswith("bastion") and "nodes" not in words:
            words += " nodes=31"
        own: dict[str, Any] = {"dtype": "bfloat16", "max_num_seqs": most}
        own |= {"max_model_len": self.length, "max_num_batched_tokens": 2048 if small else 8192}
        if self.shape == "experts":
            own |= {"memory": 0.9 / len(self.modes)}
            own["more"] = {"load_format": "dummy", "skip_tokenizer_init": True}
        else:
            own |= gpu_share(what, len(self.modes), most, self.length)
        if small:
            own |= {**SMALL, "more": {**own.get("more", {}), **SMALL["more"]}}
        return method_of(words, what).engine(what.target, cpu=False, **own)

    def start(self, small: bool) -> dict[str, Any]:
        """Each mode's engine, and how long its start took."""
        from vllm import LLM

        folder, found = folder_of(self.shape, small), {}
        for mode in self.modes:
            begin = time.perf_counter()
            llm = LLM(**self.engine(mode, small, folder).arguments())
            found[mode] = llm, time.perf_counter() - begin
        return found


# Qwen3-30B-A3B of eight layers with random weights, and a drafter of its width.
_EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
    "intermediate_size": 6144, "num_hidden_layers": 8, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960, "rope_theta": 1000000, "hidden_act": "silu",
    "torch_dtype": "bfloat16", "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "norm_topk_prob": True,
}  # fmt: skip
_DRAFTER = _EXPERTS | {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 5,
    "num_target_layers": 8, "block_size": 16, "layer_types": ["full_attention"] * 5,
    "dflash_config": {"target_layer_ids": [1, 2, 3, 4, 6], "mask_token_id": 1023},
}  # fmt: skip
# Sizes that the simulated GPU runs.
_FEW = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 512,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
}  # fmt: skip


def folder_of(shape: str, small: bool) -> Path:
    """The folder of a pair, in a rehearsal the tiny one; experts have configs alone."""
    from benchmarks.pairs import pair_folder

    if shape != "experts":
        return TINY if small else pair_folder(shape)
    folder = Path(tempfile.mkdtemp(prefix="bastion-"))
    for name, config in {"target": _EXPERTS, "drafter": _DRAFTER}.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config | (_FEW if small else {})))
    return folder


def held_out(number: int, tokens: int, temperature: float = 0.0) -> list[Request]:
    """Held-out prompts of the tiny pair's domains in turn, again and again; seeded above T=0."""
    from benchmarks.prompts import load_jsonl

    domains: dict[str, list[str]] = {}
    for prompt in load_jsonl(TINY / "prompts.jsonl"):
        domains.setdefault(prompt.set, []).append(prompt.turns[0])
    turns = [text for turn in zip(*domains.values(), strict=True) for text in turn]
    texts = [turns[i % len(turns)] for i in range(number)]
    return [Request(str(i), text, tokens, temperature, i) for i, text in enumerate(texts)]


def recorded(number: int, tokens: int, temperature: float = 0.0) -> list[Request]:
    """`number` prompts of each set of the recording in turn, again and again; seeded above T=0.

    Replies have a quarter to five quarters of `tokens`. If all had one length, those of plain
    decoding alone would end together, and its prompts would come in few steps.
    """
    from benchmarks.replay.recording import load_recording

    known = load_recording(RESULTS / "recordings" / "smollm2.npz")
    lengths, begin = random.Random(5), 0
    sets: dict[str, list[list[int]]] = {}
    for domain, length in zip(known.domains, known.prompt_lens.tolist(), strict=True):
        sets.setdefault(domain, []).append(known.prompts[begin : begin + length].tolist())
        begin += length
    turns = [found[i % len(found)] for i in range(number) for found in sets.values()]
    return [
        Request(
            *(str(i), prompt, lengths.randint(tokens // 4, tokens * 5 // 4), temperature, i),
            params={"ignore_eos": False},
        )
        for i, prompt in enumerate(turns)
    ]


def noise(number: int, tokens: int, temperature: float = 0.0, length: int = 128) -> list[Request]:
    """Prompts of `length` token ids, all different, for engines without a tokenizer."""
    prompts = [[(31 * r + 7 * i) % 1000 + 2 for i in range(length)] for r in range(number)]
    params = {"detokenize": False}
    return [Request(str(r), ids, tokens, params=params) for r, ids in enumerate(prompts)]
