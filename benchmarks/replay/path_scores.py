# SPDX-License-Identifier: Apache-2.0
"""Online correction of the drafter's probabilities, per depth and rank.

The paper's path score is the product of the drafter's probabilities q along the path. Drafters
misstate them, and differently by depth and rank, so with `calibrated` scores each factor becomes

    p(d, k, q) = sigmoid( b[d, k] + a[d, k] * logit(q) ),   a in [1/2, 2], b in [-2, 2]

fitted to what the target did: every time a node at depth d - 1 lay on the accepted path, the target
named the token of depth d, and each candidate k of that depth was right or wrong. The fit is a
penalised logistic regression on binned counts, pulled towards the identity (a = 1, b = 0) where
little was seen, refreshed every `refit_every` observations, with old counts fading.

p rises with q (a > 0) and falls with rank (a running minimum over the candidates of one depth), so
the candidates stay sorted and best-first expansion stays valid.

Only the order and size of trees depends on this; what is accepted never does.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]

_SLOPE = (0.5, 2.0)
_BIAS = (-2.0, 2.0)
# precision of the priors: a standard deviation of 1 in b and 0.3 in a
_PRIOR_BIAS, _PRIOR_SLOPE = 1.0, 1.0 / 0.3**2
# bins of logit(q) between -12 and 12; beyond, the outermost ones
_NUM_BINS, _BIN_RANGE = 16, 12.0
_MAX_LOGIT = 30.0
_NEWTON_STEPS = 6


class PathScoreCorrection:
    """The correction of one engine, learned over all its requests.

    Args:
        depth: drafted depths, D.
        top_k: candidates per depth, K.
        refit_every: observations between two fits.
        half_life: observations after which a count weighs half.
    """

    def __init__(
        self, depth: int, top_k: int, *, refit_every: int = 64, half_life: int = 4096
    ) -> None:
        self.refit_every = refit_every
        self._fade = 0.5 ** (refit_every / half_life)
        self._since_fit = 0
        # [D, K, bins]: times seen, times right, sum of logits
        self._seen = np.zeros((depth, top_k, _NUM_BINS))
        self._right = np.zeros_like(self._seen)
        self._logits = np.zeros_like(self._seen)
        # [D, K] float32: the coefficients in use; the arrays are replaced, never written
        self.slope = np.ones((depth, top_k), dtype=np.float32)
        self.bias = np.zeros((depth, top_k), dtype=np.float32)

    def observe(self, logprobs: ArrayLike, ranks: ArrayLike) -> bool:
        """Take in one verified step of one request. Not for requests whose tree was a fallback.

        Args:
            logprobs: [D, K] the drafter's log-probabilities, sorted, uncorrected.
            ranks: [m] rank of the target's token among the candidates of depth 1..m, -1 where it
                was none of them; m = accepted draft tokens + 1, at most D.

        Returns:
            Whether the coefficients changed.
        """
        ranks = np.asarray(ranks, dtype=np.int64)
        m = len(ranks)
        if m == 0:
            return False
        logits = _logit(np.asarray(logprobs, dtype=np.float64)[:m])
        num_ranks = logits.shape[1]
        bins = ((logits + _BIN_RANGE) * (_NUM_BINS / (2 * _BIN_RANGE))).astype(np.int64)
        np.clip(bins, 0, _NUM_BINS - 1, out=bins)
        d, k = np.ogrid[:m, :num_ranks]
        self._seen[d, k, bins] += 1.0
        self._logits[d, k, bins] += logits
        hit = np.flatnonzero(ranks >= 0)
        self._right[hit, ranks[hit], bins[hit, ranks[hit]]] += 1.0
        self._since_fit += 1
        if self._since_fit < self.refit_every:
            return False
        self.refit()
        return True

    def refit(self) -> None:
        """Fit the coefficients to the counts, then let the counts fade."""
        self._since_fit = 0
        seen, right = self._seen, self._right
        x = np.divide(self._logits, seen, out=np.zeros_like(seen), where=seen > 0)
        a = self.slope.astype(np.float64)
        b = self.bias.astype(np.float64)
        for _ in range(_NEWTON_STEPS):
            p = _sigmoid(b[..., None] + a[..., None] * x)
            error = right - seen * p
            weight = seen * p * (1.0 - p)
            grad_b = error.sum(-1) - _PRIOR_BIAS * b
            grad_a = (error * x).sum(-1) - _PRIOR_SLOPE * (a - 1.0)
            h_bb = weight.sum(-1) + _PRIOR_BIAS
            h_ab = (weight * x).sum(-1)
            h_aa = (weight * x * x).sum(-1) + _PRIOR_SLOPE
            determinant = h_aa * h_bb - h_ab**2
            b = np.clip(b + (h_aa * grad_b - h_ab * grad_a) / determinant, *_BIAS)
            a = np.clip(a + (h_bb * grad_a - h_ab * grad_b) / determinant, *_SLOPE)
        self.slope = a.astype(np.float32)
        self.bias = b.astype(np.float32)
        for counts in (self._seen, self._right, self._logits):
            counts *= self._fade

    def apply(self, logprobs: ArrayLike) -> FloatArray:
        """[..., D, K] corrected log-probabilities: <= 0, non-increasing over the last axis."""
        logits = _logit(np.asarray(logprobs, dtype=np.float64))
        corrected = -np.logaddexp(0.0, -(self.bias + self.slope * logits))
        return np.minimum.accumulate(corrected, axis=-1)


def _logit(logprobs: FloatArray) -> FloatArray:
    capped = np.minimum(logprobs, -1e-6)
    logits = capped - np.log(-np.expm1(capped))
    return np.clip(logits, -_MAX_LOGIT, _MAX_LOGIT).astype(np.float64)


def _sigmoid(x: FloatArray) -> FloatArray:
    return np.asarray(1.0 / (1.0 + np.exp(-x)))
