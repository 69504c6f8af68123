# SPDX-License-Identifier: Apache-2.0
"""Replay of the product's trees and controller, with and without copies of the context."""

import numpy as np
import pytest
from synthetic_recording import synthetic_recording

from benchmarks.replay.costs import paper_a100
from benchmarks.replay.lookup import NODES, Engine
from benchmarks.replay.policies import Adaptive, Fixed, Plain
from benchmarks.replay.recording import Drafted, Emitted, recording_of
from benchmarks.replay.simulation import Corpus, Truth, simulate

SOURCE = paper_a100(2048)


def run(corpus, policy, batch=1, source=SOURCE):
    return simulate(corpus, policy, Truth(source.table), batch=batch)


def engine(corpus, source=SOURCE, **options):
    return Engine(corpus, source.latency("ema_table"), name="engine", **options)


def repeating(period, length=60, depth=7, top_k=4):
    """Replies that repeat their prompt for ever, and drafts that are always wrong."""
    rng = np.random.default_rng(0)
    requests, drafts = [], []
    for i in range(4):
        words = rng.permutation(400)[:period]
        text = np.resize(words, 2 * period + length + depth + 1)
        requests.append(Emitted(f"{i}", "copies", 0.0, text[: 2 * period], text[2 * period :]))
        q = np.log(np.full((depth, top_k), 1 / 8))
        for position in range(1, length):
            drafts.append(Drafted(f"{i}", position, np.full((depth, top_k), 450), q))
    return Corpus(recording_of({}, requests, drafts), NODES)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("nodes", [16, NODES])
def test_without_lookup_a_fixed_budget_is_the_one_of_the_policies(nodes, batch):
    corpus = Corpus(synthetic_recording(), NODES)
    ours = run(corpus, engine(corpus, lookup=False, budget=nodes), batch)
    theirs = run(corpus, Fixed(corpus, nodes), batch)
    assert (ours.tokens, ours.steps, ours.nodes) == (theirs.tokens, theirs.steps, theirs.nodes)
    assert ours.ms == pytest.approx(theirs.ms)


def test_without_lookup_the_controller_decides_as_the_policies_do():
    corpus = Corpus(synthetic_recording(prompts=12), NODES)
    ours = run(corpus, engine(corpus, lookup=False))
    theirs = run(corpus, Adaptive(corpus, SOURCE.latency("ema_table")))
    assert ours.ms == pytest.approx(theirs.ms, rel=0.02)


def test_copies_are_accepted_to_their_end_where_a_text_repeats():
    corpus = repeating(period=20)
    # The first steps learn how far copies can be trusted.
    assert run(corpus, engine(corpus)).tau > 8
    assert run(corpus, engine(corpus, lookup=False)).tau == 1.0
    # A lattice that is always wrong costs no accepted token.
    fixed = run(corpus, engine(corpus, budget=NODES))
    assert fixed.tau > 8


def test_copies_alone_need_no_drafter():
    corpus = repeating(period=20)
    plain = run(corpus, Plain())
    alone = run(corpus, engine(corpus, drafter=False))
    assert plain.ms / alone.ms > 5


def test_nothing_is_lost_where_nothing_repeats():
    corpus = Corpus(synthetic_recording(prompts=12), NODES)
    without, lookup = (run(corpus, engine(corpus, lookup=on)) for on in (False, True))
    assert lookup.ms < 1.02 * without.ms
