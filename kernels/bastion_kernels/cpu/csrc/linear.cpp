// SPDX-License-Identifier: Apache-2.0
// x @ weight.T for few rows of x, in bfloat16 or int8, on CPUs with AVX-512 BF16 and VNNI.
//
// With few rows the product is bound by the bandwidth of the weights, so each weight is read from
// memory once. Weights are packed in blocks of 16 columns [words, 16]. A word is 4 bytes of K,
// which one instruction multiplies: two bfloat16 or four int8.
//
// A unit of work is a few blocks of columns for a block of rows. Up to 24 rows are summed in
// registers at once. With more rows the block is read again, from the cache.
#include "common.h"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)

#include <immintrin.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <optional>
#include <utility>
#include <vector>

namespace bastion {
namespace {

struct LinearArgs {
  int64_t threads;
  int64_t rows;
  int64_t words;   // of 4 bytes, in a row of x in the weights' dtype
  int64_t blocks;  // of 16 columns
  const uint16_t* x;  // [rows, K] bf16
  int64_t x_row;      // elements between two rows
  const uint32_t* packed;  // [blocks, words, 16]
  const uint16_t* bias;    // bf16 product: [N] bf16 or null
  const int32_t* start;    // int8 product: [N], initial values of the sums
  const float* scales;     // int8 product: [N]
  uint16_t* out;           // [rows, N] bf16
};

constexpr int64_t kColumns = 16;  // of a block: lanes of a vector of 32-bit sums
constexpr int kMaxRows = 24;      // summed together; sums, weights and x share 32 registers
constexpr int64_t kDepth = 2048;  // words per pass, so that a block's part stays in the L2 cache
constexpr int64_t kAhead = 8192;  // bytes to prefetch; the hardware prefetcher is too slow alone
constexpr int64_t kBlockBytes = 1 << 19;  // rows of x that share a core's cache
constexpr int64_t kUnitsPerThread = 4;    // so that a slow thread delays the others less
constexpr int kZeroPoint = 128;           // int8 rows are stored unsigned

// Rows of x in the weights' dtype, and their scales if that is int8.
struct Rows {
  Span<uint32_t> words;
  int64_t stride;  // words between two rows
  Span<float> scales;
};

// Words between two rows. A power of two would map all rows to the same few cache sets.
int64_t row_stride(int64_t words) { return ceil_div(words, 16) * 16 + 16; }

struct Bf16Product {
  using Sums = __m512;

  static Sums load(const void* sums) { return _mm512_load_ps(sums); }
  static void store(void* sums, Sums value) { _mm512_store_ps(sums, value); }

  static Sums dot(Sums sums, uint32_t x, __m512i weights) {
    return _mm512_dpbf16_ps(sums, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(int32_t(x)));
  }

  static Sums start(const LinearArgs& args, int64_t block) {
    if (args.bias == nullptr) return _mm512_setzero_ps();
    const auto bias = (const __m256i*)(args.bias + kColumns * block);
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(bias)), 16));
  }

  static __m512 result(const LinearArgs&, int64_t, Sums sums, const float*) { return sums; }

  static void copy(const LinearArgs& args, int64_t first, int64_t count, const Rows& into) {
    for (int64_t row = 0; row < count; ++row) {
      std::memcpy(into.words.at(row * into.stride, args.words), args.x + (first + row) * args.x_row,
                  4 * args.words);
    }
  }
};

struct Int8Product {
  using Sums = __m512i;

  static Sums load(const void* sums) { return _mm512_load_si512(sums); }
  static void store(void* sums, Sums value) { _mm512_store_si512(sums, value); }

  static Sums dot(Sums sums, uint32_t x, __m512i weights) {
    return _mm512_dpbusd_epi32(sums, _mm512_set1_epi32(int32_t(x)), weights);
  }

  static Sums start(const LinearArgs& args, int64_t block) {
    return _mm512_loadu_si512(args.start + kColumns * block);
  }

  static __m512 result(const LinearArgs& args, int64_t block, Sums sums, const float* x_scale) {
    const __m512 scales = _mm512_loadu_ps(args.scales + kColumns * block);
    return _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sums), scales),
                         _mm512_set1_ps(*x_scale));
  }

  // Round each row by the scale of its largest number.
  static void copy(const LinearArgs& args, int64_t first, int64_t count, const Rows& into) {
    const int64_t length = 4 * args.words;
    for (int64_t row = 0; row < count; ++row) {
      const uint16_t* source = args.x + (first + row) * args.x_row;
      auto line = reinterpret_cast<uint8_t*>(into.words.at(row * into.stride, args.words));
      // The bits of non-negative floats sort like the floats.
      int32_t largest = 0;
      for (int64_t i = 0; i < length; ++i) {
        const int32_t bits = source[i] & 0x7FFF;
        largest = bits > largest ? bits : largest;
      }
      const float top = bit_cast<float>(largest << 16);
      into.scales[row] = top / 127;
      const float factor = top > 0 ? 127 / top : 0;
      for (int64_t i = 0; i < length; ++i) {
        const float number = bit_cast<float>(int32_t(source[i]) << 16) * factor;
        line[i] = uint8_t(int32_t(std::nearbyint(number)) + kZeroPoint);
      }
    }
  }
};

// A block of columns for some rows, over `words` of K.
struct Tile {
  const uint32_t* x;
  int64_t x_stride;
  const uint32_t* weights;  // [words, 16]
  int64_t words;
  const uint32_t* start;  // [rows, 16], or [16] for all rows if start_stride is 0
  int64_t start_stride;
  uint32_t* sums;  // [rows, 16]; written
};

template <class Product, int kRows>
void multiply(const Tile& tile) {
  typename Product::Sums sums[kRows];
#pragma GCC unroll 24
  for (int row = 0; row < kRows; ++row) {
    sums[row] = Product::load(tile.start + row * tile.start_stride);
  }
  for (int64_t word = 0; word < tile.words; ++word) {
    const uint32_t* line = tile.weights + kColumns * word;
    _mm_prefetch((const char*)line + kAhead, _MM_HINT_T0);
    const __m512i weights = _mm512_loadu_si512(line);
#pragma GCC unroll 24
    for (int row = 0; row < kRows; ++row) {
      sums[row] = Product::dot(sums[row], tile.x[row * tile.x_stride + word], weights);
    }
  }
#pragma GCC unroll 24
  for (int row = 0; row < kRows; ++row) {
    Product::store(tile.sums + kColumns * row, sums[row]);
  }
}

template <class Product, int... kRows>
void multiply(const Tile& tile, int64_t rows, std::integer_sequence<int, kRows...>) {
  using Function = void (*)(const Tile&);
  static constexpr Function functions[] = {multiply<Product, kRows + 1>...};
  functions[rows - 1](tile);
}

// One block of columns for `count` rows: passes over K, each in groups of rows of about equal size.
template <class Product>
void multiply_block(const LinearArgs& args, int64_t block, int64_t first, int64_t count,
                    const Rows& rows, Span<uint32_t> sums) {
  Span<uint32_t> start = sums.part(kColumns * count, kColumns);
  Product::store(start.data, Product::start(args, block));
  const int64_t groups = ceil_div(count, kMaxRows);
  for (int64_t done = 0; done < args.words; done += kDepth) {
    const int64_t words = min(kDepth, args.words - done);
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t begin = count * group / groups, end = count * (group + 1) / groups;
      uint32_t* line = sums.at(kColumns * begin, kColumns * (end - begin));
      CHECK((end - 1) * rows.stride + args.words <= rows.words.size);
      const Tile tile = {rows.words.data + begin * rows.stride + done,
                         rows.stride,
                         args.packed + kColumns * (block * args.words + done),
                         words,
                         done ? line : start.data,
                         done ? kColumns : 0,
                         line};
      multiply<Product>(tile, end - begin, std::make_integer_sequence<int, kMaxRows>());
    }
  }
  for (int64_t row = 0; row < count; ++row) {
    const float* scale = rows.scales.size ? &rows.scales[row] : nullptr;
    const auto total = Product::load(sums.at(kColumns * row, kColumns));
    const __m256bh rounded = _mm512_cvtneps_pbh(Product::result(args, block, total, scale));
    uint16_t* out = args.out + ((first + row) * args.blocks + block) * kColumns;
    _mm256_storeu_si256((__m256i*)out, (__m256i)rounded);
  }
}

struct Scratch {
  Buffer<uint32_t> words, sums;
  Buffer<float> scales;
};

template <class Product>
void linear(const LinearArgs& args) {
  const int64_t stride = row_stride(args.words);
  const int64_t fitting = max(1, kBlockBytes / (4 * stride) / kMaxRows) * kMaxRows;
  const int64_t at_once = min(args.rows, fitting);
  const int64_t step = max(1, args.blocks / (kUnitsPerThread * args.threads));
  const int64_t steps = ceil_div(args.blocks, step);
  Units units(ceil_div(args.rows, at_once) * steps);
#pragma omp parallel num_threads(args.threads)
  {
    static thread_local Scratch scratch;
    const bool scaled = args.scales != nullptr;
    const Rows rows = {scratch.words.get(at_once * stride), stride,
                       scratch.scales.get(scaled ? at_once : 0)};
    const Span<uint32_t> sums = scratch.sums.get(kColumns * (at_once + 1));
    int64_t copied = -1;
    for (int64_t unit; (unit = units.take()) >= 0;) {
      const int64_t first = unit / steps * at_once, count = min(at_once, args.rows - first);
      if (first != copied) Product::copy(args, first, count, rows);
      copied = first;
      const int64_t begin = unit % steps * step, end = min(begin + step, args.blocks);
      for (int64_t block = begin; block < end; ++block) {
        multiply_block<Product>(args, block, first, count, rows, sums);
      }
    }
  }
}

using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

template <class T>
T* data_of(const Optional& tensor) {
  return tensor ? static_cast<T*>(tensor->data_ptr()) : nullptr;
}

// The op; `cpu/linear.py` says what it takes.
Tensor op(Tensor x, Tensor values, Optional start, Optional scales, Optional bias) {
  const int64_t last = x.dim() - 1;
  // Rows may lie apart. A contiguous tensor's own stride says nothing where a dimension has size 1.
  const bool dense = x.is_contiguous(), apart = !dense && last == 1 && x.stride(1) == 1;
  if (!dense && !apart) x = torch::stable::contiguous(x);
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  const int64_t length = shape[last], rows = length ? x.numel() / length : 0;
  shape[last] = values.size(0) * kColumns;
  Tensor out = torch::stable::new_empty(x, shape);
  const LinearArgs args = {torch::stable::get_num_threads(), rows, values.size(1), values.size(0),
                           static_cast<uint16_t*>(x.data_ptr()), apart ? x.stride(0) : length,
                           static_cast<uint32_t*>(values.data_ptr()), data_of<uint16_t>(bias),
                           data_of<int32_t>(start), data_of<float>(scales),
                           static_cast<uint16_t*>(out.data_ptr())};
  if (rows != 0 && scales) linear<Int8Product>(args);
  if (rows != 0 && !scales) linear<Bf16Product>(args);
  return out;
}

}  // namespace
}  // namespace bastion

// Implements the op `bastion::linear`; to be called once.
extern "C" BASTION_EXPORT void bastion_register_linear() {
  using torch::stable::detail::StableLibrary;
  static StableLibrary library(StableLibrary::Kind::IMPL, "bastion", "CPU", __FILE__, __LINE__);
  library.impl("linear", TORCH_BOX(&bastion::op));
}

#endif  // AVX-512 BF16 and VNNI
