// SPDX-License-Identifier: Apache-2.0
// AMX tile registers: 16 rows of 64 bytes each. BASTION_EMULATE_TILES emulates them, for tests on
// machines without AMX.
#pragma once

#include <cstdint>

#include "vectors.h"

#if defined(__AMX_BF16__) || defined(BASTION_EMULATE_TILES)
#define BASTION_TILES 1
#endif

#ifdef BASTION_TILES
namespace bastion {

constexpr int64_t kTileRows = 16;

#ifndef BASTION_EMULATE_TILES

// Eight full tiles during this object's lifetime.
//
// Inline assembly, because GCC's intrinsics are macros that take no template parameter as the
// tile's number. The operands do not cover the rows read, hence "memory".
class Tiles {
 public:
  Tiles() {
    alignas(64) uint8_t config[64] = {1};  // palette 1
    for (int tile = 0; tile < 8; ++tile) {
      config[16 + 2 * tile] = 64;  // bytes of a row
      config[48 + tile] = kTileRows;
    }
    asm volatile("ldtilecfg (%0)" ::"r"(config) : "memory");
  }
  ~Tiles() { asm volatile("tilerelease"); }

  template <int kTile>
  void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
  }
  // Rows `stride` bytes apart.
  template <int kTile>
  void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(kTile), "r"(from), "r"(stride) : "memory");
  }
  template <int kTile>
  void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(kTile), "r"(to), "r"(stride) : "memory");
  }
  // C += A @ B. A: [16, 32] bf16; B: [16, 16, 2] bf16, pairs of A's columns; C: [16, 16] float32.
  template <int kC, int kA, int kB>
  void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
  }
};

#else

class Tiles {
 public:
  template <int kTile>
  void zero() {
    std::memset(tiles_[kTile], 0, sizeof(tiles_[kTile]));
  }
  template <int kTile>
  void load(const void* from, int64_t stride) {
    for (int row = 0; row < kTileRows; ++row) {
      std::memcpy(tiles_[kTile][row], static_cast<const uint8_t*>(from) + row * stride, 64);
    }
  }
  template <int kTile>
  void store(void* to, int64_t stride) {
    for (int row = 0; row < kTileRows; ++row) {
      std::memcpy(static_cast<uint8_t*>(to) + row * stride, tiles_[kTile][row], 64);
    }
  }
  template <int kC, int kA, int kB>
  void multiply() {
    for (int row = 0; row < kTileRows; ++row) {
      for (int pair = 0; pair < 16; ++pair) {
        for (int column = 0; column < 16; ++column) {
          float total = bit_cast<float>(tiles_[kC][row][column]);
          const uint32_t a = tiles_[kA][row][pair], b = tiles_[kB][pair][column];
          total += bit_cast<float>(a << 16) * bit_cast<float>(b << 16);
          total += bit_cast<float>(a & 0xFFFF0000) * bit_cast<float>(b & 0xFFFF0000);
          tiles_[kC][row][column] = bit_cast<uint32_t>(total);
        }
      }
    }
  }

 private:
  uint32_t tiles_[8][kTileRows][16] = {};
};

#endif

}  // namespace bastion
#endif  // BASTION_TILES
