// SPDX-License-Identifier: Apache-2.0
// Log-probabilities of candidates after prefixes, and the choice of the best new prefixes.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "vectors.h"

namespace bastion {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int32_t kInfinite = 0x7F800000;  // the bits of kInfinity

// Log-softmax of scores [count], in place: NaN if one of them is NaN or inf, or all are -inf. The
// buffer is padded to whole vectors.
inline void log_softmax(float* scores, int64_t count) {
  const int64_t whole = ceil_div(count, kLanes) * kLanes;
  std::fill(scores + count, scores + whole, -kInfinity);
  Floats best = splat(-kInfinity), is_nan{};
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Floats x = load(scores + i);
    best = larger(x, best);
    is_nan += x == x ? Floats{} : splat(1.0f);
  }
  const float top = largest(best);
  if (sum(is_nan) > 0 || !(std::fabs(top) < kInfinity)) {
    std::fill(scores, scores + count, std::numeric_limits<float>::quiet_NaN());
    return;
  }
  Floats total{};
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Floats x = load(scores + i);
    total += x > -kInfinity ? exp_of(x - top) : Floats{};
  }
  const float mass = std::log(sum(total));
  for (int64_t i = 0; i < whole; i += kLanes) store(scores + i, load(scores + i) - top - mass);
}

// Keys sort by cost, then by place: the bits of a non-negative float sort like the float.
inline int64_t key_of(float cost, int64_t place) {
  return int64_t(bit_cast<int32_t>(cost)) << 32 | place;
}
inline float cost_of(int64_t key) { return bit_cast<float>(int32_t(key >> 32)); }
inline int64_t place_of(int64_t key) { return key & 0xFFFFFFFF; }

// Keys of a prefix's best `top_k` children; returns their number. logprobs: [candidates]; own:
// scratch for as many keys; keys: written.
inline int64_t add_children(const float* logprobs, int64_t candidates, int64_t top_k, float above,
                            int64_t first, Span<int64_t> own, int64_t* keys) {
  int64_t possible = 0;
  for (int64_t i = 0; i < candidates; ++i) {
    const float logprob = logprobs[i];
    if (!(logprob > -kInfinity)) continue;
    own[possible++] = key_of(logprob < 0 ? -logprob : 0.0f, i);
  }
  if (top_k < possible) {
    std::nth_element(own.data, own.data + top_k - 1, own.data + possible);
    possible = top_k;
  }
  int64_t count = 0;
  for (int64_t i = 0; i < possible; ++i) {
    const float cost = above + cost_of(own[i]);
    if (cost < kInfinity) keys[count++] = key_of(cost, first + place_of(own[i]));
  }
  return count;
}

// Keep the `most` smallest of keys [count], ordered by place; returns their number.
inline int64_t keep_best(int64_t* keys, int64_t count, int64_t most) {
  if (most < count) {
    std::nth_element(keys, keys + most - 1, keys + count);
    count = most;
  }
  std::sort(keys, keys + count,
            [](int64_t a, int64_t b) { return place_of(a) < place_of(b); });
  return count;
}

}  // namespace bastion
