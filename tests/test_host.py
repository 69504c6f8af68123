# SPDX-License-Identifier: Apache-2.0
"""The host seam: only one place asks for the device, and a GPU engine loads no CPU code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

# Everything that the CUDA path imports, in a process in which importing Numba or llvmlite raises.
_SCRIPT = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numba", "llvmlite"):
            raise ImportError(f"{name} must not be imported on a GPU")

sys.meta_path.insert(0, Blocker())

import importlib
from pathlib import Path
from vllm.platforms import current_platform

if current_platform.is_cpu():
    import vllm.v1.worker.cpu.shm  # vLLM's substitutes for pinned memory and events

import bastion_kernels
import vllm_bastion
from vllm_bastion import platform, plugin

plugin.register()
# Other modules by file: `pkgutil` would import the CPU's packages to look into them.
skipped = ["vllm_bastion.cpu", "bastion_kernels.cpu"]
for package in (bastion_kernels, vllm_bastion):
    root = Path(package.__file__).parent
    for file in sorted(root.rglob("*.py")):
        name = ".".join(file.relative_to(root.parent).with_suffix("").parts)
        if not any((name + ".").startswith(each + ".") for each in skipped):
            importlib.import_module(name.removesuffix(".__init__"))
host = platform.Host()
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

host.tree_backend(FlashAttentionBackend)
assert host.compile_factors("auto") == ()
with host.loading_compiled():
    pass
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"numba", "llvmlite"}
# Every process asks which build of vLLM is installed.
expected = {"vllm_bastion.cpu", "vllm_bastion.cpu.build"}
cpu = ("vllm_bastion.cpu", "bastion_kernels.cpu")
found = {name for name in sys.modules if name.startswith(cpu)}
assert found <= expected, found - expected
"""


def test_the_cuda_path_needs_no_numba_and_writes_nothing(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    environment = os.environ | {
        "VLLM_BASTION_CACHE": str(cache / "own"),
        "XDG_CACHE_HOME": str(cache / "xdg"),
        "VLLM_CACHE_ROOT": str(tmp_path / "vllm"),
    }
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert not (cache / "own").exists()
    assert not (cache / "xdg" / "vllm-bastion").exists()


# The seam and the CPU's side of it, and the policy, which knows no vLLM and is given a device.
_SEAM = ("host.py", "platform.py", "cpu/", "policy/")
# vLLM asks for its version before there is a platform to ask; and a worker of a CPU only.
_IMPORTS_CPU = ("plugin.py", "hooks/cpu_worker.py")
_ASKS = re.compile(
    r"device\.type|\bis_cuda\b|\bis_cpu\(|^\s*(from|import) (vllm_bastion|bastion_kernels)\.cpu\b"
)


def test_only_the_seam_asks_for_the_device() -> None:
    root = Path(__file__).parents[1] / "vllm_bastion"
    found = []
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root).as_posix()
        if name.startswith(_SEAM) or name in _IMPORTS_CPU:
            continue
        lines = file.read_text(encoding="utf-8").splitlines()
        found += [f"{name}:{n}" for n, line in enumerate(lines, 1) if _ASKS.search(line)]
    assert not found
