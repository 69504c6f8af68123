# SPDX-License-Identifier: Apache-2.0
"""What the documents name exists: links, keys, variables, files, commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import vllm

from helpers import ROOT
from vllm_bastion import config, envs

DOCS = sorted((ROOT / "docs").rglob("*.md"))
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *DOCS,
    ROOT / "kernels" / "README.md",
    *sorted((ROOT / "benchmarks").glob("**/README.md")),
]
# What the changelog says of earlier versions, and a variable of the benchmarks.
EARLIER = {"bastion_calibration", "VLLM_BASTION_PAGE", "VLLM_BASTION_COMMIT"}

pages = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def prose(path: Path) -> str:
    """A page without fenced and indented code."""
    text = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_links_lead_to_files_and_headings(path: Path) -> None:
    text = prose(path)
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[.+\]: (\S+)$", text, re.M)
    for link in links:
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pages
def test_keys_and_variables_exist(path: Path) -> None:
    text = path.read_text("utf-8")
    # Without metrics (vllm:bastion_...), the package of the ops, and "bastion_*".
    found = set(re.findall(r"(?<!vllm:)\bbastion_(?!kernels)[a-z_]*[a-z]\b", text))
    found |= set(re.findall(r"\bVLLM_BASTION_[A-Z_]*[A-Z]\b", text))
    assert found <= {*config.user_keys(), *envs.VARIABLES, *EARLIER}


@pages
def test_commands_exist(path: Path) -> None:
    if path.parent.parent.name == "benchmarks":
        pytest.skip("a pair's recipe names commands of the history")
    text = path.read_text("utf-8")
    made = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert set(re.findall(r"(?:`| {4})make ([a-z0-9-]+)", text)) <= set(made)
    for name in re.findall(r"python -m ((?:benchmarks|tests)[.\w]*\w)", text):
        place = ROOT.joinpath(*name.split("."))
        assert (place / "__main__.py").exists() or place.with_suffix(".py").exists(), name


def test_where_to_look_names_at_most_two_files_that_exist() -> None:
    text = (ROOT / "docs" / "develop.md").read_text("utf-8")
    answers = re.findall(r"^- \*\*.+?\*\*(.*?)(?=^- |^$)", text, re.DOTALL | re.MULTILINE)
    assert len(answers) > 15
    roots = (ROOT, ROOT / "vllm_bastion", ROOT / "kernels" / "bastion_kernels")
    for answer in answers:
        names = set(re.findall(r"`([\w/]+(?:\.py|/))`", answer))  # links are further reading
        assert len(names) <= 2, answer
        for name in names:
            assert any((root / name).exists() for root in roots), name


def test_every_file_that_the_readme_names_is_a_link() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"(?<!\[)`(?:docs|benchmarks|kernels|vllm_bastion)/[\w./-]*`", text) == []


# What other libraries print: pydantic, Python, PyTorch, nanobind, lm-format-enforcer.
FOREIGN = ("method: Input should", "PackageNotFoundError", "CUDA out", "nanobind", "vllm is not")


def test_troubleshooting_quotes_what_is_printed() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    installed = Path(vllm.__file__).parent
    folders = ("v1", "config", "platforms", "triton_utils", "distributed/device_communicators")
    files = [*(installed / name for name in folders), ROOT / "vllm_bastion", ROOT / "kernels"]
    sources = "\n".join(path.read_text("utf-8") for file in files for path in file.rglob("*.py"))
    joined = re.sub(r"""["']\s*\n\s*f?["']""", "", sources)  # a literal over several lines
    quoted = re.findall(r"(?<!\*)\*([^*\n]{12,})\*", text)
    assert len(quoted) > 20
    missing = [
        quote
        for quote in quoted
        for part in re.split(r"\.\.\.|\"|\d+\.?\d*|cuda:0", quote)
        if not quote.startswith(FOREIGN) and part.strip(" ().:,/") not in joined
    ]
    assert missing == []


@pages
def test_files_of_tests_exist(path: Path) -> None:
    names = set(re.findall(r"\btest_\w+\.py\b", path.read_text("utf-8")))
    assert names <= {found.name for found in (ROOT / "tests").rglob("test_*.py")}
