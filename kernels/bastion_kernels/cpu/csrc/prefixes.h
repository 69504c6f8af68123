// SPDX-License-Identifier: Apache-2.0
// Arguments and memory of prefixes.cpp.
#pragma once

#include "best_children.h"
#include "panels.h"

namespace bastion {

struct PrefixArgs {
  int64_t threads, half;  // half: weights, embeddings and states are bf16, else float32
  int64_t tiles;          // whether to multiply bf16 with tile registers
  int64_t reqs, depth, width, candidates;      // R, D, B, M
  int64_t hidden_words, state, rank_columns;   // words of H, G, and E up to a multiple of 16
  int64_t last_words, top_k, corrected_from;   // last_words: in a row of `last`
  const int64_t* tokens;      // [R, 1 + D M], each anchor and its candidates
  const uint32_t* embedded;   // [R, 1 + D M, words of H], their embeddings
  const uint32_t* of_input;   // [3, blocks of G, words of H, 16]
  const uint32_t* of_state;   // [3, blocks of G, words of G, 16]
  const uint32_t* projection; // [blocks of E, words of G, 16]
  const float* positions;     // [R, D, rank_columns]
  const uint32_t* last;       // [V, words of E]
  const int32_t* ids;         // [R, D, M], rows of `last`
  const float* base;          // [R, D, M]
  float* logprobs;            // [R, D, B, M]; written
  int32_t* rows;              // [R, D, B, M]; written
};

constexpr int64_t kPhases = 4;
constexpr int64_t kFewestTileRows = 4;  // fewer are faster without tiles

// `to` is read as words later; strict aliasing allows that for copied bytes only.
template <class T>
void round_to(T* to, Floats x) {
  T rounded[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) from_float(x[i], rounded + i);
  std::memcpy(static_cast<void*>(to), rounded, sizeof(rounded));
}

// A power of two would map all rows to the same few cache sets.
inline int64_t padded(int64_t words) { return ceil_div(words, kLanes) * kLanes + kLanes; }

// One kept prefix of the current depth.
struct Prefix {
  int32_t req, parent;        // parent: index in the list of the depth above
  int32_t token;              // index of its last token in [R, 1 + D M]
  int32_t input_row, gate_row;  // its rows of the two products
  float cost;
};

// Memory of a call.
struct Shared {
  Buffer<Prefix> prefixes, found;
  Buffer<uint32_t> inputs, gates, states, old, latents;
  Buffer<int64_t> next;
  Buffer<int32_t> starts, counts, table;
};

// Memory of a thread.
struct Scratch {
  Buffer<float> products, scores;
  Buffer<uint32_t> weights;
  Buffer<int64_t> own, keys;
};

}  // namespace bastion
