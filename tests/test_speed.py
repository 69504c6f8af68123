# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of `benchmarks.speed`, without engines."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.engine import Request
from benchmarks.speed import report
from benchmarks.speed.driver import Driver, Outcome, rmse
from benchmarks.speed.figures import budgets_of, sweep_figure, tradeoff_figure
from benchmarks.speed.methods import ADAPTIVE, BUDGETS, PLAIN, engines, groups
from helpers import ROOT


def run(engine: str, seconds: float, **fields: Any) -> dict[str, Any]:
    """A drive of 100 tokens: 10 forwards in 20 steps, unless said otherwise."""
    return {
        "engine": engine,
        "group": 0,
        "temperature": 0.0,
        "concurrency": 1,
        "domain": "code",
        "repeat": 0,
        "tokens": 100,
        "seconds": seconds,
        "tpot_ms": 10 * seconds,
        "forwards": 10,
        "emitted": 40,
        "verified": 70,
        "steps": 20,
        "step_ms": 200.0,
        "verify_ms": 120.0,
        "draft_ms": 50.0,
        "requests": 2,
        "same_as_plain": 2,
        **fields,
    }


def test_a_speedup_is_the_median_over_repeats_of_ratios_within_a_repeat() -> None:
    # The machine is twice as slow in the second repeat, which does not affect the ratio.
    runs = [
        run(PLAIN, 10, repeat=0),
        run("dflash 7", 5, repeat=0),
        run(PLAIN, 20, repeat=1),
        run("dflash 7", 10, repeat=1),
        run(PLAIN, 10, repeat=2),
        run("dflash 7", 2, repeat=2),
    ]
    cell = report.tabulate(runs)[0.0, 1]["code"]["dflash 7"]
    assert cell.speedup == 2.0
    numbers = cell.numbers()
    assert numbers["speedup_range"] == [2.0, 5.0]
    assert numbers["tokens_per_s"] == 20.0
    assert numbers["tokens_per_s_range"] == [10.0, 50.0]
    assert numbers["repeats"] == 3


def test_ratios_stay_within_their_group() -> None:
    runs = [
        run(PLAIN, 10, group=0),
        run("dflash 7", 5, group=0),
        run(PLAIN, 40, group=1),
        run(ADAPTIVE, 10, group=1),
    ]
    cells = report.tabulate(runs)[0.0, 1]["code"]
    assert cells["dflash 7"].speedup == 2.0
    assert cells[ADAPTIVE].speedup == 4.0
    assert cells[PLAIN].speedup == 1.0
    assert list(cells[PLAIN].speedups.values()) == [1.0, 1.0]


def test_parts_of_a_step_add_up_and_tau_weighs_forwards() -> None:
    runs = [
        run(PLAIN, 1),
        run("bastion N=8", 1, forwards=10, emitted=40, verified=80),
        run("bastion N=8", 1, repeat=1, forwards=30, emitted=40, verified=160, steps=60),
    ]
    numbers = report.tabulate(runs)[0.0, 1]["code"]["bastion N=8"].numbers()
    assert numbers["tau"] == 80 / 40
    assert numbers["nodes"] == 240 / 40
    assert numbers["verify_ms"] == 240 / 80
    assert numbers["draft_ms"] == 100 / 80
    assert numbers["verify_ms"] + numbers["draft_ms"] + numbers["aux_ms"] == 400 / 80
    assert numbers["same_as_plain"] == "4/4"


def test_without_plain_decoding_there_is_no_ratio() -> None:
    cell = report.tabulate([run("dflash 7", 5)])[0.0, 1]["code"]["dflash 7"]
    assert math.isnan(cell.speedup) and cell.numbers()["speedup_range"] is None


# Speed-ups by domain; plain takes 12 s everywhere.
SPEEDUPS = {
    "dflash 4": {"code": 2.0, "chat": 1.0},
    "dflash 15": {"code": 3.0, "chat": 0.75},
    "bastion N=8": {"code": 3.0, "chat": 2.0},
    "bastion N=32": {"code": 4.0, "chat": 0.5},
    ADAPTIVE: {"code": 3.0, "chat": 0.75},
}


def example() -> list[dict[str, Any]]:
    runs = [run(PLAIN, 12, domain=domain) for domain in ("code", "chat")]
    for name, by_domain in SPEEDUPS.items():
        runs += [run(name, 12 / ratio, domain=domain) for domain, ratio in by_domain.items()]
    return runs


def test_the_adaptive_engine_is_compared_with_the_best_of_each_kind() -> None:
    domains = report.tabulate(example())[0.0, 1]
    found = report.ratios(domains)
    assert found["plain"] == pytest.approx((3 + 0.75) / 2)
    # 15 has the higher mean (1.875 against 1.5), although 4 is better in chat.
    assert found["chain"] == "dflash 15"
    assert found[report.BEST_CHAIN] == pytest.approx((3 / 3 + 0.75 / 0.75) / 2)
    # In chat plain decoding is better than the chain.
    assert found["worst"] == {"domain": "chat", "ratio": pytest.approx(0.75)}
    assert found["fixed"] == "bastion N=8"
    assert found[report.BEST_FIXED] == pytest.approx((3 / 3 + 0.75 / 2) / 2)
    assert found[report.ORACLE] == pytest.approx((3 / 4 + 0.75 / 2) / 2)


def test_a_method_that_lacks_a_domain_is_not_the_best() -> None:
    runs = [r for r in example() if (r["engine"], r["domain"]) != ("dflash 15", "chat")]
    domains = report.tabulate(runs)[0.0, 1]
    assert report.best_chain(domains) == "dflash 4"
    assert math.isnan(report.mean_speedup(domains, "dflash 15"))
    runs = [r for r in runs if (r["engine"], r["domain"]) != (ADAPTIVE, "chat")]
    assert report.ratios(report.tabulate(runs)[0.0, 1]) == {}


def test_tables_have_a_row_per_method_in_order_and_a_column_per_concurrency() -> None:
    more = [r | {"concurrency": 4, "seconds": r["seconds"] / 2} for r in example()]
    page = report.markdown(
        report.tabulate(example() + more), {"C(N)": 1.25}, "python speed", "Speed"
    )
    rows = [line for line in page.splitlines() if line.startswith(f"| {ADAPTIVE} |")]
    # Two tables of methods, one by concurrency.
    assert len(rows) == 3
    assert rows[0].split(" | ")[1:5] == ["3.00x", "4.00", "0.75x", "4.00"]
    assert rows[2] == f"| {ADAPTIVE} | 1.88x | 1.88x |"
    names = [line.split(" |")[0][2:] for line in page.splitlines() if "x | " in line]
    assert names[:6] == [PLAIN, *SPEEDUPS]
    assert "| C(N) | 1.25 |" in page
    for line in page.splitlines():
        if line.startswith("|---"):
            columns = line.count("|")
        elif line.startswith("| ") and "tau" not in line and "RMSE" not in line:
            head = line.count("|")
            assert head in (columns, 3, 4), line


def test_the_summary_is_plain_json_with_every_cell() -> None:
    import json

    (only,) = json.loads(json.dumps(report.summary(report.tabulate(example()))))
    assert only["temperature"] == 0.0 and only["concurrency"] == 1
    assert set(only["domains"]) == {"code", "chat"}
    assert only["domains"]["chat"]["bastion N=32"]["speedup"] == 0.5
    assert only["mean_speedup"][ADAPTIVE] == pytest.approx(1.875)


def test_figures_are_drawn_from_what_ran_on_every_domain(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [r for r in example() if (r["engine"], r["domain"]) != ("bastion N=32", "chat")]
    assert budgets_of(report.tabulate(runs)[0.0, 1]) == [8]
    domains = report.tabulate(example())[0.0, 1]
    assert budgets_of(domains) == [8, 32]
    tradeoff_figure(domains, "T=0", tmp_path / "a.png")
    sweep_figure({"T=0": domains, "T=1": domains}, tmp_path / "b.png")
    assert all((tmp_path / name).stat().st_size > 5000 for name in ("a.png", "b.png"))


def test_every_group_of_engines_has_plain_decoding() -> None:
    names = [PLAIN, "a", "b", "c"]
    assert groups(names, 4) == [names]
    assert groups(names, 3) == [[PLAIN, "a", "b"], [PLAIN, "c"]]
    assert groups([PLAIN], 1) == [[PLAIN]]
    with pytest.raises(ValueError, match="two engines"):
        groups(names, 1)


def test_only_bastion_sees_the_plugin() -> None:
    methods = engines(Path("pair"), dtype="float32")
    assert len(methods) == 1 + 3 + len(BUDGETS) + 1
    for name, engine in methods.items():
        ours = name.startswith("bastion")
        assert (engine.environment.get("VLLM_PLUGINS") == "") == (not ours), name
        arguments = engine.arguments()
        assert not arguments["enforce_eager"] and arguments["dtype"] == "float32"
        method = (arguments["speculative_config"] or {}).get("method")
        assert method == ("bastion" if ours else None if name == PLAIN else "dflash")


def test_other_drafters_have_rows_and_ratios_of_their_own() -> None:
    others = {Path("tiny/dspark"): "dspark", Path("tiny/dflash2"): "dflash"}
    methods = engines(Path("pair"), others)
    rows = [name for name in methods if "dspark" in name]
    assert rows[0] == "dspark 4" and rows[-1] == "bastion dspark adaptive"
    assert len(rows) == 3 + len(BUDGETS) + 1 and "bastion dflash2 N=16" in methods
    for name, method in (("dspark 15", "dspark"), ("bastion dspark N=16", "bastion")):
        given = methods[name].arguments()["speculative_config"]
        assert (given["method"], given["model"]) == (method, "tiny/dspark")
        assert (methods[name].environment.get("VLLM_PLUGINS") == "") == (method == "dspark")
    assert methods["dflash2 15"].arguments()["speculative_config"]["method"] == "dflash"

    speedups = {"dspark 15": 2.0, "bastion dspark N=16": 3.0, "bastion dspark adaptive": 2.5}
    runs = example() + [
        run(name, 12 / ratio, domain=domain)
        for name, ratio in speedups.items()
        for domain in ("code", "chat")
    ]
    table = report.tabulate(runs)
    assert report.ratios(table[0.0, 1]) == report.ratios(report.tabulate(example())[0.0, 1])
    (cell,) = report.summary(table)
    own = cell["other_drafters_over"]["bastion dspark adaptive"]
    assert own["plain"] == 2.5 and own["chain"] == "dspark 15"
    assert own[report.BEST_CHAIN] == pytest.approx(1.25)
    assert own[report.BEST_FIXED] == pytest.approx(2.5 / 3)
    page = report.markdown(table, {}, "python speed", "Speed")
    assert "bastion dspark adaptive over plain 2.50x, " in page
    names = [line.split(" |")[0][2:] for line in page.splitlines() if "x | " in line]
    assert names[-3:] == list(speedups)


def test_an_engine_without_the_plugin_does_not_import_it() -> None:
    code = (
        "import sys, benchmarks.speed.__main__, benchmarks.speed.driver, benchmarks.speed.methods;"
        "print([m for m in sys.modules if m.split('.')[0] in ('vllm_bastion', 'bastion_kernels')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert found.stdout.strip() == "[]", found.stderr


def test_rmse_is_over_all_steps_of_all_drives() -> None:
    one = Outcome(timed_steps=3, squared_ms={"table": 9.0})
    two = Outcome(timed_steps=1, squared_ms={"table": 7.0})
    assert rmse([one, two, Outcome()]) == {"table": 2.0}


class _Output:
    def __init__(self, request_id: str, token_ids: list[int], finished: bool) -> None:
        self.request_id, self.finished = request_id, finished
        self.outputs = [type("Completion", (), {"token_ids": token_ids})()]


class _Scheduler:
    def update_from_output(self, scheduled: Any, output: Any) -> None:
        return None


class _Llm:
    """A fake engine: one step for the prompt, then two tokens per step and running request."""

    def __init__(self, length: int) -> None:
        self.length, self.running, self.most = length, {}, 0
        self.scheduler, self.model_executor = _Scheduler(), self
        self.llm_engine = self.engine_core = self.driver_worker = self.worker = self
        self.model_runner = type("Runner", (), {})()
        self.model_runner.model = type("Model", (), {})()
        self.model_runner.model.forward = lambda: None
        self.model_runner.model.compute_logits = lambda: None

    def add_request(self, name: str, prompt: str, params: Any) -> None:
        self.running[name] = []
        self.most = max(self.most, len(self.running))

    def step(self) -> list[_Output]:
        self.model_runner.model.forward()
        new = {name: [7] * (2 if ids else 1) for name, ids in self.running.items()}
        drafts = {name: [0] * 5 for name, ids in self.running.items() if ids}
        scheduled = type("Scheduled", (), {"scheduled_spec_decode_tokens": drafts})()
        scheduled.num_scheduled_tokens = {
            name: 6 if ids else 9 for name, ids in self.running.items()
        }
        output = type("Output", (), {"req_ids": list(new), "sampled_token_ids": [*new.values()]})()
        self.scheduler.update_from_output(scheduled, output)
        for name, ids in new.items():
            self.running[name] += ids
        done = [
            _Output(f"{name}-0", ids[: self.length], len(ids) >= self.length)
            for name, ids in self.running.items()
        ]
        self.running = {n: ids for n, ids in self.running.items() if len(ids) < self.length}
        return done


def test_a_drive_keeps_the_concurrency_and_leaves_prompts_out_of_the_steps() -> None:
    llm = _Llm(length=5)
    driver = Driver(llm)
    requests = [Request(str(i), "text", max_tokens=5) for i in range(5)]
    outcome = driver.drive(requests, 2)
    assert llm.most == 2
    assert outcome.tokens == 25 and outcome.token_ids == [[7] * 5] * 5
    # Each request: a step that ends its prompt, then two forwards of two tokens.
    assert (outcome.forwards, outcome.emitted, outcome.verified) == (10, 20, 50)
    # Requests 0 and 1 share steps, so do 2 and 3; 4 is alone. Two of three steps are decodes.
    assert outcome.steps == 6
    assert outcome.step_ms >= outcome.verify_ms > 0 and outcome.draft_ms == 0
    again = driver.drive(requests[:1], 1)
    assert (again.steps, again.forwards) == (2, 2)


def test_a_response_has_its_own_tokens_and_the_steps_that_it_shared() -> None:
    driver = Driver(_Llm(length=5))
    requests = [Request(str(i), "text", max_tokens=5) for i in range(3)]
    outcome = driver.drive(requests, 2)
    for response in driver._responses:
        assert response.token_ids == [7] * 5
        assert (response.forwards, response.emitted, response.verified) == (2, 4, 10)
        assert response.steps == 2 and response.step_ms >= response.verify_ms > 0
        assert response.begin_s < response.first_s < response.end_s
    # Requests 0 and 1 shared their steps.
    assert outcome.steps == 4
