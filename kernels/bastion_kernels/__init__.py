# SPDX-License-Identifier: Apache-2.0
"""Device ops of a tree-verified decoding step: plain tensors in, plain tensors out, no vLLM.

Every op runs a Triton kernel on CUDA tensors, and Numba or C++ on CPU tensors; see `op`. It writes
into preallocated outputs of fixed shape, so a CUDA graph can capture it. Sizes:

    R  requests of the batch, in batch order        N  node budget, without the root
    S  persistent request slots; slots[r] = -1      D  drafted depth (gamma)
       marks an inert row                           L  depth of a tree: D, or more with n-grams
    T  rows (tokens) of the step                    K  candidates per depth
    P  logits rows of the step                      V  vocabulary
    W  ceil((N + 1) / 32) mask words

Node 0 is the root, the last sampled token; draft node j of a row of [.., N] is node j + 1. Nodes
are stored by non-increasing path score, parents first, so any prefix of the columns is a tree.
"""

from bastion_kernels.accept.gather import gather_rows
from bastion_kernels.accept.history import ancestor_tokens, mask_bad_words, penalise_ancestors
from bastion_kernels.accept.kv_compact import KVCaches, compact_caches
from bastion_kernels.accept.walk import accept_path
from bastion_kernels.attention.kv_layout import KVLayout, learn_layout
from bastion_kernels.attention.mask import ancestor_bits, tree_positions
from bastion_kernels.attention.tree_attention import AttentionLayer, AttentionStep
from bastion_kernels.attention.workspace import TreeAttentionWorkspace
from bastion_kernels.draft.best_first import expand_best_first
from bastion_kernels.draft.find_ngram import find_ngram
from bastion_kernels.draft.inputs import draft_inputs
from bastion_kernels.draft.mix_ngram import mix_ngram, ngram_chances, ngram_priors
from bastion_kernels.draft.ngram_table import add_prompt, keep_replies, ngram_table
from bastion_kernels.draft.take_best import take_best
from bastion_kernels.draft.topk_logprobs import topk_logprobs
from bastion_kernels.gated_delta.blocks import StateBlocks, find_commits, find_states
from bastion_kernels.gated_delta.recurrence import gated_delta_commit, gated_delta_tree
from bastion_kernels.gated_delta.short_conv import short_conv_commit, short_conv_tree
from bastion_kernels.gated_delta.states import LayerStates
from bastion_kernels.rows import bind_slots, context_rows
