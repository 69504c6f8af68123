// SPDX-License-Identifier: Apache-2.0
// Scores and weighted sums over a tile of cached tokens, with AMX tile registers.
//
// Layout AMX of a bf16 cache has keys as [page / 16, d / 2, 16 tokens, 2] and values as
// [d / 16, page / 2, 16 channels, 2 tokens], so both are loaded without rearranging.
#pragma once

#include "attention.h"
#include "tiles.h"

#ifdef BASTION_TILES
namespace bastion {

class TileReader {
 public:
  static constexpr bool kTiles = true;

  TileReader(const LayerArgs& layer, const Scratch& scratch) : layer_(layer), work_(scratch) {}

  void find(const Blocks<Bf16>& blocks, Tokens tokens, bool with_values) {
    const int64_t dim = layer_.dim, page = layer_.page, step = 16 * page;
    for (int64_t group = 0; group < tokens.groups(); ++group) {
      const int64_t first = tokens.first + kGroup * group, offset = first % page;
      const int64_t begin = blocks.begin(first);
      keys_[group] = blocks.cache.at(begin + offset * dim, kGroup * dim);
      values_[group] = blocks.cache.at(begin + page * dim + offset * 16, (dim / 16 - 1) * step + 512);
    }
    if (with_values && tokens.count % kGroup) copy_last(values_[tokens.groups() - 1], tokens);
  }

  // scores[kGroup, kTile] of rows from `first` on.
  void score(int64_t first, int64_t rows, Tokens tokens) {
    const int64_t dim = layer_.dim;
    const bool both = rows - first > 16;
    for (int64_t group = 0; group < tokens.groups(); ++group) {
      tiles_.zero<4>();
      tiles_.zero<5>();
      tiles_.zero<6>();
      tiles_.zero<7>();
      for (int64_t c = 0; c < dim; c += 32) {
        tiles_.load<2>(keys_[group] + 16 * c, 64);
        tiles_.load<3>(keys_[group] + 16 * (dim + c), 64);
        load_rows<0>(work_.query_bits, first, dim, c);
        tiles_.multiply<4, 0, 2>();
        tiles_.multiply<5, 0, 3>();
        if (!both) continue;
        load_rows<1>(work_.query_bits, first + 16, dim, c);
        tiles_.multiply<6, 1, 2>();
        tiles_.multiply<7, 1, 3>();
      }
      store_sums(work_.scores, 0, kTile, kGroup * group, both);
    }
  }

  // sums += weights @ values.
  void mix(int64_t first, int64_t rows, Tokens tokens) {
    const int64_t dim = layer_.dim, step = 16 * layer_.page;
    const bool both = rows - first > 16;
    for (int64_t c = 0; c < dim; c += 32) {
      load_sums(first, c, both);
      for (int64_t group = 0; group < tokens.groups(); ++group) {
        const bool whole = kGroup * (group + 1) <= tokens.count;
        const uint16_t* last = work_.last.at(32 * c, 1024);
        const Bf16* values = values_[group] + c * layer_.page;
        tiles_.load<2>(whole ? &values->bits : last, 64);
        tiles_.load<3>(whole ? &values[step].bits : last + 512, 64);
        load_rows<0>(work_.weights, 0, kTile, kGroup * group);
        tiles_.multiply<4, 0, 2>();
        tiles_.multiply<5, 0, 3>();
        if (!both) continue;
        load_rows<1>(work_.weights, 16, kTile, kGroup * group);
        tiles_.multiply<6, 1, 2>();
        tiles_.multiply<7, 1, 3>();
      }
      store_sums(work_.sums, first, dim, c, both);
    }
  }

  // A token's value in float32.
  void value(const Blocks<Bf16>& blocks, int64_t token, float* out) const {
    const int64_t dim = layer_.dim, page = layer_.page, offset = token % page;
    const int64_t begin = blocks.begin(token) + page * dim + offset / 2 * 32 + offset % 2;
    for (int64_t c = 0; c < dim; ++c) {
      out[c] = to_float(blocks.cache[begin + c / 16 * 16 * page + c % 16 * 2]);
    }
  }

 private:
  // Values of the last group, zero past the request's tokens: memory there may hold NaN, and
  // 0 * NaN is NaN.
  void copy_last(const Bf16* values, Tokens tokens) {
    const int64_t count = tokens.count % kGroup, step = 16 * layer_.page;
    for (int64_t part = 0; part < layer_.dim / 16; ++part) {
      uint16_t* to = work_.last.at(512 * part, 512);
      for (int64_t i = 0; i < 512; ++i) {
        const bool used = i / 32 * 2 + i % 2 < count;
        to[i] = used ? values[part * step + i].bits : 0;
      }
    }
  }

  // A tile of 16 rows and 32 columns of a bf16 matrix.
  template <int kTo>
  void load_rows(Span<uint16_t> matrix, int64_t row, int64_t stride, int64_t column) {
    tiles_.load<kTo>(matrix.at(row * stride + column, 15 * stride + 32), 2 * stride);
  }

  void load_sums(int64_t row, int64_t column, bool both) {
    const int64_t dim = layer_.dim;
    const float* from = work_.sums.at(row * dim + column, 15 * dim + 32);
    tiles_.load<4>(from, 4 * dim);
    tiles_.load<5>(from + 16, 4 * dim);
    if (!both) return;
    from = work_.sums.at((row + 16) * dim + column, 15 * dim + 32);
    tiles_.load<6>(from, 4 * dim);
    tiles_.load<7>(from + 16, 4 * dim);
  }

  void store_sums(Span<float> matrix, int64_t row, int64_t stride, int64_t column, bool both) {
    float* to = matrix.at(row * stride + column, 15 * stride + 32);
    tiles_.store<4>(to, 4 * stride);
    tiles_.store<5>(to + 16, 4 * stride);
    if (!both) return;
    to = matrix.at((row + 16) * stride + column, 15 * stride + 32);
    tiles_.store<6>(to, 4 * stride);
    tiles_.store<7>(to + 16, 4 * stride);
  }

  const LayerArgs& layer_;
  const Scratch& work_;
  Tiles tiles_;
  const Bf16* keys_[kTile / kGroup] = {};
  const Bf16* values_[kTile / kGroup] = {};
};

}  // namespace bastion
#endif  // BASTION_TILES
