# SPDX-License-Identifier: Apache-2.0
"""Path-score correction: identity at first, recovers a known misstatement, stays ordered."""

import numpy as np

from benchmarks.replay.path_scores import PathScoreCorrection

DEPTH, TOP_K = 5, 4


def _logprobs(rng, *shape):
    q = rng.dirichlet(np.full(TOP_K + 2, 0.4), size=shape)[..., :TOP_K]
    return np.log(-np.sort(-q, axis=-1) + 1e-12)


def _target_ranks(rng, probabilities):
    """Walk until the target leaves the candidates; the last rank is -1 unless all matched."""
    ranks = []
    for p in probabilities:
        p = p / max(1.0, p.sum())
        rank = int(np.searchsorted(np.cumsum(p), rng.random()))
        ranks.append(rank if rank < TOP_K else -1)
        if ranks[-1] < 0:
            break
    return ranks


def test_nothing_is_changed_before_anything_was_seen():
    logprobs = _logprobs(np.random.default_rng(0), 3, DEPTH)
    corrected = PathScoreCorrection(DEPTH, TOP_K).apply(logprobs)
    np.testing.assert_allclose(corrected, logprobs, atol=1e-5)


def test_a_known_misstatement_is_recovered_per_depth():
    # the target does at depth d what the drafter says, with logits shifted by shift[d]
    rng = np.random.default_rng(1)
    shift = np.array([0.0, -0.4, -0.8, -1.2, -1.5])[:, None]
    correction = PathScoreCorrection(DEPTH, TOP_K, half_life=10**6)

    def truth(logprobs):
        q = np.exp(logprobs)
        logit = np.log(q) - np.log1p(-np.minimum(q, 1 - 1e-9))
        return 1 / (1 + np.exp(-(logit + shift)))

    for _ in range(12_000):
        logprobs = _logprobs(rng, DEPTH)
        correction.observe(logprobs, _target_ranks(rng, truth(logprobs)))
    fresh = _logprobs(rng, 500, DEPTH)
    before = np.abs(np.exp(fresh) - truth(fresh))
    after = np.abs(np.exp(correction.apply(fresh)) - truth(fresh))
    # depth 0 has nothing to gain; the deepest ones are rarely reached and still improve
    assert after[:, 0].mean() < 0.02
    for depth in range(1, DEPTH):
        assert after[:, depth].mean() < 0.35 * before[:, depth].mean()


def test_an_honest_drafter_is_left_alone():
    rng = np.random.default_rng(2)
    correction = PathScoreCorrection(DEPTH, TOP_K)
    for _ in range(3000):
        logprobs = _logprobs(rng, DEPTH)
        correction.observe(logprobs, _target_ranks(rng, np.exp(logprobs)))
    fresh = _logprobs(rng, 500, DEPTH)
    error = np.abs(np.exp(correction.apply(fresh)) - np.exp(fresh))
    assert error[:, :3].mean() < 0.02


def test_output_is_ordered_bounded_and_monotone_whatever_is_seen():
    rng = np.random.default_rng(3)
    correction = PathScoreCorrection(DEPTH, TOP_K, refit_every=16)
    for _ in range(600):
        # a target that always takes the last candidate contradicts every score
        correction.observe(_logprobs(rng, DEPTH), [TOP_K - 1] * DEPTH)
    assert (correction.slope >= 0.5).all() and (correction.slope <= 2.0).all()
    assert (np.abs(correction.bias) <= 2.0).all()
    fresh = _logprobs(rng, 200, DEPTH)
    corrected = correction.apply(fresh)
    assert (corrected <= 0).all() and (np.diff(corrected, axis=-1) <= 0).all()
    rising = np.log(np.linspace(0.01, 0.99, 50))[:, None, None] * np.ones((1, DEPTH, TOP_K))
    assert (np.diff(correction.apply(rising), axis=0) >= 0).all()


def test_scores_of_one_depth_do_not_move_another():
    rng = np.random.default_rng(4)
    correction = PathScoreCorrection(DEPTH, TOP_K, refit_every=10)
    for _ in range(500):
        correction.observe(_logprobs(rng, DEPTH), [-1])
    assert (correction.bias[0] < -0.5).any()
    assert (correction.bias[1:] == 0).all() and (correction.slope[1:] == 1).all()


def test_a_change_of_text_is_followed():
    rng = np.random.default_rng(5)
    correction = PathScoreCorrection(DEPTH, TOP_K, half_life=256)
    for outcome, sign in ((-1, -1.0), (0, 1.0)):
        for _ in range(1500):
            correction.observe(_logprobs(rng, DEPTH), [outcome])
        assert np.sign(correction.bias[0, 0]) == sign


def test_observations_between_fits_change_nothing():
    correction = PathScoreCorrection(DEPTH, TOP_K, refit_every=4)
    logprobs = _logprobs(np.random.default_rng(6), DEPTH)
    slope = correction.slope
    assert [correction.observe(logprobs, [-1]) for _ in range(4)] == [False, False, False, True]
    assert correction.slope is not slope, "arrays are replaced, so a copy to a device can tell"
    assert not correction.observe(logprobs, [])
