# SPDX-License-Identifier: Apache-2.0
"""The target's own replies, which its drafter is trained to predict.

    python -m benchmarks.smollm2.rollouts --gsm8k grade-school-math's train.jsonl

Writes numbered shards of token ids to the pair's folder, sources in turn, greedy and at T=1; an
interrupted run goes on where it stopped.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import parser_of
from benchmarks.smollm2 import prompts
from benchmarks.smollm2.target import END_OF_TURN, fetch, pair_folder

# (source, temperature): one shard of each in turn.
ROUND = (
    ("gsm8k", 0.0),
    ("code", 0.0),
    ("own", 0.0),
    ("gsm8k", 1.0),
    ("own", 0.0),
    ("code", 0.0),
    ("gsm8k", 0.0),
    ("own", 1.0),
)
REPLY, INSTRUCTION, PROMPT = 320, 160, 400  # most tokens
SECOND_TURNS = 0.25  # of a shard of own instructions: conversations with a second turn


class Engine:
    """vLLM's offline engine on token ids, one of several that may share a GPU."""

    def __init__(self, folder: Path, seed: int) -> None:
        from vllm import LLM
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
            more: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
        else:
            graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}  # starts sooner
            more = {
                "max_num_seqs": 512,
                "gpu_memory_utilization": 0.1,
                "compilation_config": graphs,
            }
        self.llm = LLM(
            str(folder), dtype="bfloat16", max_model_len=1536, disable_log_stats=True, seed=seed,
            kv_cache_memory_bytes=3 << 30, **more,
        )  # fmt: skip
        self.end = self.llm.get_tokenizer().convert_tokens_to_ids(END_OF_TURN)

    def __call__(self, many: list[list[int]], temperature: float, tokens: int) -> list[list[int]]:
        """Continue token ids up to the end of a turn (which is kept)."""
        from vllm import SamplingParams, TokensPrompt

        # vLLM 0.32 cannot seed requests of a CPU one by one when a prompt is split.
        params = SamplingParams(temperature=temperature, max_tokens=tokens, detokenize=False)
        found = self.llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in many], params)
        return [list(one.outputs[0].token_ids) for one in found]


def shards(
    engine: Engine, file: Path | None, sources: Sequence[str], size: int
) -> Iterator[tuple[str, Any]]:
    """(name, function that makes the rows) without end; `size`: conversations of a shard."""
    tok = engine.llm.get_tokenizer()
    texts = {"gsm8k": prompts.gsm8k(file), "code": prompts.code()}
    print({name: len(found) for name, found in texts.items()}, flush=True)

    def ids(text: str) -> list[int]:
        whole = tok.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        return tok(whole, add_special_tokens=False)["input_ids"]

    def asked(source: str, temperature: float, number: int) -> list[dict[str, Any]]:
        pool = texts[source]
        picked = [ids(pool[(number * size + i) % len(pool)]) for i in range(size)]
        picked = [one for one in picked if len(one) <= PROMPT]
        return _rows(picked, engine(picked, temperature, REPLY))

    def written(temperature: float, number: int) -> list[dict[str, Any]]:
        starts = tok(prompts.own(size * (number + 1))[-size:], add_special_tokens=False)
        reply_to = tok(f"{END_OF_TURN}\n<|im_start|>assistant\n", add_special_tokens=False)
        again = tok("\n<|im_start|>user\n", add_special_tokens=False)["input_ids"]
        begin = reply_to["input_ids"]

        def instruct(before: list[list[int]]) -> list[list[int]]:
            found = engine(before, 1.0, INSTRUCTION)
            ended = zip(before, found, strict=True)
            return [ids + text[:-1] + begin for ids, text in ended if text[-1] == engine.end]

        first = instruct(starts["input_ids"])
        rows = _rows(first, engine(first, temperature, REPLY))
        ended = [row for row in rows if row["reply"][-1] == engine.end][: int(SECOND_TURNS * size)]
        second = instruct([r["prompt"] + r["reply"] + again for r in ended])
        second = [one for one in second if len(one) < 1000]
        return rows + _rows(second, engine(second, temperature, REPLY))

    numbers = dict.fromkeys(prompts.SOURCES, 0)
    while True:
        for source, temperature in ROUND:
            if source not in sources:
                continue
            number = numbers[source]
            numbers[source] += 1
            name = f"{source}-{number:04d}-t{temperature:g}.jsonl"
            if source == "own":
                yield name, lambda t=temperature, n=number: written(t, n)
            else:
                yield name, lambda s=source, t=temperature, n=number: asked(s, t, n)


def _rows(asked: list[list[int]], replies: list[list[int]]) -> list[dict[str, Any]]:
    both = zip(asked, replies, strict=True)
    return [{"prompt": one, "reply": reply} for one, reply in both if len(reply) > 8]


def main() -> None:
    """Write shards until there are `--tokens` tokens of replies."""
    parser = parser_of(__doc__)
    parser.add_argument("--gsm8k", type=Path, help="its training questions (default: the Hub's)")
    parser.add_argument("--tokens", type=float, default=3e6, help="of replies, all shards together")
    parser.add_argument("--sources", nargs="+", choices=prompts.SOURCES, default=prompts.SOURCES)
    parser.add_argument("--shard", type=int, default=128, help="conversations of a shard")
    args = parser.parse_args()
    folder = pair_folder() / "rollouts"
    folder.mkdir(parents=True, exist_ok=True)
    engine = Engine(fetch(), seed=len(list(folder.glob("*.jsonl"))))
    total = 0
    for name, make in shards(engine, args.gsm8k, args.sources, args.shard):
        path, begin = folder / name, time.monotonic()
        if path.exists():
            rows = [json.loads(line) for line in path.read_text().splitlines()]
        else:
            rows = make()
            part = path.with_suffix(".part")
            part.write_text("".join(json.dumps(row) + "\n" for row in rows))
            part.rename(path)
        new = sum(len(row["reply"]) for row in rows)
        total += new
        seconds = time.monotonic() - begin
        print(
            f"{name}: {len(rows)} replies, {new} tokens, {seconds:.0f} s; {total} in all",
            flush=True,
        )
        if total >= args.tokens:
            return


if __name__ == "__main__":
    main()
