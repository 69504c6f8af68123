# SPDX-License-Identifier: Apache-2.0
"""What the ops compute, in plain PyTorch or Python on any device: slow, obvious, without checks.

The ops' tests compare every version with these, or both with another truth. The rehearsal computes
with them, and the benchmarks check with them.
"""

from tests.references.accept import accept_path, compact_caches, gather_rows
from tests.references.attention import ancestor_bits, tree_attention, tree_positions
from tests.references.best_first import expand_best_first
from tests.references.declare import OF
from tests.references.gated_delta import (
    gated_delta_commit,
    gated_delta_tree,
    short_conv_commit,
    short_conv_tree,
)
from tests.references.history import ancestor_tokens, mask_bad_words, penalise_ancestors
from tests.references.inputs import draft_inputs
from tests.references.lookup import add_prompt, find_ngram, keep_replies, mix_ngram
from tests.references.rows import bind_slots, context_rows
from tests.references.state_blocks import find_commits, find_states
from tests.references.take_best import take_best
from tests.references.topk import topk_logprobs

__all__ = [
    "OF", "accept_path", "add_prompt", "ancestor_bits", "ancestor_tokens", "bind_slots",
    "compact_caches", "context_rows", "draft_inputs", "expand_best_first", "find_commits",
    "find_ngram", "find_states", "gated_delta_commit", "gated_delta_tree", "gather_rows",
    "keep_replies", "mask_bad_words", "mix_ngram", "penalise_ancestors", "short_conv_commit",
    "short_conv_tree", "take_best", "topk_logprobs", "tree_attention", "tree_positions",
]  # fmt: skip
