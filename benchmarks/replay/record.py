# SPDX-License-Identifier: Apache-2.0
"""Record drafts and continuations from a real vLLM run, for `benchmarks.replay`.

    python -m benchmarks.replay.record                     # results/recordings/tiny.npz
    python -m benchmarks.replay.record --target T --drafter D --jsonl FILE   # chats of any pair

A bastion engine decodes held-out prompts of every domain at T=0 and T=1 (seeded) and verifies
nothing, so it emits one token per step, and the drafter's top-K is recorded at every position.
Tokens and drafts do not depend on what is verified, so any budget policy can be replayed on the
recording. A drafter with a head over its candidates cannot be recorded: its trees need more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, TINY, parser_of
from benchmarks.harness.decoder import run_engine
from benchmarks.harness.engine import GAMMA, Engine, Request, bastion
from benchmarks.progress import Progress
from benchmarks.prompts import load_jsonl, load_prompts
from benchmarks.provenance import provenance
from benchmarks.replay.recording import Drafted, Emitted, Recording, recording_of, save_recording

BATCH = 4


def requests_for(
    prompts: list[dict[str, str]], temperatures: Sequence[float], steps: int
) -> dict[str, tuple[Request, str]]:
    """Requests and their domains by name. The last step needs gamma + 1 tokens after it."""
    found = {}
    for temperature in temperatures:
        for seed, row in enumerate(prompts):
            name = f"{row['id']}/T{temperature:g}"
            request = Request(name, row["prompt"], steps + GAMMA + 1, temperature, seed)
            found[name] = request, row["domain"]
    return found


def record(
    engine: Engine,
    drafter: Path,
    asked: dict[str, tuple[Request, str]],
    progress: Any,
    meta: Any,
    **keys: Any,
) -> Recording:
    """The drafts at every position of requests, which are named with their domains."""
    probing = replace(
        engine,
        speculative=bastion(drafter, 1, 1, lookup=False, **keys),
        eager=True,
        probe="benchmarks.probes:drafts",
    )
    done = run_engine(probing, [one for one, _ in asked.values()], progress)
    requests = [
        Emitted(one.name, domain, request.temperature, one.prompt_ids, one.token_ids)
        for one, (request, domain) in zip(done.completions, asked.values(), strict=True)
    ]
    names = list(asked)
    if any(draft.transitions is not None for draft in done.probed):
        raise SystemExit("replay.record: this drafter's head scores candidates by their parents")
    drafts = (Drafted(names[d.request], d.position, d.tokens, d.logprobs) for d in done.probed)
    return recording_of(meta, requests, drafts)


def chats(target: Path, files: Sequence[Path], samples: int) -> list[dict[str, str]]:
    """The files' prompts, each as the first turn of a chat with the target."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)

    def text(turn: str) -> str:
        chat = [{"role": "user", "content": turn}]
        found: str = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return found

    prompts = [prompt for file in files for prompt in load_jsonl(file, samples)]
    return [{"id": f"{p.set}/{p.id}", "domain": p.set, "prompt": text(p.turns[0])} for p in prompts]


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=int, default=8, help="per domain (default 8)")
    parser.add_argument("--steps", type=int, default=36, help="steps per request (default 36)")
    parser.add_argument("--top-k", type=int, default=16, help="candidates per depth (default 16)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--target", type=Path, default=TINY / "target")
    parser.add_argument("--drafter", type=Path, default=TINY / "drafter")
    parser.add_argument("--jsonl", type=Path, nargs="+", help="chats, in place of its prompts")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(argv)
    if given.jsonl:
        rows = chats(given.target, given.jsonl, given.prompts)
    else:
        rows = load_prompts(TINY / "prompts.jsonl", given.prompts)
    asked = requests_for(rows, given.temperatures, given.steps)
    engine = Engine(target=given.target, max_num_seqs=BATCH, max_model_len=1024)
    progress = Progress("recording")
    meta = provenance() | {"pair": given.target.parent.name, "steps": given.steps}
    recording = record(engine, given.drafter, asked, progress, meta, top_k=given.top_k)
    path = given.out / "recordings" / f"{given.target.parent.name}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_recording(recording, path)
    size = path.stat().st_size / 1e6
    progress.done(f"{recording.num_steps} steps, {size:.2f} MB, {progress.seconds:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
