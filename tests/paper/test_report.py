# SPDX-License-Identifier: Apache-2.0
"""The arithmetic and the pages of `benchmarks.paper`, over responses made up here."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.paper import report
from benchmarks.paper.methods import (
    PLAIN,
    REFERENCE,
    Drafter,
    Target,
    chosen,
    methods,
    reference_of,
)
from benchmarks.paper.stats import Cell, sameness, speedup, spent
from benchmarks.paper.store import Key

ADAPTIVE = "bastion adaptive"


def response(method: str, number: int = 0, ms: float = 10.0, **fields: Any) -> dict[str, Any]:
    """101 tokens at `ms` each after the first; 25 forwards of 4 tokens and 10 nodes."""
    key = {"method": method, "temperature": 0.0, "concurrency": 1, "set": "a", "turn": 0}
    begin = 10.0 * number
    key |= {"kind": "response", "id": str(number), "session": method}
    sizes = {"prompt_len": 50, "tokens": 101, "emitted": 100, "forwards": 25, "verified": 250}
    end = begin + 0.5 + 100 * ms / 1e3
    times = {"begin_s": begin, "first_s": begin + 0.5, "end_s": end, "steps": 20, "step_ms": 200.0}
    times |= {"verify_ms": 120.0, "draft_ms": 50.0}
    times |= {"timed_steps": 0, "predicted_ms": 0.0, "measured_ms": 0.0}
    return key | sizes | times | fields


def test_the_speedup_is_the_ratio_of_mean_times_per_token() -> None:
    plain = Cell([response(PLAIN, i, ms) for i, ms in enumerate((10.0, 30.0))])
    own = Cell([response("x", i, ms) for i, ms in enumerate((5.0, 5.0))])
    ratio = speedup([(plain, own)])
    assert ratio.mean == pytest.approx(20.0 / 5.0)
    # Resamples of two prompts: both the first, both the second, or one of each.
    assert (ratio.low, ratio.high) == (pytest.approx(2.0), pytest.approx(6.0))
    steady = speedup([(Cell([response(PLAIN)]), Cell([response("x", 0, 4.0)]))] * 2)
    assert steady.mean == steady.low == steady.high == pytest.approx(2.5)


def test_only_prompts_that_both_have_count_and_turns_are_averaged() -> None:
    turns = [response(PLAIN, 0, 10.0), response(PLAIN, 0, 20.0, turn=1), response(PLAIN, 1, 99.0)]
    own = [response("x", 0, 5.0), response("x", 0, 5.0, turn=1)]
    assert speedup([(Cell(turns), Cell(own))]).mean == pytest.approx(3.0)
    assert math.isnan(speedup([(Cell(turns), Cell([response("x", 7)]))]).mean)


def test_a_response_is_compared_with_plain_decodings_of_the_same_round() -> None:
    # The machine is three times as slow in the second round, and plain decoding ran there again.
    plain = [response(PLAIN, 0, 10.0, round="r"), response(PLAIN, 0, 30.0, round="s")]
    fast = Cell([response("x", 0, 5.0, round="r")])
    slow = Cell([response("y", 0, 15.0, round="s")])
    assert speedup([(Cell(plain), fast)]).mean == pytest.approx(2.0)
    assert speedup([(Cell(plain), slow)]).mean == pytest.approx(2.0)
    assert speedup([(Cell(plain), Cell(plain))]).mean == pytest.approx(1.0)
    # Rows of a file that was made one engine after another have no round.
    assert speedup([(Cell(plain), Cell([response("x", 0, 5.0)]))]).mean == pytest.approx(2.0)


def test_sampled_responses_are_compared_by_seed_and_not_judged() -> None:
    rows = [response("x", i, temperature=1.0, differs_at=at) for i, at in enumerate((None, 3))]
    assert sameness(rows, [], Key.of) == "1/2 seeded, 1 not judged"
    assert sameness(rows[:1], [], Key.of) == "1/1 seeded"
    assert sameness([response("dflash 7", temperature=1.0)], [], Key.of) == "other draws"
    assert sameness([response(PLAIN)], [], Key.of) == ""


def test_errors_of_predictions_are_root_mean_squares_over_all_steps(tmp_path: Path) -> None:
    errors = [{"timed_steps": 3, "squared_ms": {"table": 9.0}}]
    errors += [{"timed_steps": 1, "squared_ms": {"table": 7.0}}]
    rows = [response(PLAIN), *(response(ADAPTIVE, i, **e) for i, e in enumerate(errors))]
    (machine,) = report.machines([write(tmp_path / "a.jsonl", rows)])
    page = report.markdown(machine)
    assert f"- {ADAPTIVE}: table 2\n" in page and "one engine after another" in page


def test_tau_is_over_rounds_and_of_responses() -> None:
    rows = [response("x"), response("x", 1, emitted=20, forwards=20, verified=0)]
    numbers = Cell(rows).numbers()
    assert numbers["tau"] == 120 / 45 and numbers["tau_of_responses"] == (4 + 1) / 2
    assert numbers["nodes"] == 250 / 45
    assert numbers["verify_ms"] == 6.0 and numbers["draft_ms"] == 2.5
    assert numbers["aux_ms"] == pytest.approx(1.5) and numbers["ttft_ms"] == pytest.approx(500)


def test_throughput_counts_time_that_responses_share_once() -> None:
    spans = [(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]
    rows = [{"session": "a", "b": b, "e": e} for b, e in spans]
    assert spent(rows, "b", "e") == 4.0
    assert spent([*rows, {"session": "b", "b": 0.0, "e": 2.5}], "b", "e") == 6.5


def test_throughput_is_over_plain_decodings_of_the_same_rounds(tmp_path: Path) -> None:
    # Plain decoding ran again in the second round, when the machine was slower.
    load = {"concurrency": 4}
    plain = [
        response(PLAIN, ms=9.5, round="r", **load),
        response(PLAIN, 1, 99.5, round="s", **load),
    ]
    rows = [*plain, response(ADAPTIVE, ms=4.5, round="r", **load)]
    (machine,) = report.machines([write(tmp_path / "a.jsonl", rows)])
    page = report.markdown(machine)
    assert "| tokens/s over plain | a | mean |" in page
    assert f"| {ADAPTIVE} | {1.45 / 0.95:.2f}x | {1.45 / 0.95:.2f}x |" in page


def write(path: Path, rows: list[dict[str, Any]], device: str = "CPU", name: str = "tiny") -> Path:
    settings = {"tokens": 101, "dtype": "float32", "samples": 2}
    source = {"device": device, "command": f"python {path.stem}", "commit": "abcdef0123"}
    header = {"kind": "run", "name": name, "settings": settings, "provenance": source}
    path.write_text("".join(json.dumps(row) + "\n" for row in [header, *rows]))
    return path


def example() -> list[dict[str, Any]]:
    rows = []
    for method, ms in ((PLAIN, 10.0), ("dflash 7", 5.0), ("bastion N=16", 4.0), (ADAPTIVE, 2.5)):
        for number in range(2):
            for name in ("a", "b"):
                same = {} if method == PLAIN else {"differs_at": None}
                rows.append(response(method, number, ms, set=name, **same))
    rows[-1]["differs_at"] = 3
    key = {k: rows[-1][k] for k in ("method", "temperature", "concurrency", "set", "id", "turn")}
    return [*rows, {"kind": "judged", **key, "near_tie": True}]


def test_machines_are_joined_by_device_and_target(tmp_path: Path) -> None:
    rows = example()
    files = [
        write(tmp_path / "a.jsonl", rows[:6]),
        write(tmp_path / "b.jsonl", rows[4:]),  # two of them again
        write(tmp_path / "c.jsonl", rows, device="GPU"),
    ]
    cpu, gpu = report.machines(files)
    assert (cpu.device, gpu.device) == ("CPU", "GPU")
    assert len(cpu.responses) == len(gpu.responses) == 16
    assert cpu.commands == ["python a", "python b"]
    ours, theirs = (report.markdown(machine).partition("## ")[2] for machine in (cpu, gpu))
    assert ours == theirs and ours.count(f"| {ADAPTIVE} | ") == 2
    assert "| 3/4, 1 near-ties |" in ours and "| dflash 7 | 2.00x" in ours


def test_only_methods_of_this_plugin_load_it() -> None:
    what = Target("t", "d", 15, "e", (Drafter("x/dspark", 15, "dspark", False),))
    on_cpu = methods(what, cpu=True)
    for method in on_cpu.values():
        engine = method.engine("t", True, max_model_len=64)
        hidden = engine.environment.get("VLLM_PLUGINS") == ""
        assert hidden == (not method.ours and "V2" not in method.name), method.name
    on_gpu = methods(what, cpu=False)
    assert REFERENCE in on_cpu and REFERENCE not in on_gpu
    assert {PLAIN, "eagle3 7", "dflash 15", "ngram", "suffix", ADAPTIVE} <= on_gpu.keys()
    chain = on_gpu["dflash 7, adaptive verification"].speculative
    assert chain is not None and chain["enable_adaptive_verification"] is True
    # vLLM's V1 runner, which a CPU host uses, has no DSpark.
    chains = [name for name in on_cpu if re.search(r"(dflash|dspark) 7", name)]
    assert chains == ["dflash 7", "dflash 7, V2 runner", "dspark 7, V2 runner"]
    assert "dspark 7" in on_gpu and not any("V2" in name for name in on_gpu)


def test_draws_are_compared_within_one_runner_only() -> None:
    rows = methods(Target("t", "d", 15), cpu=True)
    for name, method in rows.items():
        assert reference_of(method, 0.0, list(rows)) == PLAIN
        sampled = reference_of(method, 1.0, list(rows))
        ours = name == REFERENCE or name.startswith("bastion")
        assert sampled == (REFERENCE if ours else None), name
    assert reference_of(rows[ADAPTIVE], 1.0, [PLAIN, ADAPTIVE]) == PLAIN
    # Whatever is asked for, what it is compared with is there.
    assert list(chosen(rows, ["adaptive"], sampled=False)) == [PLAIN, ADAPTIVE]
    assert list(chosen(rows, ["adaptive"], sampled=True)) == [PLAIN, REFERENCE, ADAPTIVE]
