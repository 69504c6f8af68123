// SPDX-License-Identifier: Apache-2.0
// The K largest logits of each row and their log-probabilities.
//
// A row is read in parts that fit the L1 cache. A part is converted to float32 and reduced to the
// maximum of every segment of 64 logits and to a sum of exponentials. Only segments whose maximum
// may be among the K largest are read again.
#include <cmath>
#include <limits>

#include "vectors.h"

namespace bastion {

struct TopKArgs {
  int64_t threads;
  int64_t rows;
  int64_t vocab;
  int64_t k;
  int64_t half;  // logits are bf16, else float32
  const void* logits;  // [rows, vocab]
  int64_t logits_row;  // elements between two rows
  int32_t* tokens;     // [rows, k]; written
  int64_t tokens_row;
  float* logprobs;  // [rows, k]; written
  int64_t logprobs_row;
};

namespace {

constexpr int64_t kSegment = 64;  // logits per maximum
constexpr int64_t kPart = 2048;   // logits per sum of exponentials
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A logit and its token as one integer: larger for a larger logit, then for a lower token.
int64_t key_of(float logit, int64_t token) {
  int64_t order = bit_cast<int32_t>(logit);
  order ^= (order >> 31) & 0x7FFFFFFF;
  return order * (int64_t(1) << 32) | (0x7FFFFFFF - token);
}

float logit_of(int64_t key) {
  const int64_t order = key >> 32;
  return bit_cast<float>(int32_t(order ^ ((order >> 31) & 0x7FFFFFFF)));
}

int32_t token_of(int64_t key) { return int32_t(0x7FFFFFFF - (key & 0x7FFFFFFF)); }

template <class Logit>
class Row {
 public:
  Row(const Logit* logits, int64_t vocab, Span<float> part, Span<float> maxima)
      : logits_{const_cast<Logit*>(logits), vocab}, part_(part), maxima_(maxima) {}

  // log sum exp(logit - largest logit), or NaN if a logit is NaN. Fills the maxima.
  float reduce(float* largest_logit) {
    float top = -kInfinity, total = 0;
    bool undefined = false;
    for (int64_t first = 0; first < logits_.size; first += kPart) {
      const int64_t count = min(kPart, logits_.size - first);
      read(first, count);
      const float best = find_maxima(first / kSegment, ceil_div(count, kSegment), &undefined);
      if (!(std::fabs(best) < kInfinity)) {
        undefined |= best > 0;
        continue;
      }
      const float mass = sum_of_powers(ceil_div(count, kSegment) * kSegment, best);
      if (best > top) {
        total = total * std::exp(top - best) + mass;
        top = best;
      } else {
        total += mass * std::exp(best - top);
      }
    }
    *largest_logit = top;
    return undefined ? std::numeric_limits<float>::quiet_NaN() : std::log(total);
  }

  // The best.size largest keys, in order.
  void select(Span<int64_t> best) {
    int64_t size = 0;
    float threshold = -kInfinity;
    for (int64_t segment = 0; segment < maxima_.size; ++segment) {
      // A later token loses ties, so it must be larger.
      if (size == best.size && maxima_[segment] <= threshold) continue;
      const int64_t first = segment * kSegment, count = min(kSegment, logits_.size - first);
      read(first, count);
      for (int64_t i = 0; i < count; ++i) {
        const float logit = part_[i];
        if (size == best.size && !(logit > threshold)) continue;
        // NaN ranks as -inf, and -0.0 as 0.0.
        insert(best, &size, key_of(logit == logit ? logit + 0.0f : -kInfinity, first + i));
        if (size == best.size) threshold = logit_of(best[size - 1]);
      }
    }
  }

 private:
  // part = logits from `first` on, padded with -inf to a whole segment.
  void read(int64_t first, int64_t count) {
    const Logit* from = logits_.at(first, count);
    float* to = part_.at(0, ceil_div(count, kSegment) * kSegment);
    const int64_t whole = count / kLanes * kLanes;
    for (int64_t i = 0; i < whole; i += kLanes) store(to + i, widen(from + i));
    for (int64_t i = whole; i < count; ++i) to[i] = to_float(from[i]);
    for (int64_t i = count; i % kSegment; ++i) to[i] = -kInfinity;
  }

  float find_maxima(int64_t begin, int64_t segments, bool* undefined) {
    const Floats lowest = splat(-kInfinity);
    Ints is_nan{};
    float best = -kInfinity;
    for (int64_t segment = 0; segment < segments; ++segment) {
      const float* from = part_.at(segment * kSegment, kSegment);
      Floats top = lowest;
      for (int64_t i = 0; i < kSegment; i += kLanes) {
        const Floats x = load(from + i);
        is_nan |= x != x;
        top = larger(x, top);
      }
      const float most = largest(top);
      maxima_[begin + segment] = most;
      best = larger(most, best);
    }
    for (int64_t i = 0; i < kLanes; ++i) *undefined |= is_nan[i] != 0;
    return best;
  }

  float sum_of_powers(int64_t count, float best) {
    const float* from = part_.at(0, count);
    Floats total{};
    for (int64_t i = 0; i < count; i += kLanes) {
      const Floats x = load(from + i);
      total += x > -kInfinity ? exp_of(x - best) : Floats{};
    }
    return sum(total);
  }

  static void insert(Span<int64_t> best, int64_t* size, int64_t key) {
    int64_t i = *size < best.size ? *size : best.size - 1;
    for (; i > 0 && best[i - 1] < key; --i) best[i] = best[i - 1];
    best[i] = key;
    *size = min(*size + 1, best.size);
  }

  Span<Logit> logits_;
  Span<float> part_, maxima_;
};

struct Scratch {
  Buffer<int64_t> best;
  Buffer<float> part, maxima;
};

template <class Logit>
void top_k(const TopKArgs& args) {
  const auto logits = static_cast<const Logit*>(args.logits);
  Units units(args.rows);
#pragma omp parallel num_threads(min(args.threads, args.rows))
  {
    static thread_local Scratch scratch;
    const Span<int64_t> best = scratch.best.get(args.k);
    const Span<float> part = scratch.part.get(kPart);
    const Span<float> maxima = scratch.maxima.get(ceil_div(args.vocab, kSegment));
    for (int64_t row; (row = units.take()) >= 0;) {
      Row<Logit> work(logits + row * args.logits_row, args.vocab, part, maxima);
      float largest_logit;
      const float mass = work.reduce(&largest_logit);
      work.select(best);
      for (int64_t rank = 0; rank < args.k; ++rank) {
        args.tokens[row * args.tokens_row + rank] = token_of(best[rank]);
        args.logprobs[row * args.logprobs_row + rank] =
            logit_of(best[rank]) - largest_logit - mass;
      }
    }
  }
}

}  // namespace
}  // namespace bastion

extern "C" BASTION_EXPORT void bastion_top_k(const bastion::TopKArgs* args) {
  if (args->rows == 0) return;
  if (args->half) {
    bastion::top_k<bastion::Bf16>(*args);
  } else {
    bastion::top_k<float>(*args);
  }
}
