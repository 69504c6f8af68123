# SPDX-License-Identifier: Apache-2.0
"""Record drafts and continuations from a real vLLM run, for `benchmarks.replay`.

    python -m benchmarks.replay.record                     # results/recordings/tiny.npz
    python -m benchmarks.replay.record --pair smollm2 --jsonl FILE   # first turns of chats

A bastion engine decodes held-out prompts of every domain at T=0 and T=1 (seeded) and verifies
nothing, so it emits one token per step, and the drafter's top-K is recorded at every position.
Tokens and drafts do not depend on what is verified, so any budget policy can be replayed on the
recording. A drafter with a head over its candidates cannot be recorded: its trees need more.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from benchmarks import RESULTS, TINY, parser_of
from benchmarks.chat import Renderer
from benchmarks.e2e.methods import Target, drafts_of, method_of
from benchmarks.harness.driver import start_driver
from benchmarks.harness.engine import Engine, Request
from benchmarks.harness.process import begun
from benchmarks.pairs import pair_dtype, pair_folder
from benchmarks.progress import Progress
from benchmarks.prompts import load_jsonl
from benchmarks.provenance import provenance
from benchmarks.replay.recording import Drafted, Emitted, Recording, recording_of, save_recording

_BATCH, _LENGTH = 4, 1024


def record(engine: Engine, asked: dict[str, tuple[str, Request]], steps: int) -> Recording:
    """The drafts at every position of requests, which are named with their domains."""
    progress = Progress("recording")
    with begun(engine) as process:
        process.answer(progress)
        process.start(start_driver, engine)
        process.answer(progress)
        process.call("drive", [request for _, request in asked.values()], _BATCH)
        responses = process.answer(progress)
        process.call("probed")
        seen = process.answer(progress)
    requests = [
        Emitted(name, domain, request.temperature, one.prompt_ids, one.token_ids)
        for one, (name, (domain, request)) in zip(responses, asked.items(), strict=True)
    ]
    if any(draft.transitions is not None for draft in seen):
        raise SystemExit("replay.record: this drafter's head scores candidates by their parents")
    names = list(asked)
    drafts = (Drafted(names[d.request], d.position, d.tokens, d.logprobs) for d in seen)
    progress.done(f"{len(seen)} steps in {progress.seconds:.0f} s")
    return recording_of(provenance() | {"steps": steps}, requests, drafts)


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--pair", default="tiny", help="see benchmarks.pairs")
    parser.add_argument("--jsonl", type=Path, nargs="+", default=[TINY / "prompts.jsonl"])
    parser.add_argument("--prompts", type=int, default=8, help="per domain (default 8)")
    parser.add_argument("--steps", type=int, default=36, help="steps per request (default 36)")
    parser.add_argument("--top-k", type=int, default=16, help="candidates per depth (default 16)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    given = parser.parse_args(argv)
    folder = pair_folder(given.pair)
    what = Target(str(folder / "target"), str(folder / "drafter"))
    # The last step needs as many tokens after it as are drafted, and the target's own.
    tokens = given.steps + drafts_of(str(what.drafter))[0] + 1
    renderer = Renderer(
        AutoTokenizer.from_pretrained(what.target), given.pair != "smollm2", _LENGTH - tokens
    )
    prompts = [one for path in given.jsonl for one in load_jsonl(path, given.prompts)]
    asked = {}
    for temperature in given.temperatures:
        for seed, one in enumerate(prompts):
            name = f"{one.set}/{one.id}/T{temperature:g}"
            ids = renderer.ids(one, [])
            asked[name] = one.set, Request(name, ids, tokens, temperature, seed)
    words = f"bastion nodes=1 budget=1 lookup=false top_k={given.top_k}"
    engine = method_of(words, what).engine(
        what.target, cpu=True, dtype=pair_dtype(given.pair), eager=True, max_num_seqs=_BATCH,
        max_model_len=_LENGTH, probe="benchmarks.probes:drafts",
    )  # fmt: skip
    path = RESULTS / "recordings" / f"{given.pair}.npz"
    save_recording(record(engine, asked, given.steps), path)
    print(f"{path.stat().st_size / 1e6:.2f} MB in {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
