# SPDX-License-Identifier: Apache-2.0
"""A server under load with the tiny pair's own drafter, then with one of random weights.

    python -m benchmarks.wrong_drafter      # results/wrong-drafter.json, .md; pictures in docs/

A browser has the server's page open while clients send requests. What is kept of each run: the
page, the metrics, bastion's lines in the log, and the texts, which must be the same.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from benchmarks import RESULTS, ROOT, TINY
from benchmarks.harness.browser import Browser
from benchmarks.harness.engine import UserEngine
from benchmarks.progress import Progress
from benchmarks.prompts import load_prompts
from benchmarks.provenance import provenance
from benchmarks.random_drafter import write_random
from benchmarks.serve import served

_CLIENTS, _TOKENS = 4, 40
_ENVIRONMENT = {
    "VLLM_BASTION_PAGE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_LOG_STATS_INTERVAL": "5",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
}
_TITLES = {"own": "its own drafter", "random": "random weights"}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs")
    given = parser.parse_args(argv)
    result: dict[str, Any] = {"provenance": provenance(argv), "requests": given.requests}
    texts: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="bastion-") as name:
        folder = Path(name)
        drafters = {"own": TINY / "drafter", "random": folder / "random-drafter"}
        write_random(TINY / "drafter", drafters["random"])
        for kind, drafter in drafters.items():
            picture = given.pictures / ("page.png" if kind == "own" else "page-random.png")
            (folder / kind).mkdir()
            run, texts[kind] = observe(drafter, folder / kind, given.requests, picture)
            result[kind] = run
    result["same_texts"] = sum(map(str.__eq__, texts["own"], texts["random"]))
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "wrong-drafter.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(result))
    print(markdown(result))
    return 0


def observe(
    drafter: Path, folder: Path, requests: int, picture: Path
) -> tuple[dict[str, Any], list[str]]:
    """Serve, send requests with the page open, and collect what was told; and the texts."""
    engine = UserEngine(
        speculative={"method": "bastion", "model": str(drafter)},
        target=TINY / "target",
        max_num_seqs=_CLIENTS,
        dtype="float32",
        environment=_ENVIRONMENT,
    )
    prompts = [row["prompt"] for row in load_prompts(TINY / "prompts.jsonl")]
    progress = Progress(drafter.name)
    with served(engine, folder, progress) as url, Browser(height=1700) as browser:
        browser.open(f"{url}/bastion")
        ask = partial(complete, url, str(engine.target))
        begin = time.monotonic()
        with ThreadPoolExecutor(_CLIENTS) as clients:
            texts = list(clients.map(ask, [prompts[i % len(prompts)] for i in range(requests)]))
        seconds = time.monotonic() - begin
        time.sleep(2.5)  # the page polls once a second
        picture.parent.mkdir(parents=True, exist_ok=True)
        browser.screenshot(picture)
        errors = browser.errors()
        told = {
            "seconds": seconds,
            "shown": browser.run("return document.getElementById('facts').innerText"),
            "reasons": browser.run("return document.getElementById('reasons').innerText"),
            "page_errors": errors,
            "metrics": metrics(url),
        }
    progress.done(f"{requests} requests in {seconds:.0f} s")
    log = (folder / "server.log").read_text(errors="replace")
    told["log"] = [_without_paths(line) for line in log.splitlines() if _is_told(line)]
    return told, texts


def complete(url: str, model: str, prompt: str) -> str:
    """One request, T=0."""
    body = {"model": model, "prompt": prompt, "max_tokens": _TOKENS, "temperature": 0}
    data = json.dumps({**body, "ignore_eos": True}).encode()
    request = Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    with urlopen(request, timeout=600) as answer:
        text: str = json.loads(answer.read())["choices"][0]["text"]
    return text


def metrics(url: str) -> dict[str, float]:
    """Sums of our metrics, without the labels that vLLM adds."""
    with urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    found = {}
    for line in lines:
        if line.startswith("vllm:bastion_") and "_bucket" not in line and "_created" not in line:
            name, _, value = line.rpartition(" ")
            name = re.sub(r'(engine|model_name)="[^"]*",?', "", name).replace(",}", "}")
            found[name.removesuffix("{}")] = float(value)
    return found


def _is_told(line: str) -> bool:
    return "Bastion: " in line or "does not fit the target" in line


def _without_paths(line: str) -> str:
    """The message without vLLM's prefix and without this machine's folders."""
    message = re.sub(r"^.*?\] ", "", line)
    return re.sub(r'"[^"]*/([^"/]+)"', r'"\1"', message)


def share(run: dict[str, Any], kind: str) -> float:
    """Share of a kind among the steps that decode."""
    steps = {
        name: value
        for name, value in run["metrics"].items()
        if name.startswith("vllm:bastion_steps_total") and 'kind="prompt"' not in name
    }
    own = sum(value for name, value in steps.items() if f'kind="{kind}"' in name)
    return own / max(sum(steps.values()), 1)


def markdown(result: dict[str, Any]) -> str:
    """A table of both runs, and what the log said."""
    names = {
        "estimated gain over plain": "vllm:bastion_estimated_gain",
        "draft tokens promised": "vllm:bastion_promised_tokens_total",
        "draft tokens yielded": "vllm:bastion_yielded_tokens_total",
    }
    count = result["requests"]
    lines = ["# The right drafter and a wrong one", "", f"`{result['provenance']['command']}`", ""]
    lines += [f"{count} requests, {_CLIENTS} at a time, {_TOKENS} tokens each, T=0.", ""]
    lines += ["| | " + " | ".join(_TITLES.values()) + " |", "|---|---|---|"]
    runs = [result[kind] for kind in _TITLES]
    rows: dict[str, list[str]] = {
        "share of tree steps": [f"{100 * share(run, 'tree'):.0f}%" for run in runs],
        "share of plain steps": [f"{100 * share(run, 'plain'):.0f}%" for run in runs],
    }
    for title, name in names.items():
        rows[title] = [f"{run['metrics'].get(name, float('nan')):.4g}" for run in runs]
    lines += [f"| {title} | " + " | ".join(cells) + " |" for title, cells in rows.items()]
    lines += ["", f"Texts that are the same: {result['same_texts']} of {count}.", ""]
    for kind, title in _TITLES.items():
        lines += [
            f"## The log with {title}",
            "",
            *(f"- {line}" for line in result[kind]["log"]),
            "",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
