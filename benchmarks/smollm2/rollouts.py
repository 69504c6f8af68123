# SPDX-License-Identifier: Apache-2.0
"""The target's own replies and its states on them, which its drafter is trained with.

    python -m benchmarks.smollm2.rollouts --gsm8k grade-school-math's train.jsonl

Writes numbered shards to the pair's folder (see `states`), sources in turn, greedy and at T=1; an
interrupted run goes on where it stopped. The states are those of the engine's own steps, so a
reply's are computed once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import parser_of
from benchmarks.chat import Renderer
from benchmarks.prompts import Prompt
from benchmarks.smollm2 import prompts
from benchmarks.smollm2.states import FAST_DTYPE, LIKELY, Reply, pack, replies_of
from benchmarks.smollm2.target import END_OF_TURN, fetch, pair_folder
from benchmarks.tiny.model import feature_layers

# Source and temperature: one shard of each in turn.
ROUND = ["gsm8k 0", "own 0", "code 0", "text 0", "own 1", "gsm8k 1", "edit 0", "own 0", "code 1"]
REPLY, INSTRUCTION, PROMPT = 320, 160, 1200  # most tokens
SECOND_TURNS = 0.25  # of a shard of own instructions: conversations with a second turn


class Engine:
    """vLLM's offline engine on token ids, whose steps' states can be kept."""

    def __init__(self, folder: Path, seed: int, **options: Any) -> None:
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "1"}
        from vllm import LLM
        from vllm.platforms import current_platform

        cpu = current_platform.is_cpu()
        memory = {"kv_cache_memory_bytes": 4 << 30} if cpu else {"gpu_memory_utilization": 0.1}
        sizes = {"max_num_seqs": 128 if cpu else 512, "max_model_len": 2048, **memory}
        defaults = {"dtype": FAST_DTYPE, "enable_prefix_caching": False, **sizes}
        self.llm = LLM(
            str(folder), seed=seed, enforce_eager=True, disable_log_stats=True, **defaults | options
        )
        self.end = self.llm.get_tokenizer().convert_tokens_to_ids(END_OF_TURN)
        self.keeps, self.steps = False, list[tuple[Any, dict[str, Tensor]]]()
        executor: Any = self.llm.llm_engine.model_executor
        self._keep_states(executor.driver_worker.worker.model_runner)

    def _keep_states(self, runner: Any) -> None:
        """Make a step's features and most likely tokens arrive in `self.steps`."""
        model, sample = runner.model, runner.sample
        forward, logits_of = model.forward, model.compute_logits
        layers = feature_layers(model.config.num_hidden_layers)
        model.set_aux_hidden_state_layers(tuple(layer + 1 for layer in layers))
        last: dict[str, Any] = {}

        def forward_kept(*args: Any, **kwargs: Any) -> Tensor:
            hidden, last["features"] = forward(*args, **kwargs)
            return hidden

        def logits_kept(hidden: Tensor) -> Tensor:
            last["logits"] = logits_of(hidden)
            return last["logits"]

        def sample_kept(hidden: Tensor, batch: Any, grammar: Any) -> Any:
            sampled = sample(hidden, batch, grammar)
            if self.keeps:
                odds, likely = last["logits"].float().topk(LIKELY)
                features = torch.cat(last["features"], dim=-1)[: batch.num_tokens].bfloat16()
                features, odds = features.cpu(), odds.softmax(-1).half().cpu()
                states = {"features": features, "likely": likely.int().cpu(), "odds": odds}
                self.steps.append((batch, states))
            return sampled

        model.forward, model.compute_logits = forward_kept, logits_kept
        runner.sample = sample_kept

    def __call__(
        self, many: list[list[int]], temperature: float, tokens: int, keep: bool = True
    ) -> list[Reply]:
        """Continue token ids up to the end of a turn (which is kept)."""
        from vllm import SamplingParams, TokensPrompt

        self.keeps = keep
        # vLLM 0.32 cannot seed requests of a CPU one by one when a prompt is split.
        params = SamplingParams(temperature=temperature, max_tokens=tokens, detokenize=False)
        found = self.llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in many], params)
        asked = {one.request_id: (one.prompt_token_ids, one.outputs[0].token_ids) for one in found}
        steps, self.steps = self.steps, []
        return replies_of(asked, steps)


def shards(
    engine: Engine, file: Path | None, sources: Sequence[str], size: int, first: int
) -> Iterator[tuple[str, Any]]:
    """(name, function that makes the replies) without end; `size`: conversations of a shard."""
    tok = engine.llm.get_tokenizer()
    texts = {"gsm8k": prompts.gsm8k(file), **prompts.from_packages()}
    render = Renderer(tok, raw=False, limit=PROMPT)

    def asked(source: str, temperature: float, number: int) -> list[Reply]:
        pool = texts[source]
        picked = [pool[(number * size + i) % len(pool)] for i in range(size)]
        ids = [render.ids(Prompt(source, "", (text,)), []) for text in picked]
        return engine(ids, temperature, REPLY)

    def written(temperature: float, number: int) -> list[Reply]:
        starts = tok(prompts.own(size * (number + 1))[-size:], add_special_tokens=False)
        reply_to = tok(f"{END_OF_TURN}\n<|im_start|>assistant\n", add_special_tokens=False)
        again = tok("\n<|im_start|>user\n", add_special_tokens=False)["input_ids"]

        def instruct(before: list[list[int]]) -> list[list[int]]:
            found = engine(before, 1.0, INSTRUCTION, keep=False)
            ended = [one.ids[:-1] for one in found if one.ids[-1] == engine.end]
            return [ids + reply_to["input_ids"] for ids in ended]

        rows = engine(instruct(starts["input_ids"]), temperature, REPLY)
        ended = [row.ids for row in rows if row.ids[-1] == engine.end]
        second = instruct([ids + again for ids in ended[: int(SECOND_TURNS * size)]])
        return rows + engine(second, temperature, REPLY)

    numbers = dict.fromkeys(prompts.SOURCES, first)
    while True:
        for source, temperature in (one.split() for one in ROUND):
            if source in sources:
                make = written if source == "own" else partial(asked, source)
                name = f"{source}-{numbers[source]:04d}-t{temperature}.pt"
                yield name, partial(make, float(temperature), numbers[source])
                numbers[source] += 1


def main() -> None:
    """Write shards until there are `--tokens` tokens of replies."""
    parser = parser_of(__doc__)
    parser.add_argument("--gsm8k", type=Path, help="its training questions (default: the Hub's)")
    parser.add_argument("--tokens", type=float, default=3e6, help="of replies, all shards together")
    parser.add_argument("--sources", nargs="+", choices=prompts.SOURCES, default=prompts.SOURCES)
    parser.add_argument("--shard", type=int, default=512, help="conversations of a shard")
    parser.add_argument("--first", type=int, default=0, help="number of each source's first shard")
    args = parser.parse_args()
    folder = pair_folder() / "states"
    folder.mkdir(parents=True, exist_ok=True)
    engine = Engine(fetch(), seed=len(list(folder.glob("*.pt"))))
    total = 0
    for name, make in shards(engine, args.gsm8k, args.sources, args.shard, args.first):
        path = folder / name
        if path.exists():
            shard = torch.load(path, mmap=True)
        else:
            shard = pack(make(), greedy="-t0" in name)
            part = path.with_suffix(".part")
            torch.save(shard, part)
            part.rename(path)
        _, length, first, _ = shard["rows"].T
        new = int((length - first - 1).sum())
        total += new
        print(f"{name}: {len(length)} replies, {new} tokens; {total} in all", flush=True)
        if total >= args.tokens:
            return


if __name__ == "__main__":
    main()
