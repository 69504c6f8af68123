// SPDX-License-Identifier: Apache-2.0
// Arguments of the gated delta kernels; see gated_delta/recurrence.py and short_conv.py.
#pragma once

#include "vectors.h"

namespace bastion {

// The size of a row, rounded up to whole vectors.
inline int64_t whole_vectors(int64_t size) { return ceil_div(size, kLanes) * kLanes; }

// Numbers whose format is known at run time. Strides are in elements.
struct Numbers {
  const void* data;
  int64_t format;

  float at(int64_t i) const {
    if (format == kBf16) return to_float(static_cast<const Bf16*>(data)[i]);
    if (format == kFp16) return to_float(static_cast<const Fp16*>(data)[i]);
    return static_cast<const float*>(data)[i];
  }

  void set(int64_t i, float x) const {
    void* to = const_cast<void*>(data);
    if (format == kBf16) return from_float(x, static_cast<Bf16*>(to) + i);
    if (format == kFp16) return from_float(x, static_cast<Fp16*>(to) + i);
    static_cast<float*>(to)[i] = x;
  }
};

// Arguments of a layer, the same in every step. C = 2 Hk K + H V channels: queries, keys, values.
struct DeltaLayerArgs {
  int64_t heads;      // of values: H
  int64_t key_heads;  // Hk
  int64_t dim;        // K
  int64_t width;      // V
  int64_t taps;       // W
  int64_t format;     // of rows
  Numbers weight;     // [C, W]
  int64_t weight_channel, weight_tap;
  Numbers inputs;     // [B, C, W - 1]: of the convolution, before the step
  int64_t inputs_place, inputs_channel, inputs_column;
  Numbers state;      // [B, H, K, V]
  int64_t state_place, state_head, state_key, state_value;
  Numbers decay_log;  // [H]: A_log
  Numbers decay_bias; // [H]: dt_bias
  int64_t max_rows;   // M
  void* saved_inputs; // [M, C]; written, like the next three
  void* saved_keys;   // [M, Hk, K]
  float* updates;     // [M, H, V]
  double* decays;     // [M, H]
  float scale;
};

// Arguments of a step, the same for every layer.
struct DeltaStepArgs {
  int64_t requests;
  const int32_t* places;   // [requests]: rows of the states; < 0: skipped
  const int32_t* starts;   // [requests + 1]: the requests' first tree rows
  const int32_t* tails;    // [requests]: rows of the tree, its root included
  const int64_t* slots;    // [requests]; < 0: causal
  const int32_t* parents;  // [slots, nodes]: of nodes from 1 on
  int64_t parents_slot;
  const int64_t* rows;  // the tree rows among the step's; null: all
};

struct DeltaRowsArgs {
  int64_t threads;
  const void* mixed;  // [rows, C]
  int64_t mixed_row;
  const void* b;  // [rows, H]
  int64_t b_row;
  const void* a;  // [rows, H]
  int64_t a_row;
  void* out;  // [rows, H, V]; written
  int64_t out_row, out_head;
};

// Accepted paths, for the states of all layers.
struct CommitArgs {
  int64_t threads;
  int64_t layers;
  int64_t requests;
  const int64_t* table;   // [layers, 2]: address of a layer's states, and its group
  const int32_t* places;  // [groups, requests]: states to read; < 0: none
  int64_t places_group;
  const int32_t* into;    // [groups, requests]: states to write; < 0: none
  int64_t into_group;
  const int32_t* starts;  // [requests + 1]
  const int32_t* logits;  // [requests + 1]: running sum of the tails' rows
  const int32_t* path;    // [requests, depths]
  int64_t path_row;
  int64_t depths;
  const int32_t* lengths; // [requests]: most entries of the path; null: depths
};

struct DeltaCommitArgs {
  CommitArgs paths;
  int64_t heads, key_heads, dim, width;
  Numbers keys;  // [L, T, Hk, K]
  int64_t keys_layer, keys_row, keys_head;
  const float* updates;  // [L, M, H, V]
  int64_t updates_layer;
  const double* decays;  // [L, M, H]
  int64_t decays_layer;
  int64_t state_format;
  int64_t state_place, state_head, state_key, state_value;
};

struct ConvCommitArgs {
  CommitArgs paths;
  int64_t channels, kept;
  Numbers inputs;  // [L, M, C]
  int64_t inputs_layer, inputs_row;
  int64_t state_format;
  int64_t state_place, state_channel, state_column;
};

}  // namespace bastion
