// SPDX-License-Identifier: Apache-2.0
// Products of a few rows with packed weights, summed in float32, on any CPU.
//
// Weights are packed as in linear.cpp, in blocks of 16 columns [words, 16]. A word is 4 bytes of
// K: one float32 or two bfloat16.
#pragma once

#include <utility>

#include "tiles.h"
#include "vectors.h"

namespace bastion {

template <class T>
constexpr int64_t kPerWord = 4 / int64_t(sizeof(T));

// sums + x * weights, for one word of x and of 16 columns.
template <class T>
Floats dot(Floats sums, uint32_t x, Ints weights);

template <>
inline Floats dot<float>(Floats sums, uint32_t x, Ints weights) {
  return sums + splat(bit_cast<float>(x)) * (Floats)weights;
}

template <>
inline Floats dot<Bf16>(Floats sums, uint32_t x, Ints weights) {
#if defined(__AVX512BF16__)
  return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)weights,
                                  (__m512bh)_mm512_set1_epi32(int32_t(x)));
#else
  sums += splat(bit_cast<float>(x << 16)) * (Floats)(weights << 16);
  return sums + splat(bit_cast<float>(x & 0xFFFF0000)) * (Floats)(weights & int32_t(0xFFFF0000));
#endif
}

// Rows of x, with blocks of columns that lie `weights_stride` words apart.
struct Panel {
  const uint32_t* x;
  int64_t x_stride;  // words between two rows
  const uint32_t* weights;
  int64_t weights_stride;
  int64_t words;  // of K
  float* out;     // [blocks, rows, 16]; written
  int64_t out_stride;
};

template <class T, int kBlocks, int kRows>
void multiply_panel(const Panel& panel) {
  Floats sums[kBlocks][kRows] = {};
  for (int64_t word = 0; word < panel.words; ++word) {
    Ints weights[kBlocks];
#pragma GCC unroll 4
    for (int block = 0; block < kBlocks; ++block) {
      std::memcpy(&weights[block], panel.weights + block * panel.weights_stride + kLanes * word,
                  sizeof(Ints));
    }
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const uint32_t x = panel.x[row * panel.x_stride + word];
#pragma GCC unroll 4
      for (int block = 0; block < kBlocks; ++block) {
        sums[block][row] = dot<T>(sums[block][row], x, weights[block]);
      }
    }
  }
#pragma GCC unroll 4
  for (int block = 0; block < kBlocks; ++block) {
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      store(panel.out + block * panel.out_stride + kLanes * row, sums[block][row]);
    }
  }
}

template <class T, int kBlocks, int... kRows>
void multiply_panel(const Panel& panel, int64_t rows, std::integer_sequence<int, kRows...>) {
  using Function = void (*)(const Panel&);
  static constexpr Function functions[] = {multiply_panel<T, kBlocks, kRows + 1>...};
  functions[rows - 1](panel);
}

// Any number of rows, in groups of about equal size whose sums fit the registers.
template <class T, int kBlocks>
void multiply_rows(Panel panel, int64_t rows) {
  constexpr int kMost = kBlocks == 1 ? 16 : 8;
  const Panel all = panel;
  const int64_t groups = ceil_div(rows, kMost);
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t begin = rows * group / groups, end = rows * (group + 1) / groups;
    panel.x = all.x + begin * all.x_stride;
    panel.out = all.out + begin * kLanes;
    multiply_panel<T, kBlocks>(panel, end - begin, std::make_integer_sequence<int, kMost>());
  }
}

#ifdef BASTION_TILES
constexpr int64_t kTileWords = 16;

// multiply_rows for bf16 with tile registers. K is a multiple of a tile; kBlocks is 1 or 3.
template <int kBlocks>
void multiply_tiles(const Panel& panel, int64_t rows) {
  const int64_t groups = ceil_div(rows, kTileRows);
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t begin = rows * group / groups, end = rows * (group + 1) / groups;
    Tiles tiles(end - begin);
    tiles.zero<4>();
    tiles.zero<5>();
    tiles.zero<6>();
    for (int64_t word = 0; word < panel.words; word += kTileWords) {
      const uint32_t* weights = panel.weights + kLanes * word;
      tiles.load<0>(panel.x + begin * panel.x_stride + word, 4 * panel.x_stride);
      tiles.load<2>(weights, 4 * kLanes);
      tiles.multiply<4, 0, 2>();
      if (kBlocks == 1) continue;
      tiles.load<3>(weights + panel.weights_stride, 4 * kLanes);
      tiles.multiply<5, 0, 3>();
      tiles.load<2>(weights + 2 * panel.weights_stride, 4 * kLanes);
      tiles.multiply<6, 0, 2>();
    }
    float* out = panel.out + begin * kLanes;
    tiles.store<4>(out, 4 * kLanes);
    if (kBlocks == 1) continue;
    tiles.store<5>(out + panel.out_stride, 4 * kLanes);
    tiles.store<6>(out + 2 * panel.out_stride, 4 * kLanes);
  }
}
#endif

}  // namespace bastion
