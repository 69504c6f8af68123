// SPDX-License-Identifier: Apache-2.0
// Vectors of float32 that fill a register, and conversions from other formats.
//
// GCC's and Clang's vector extensions: 16 numbers with AVX-512, elsewhere 8. GCC moves a vector that
// is wider than a register through the stack, which takes many times as long.
#pragma once

#include <cstdint>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "common.h"

namespace bastion {

#ifdef __AVX512F__
constexpr int64_t kLanes = 16;
#else
constexpr int64_t kLanes = 8;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

inline Floats splat(float x) { return x - Floats{}; }
inline Ints splat(int32_t x) { return x - Ints{}; }

inline Ints lane_numbers() {
  Ints numbers;
  for (int i = 0; i < kLanes; ++i) numbers[i] = i;
  return numbers;
}

inline Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof(x)); }

// The maximum; b where either is NaN.
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline float larger(float a, float b) { return a > b ? a : b; }

// Sum and maximum of the lanes.
inline float sum(Floats x) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) x[i] += x[i + width];
  }
  return x[0];
}

inline float largest(Floats x) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) x[i] = larger(x[i], x[i + width]);
  }
  return x[0];
}

// exp(x) to the last bits of float32 for x up to some tens; exp(-87) for smaller ones and NaN.
// F, I: float and int32_t, or vectors of them.
template <class F, class I>
inline F exp_of(F x) {
  x = larger(x, F{} - 87.0f);
  // Adding 1.5 * 2^23 rounds to a whole number, which is then in the low bits.
  const F shifted = x * 1.44269504088896f + 12582912.0f;
  const F whole = shifted - 12582912.0f;
  x = x - whole * 0.693359375f;
  x = x + whole * 2.12194440e-4f;
  F y = x * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * x + 8.3334519073e-3f;
  y = y * x + 4.1665795894e-2f;
  y = y * x + 1.6666665459e-1f;
  y = y * x + 5.0000001201e-1f;
  y = y * x + 1.0f;
  y = y * x + 1.0f;
  const I exponent = (bit_cast<I>(shifted) - (0x4B400000 - 127)) << 23;
  return y * bit_cast<F>(exponent);
}

inline float exp_of(float x) { return exp_of<float, int32_t>(x); }
inline Floats exp_of(Floats x) { return exp_of<Floats, Ints>(x); }

inline Floats sigmoid(Floats x) {
  const Floats most = splat(80.0f);
  x = -x;
  return 1.0f / (1.0f + exp_of(x < most ? x : most));
}

// ---- Number formats ----

enum Format : int64_t { kFloat32, kBf16, kFp16, kE4M3, kE5M2 };

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};
struct E4M3 {
  uint8_t bits;
};
struct E5M2 {
  uint8_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(Bf16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }

inline float to_float(Fp16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = x.bits & 0x7FFF;
  // A normal number gets float32's exponent bias. A subnormal one becomes the low bits of 0.5.
  const float normal = bit_cast<float>((rest << 13) + (0xE0u << 23)) * 0x1p-112f;
  const float subnormal = bit_cast<float>(rest | 0x3F000000u) - 0.5f;
  return bit_cast<float>(sign | bit_cast<uint32_t>(rest < 0x400 ? subnormal : normal));
}

// A float8 is read as the high bits of a float16: exact for E5M2, and 1/256 of the value for E4M3.
// The caller's scales make up for that.
inline Fp16 as_half(E5M2 x) { return {uint16_t(x.bits << 8)}; }
inline Fp16 as_half(E4M3 x) { return {uint16_t((x.bits & 0x80) << 8 | (x.bits & 0x7F) << 7)}; }
inline float to_float(E4M3 x) { return to_float(as_half(x)); }
inline float to_float(E5M2 x) { return to_float(as_half(x)); }

// The nearest number, ties to even.
inline void from_float(float x, float* to) { *to = x; }

inline void from_float(float x, Bf16* to) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  to->bits = is_nan ? 0x7FC0 : uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

inline void from_float(float x, Fp16* to) {
  const uint32_t bits = bit_cast<uint32_t>(x), doubled = bits + bits;
  // The scaling overflows where a float16 does. Adding a number whose last bit has the value of the
  // float16's last bit rounds to that.
  const float scaled = bit_cast<float>(bits & 0x7FFFFFFF) * 0x1p112f * 0x1p-110f;
  uint32_t exponent = doubled & 0xFF000000;
  exponent = exponent < 0x71000000 ? 0x71000000 : exponent;
  const float rounded = bit_cast<float>((exponent >> 1) + 0x07800000) + scaled;
  const uint32_t half = ((bit_cast<uint32_t>(rounded) >> 13) & 0x7C00) +
                        (bit_cast<uint32_t>(rounded) & 0xFFF);
  to->bits = uint16_t((bits >> 16 & 0x8000) | (doubled > 0xFF000000 ? 0x7E00 : half));
}

// kLanes numbers as float32.
template <class T>
inline Floats widen(const T* from) {
  Floats x;
  for (int64_t i = 0; i < kLanes; ++i) x[i] = to_float(from[i]);
  return x;
}

template <>
inline Floats widen(const float* from) {
  return load(from);
}

template <>
inline Floats widen(const Bf16* from) {
  uint16_t bits __attribute__((vector_size(2 * kLanes)));
  std::memcpy(&bits, from, sizeof(bits));
  return bit_cast<Floats>(__builtin_convertvector(bits, Ints) << 16);
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
template <>
inline Floats widen(const Fp16* from) {
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
}

template <>
inline Floats widen(const E5M2* from) {
  const __m256i bits = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)from));
  return (Floats)_mm512_cvtph_ps(_mm256_slli_epi16(bits, 8));
}

template <>
inline Floats widen(const E4M3* from) {
  const __m256i bits = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from));
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(bits, 7), _mm256_set1_epi16(int16_t(0xBFFF)));
  return (Floats)_mm512_cvtph_ps(half);
}
#endif

}  // namespace bastion
