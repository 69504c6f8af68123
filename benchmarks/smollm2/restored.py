# SPDX-License-Identifier: Apache-2.0
"""Tokens per tree of the same replies, fresh and after restored state.

    python -m benchmarks.smollm2.restored --questions grade-school-math's test.jsonl

A prompt is a conversation of questions and answers of the given length, and a further question. It
is decoded with everything computed, again with a prefix hit, among others in a cache that is too
small for all (preemption), and with its reply and one more question as a second turn, computed and
cached. `tests/e2e/test_restored.py` has a connector's restore too.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.process import EngineProcess
from benchmarks.smollm2.install import pair
from tests.e2e.session import Session

NODES, BLOCK = 16, 32
Batch = dict[str, Any]
_ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


class Conversations:
    """Prompts of given lengths from rows of questions and answers."""

    def __init__(self, tokenizer: Any, rows: list[dict[str, str]]) -> None:
        self._tokenizer, self._rows, self._next = tokenizer, rows, 0

    def _row(self) -> dict[str, str]:
        self._next += 1
        return self._rows[(self._next - 1) % len(self._rows)]

    def prompt(self, length: int) -> list[int]:
        """At most `length` tokens, and more than `length` less one question and answer."""
        asked = self._row()["question"]
        turns: list[dict[str, str]] = []
        last = {"role": "user", "content": asked}
        ids = self._ids([last])
        while len(ids) <= length:
            found, row = ids, self._row()
            turns.append({"role": "user", "content": row["question"]})
            turns.append({"role": "assistant", "content": row["answer"]})
            ids = self._ids([*turns, last])
        return found

    def again(self, prompt: list[int], reply: list[int]) -> list[int]:
        """A second turn: the conversation with its reply and a further question."""
        text = f"<|im_end|>\n<|im_start|>user\n{self._row()['question']}<|im_end|>\n"
        text += "<|im_start|>assistant\n"
        return prompt + reply + self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _ids(self, turns: list[dict[str, str]]) -> list[int]:
        text = self._tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, tokenize=False
        )
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[no-any-return]


def batch(prompts: list[list[int]], tokens: int) -> Batch:
    """Greedy requests of a fixed length."""
    params = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    rows = [{"id": str(i), "prompt": ids, "params": params} for i, ids in enumerate(prompts)]
    return {"requests": rows}


def trees(done: Batch) -> dict[tuple[str, int], int]:
    """Tokens by request and position of every tree that other requests did not make smaller."""
    rows = zip(done["path_requests"], done["roots"], done["verified"], done["paths"], strict=True)
    return {(name, at): len(path) for name, at, nodes, path in rows if nodes == NODES}


def compared(fresh: Batch, restored: Batch) -> str:
    """Tokens per tree, restored and fresh, at the positions where both have one."""
    ours, theirs = trees(restored), trees(fresh)
    common = sorted(ours.keys() & theirs.keys())
    means = [sum(one[at] for at in common) / max(1, len(common)) for one in (ours, theirs)]
    return f"{means[0]:.3f}, {means[1]:.3f} ({len(common)} of {len(theirs)})"


def decoded(spec: dict[str, Any], batches: list[Batch]) -> Iterator[Batch]:
    """What an engine in a process of its own decodes."""
    with tempfile.TemporaryDirectory() as folder:
        process = EngineProcess(Path(folder) / "engine.log", _ENVIRONMENT)
        try:
            process.start(Session, spec)
            process.answer()
            for one in batches:
                process.call("run", one)
                yield process.answer()
        finally:
            process.close()


def engine(folder: Path, args: argparse.Namespace, length: int, **keys: Any) -> dict[str, Any]:
    """Keyword arguments of `LLM` with a fixed budget, so that trees do not depend on times."""
    return {
        "engine": {
            "model": str(folder / "target"),
            "dtype": args.dtype,
            "enforce_eager": True,
            "max_num_seqs": 1,
            "max_model_len": length,
            "max_num_batched_tokens": 512,
            "block_size": BLOCK,
            "disable_log_stats": False,  # counts preemptions
            "speculative_config": {
                "method": "bastion",
                "model": str(folder / "drafter"),
                "num_speculative_tokens": NODES,
                "bastion_budget": NODES,
                "bastion_calibration": "off",
            },
            **keys,
        }
    }


def main() -> None:
    """Print a row for every length."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.smollm2.restored",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--questions", type=Path, required=True, help="JSON lines")
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 2000, 4000, 8000])
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="of a reply")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from transformers import AutoTokenizer

    folder = pair()
    rows = [json.loads(line) for line in args.questions.read_text().splitlines()]
    chats = Conversations(AutoTokenizer.from_pretrained(folder / "target"), rows)
    print("Tokens per tree after restored state, fresh at the same positions (trees in both)\n")
    print("| context | prefix hit | preempted | second turn, cached |", flush=True)
    print("|---|---|---|---|", flush=True)
    for context in args.contexts:
        prompts = [chats.prompt(min(context, 8192 - 2 * args.tokens - 300))]
        prompts += [chats.prompt(len(prompts[0])) for _ in range(args.prompts - 1)]
        longest = max(map(len, prompts)) + 2 * args.tokens + 300
        first = batch(prompts, args.tokens)
        each = -(-(longest + 2 * BLOCK) // BLOCK)
        plain = engine(folder, args, longest, enable_prefix_caching=False)
        plain["engine"]["num_gpu_blocks_override"] = each + 1
        (fresh,) = decoded(plain, [first])
        replies = [fresh["requests"][str(i)]["token_ids"] for i in range(len(prompts))]
        pairs = zip(prompts, replies, strict=True)
        turns = batch([chats.again(*one) for one in pairs], args.tokens)
        (second,) = decoded(plain, [turns])
        caching = engine(folder, args, longest, enable_prefix_caching=True)
        caching["engine"]["num_gpu_blocks_override"] = (args.prompts + 1) * each
        _, hit, cached = decoded(caching, [first, first, turns])
        assert all(one["cached_tokens"] >= BLOCK for one in hit["requests"].values())
        # Room for the prompts but not for all replies.
        tight = sum(-(-(len(ids) + 24) // BLOCK) for ids in prompts) + 2
        crowded = engine(folder, args, longest, enable_prefix_caching=False)
        crowded["engine"] |= {"max_num_seqs": args.prompts, "num_gpu_blocks_override": tight}
        (preempted,) = decoded(crowded, [first])
        count = int(preempted["metrics"]["num_preemptions"])
        cells = [compared(fresh, hit), f"{compared(fresh, preempted)}, {count} times"]
        cells.append(compared(second, cached))
        print(f"| {max(map(len, prompts))} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
