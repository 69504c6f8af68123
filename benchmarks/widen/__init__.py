# SPDX-License-Identifier: Apache-2.0
"""Make from the tiny pair a pair that computes the same function in the shape of a real model.

    python -m benchmarks.widen 0.6B                  # prints the folder it is in
    python -m benchmarks.widen --config config.json  # the shape of any Qwen3-like config.json

Acceptance is then the tiny pair's, which was trained, and the time of a step is the shape's: every
matrix has its full size. Pairs (target/, drafter/, pair.json) lie in
`$XDG_CACHE_HOME/vllm-bastion/pairs`, never in the repository, and are made once.
With h, d the tiny hidden and head sizes and H, D the wide ones:

- channels are padded with zeros, so norms see a mean square h/H of theirs: hidden norms' weights
  are multiplied by sqrt(h/H) and eps by h/H (which fits h/H exactly and d/D nearly);
- the tiny head's rotary pairs keep their frequencies at theta^(D/d), its halves start at 0 and D/2;
- k norms' weights are multiplied by sqrt(d/D); q norms' are too, and by sqrt(D/d) again, because
  attention divides by sqrt(D): they stay;
- a KV head is repeated where a wide group has fewer queries than a tiny one;
- layers beyond the tiny depth add nothing: their output projections are zero. Their other weights
  are noise, since a device may draw less power, and be faster, on zeros;
- padded vocabulary entries are never chosen: a small constant in channel h of every embedding row
  reaches the head through the final norm, which meets large negative weights in the padded rows.

The drafter gets five layers and reads five of the target's, as the published ones do.

`llama-8B` has Llama 3.1 8B's sizes and Qwen3's q and k norms. Llama has none, and the tiny pair's
cannot be folded into projections, because they divide by the length of each query and key. With
every head's mean length instead, 86% of the argmaxes on held-out text are the same, and the chain's
tau falls from 3.6 to 2.4: another function.
"""

import sys

from benchmarks import TINY

# Its modules name each other without a package.
sys.path.append(str(TINY))
