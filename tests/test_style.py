# SPDX-License-Identifier: Apache-2.0
"""House rules that no linter checks. import-linter checks which module may import which."""

from __future__ import annotations

import ast
import re
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from config_table import markdown_table
from helpers import ROOT
from vllm_bastion import compat, config, envs

LINE_BUDGET = 500
FOLDERS = ("vllm_bastion", "kernels", "tests", "benchmarks")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PACKAGE = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in FOLDERS[:2]]

READS_ENVIRONMENT = (
    "vllm_bastion/envs.py",
    "kernels/bastion_kernels/cpu/cache.py",  # the ops do not import vllm_bastion
    "kernels/bastion_kernels/cpu/library.py",  # CXX, which is not ours
)
TOP_LEVEL = {
    "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md",
    "benchmarks", "dashboards", "docs", "kernels", "pyproject.toml", "tests", "vllm_bastion",
}  # fmt: skip


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_file_has_its_header_and_keeps_the_line_budget(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    if not lines:
        return
    first = lines[1] if lines[0].startswith("#!") else lines[0]
    assert first == "# SPDX-License-Identifier: Apache-2.0"
    assert ast.get_docstring(ast.parse(text)), "say what the file is for"
    assert len(lines) <= LINE_BUDGET


@pytest.mark.parametrize("path", PACKAGE, ids=_name)
def test_package_logs_under_vllms_name(path: Path) -> None:
    name = _name(path)
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module == "vllm.logger":
            assert name == "vllm_bastion/logger.py", "use vllm_bastion.logger"
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "getLogger":
            given = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
            ours = str(given).startswith("vllm.bastion") or name == "vllm_bastion/logger.py"
            assert ours, "vLLM shows loggers below `vllm` only: use vllm_bastion.logger"
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
            assert name in READS_ENVIRONMENT, "use envs.py"


def test_top_level_holds_what_it_should() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    top = {line.split("/")[0] for line in listed.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} <= TOP_LEVEL
    assert not (ROOT / "kernels" / "__init__.py").exists(), "it would shadow Hugging Face's kernels"


def test_documents_show_the_settings_as_they_are() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- config:begin -->\n(.*?)\n?<!-- config:end -->", text, re.DOTALL)
    assert found, "docs/configuration.md needs the markers config:begin and config:end"
    assert found.group(1) == markdown_table(), (
        "run `python tests/config_table.py` and paste its table between the markers"
    )
    for name in envs.VARIABLES:
        assert f"`{name}`" in text


def test_the_readme_names_the_supported_range_and_is_short() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"`{compat.SUPPORTED_VLLM}`" in readme
    lines = readme.splitlines()
    assert len(lines) <= 120 and max(map(len, lines)) <= 100


def test_environment_variables_are_declared_where_they_are_read() -> None:
    used = set()
    for path in PACKAGE:
        used |= set(re.findall(r"\bVLLM_BASTION_[A-Z_]+\b", path.read_text(encoding="utf-8")))
    assert used == set(envs.VARIABLES)


def test_every_setting_has_a_default_and_one_line_of_help() -> None:
    table = markdown_table().splitlines()[2:]
    assert [line.split("`")[1] for line in table] == list(config.user_keys())
    assert all(len(line.split("|")[3].strip()) > 20 for line in table)
    own = [
        f.name for f in fields(config.BastionSpeculativeConfig) if f.name.startswith(config.PREFIX)
    ]
    assert set(own) == {*config.user_keys(), "bastion_gamma"}
    defaults = {field.name: field.default for field in fields(config.BastionSpeculativeConfig)}
    for name in config.user_keys():
        config.key_adapter(name).validate_python(defaults[name])
