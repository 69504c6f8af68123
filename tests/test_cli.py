# SPDX-License-Identifier: Apache-2.0
"""The command line around `check`; tests/test_check.py has its answers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from vllm_bastion import __version__, cli


def test_check_names_a_folder_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "/nope", "D"]) == 1
    assert capsys.readouterr().err == (
        "vllm-bastion check: the target cannot be read: there is no folder /nope: give a "
        "model's folder or its Hugging Face name\n"
    )
    assert cli.main(["check", "T", "./models/nope"]) == 1
    assert "drafter cannot be read: there is no folder ./models/nope" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["torch", "vllm"])
def test_without_torch_or_vllm_there_is_one_sentence(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from vllm_bastion.cli import main; "
    done = _python("-c", code + "raise SystemExit(main(['check', 'T', 'D']))")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("vllm-bastion check: vLLM cannot be imported here (")


def test_the_module_is_the_command() -> None:
    done = _python("-m", "vllm_bastion", "--version")
    assert (done.returncode, done.stdout) == (0, f"vllm-bastion {__version__}\n")


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
