// SPDX-License-Identifier: Apache-2.0
// Scores and weighted sums over a tile of cached tokens, with float32 vectors.
#pragma once

#include "attention.h"

namespace bastion {

// What the registers hold of C below: with AVX-512 all of it.
#ifdef __AVX512F__
constexpr int kHeldRows = 8, kHeldVectors = 2;
#else
constexpr int kHeldRows = 4, kHeldVectors = 2;
#endif

// C = A @ B, plus C if kAdd, for the part of C that the registers hold.
template <bool kAdd>
inline void multiply_held(const float* a, int64_t a_row, const float* b, int64_t b_row, float* c,
                          int64_t c_row, int64_t length) {
  Floats sums[kHeldRows][kHeldVectors];
#pragma GCC unroll 8
  for (int row = 0; row < kHeldRows; ++row) {
#pragma GCC unroll 2
    for (int v = 0; v < kHeldVectors; ++v) {
      sums[row][v] = kAdd ? load(c + row * c_row + kLanes * v) : Floats{};
    }
  }
  for (int64_t i = 0; i < length; ++i) {
#pragma GCC unroll 8
    for (int row = 0; row < kHeldRows; ++row) {
      const Floats number = splat(a[row * a_row + i]);
#pragma GCC unroll 2
      for (int v = 0; v < kHeldVectors; ++v) {
        sums[row][v] += number * load(b + i * b_row + kLanes * v);
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kHeldRows; ++row) {
#pragma GCC unroll 2
    for (int v = 0; v < kHeldVectors; ++v) store(c + row * c_row + kLanes * v, sums[row][v]);
  }
}

// C[8, 32] = A[8, length] @ B[length, 32], plus C if kAdd. Rows are `*_row` elements apart.
template <bool kAdd>
inline void multiply_8x32(const float* a, int64_t a_row, const float* b, int64_t b_row, float* c,
                          int64_t c_row, int64_t length) {
  for (int64_t row = 0; row < 8; row += kHeldRows) {
    for (int64_t column = 0; column < 32; column += kLanes * kHeldVectors) {
      multiply_held<kAdd>(a + row * a_row, a_row, b + column, b_row, c + row * c_row + column,
                          c_row, length);
    }
  }
}

// Keys are read channel by channel, [d, 32 tokens], and values token by token, which is layout
// VECTOR of a float32 cache. Other caches are rearranged in the scratch memory.
template <class T>
class VectorReader {
 public:
  static constexpr bool kTiles = false;

  VectorReader(const LayerArgs& layer, const Scratch& scratch)
      : layer_(layer), work_(scratch), wide_(ceil_div(layer.dim, kGroup) * kGroup) {}

  // Find a tile's keys, and its values unless only scores are wanted.
  void find(const Blocks<T>& blocks, Tokens tokens, bool with_values) {
    for (int64_t group = 0; group < tokens.groups(); ++group) {
      const int64_t first = tokens.first + kGroup * group;
      const int64_t count = min(kGroup, tokens.count - kGroup * group);
      if (layer_.layout != kVector) {
        copy_each(blocks, first, count, group, with_values);
        continue;
      }
      const int64_t offset = first % layer_.page;
      const int64_t keys = blocks.begin(first) + offset;
      const int64_t values = keys - offset + (layer_.page + offset) * layer_.dim;
      find_group(blocks, group, keys, values, count, with_values);
    }
  }

  // scores[kGroup, kTile] of rows from `first` on.
  void score(int64_t first, int64_t rows, Tokens tokens) {
    const int64_t dim = layer_.dim;
    for (int64_t group = 0; group < tokens.groups(); ++group) {
      if (group + 1 < tokens.groups()) prefetch(keys_[group + 1]);
      for (int64_t row = 0; row < min(kGroup, rows - first); row += 8) {
        multiply_8x32<false>(work_.query.at((first + row) * dim, 8 * dim), dim, keys_[group],
                             key_stride_, work_.scores.at(row * kTile + kGroup * group, 7 * kTile + kGroup),
                             kTile, dim);
      }
    }
  }

  // sums += weights @ values.
  void mix(int64_t first, int64_t rows, Tokens tokens) {
    for (int64_t group = 0; group < tokens.groups(); ++group) {
      const int64_t count = min(kGroup, tokens.count - kGroup * group);
      for (int64_t c = 0; c < wide_; c += kGroup) {
        for (int64_t row = 0; row < min(kGroup, rows - first); row += 8) {
          multiply_8x32<true>(work_.scores.at(row * kTile + kGroup * group, 7 * kTile + count), kTile,
                              values_[group] + c, wide_,
                              work_.sums.at((first + row) * wide_ + c, 7 * wide_ + kGroup), wide_,
                              count);
        }
      }
    }
  }

  // A token's value in float32.
  void value(const Blocks<T>& blocks, int64_t token, float* out) const {
    const int64_t begin = blocks.begin(token), offset = token % layer_.page, dim = layer_.dim;
    if (layer_.layout == kVector) {
      const T* from = blocks.cache.at(begin + (layer_.page + offset) * dim, dim);
      for (int64_t c = 0; c < dim; c += kLanes) store(out + c, widen(from + c));
      return;
    }
    const int32_t* offsets = layer_.offsets + (2 * offset + 1) * dim;
    for (int64_t c = 0; c < dim; ++c) out[c] = to_float(blocks.cache[begin + offsets[c]]);
  }

 private:
  // A group's keys in a cache are too far apart for the hardware's prefetcher.
  void prefetch(const float* keys) const {
    if (key_stride_ == kGroup) return;
    for (int64_t c = 0; c < layer_.dim; ++c) {
      __builtin_prefetch(keys + c * key_stride_);
      __builtin_prefetch(keys + c * key_stride_ + 16);
    }
  }

  // Layout VECTOR.
  void find_group(const Blocks<T>& blocks, int64_t group, int64_t keys, int64_t values,
                  int64_t count, bool with_values) {
    const int64_t dim = layer_.dim, page = layer_.page;
    const T* key = blocks.cache.at(keys, (dim - 1) * page + kGroup);
    const T* value = blocks.cache.at(values, count * dim);
    if constexpr (sizeof(T) == sizeof(float)) {
      keys_[group] = key;
      values_[group] = value;
      key_stride_ = page;
      return;
    }
    float* to = panel_keys(group);
    for (int64_t c = 0; c < dim; ++c) {
      for (int64_t i = 0; i < kGroup; i += kLanes) {
        store(to + kGroup * c + i, widen(key + c * page + i));
      }
    }
    to = panel_values(group);
    for (int64_t i = 0; i < (with_values ? count * dim : 0); i += kLanes) {
      store(to + i, widen(value + i));
    }
  }

  // Any other layout, element by element.
  void copy_each(const Blocks<T>& blocks, int64_t first, int64_t count, int64_t group,
                 bool with_values) {
    const int64_t dim = layer_.dim;
    float *keys = panel_keys(group), *values = panel_values(group);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t begin = blocks.begin(first + i);
      const int32_t* offsets = layer_.offsets + (first + i) % layer_.page * 2 * dim;
      for (int64_t c = 0; c < dim; ++c) {
        keys[kGroup * c + i] = to_float(blocks.cache[begin + offsets[c]]);
      }
      for (int64_t c = 0; c < (with_values ? dim : 0); ++c) {
        values[wide_ * i + c] = to_float(blocks.cache[begin + offsets[dim + c]]);
      }
    }
  }

  float* panel_keys(int64_t group) {
    float* to = work_.panel.at(kGroup * layer_.dim * group, kGroup * layer_.dim);
    keys_[group] = to;
    key_stride_ = kGroup;
    return to;
  }

  float* panel_values(int64_t group) {
    float* to = work_.panel.at(kTile * layer_.dim + kGroup * wide_ * group, kGroup * wide_);
    values_[group] = to;
    return to;
  }

  const LayerArgs& layer_;
  const Scratch& work_;
  const int64_t wide_;
  // By group. `const T*` of a float32 cache and `const float*` are the same type.
  const float* keys_[kTile / kGroup] = {};
  const float* values_[kTile / kGroup] = {};
  int64_t key_stride_ = kGroup;
};

}  // namespace bastion
