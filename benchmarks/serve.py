# SPDX-License-Identifier: Apache-2.0
"""Load through a server, by vLLM's own `vllm bench serve`: plain decoding, dflash, bastion.

    python -m benchmarks.serve               # the tiny pair: results/serve-tiny.json, .md
    python -m benchmarks.serve --pair 0.6B --only "dflash 15" adaptive --concurrency 1 8

Each method gets a server, started as a user would. The client sends the 90 prompts of the tiny pair
at T=0, a fixed number at a time, and streams 64 tokens each. Server, engine and client share the
machine, so the numbers include the cost of the API.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS, TINY
from benchmarks.harness.engine import GAMMA, UserEngine
from benchmarks.harness.server import VLLM, serving, users_environment
from benchmarks.paper.arguments import pair_dtype, pair_folder
from benchmarks.paper.methods import PLAIN, Target, methods
from benchmarks.progress import Progress
from benchmarks.provenance import provenance

_TOKENS = 64
_COLUMNS = {
    "output_throughput": "tokens/s",
    "median_ttft_ms": "first token, ms",
    "median_tpot_ms": "ms/token",
    "p99_itl_ms": "99% between chunks, ms",
    "spec_decode_acceptance_length": "tau",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pair", default="tiny", help="tiny, or a shape of benchmarks.widen")
    parser.add_argument("--only", nargs="+", default=["dflash 15", "N=16", "adaptive"])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--prompts", type=int, default=90)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    pair, cpu = pair_folder(given.pair), not torch.cuda.is_available()
    what = Target(str(pair / "target"), str(pair / "drafter"), GAMMA)
    engines = {
        name: method.engine(
            what.target, cpu, dtype=pair_dtype(given.pair), max_num_seqs=max(given.concurrency)
        )
        for name, method in methods(what, cpu=cpu).items()
        if name == PLAIN or any(part in name for part in given.only)
    }
    result: dict[str, Any] = {
        "provenance": provenance(argv),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "load": os.getloadavg()[0],
        "complete": False,
        "results": {},
    }
    path = given.out / f"serve-{given.pair}.json"
    given.out.mkdir(parents=True, exist_ok=True)
    for name, engine in engines.items():
        progress = Progress(name)
        with (
            tempfile.TemporaryDirectory(prefix="bastion-") as folder,
            served(engine, Path(folder), progress) as url,
        ):
            for concurrency in given.concurrency:
                progress.done(f"{concurrency} at a time")
                client = load(url, engine, given.prompts, concurrency, Path(folder))
                result["results"].setdefault(name, {})[str(concurrency)] = client
                path.write_text(json.dumps(result, indent=1) + "\n")
    result["complete"] = True
    path.write_text(json.dumps(result, indent=1) + "\n")
    page = markdown(result, given.pair)
    path.with_suffix(".md").write_text(page)
    print(page)
    return 0


@contextmanager
def served(engine: UserEngine, folder: Path, progress: Progress) -> Iterator[str]:
    """Run a server and yield its address."""
    arguments = [
        str(engine.target), "--dtype", engine.dtype, "--max-num-seqs", str(engine.max_num_seqs),
        "--no-enable-prefix-caching",
    ]  # fmt: skip
    if engine.speculative is not None:
        arguments += ["--speculative-config", json.dumps(engine.speculative)]
    env = users_environment(engine.environment)
    with serving(arguments, env, folder / "server.log") as server:
        progress.done(f"started in {server.start_s:.0f} s")
        yield server.url


def load(
    url: str, engine: UserEngine, prompts: int, concurrency: int, folder: Path
) -> dict[str, Any]:
    """The report of `vllm bench serve` for `prompts` requests, `concurrency` at a time."""
    command = [
        *VLLM, "bench", "serve", "--base-url", url, "--model", str(engine.target),
        "--dataset-name", "custom", "--dataset-path", str(TINY / "prompts.jsonl"),
        "--skip-chat-template", "--custom-output-len", str(_TOKENS), "--ignore-eos",
        "--temperature", "0", "--num-prompts", str(prompts), "--num-warmups", str(concurrency),
        "--max-concurrency", str(concurrency), "--disable-tqdm", "--save-result",
        "--result-dir", str(folder), "--result-filename", "client.json",
    ]  # fmt: skip
    env = users_environment(engine.environment)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"vllm bench serve failed:\n{done.stderr[-3000:]}")
    client = json.loads((folder / "client.json").read_text())
    if client["completed"] != prompts:
        raise RuntimeError(f"only {client['completed']} of {prompts} requests were served")
    return {name: client.get(name) for name in ("completed", "duration", *_COLUMNS)}


def markdown(result: dict[str, Any], pair: str) -> str:
    """One table per concurrency, with tokens/s over plain decoding's."""
    lines = [f"# Served load, {pair} pair", "", f"`{result['provenance']['command']}`"]
    plain = result["results"][PLAIN]
    for concurrency, base in plain.items():
        lines += ["", f"## {concurrency} at a time", ""]
        lines += ["| | over plain | " + " | ".join(_COLUMNS.values()) + " |"]
        lines += ["|---" * (2 + len(_COLUMNS)) + "|"]
        for name, cells in result["results"].items():
            client = cells[concurrency]
            ratio = client["output_throughput"] / base["output_throughput"]
            values = ["" if client[key] is None else f"{client[key]:.2f}" for key in _COLUMNS]
            lines += [f"| {name} | {ratio:.2f}x | " + " | ".join(values) + " |"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
