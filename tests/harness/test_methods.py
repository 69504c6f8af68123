# SPDX-License-Identifier: Apache-2.0
"""What the words of `python -m benchmarks.e2e` stand for, and what its engines import."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import TINY
from benchmarks.e2e.methods import (
    PLAIN,
    REFERENCE,
    Target,
    groups,
    method_of,
    paper_methods,
    reference_of,
)
from benchmarks.prompts import DataError
from helpers import ROOT, run_python

PAIR = Target(str(TINY / "target"), str(TINY / "drafter"), str(TINY / "eagle3"))


def test_words_name_a_method_and_its_keys() -> None:
    assert method_of("plain", PAIR).speculative is None
    chain = method_of("dflash 7 adaptive", PAIR).speculative
    assert chain == {
        "method": "dflash", "model": PAIR.drafter, "num_speculative_tokens": 7,
        "enable_adaptive_verification": True,
    }  # fmt: skip
    assert (method_of("dflash", PAIR).speculative or {})["num_speculative_tokens"] == 15
    ours = method_of("bastion nodes=16 lookup=false latency_model=ema drafter=dflash2", PAIR)
    assert ours.ours and ours.speculative == {
        "method": "bastion", "model": str(TINY / "dflash2"), "num_speculative_tokens": 16,
        "bastion_lookup": False, "bastion_latency_model": "ema",
    }  # fmt: skip
    for unknown in ("beam 4", "dflash 7 quick"):
        with pytest.raises(DataError, match="no method"):
            method_of(unknown, PAIR)
    with pytest.raises(DataError, match="without a drafter"):
        method_of("bastion", Target(PAIR.target))


def test_only_methods_of_this_plugin_load_it() -> None:
    for words in [*paper_methods(PAIR, cpu=True), *paper_methods(PAIR, cpu=False), REFERENCE]:
        method = method_of(words, PAIR)
        engine = method.engine(PAIR.target, cpu=True, max_model_len=64)
        hidden = engine.environment.get("VLLM_PLUGINS") == ""
        assert hidden == (not method.ours and words != REFERENCE), words


def test_another_checkout_has_its_own_packages_and_caches(tmp_path: Path) -> None:
    own = method_of("bastion", PAIR)
    other = own.elsewhere(tmp_path, "abc")
    engine = other.engine(PAIR.target, cpu=True)
    assert other.name == "bastion @ abc" and engine.speculative == own.speculative
    assert engine.paths() == (tmp_path, tmp_path / "kernels")
    assert engine.environment["VLLM_CACHE_ROOT"].endswith("against/abc/vllm")
    assert own.engine(PAIR.target, cpu=True).paths() == ()


def test_draws_are_compared_within_one_runner_only() -> None:
    plain, chain, trees = (method_of(words, PAIR) for words in (PLAIN, "dflash 7", "bastion"))
    assert [reference_of(one, 0.0, [PLAIN]) for one in (plain, chain, trees)] == [None] + [
        PLAIN
    ] * 2
    assert [reference_of(one, 1.0, [PLAIN]) for one in (plain, chain, trees)] == [None, None, PLAIN]
    assert reference_of(trees, 1.0, [PLAIN, REFERENCE]) == REFERENCE


def test_plain_decoding_is_in_every_group() -> None:
    names = [PLAIN, "a", "b", "c"]
    assert groups(names, 3) == [[PLAIN, "a", "b"], [PLAIN, "c"]]
    assert groups(names, 1) == [[name] for name in names]
    assert groups([PLAIN], 3) == [[PLAIN]]


def test_both_checkouts_are_in_one_group() -> None:
    names = [PLAIN, "dflash 7", "a", "a @ x", "b", "b @ x"]
    pairs = [[PLAIN, "a", "a @ x"], [PLAIN, "b", "b @ x"]]
    assert groups(names, 3) == [[PLAIN, "dflash 7"], *pairs]
    assert groups(names, 4) == [[PLAIN, "dflash 7", "a", "a @ x"], pairs[1]]
    assert groups([PLAIN, *names[2:]], 2) == pairs


def test_an_engine_without_the_plugin_does_not_import_it() -> None:
    code = (
        "import sys, benchmarks.e2e.__main__, benchmarks.harness.driver;"
        "print([m for m in sys.modules if m.split('.')[0] in ('vllm_bastion', 'bastion_kernels')])"
    )
    found = run_python(code, cwd=ROOT)
    assert found.stdout.strip() == "[]", found.stderr
