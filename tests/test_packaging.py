# SPDX-License-Identifier: Apache-2.0
"""What is shipped, and that installing or working here breaks nobody's imports."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from helpers import ROOT, run_python
from vllm_bastion import __version__
from vllm_bastion.cpu.build import is_cpu_build

PACKAGES = {"vllm_bastion", "bastion_kernels"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, so that builds leave nothing behind here."""
    source = tmp_path_factory.mktemp("source") / "project"
    source.mkdir()
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info", "results", "*.safetensors")
    for name in ("vllm_bastion", "kernels", "tests", "benchmarks"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, source / name, ignore=skip)
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel of the sources."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["--disable-pip-version-check", "-w", str(out), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_our_two_packages_whole_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    top = {name.split("/")[0] for name in names}
    assert top == PACKAGES | {f"vllm_bastion-{__version__}.dist-info"}
    ours = {str(p.relative_to(ROOT)) for p in (ROOT / "vllm_bastion").rglob("*.py")}
    kernels = ROOT / "kernels"
    ours |= {str(p.relative_to(kernels)) for p in (kernels / "bastion_kernels").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == ours
    sources = {str(p.relative_to(kernels)) for p in (kernels / "bastion_kernels").rglob("csrc/*")}
    assert sources and {name for name in names if "/csrc/" in name} == sources
    data = {"vllm_bastion/py.typed", "vllm_bastion/page/page.html", "bastion_kernels/py.typed"}
    assert data <= names


def test_the_wheel_names_license_entry_points_and_no_vllm(wheel: zipfile.ZipFile) -> None:
    info = f"vllm_bastion-{__version__}.dist-info"
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: <3.14,>=3.11" in metadata
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:")]
    always = [line for line in needed if "extra ==" not in line]
    assert not [line for line in always if "vllm" in line or "torch" in line or "triton" in line]
    entry_points = wheel.read(f"{info}/entry_points.txt").decode()
    for line in (
        "bastion = vllm_bastion.plugin:register",
        "bastion = vllm_bastion.plugin:cpu_platform",
        "vllm-bastion = vllm_bastion.cli:main",
    ):
        assert line in entry_points
    assert any(name.endswith("LICENSE") for name in wheel.namelist())


@pytest.mark.slow
@pytest.mark.skipif(not is_cpu_build(), reason="the command fails without us on a CPU build only")
def test_one_name_enables_the_whole_plugin(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = "import sys; sys.argv = ['vllm', '--version']\n"
    code += "from vllm.entrypoints.cli.main import main; main()"
    paths = {"PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": None}
    named = run_python(code, cwd=tmp_path, VLLM_PLUGINS="bastion", **paths)
    assert named.returncode == 0, named.stderr[-2000:]
    assert named.stdout.strip().endswith("+cpu")


def test_the_source_archive_holds_the_changelog_and_no_tests(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import setuptools.build_meta as b; b.build_sdist('out')"]
    (source / "out").mkdir()
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = (source / "out").glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml"} <= names
    assert not [name for name in names if name.startswith(("tests", "benchmarks"))]


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("echo 3.10", "is Python 3.10, not 3.11 to 3.13"),
        ("echo 'pyenv: python3.11: command not found' >&2; exit 127", "does not run (pyenv: "),
    ],
)
def test_setup_checks_the_interpreter_first(tmp_path: Path, python: str, said: str) -> None:
    shim = tmp_path / "python3.11"
    shim.write_text(f"#!/bin/sh\n{python}\n")
    shim.chmod(0o755)
    command = [str(ROOT / ".ci" / "setup"), "vllm", str(shim), str(tmp_path / "venv")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and said in line and "make setup PYTHON=" in line
    assert not (tmp_path / "venv").exists()
