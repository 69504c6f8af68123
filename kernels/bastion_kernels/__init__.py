# SPDX-License-Identifier: Apache-2.0
"""Device ops of a tree-verified decoding step: plain tensors in, plain tensors out, no vLLM.

Every op `name` dispatches by device (CUDA: Triton kernel, CPU: `name_reference` in plain PyTorch),
writes into the outputs it is given and keeps fixed shapes, so that a CUDA graph can hold it. Sizes:

    R  requests of the batch, in batch order        N  node budget, root not counted
    S  persistent request slots; slots[r] = -1      D  drafted depth (gamma)
       marks an inert row                           K  candidates per depth
    T  rows (tokens) of the step                    V  vocabulary
    L  logits rows of the step                      W  ceil((N + 1) / 32) mask words

Node 0 is the root, the last sampled token; draft node j of a row of [.., N] is node j + 1. Nodes
are stored in non-increasing path score, parents first, so any prefix of the columns is a tree.
"""

from bastion_kernels.accept.gather import gather_rows, gather_rows_reference
from bastion_kernels.accept.history import (
    ancestor_tokens,
    ancestor_tokens_reference,
    mask_bad_words,
    mask_bad_words_reference,
    penalise_ancestors,
    penalise_ancestors_reference,
)
from bastion_kernels.accept.kv_compact import KVCompactor
from bastion_kernels.accept.walk import accept_path, accept_path_reference
from bastion_kernels.attention.kv_layout import KVLayout, learn_layout
from bastion_kernels.attention.mask import (
    ancestor_bits,
    ancestor_bits_reference,
    tree_positions,
    tree_positions_reference,
)
from bastion_kernels.attention.tree_attention import (
    TreeAttentionWorkspace,
    tree_attention,
    tree_attention_reference,
)
from bastion_kernels.draft.best_first import expand_best_first, expand_best_first_reference
from bastion_kernels.draft.budget import (
    choose_budget,
    choose_budget_reference,
    take_best,
    take_best_reference,
)
from bastion_kernels.draft.topk_logprobs import (
    topk_logprobs,
    topk_logprobs_reference,
    topk_partial,
    topk_partial_reference,
)
from bastion_kernels.draft.topk_merge import merge_topk, merge_topk_reference
from bastion_kernels.draft.transitions import expand_transitions, expand_transitions_reference
from bastion_kernels.gated_delta.recurrence import (
    gated_delta_commit,
    gated_delta_commit_reference,
    gated_delta_tree,
    gated_delta_tree_reference,
)
from bastion_kernels.gated_delta.short_conv import (
    short_conv_commit,
    short_conv_commit_reference,
    short_conv_tree,
    short_conv_tree_reference,
)
from bastion_kernels.gated_delta.states import LayerStates
from bastion_kernels.rows import (
    bind_slots,
    bind_slots_reference,
    bind_tails,
    bind_tails_reference,
    kept_rows,
    kept_rows_reference,
)

__all__ = [
    "KVCompactor",
    "KVLayout",
    "LayerStates",
    "TreeAttentionWorkspace",
    "accept_path",
    "accept_path_reference",
    "ancestor_bits",
    "ancestor_bits_reference",
    "ancestor_tokens",
    "ancestor_tokens_reference",
    "bind_slots",
    "bind_slots_reference",
    "bind_tails",
    "bind_tails_reference",
    "choose_budget",
    "choose_budget_reference",
    "expand_best_first",
    "expand_best_first_reference",
    "expand_transitions",
    "expand_transitions_reference",
    "gated_delta_commit",
    "gated_delta_commit_reference",
    "gated_delta_tree",
    "gated_delta_tree_reference",
    "gather_rows",
    "gather_rows_reference",
    "kept_rows",
    "kept_rows_reference",
    "learn_layout",
    "mask_bad_words",
    "mask_bad_words_reference",
    "merge_topk",
    "merge_topk_reference",
    "penalise_ancestors",
    "penalise_ancestors_reference",
    "short_conv_commit",
    "short_conv_commit_reference",
    "short_conv_tree",
    "short_conv_tree_reference",
    "take_best",
    "take_best_reference",
    "topk_logprobs",
    "topk_logprobs_reference",
    "topk_partial",
    "topk_partial_reference",
    "tree_attention",
    "tree_attention_reference",
    "tree_positions",
    "tree_positions_reference",
]
