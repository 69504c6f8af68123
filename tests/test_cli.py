# SPDX-License-Identifier: Apache-2.0
"""The command line without vLLM, and as a module."""

import os
import subprocess
import sys

import pytest

from vllm_bastion import __version__


@pytest.mark.parametrize("missing", ["torch", "vllm"])
def test_without_torch_or_vllm_there_is_one_sentence(missing):
    code = f"import sys; sys.modules[{missing!r}] = None; from vllm_bastion.cli import main; "
    code += "raise SystemExit(main(['check', 'T', 'D']))"
    done = _python("-c", code)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("vllm-bastion check: vLLM cannot be imported here (")


def test_the_module_is_the_command():
    done = _python("-m", "vllm_bastion", "--version")
    assert (done.returncode, done.stdout) == (0, f"vllm-bastion {__version__}\n")


def _python(*arguments):
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
