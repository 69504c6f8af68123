# SPDX-License-Identifier: Apache-2.0
"""The command line, and `vllm-bastion check`: from configs to an answer."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from helpers import ROOT, is_one_sentence, run_python
from vllm_bastion import __version__, cli
from vllm_bastion.cli.check import check

TINY = ROOT / "benchmarks" / "tiny"
TARGET, DRAFTER = str(TINY / "target"), str(TINY / "drafter")
# For models without weights.
_DUMMY = ("--load-format", "dummy")


@pytest.fixture(autouse=True)
def _registered(pair: tuple[str, str]) -> None:
    """Method "bastion" in this process."""


def test_a_pair_without_weights_is_described(pair: tuple[str, str]) -> None:
    options = ["--max-num-seqs", "8", "--speculative-config", '{"bastion_budget": 12}']
    said = dict(check(*pair, [*_DUMMY, "--max-model-len", "256", *options]))
    assert "gamma 7" in said["drafter"] and said["trees"] == "N 12, K 16, budget 12"
    assert "hold 8 of 8 requests (max_num_seqs)" in said["limits"]
    assert "256 tokens a request" in said["limits"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--pipeline-parallel-size", "2"], "pipeline_parallel_size"),
        (["--speculative-config", '{"bastion_budgte": 3}'], 'did you mean "bastion_budget"?'),
        (["--speculative-config", '{"num_speculative_tokens": 900}',
          "--max-num-batched-tokens", "512", *_DUMMY], "lower it to 504"),
        (["--tensor-parallel-size", "3"], "refused    Total number of attention heads (2) must be"),
    ],
)  # fmt: skip
def test_a_refusal_is_the_engines_own_sentence(
    options: list[str], named: str, pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", *pair, *_DUMMY, *options]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("refused") and named in line
    is_one_sentence(line.removeprefix("refused").strip())


def test_a_cache_that_cannot_be_written_is_told(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BASTION_CACHE", "/dev/null/cache")
    said = dict(check(*pair, _DUMMY))
    assert "nothing can be stored" in said["note"] and "/dev/null/cache" in said["note"]


def test_the_command_prints_its_answer_and_nothing_else() -> None:
    done = _command("check", TARGET, DRAFTER, "--dtype", "float32", "--max-model-len", "128")
    assert (done.returncode, done.stderr) == (0, "")
    headings = [line.split()[0] for line in done.stdout.splitlines()]
    assert headings == ["served", "drafter", "trees", "limits", "kernels"]
    assert "Backend" not in done.stdout and "DYNAMO" not in done.stdout
    done = _command("--version")
    assert (done.returncode, done.stdout) == (0, f"vllm-bastion {__version__}\n")


@pytest.mark.parametrize(
    "options",
    [
        ["--no-such-option"], ["--max-num-seqs", "many"], ["--dtype", "float13"],
        ["--speculative-config", "{bad"],
    ],
)  # fmt: skip
def test_wrong_options_are_told_in_one_line(
    options: list[str], pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["check", *pair, *options])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vllm-bastion check: ") and options[-1] in line and " 0x" not in line
    assert "vllm serve --help" in line


@pytest.mark.parametrize("missing", ["torch", "vllm"])
def test_without_torch_or_vllm_there_is_one_sentence(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from vllm_bastion.cli import main; "
    done = run_python(code + "raise SystemExit(main(['check', 'T', 'D']))")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("vllm-bastion check: vLLM cannot be imported here (")


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "VLLM_LOGGING_LEVEL"}
    paths = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, "-m", "vllm_bastion", *arguments],
        env={**env, "TRITON_INTERPRET": "0", "PYTHONPATH": paths},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
