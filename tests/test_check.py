# SPDX-License-Identifier: Apache-2.0
"""`vllm-bastion check`: from configs to an answer, compared with engines that really start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from helpers import ROOT, is_one_sentence
from tests.e2e.engines import share_machine_code
from vllm_bastion import cli
from vllm_bastion.cli.buffers import total
from vllm_bastion.cli.check import Report, check

TINY = ROOT / "benchmarks" / "tiny"
TARGET, DRAFTER = str(TINY / "target"), str(TINY / "drafter")
# A small engine.
OPTIONS = [
    "--dtype", "float32", "--max-num-seqs", "2", "--max-model-len", "128", "--enforce-eager",
    "--max-num-batched-tokens", "64", "--kv-cache-memory-bytes", str(16 << 20),
]  # fmt: skip
# For models without weights.
_DUMMY = ("--load-format", "dummy")
ON_GPU = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _registered(pair: tuple[str, str]) -> None:
    """Method "bastion" in this process."""


def test_a_pair_without_weights_is_described(pair: tuple[str, str]) -> None:
    report = check(*pair, [*_DUMMY, "--max-model-len", "256", "--max-num-seqs", "8"])
    assert report.refusal is None
    said = dict(report.lines)
    assert "gamma 7" in said["drafter"] and "K 16" in said["trees"]
    assert "tokens a request" in said["limits"] and "(max_num_seqs)" in said["limits"]
    assert report.memory is not None and report.memory.weights is None
    assert "drafter's weights unknown" in report.text()
    # 4 layers of the target and 2 of the drafter, one head of 32, bf16: keys and values
    drafter = json.loads(Path(pair[1], "config.json").read_text())
    per_layer = 2 * 32 * 2
    assert report.memory.cached_token == 4 * per_layer
    assert report.memory.cached_draft == drafter["num_hidden_layers"] * per_layer


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--pipeline-parallel-size", "2"], "pipeline_parallel_size"),
        (["--speculative-config", '{"bastion_budgte": 3}'], 'did you mean "bastion_budget"?'),
        (["--speculative-config", '{"num_speculative_tokens": 900}',
          "--max-num-batched-tokens", "512", *_DUMMY], "lower it to 504"),
    ],
)  # fmt: skip
def test_a_refusal_is_the_engines_own_sentence(
    options: list[str], named: str, pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", *pair, *_DUMMY, *options]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("refused") and named in line
    is_one_sentence(line.removeprefix("refused").strip())


def test_a_plugin_that_is_not_loaded_is_told(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_bastion.hooks.is_wrapped", lambda target: False)
    refusal = check(*pair, []).refusal
    assert refusal is not None and "VLLM_PLUGINS" in refusal


def test_a_fixed_budget_is_the_number_of_nodes(pair: tuple[str, str]) -> None:
    report = check(*pair, [*_DUMMY, "--speculative-config", '{"bastion_budget": 12}'])
    assert "N 12" in dict(report.lines)["trees"]


def test_weights_are_counted_from_the_files_headers() -> None:
    memory = _report().memory
    with safe_open(TINY / "drafter" / "model.safetensors", "pt") as file:
        elements = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    assert memory is not None and memory.weights == 4 * elements


def _report() -> Report:
    return check(TARGET, DRAFTER, OPTIONS)


_START = """
import json, sys
from vllm import LLM
from benchmarks.harness.decoder import model_runner
from vllm_bastion.cli.memory import tensor_bytes

llm = LLM(sys.argv[1], dtype="float32", max_num_seqs=2, max_model_len=128,
    enforce_eager=True, max_num_batched_tokens=64, kv_cache_memory_bytes=16 << 20,
    speculative_config={"method": "bastion", "model": sys.argv[2]})
runner = model_runner(llm)
speculator = runner.speculator
print(json.dumps({
    "trees": tensor_bytes(speculator.trees),
    "hidden": sum(h.numel() * h.element_size() for h in speculator._context_hidden),
    "all": tensor_bytes(speculator) + tensor_bytes(speculator.input_buffers)
    + tensor_bytes(speculator.trees) + runner.req_states.draft_tokens.nbytes
    + tensor_bytes(runner.structured_outputs_worker)
    + (speculator.block_tables is not runner.block_tables)
    * speculator.block_tables.slot_mappings.nbytes,
}))
"""


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="starts a CPU engine")
def test_an_engine_that_starts_has_what_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of trees and hidden states are those of a real worker."""
    share_machine_code(tmp_path)
    monkeypatch.setenv("VLLM_BASTION_CACHE", str(tmp_path))
    report = _report()
    assert report.memory is not None
    started = subprocess.run(
        [sys.executable, "-c", _START, TARGET, DRAFTER],
        env={**os.environ, "TRITON_INTERPRET": "0", "VLLM_CPU_KVCACHE_SPACE": "1"},
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert started.returncode == 0, started.stderr[-3000:]
    found = json.loads(started.stdout.strip().splitlines()[-1])
    memory, nodes = report.memory, 64 - 1 - 15
    parts = {part.name: part.ours for part in memory.buffers}
    assert found["trees"] == parts["trees"] - 2 * nodes * 8  # vLLM's own draft tokens
    kept = parts["hidden states of accepted rows"]
    assert found["hidden"] == kept - 64 * (2 * 8 + 2 * 8) - 2 * 12
    assert found["all"] == pytest.approx(total(list(memory.buffers)).ours, rel=0.01)


def test_the_command_prints_its_answer_and_nothing_else() -> None:
    done = _command(TARGET, DRAFTER, *OPTIONS)
    assert (done.returncode, done.stderr) == (0, "")
    headings = [line.split()[0] for line in done.stdout.splitlines()]
    assert headings == [
        "served", "drafter", "trees", "limits", "kernels", *["memory"] * 4,
    ]  # fmt: skip
    assert "Backend" not in done.stdout and "DYNAMO" not in done.stdout


@pytest.mark.parametrize(
    "options", [["--no-such-option"], ["--max-num-seqs", "many"], ["--dtype", "float13"]]
)
def test_wrong_options_are_told_in_one_line(
    options: list[str], pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["check", *pair, *options])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vllm-bastion check: ") and options[-1] in line
    assert "vllm serve --help" in line


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "VLLM_LOGGING_LEVEL"}
    paths = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, "-m", "vllm_bastion", "check", *arguments],
        env={**env, "TRITON_INTERPRET": "0", "PYTHONPATH": paths},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
