// SPDX-License-Identifier: Apache-2.0
// x @ weight.T for few rows of x: in bfloat16 or int8 on CPUs with AVX-512 BF16 and VNNI, in
// bfloat16 on CPUs with AVX2 alone, which multiply it as float32.
//
// With few rows the product is bound by the bandwidth of the weights, so each weight is read from
// memory once. Weights are packed in blocks of 16 columns [words, 16]. A word is 4 bytes of K,
// two bfloat16 or four int8; AVX-512 multiplies it by one instruction.
//
// A unit of work is a few blocks of columns for a block of rows. Up to 24 rows (AVX2: 6) are summed
// in registers at once. With more rows the block is read again, from the cache.
#include "vectors.h"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__) || \
    defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)

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
constexpr int64_t kDepth = 2048;  // words per pass, so that a block's part stays in the L2 cache
constexpr int64_t kAhead = 8192;  // bytes to prefetch; the hardware prefetcher is too slow alone
constexpr int64_t kBlockBytes = 1 << 19;  // rows of x that share a core's cache
constexpr int64_t kUnitsPerThread = 4;    // so that a slow thread delays the others less
constexpr int kZeroPoint = 128;           // int8 rows are stored unsigned

// Rows of x in the dtype that is multiplied, and their scales if that is int8.
struct Rows {
  Span<uint32_t> words;
  int64_t stride;  // words between two rows
  Span<float> scales;
};

// Words between two rows. A power of two would map all rows to the same few cache sets.
int64_t row_stride(int64_t words) { return ceil_div(words, 16) * 16 + 16; }

// A product has Sums, a register or two with a number for each of a block's columns; kMaxRows, the
// rows whose sums, with weights and x, fit the registers; and kParts, the words of 4 bytes of x that
// it multiplies by a word of weights.
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)

struct Bf16Product {
  using Sums = __m512;
  using Weights = __m512i;
  static constexpr int kMaxRows = 24, kParts = 1;

  static Sums load(const void* sums) { return _mm512_load_ps(sums); }
  static void store(void* sums, Sums value) { _mm512_store_ps(sums, value); }
  static Weights weights(const uint32_t* line, int) { return _mm512_loadu_si512(line); }

  static Sums dot(Sums sums, uint32_t x, Weights weights) {
    return _mm512_dpbf16_ps(sums, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(int32_t(x)));
  }

  static Sums start(const LinearArgs& args, int64_t block) {
    return args.bias == nullptr ? Sums{} : Sums(widen((const Bf16*)args.bias + kColumns * block));
  }

  static void finish(const LinearArgs&, int64_t, Sums sums, const float*, uint16_t* out) {
    _mm256_storeu_si256((__m256i*)out, (__m256i)_mm512_cvtneps_pbh(sums));
  }

  static void copy(const LinearArgs& args, int64_t first, int64_t count, const Rows& into) {
    for (int64_t row = 0; row < count; ++row) {
      std::memcpy(into.words.at(row * into.stride, args.words), args.x + (first + row) * args.x_row,
                  4 * args.words);
    }
  }
};

struct Int8Product {
  using Sums = __m512i;
  using Weights = __m512i;
  static constexpr int kMaxRows = 24, kParts = 1;

  static Sums load(const void* sums) { return _mm512_load_si512(sums); }
  static void store(void* sums, Sums value) { _mm512_store_si512(sums, value); }
  static Weights weights(const uint32_t* line, int) { return _mm512_loadu_si512(line); }

  static Sums dot(Sums sums, uint32_t x, Weights weights) {
    return _mm512_dpbusd_epi32(sums, _mm512_set1_epi32(int32_t(x)), weights);
  }

  static Sums start(const LinearArgs& args, int64_t block) {
    return _mm512_loadu_si512(args.start + kColumns * block);
  }

  static void finish(const LinearArgs& args, int64_t block, Sums sums, const float* x_scale,
                     uint16_t* out) {
    const __m512 scales = _mm512_loadu_ps(args.scales + kColumns * block);
    const __m512 product = _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sums), scales),
                                         _mm512_set1_ps(*x_scale));
    _mm256_storeu_si256((__m256i*)out, (__m256i)_mm512_cvtneps_pbh(product));
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

#else  // AVX2: numbers of x are stored as float32, those of weights become float32 in registers

struct Bf16Product {
  struct Sums {
    __m256 low, high;  // 8 columns each
  };
  using Weights = Sums;
  static constexpr int kMaxRows = 6, kParts = 2;

  static Sums load(const void* sums) {
    const auto from = static_cast<const float*>(sums);
    return {_mm256_load_ps(from), _mm256_load_ps(from + 8)};
  }

  static void store(void* sums, Sums value) {
    const auto to = static_cast<float*>(sums);
    _mm256_store_ps(to, value.low);
    _mm256_store_ps(to + 8, value.high);
  }

  static Weights weights(const uint32_t* line, int part) {
    const __m256i low = _mm256_loadu_si256((const __m256i*)line);
    const __m256i high = _mm256_loadu_si256((const __m256i*)(line + 8));
    if (part == 0) return {(__m256)_mm256_slli_epi32(low, 16), (__m256)_mm256_slli_epi32(high, 16)};
    const __m256i mask = _mm256_set1_epi32(int32_t(0xFFFF0000));
    return {(__m256)_mm256_and_si256(low, mask), (__m256)_mm256_and_si256(high, mask)};
  }

  static Sums dot(Sums sums, uint32_t x, const Weights& weights) {
    const __m256 factor = _mm256_set1_ps(bit_cast<float>(x));
    return {_mm256_fmadd_ps(factor, weights.low, sums.low),
            _mm256_fmadd_ps(factor, weights.high, sums.high)};
  }

  static Sums start(const LinearArgs& args, int64_t block) {
    if (args.bias == nullptr) return {_mm256_setzero_ps(), _mm256_setzero_ps()};
    const auto bias = (const Bf16*)args.bias + kColumns * block;
    return {(__m256)widen(bias), (__m256)widen(bias + kLanes)};
  }

  static void finish(const LinearArgs&, int64_t, Sums sums, const float*, uint16_t* out) {
    alignas(32) float numbers[kColumns];
    store(numbers, sums);
    for (int64_t i = 0; i < kColumns; ++i) from_float(numbers[i], (Bf16*)out + i);
  }

  static void copy(const LinearArgs& args, int64_t first, int64_t count, const Rows& into) {
    const int64_t length = kParts * args.words;
    for (int64_t row = 0; row < count; ++row) {
      const uint16_t* source = args.x + (first + row) * args.x_row;
      uint32_t* line = into.words.at(row * into.stride, length);
      for (int64_t i = 0; i < length; ++i) line[i] = uint32_t(source[i]) << 16;
    }
  }
};

#endif

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
    const uint32_t* x = tile.x + Product::kParts * word;
#pragma GCC unroll 2
    for (int part = 0; part < Product::kParts; ++part) {
      const typename Product::Weights weights = Product::weights(line, part);
#pragma GCC unroll 24
      for (int row = 0; row < kRows; ++row) {
        sums[row] = Product::dot(sums[row], x[row * tile.x_stride + part], weights);
      }
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
  const int64_t groups = ceil_div(count, Product::kMaxRows);
  for (int64_t done = 0; done < args.words; done += kDepth) {
    const int64_t words = min(kDepth, args.words - done);
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t begin = count * group / groups, end = count * (group + 1) / groups;
      uint32_t* line = sums.at(kColumns * begin, kColumns * (end - begin));
      CHECK((end - 1) * rows.stride + Product::kParts * args.words <= rows.words.size);
      const Tile tile = {rows.words.data + begin * rows.stride + Product::kParts * done,
                         rows.stride,
                         args.packed + kColumns * (block * args.words + done),
                         words,
                         done ? line : start.data,
                         done ? kColumns : 0,
                         line};
      multiply<Product>(tile, end - begin, std::make_integer_sequence<int, Product::kMaxRows>());
    }
  }
  for (int64_t row = 0; row < count; ++row) {
    const float* scale = rows.scales.size ? &rows.scales[row] : nullptr;
    const auto total = Product::load(sums.at(kColumns * row, kColumns));
    uint16_t* out = args.out + ((first + row) * args.blocks + block) * kColumns;
    Product::finish(args, block, total, scale, out);
  }
}

struct Scratch {
  Buffer<uint32_t> words, sums;
  Buffer<float> scales;
};

template <class Product>
void linear(const LinearArgs& args) {
  constexpr int64_t most = Product::kMaxRows;
  const int64_t stride = row_stride(Product::kParts * args.words);
  const int64_t fitting = max(1, kBlockBytes / (4 * stride) / most) * most;
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
  if (rows != 0 && !scales) linear<Bf16Product>(args);
#ifdef __AVX512VNNI__
  if (rows != 0 && scales) linear<Int8Product>(args);
#endif
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

#endif  // AVX-512 BF16 and VNNI, or AVX2
