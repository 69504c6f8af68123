// SPDX-License-Identifier: Apache-2.0
// A gated delta layer over trees: convolution, normalisation and recurrence of a step in one call.
//
// A unit of work is one value head of one request. The products of the state with all rows' keys
// and queries are computed first, so the state is read once. Rows are then processed in order: a
// row adds the update of each row on its path. Its result depends only on the path, bit for bit.
#include <algorithm>
#include <cmath>

#include "gated_delta.h"

namespace bastion {
namespace {

constexpr int64_t kTogether = 12;  // rows multiplied with the state at once

struct Scratch {
  Buffer<float> rows, taps, state, products, sums;
  Buffer<int32_t> above;
  Buffer<double> decays;
};

// Products of kRows rows with kLanes columns of the state.
template <int kRows>
void multiply(const float* x, int64_t x_stride, const float* state, int64_t state_stride,
              int64_t dim, float* out, int64_t out_stride) {
  Floats sums[kRows] = {};
  for (int64_t i = 0; i < dim; ++i) {
    const Floats line = load(state + i * state_stride);
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) sums[row] += x[row * x_stride + i] * line;
  }
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) store(out + row * out_stride, sums[row]);
}

using Multiply = void (*)(const float*, int64_t, const float*, int64_t, int64_t, float*, int64_t);
constexpr Multiply kMultiply[kTogether] = {
    multiply<1>, multiply<2>, multiply<3>, multiply<4>,  multiply<5>,  multiply<6>,
    multiply<7>, multiply<8>, multiply<9>, multiply<10>, multiply<11>, multiply<12>};

float dot(const float* x, const float* y, int64_t size) {
  Floats total = {};
  for (int64_t i = 0; i < size; i += kLanes) total += load(x + i) * load(y + i);
  return sum(total);
}

// Rounded to the rows' format.
template <class T>
Floats rounded(Floats x) {
  T numbers[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) from_float(x[i], numbers + i);
  return widen(numbers);
}

template <>
Floats rounded<float>(Floats x) {
  return x;
}

template <>
Floats rounded<Bf16>(Floats x) {
  const Ints bits = bit_cast<Ints>(x);
  const Ints up = (bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF;
  const Ints result = x == x ? up : splat(0x7FC00000);
  return bit_cast<Floats>(result);
}

template <class T>
class Unit {
 public:
  Unit(const DeltaLayerArgs& layer, const DeltaStepArgs& step, const DeltaRowsArgs& rows,
       Scratch& scratch, int64_t request, int64_t head)
      : l_(layer), s_(step), r_(rows), m_(scratch), head_(head),
        key_head_(head / (layer.heads / layer.key_heads)),
        is_first_(head % (layer.heads / layer.key_heads) == 0),
        place_(step.places[request]), first_(step.starts[request]),
        count_(step.starts[request + 1] - step.starts[request]) {
    if (place_ < 0 || count_ <= 0) return;
    CHECK(first_ + count_ <= l_.max_rows);
    channels_ = 2 * l_.key_heads * l_.dim + l_.heads * l_.width;
    dim_ = whole_vectors(l_.dim);
    width_ = whole_vectors(l_.width);
    place_rows(request);
    // keys, queries, values
    const Span<float> all = m_.rows.get(count_ * (2 * dim_ + width_));
    keys_ = all.data;
    queries_ = keys_ + count_ * dim_;
    values_ = queries_ + count_ * dim_;
    const int64_t keys = l_.key_heads * l_.dim, mine = key_head_ * l_.dim;
    convolve(mine, l_.dim, dim_, queries_, is_first_);
    convolve(keys + mine, l_.dim, dim_, keys_, is_first_);
    convolve(2 * keys + head_ * l_.width, l_.width, width_, values_, true);
    normalise(queries_);
    normalise(keys_);
    if (is_first_) save_keys();
    multiply_state();
    recur();
  }

 private:
  int64_t source(int64_t row) const {
    return s_.rows == nullptr ? first_ + row : s_.rows[first_ + row];
  }

  // The row above each row; negative: among the inputs before the step.
  void place_rows(int64_t request) {
    above_ = m_.above.get(count_).data;
    const int64_t slot = s_.slots[request], tail = slot < 0 ? 0 : s_.tails[request];
    const int64_t root = count_ - tail;
    for (int64_t row = 0; row < count_; ++row) {
      above_[row] = int32_t(row - 1);
      if (tail > 1 && row > root) {
        const int32_t parent = s_.parents[slot * s_.parents_slot + row - root - 1];
        above_[row] = int32_t(root + max(parent, 0));
        CHECK(above_[row] < row);
      }
    }
  }

  // Convolve some channels of all rows into [rows, stride] float32, with zeros behind.
  void convolve(int64_t channel, int64_t size, int64_t stride, float* into, bool saves) {
    const int64_t before = l_.taps - 1;
    float* weight = m_.taps.get((before + l_.taps + count_) * stride).data;
    float* past = weight + l_.taps * stride;  // then the step's rows
    for (int64_t i = 0; i < size; ++i) {
      for (int64_t tap = 0; tap < l_.taps; ++tap) {
        weight[tap * stride + i] =
            l_.weight.at((channel + i) * l_.weight_channel + tap * l_.weight_tap);
      }
      for (int64_t column = 0; column < before; ++column) {
        past[column * stride + i] = l_.inputs.at(
            place_ * l_.inputs_place + (channel + i) * l_.inputs_channel + column * l_.inputs_column);
      }
    }
    for (int64_t row = 0; row < before + l_.taps + count_; ++row) {
      std::fill(weight + row * stride + size, weight + (row + 1) * stride, 0.0f);
    }
    float* now = past + before * stride;
    for (int64_t row = 0; row < count_; ++row) {
      const T* from = static_cast<const T*>(r_.mixed) + source(row) * r_.mixed_row + channel;
      for (int64_t i = 0; i < size; ++i) now[row * stride + i] = to_float(from[i]);
      if (saves) {
        T* saved = static_cast<T*>(l_.saved_inputs) + (first_ + row) * channels_ + channel;
        std::memcpy(saved, from, size * sizeof(T));
      }
    }
    for (int64_t row = 0; row < count_; ++row) {
      for (int64_t lane = 0; lane < stride; lane += kLanes) {
        Floats total = {};
        int64_t at = row;
        for (int64_t tap = before; tap >= 0; --tap) {
          total += load(now + at * stride + lane) * load(weight + tap * stride + lane);
          at = at < 0 ? at - 1 : above_[at];
        }
        store(into + row * stride + lane, rounded<T>(total * sigmoid(total)));
      }
    }
  }

  void normalise(float* rows) {
    for (int64_t row = 0; row < count_; ++row) {
      float* x = rows + row * dim_;
      const float factor = 1.0f / std::sqrt(dot(x, x, dim_) + 1e-6f);
      for (int64_t i = 0; i < dim_; i += kLanes) store(x + i, rounded<T>(load(x + i) * factor));
    }
  }

  void save_keys() {
    T* to = static_cast<T*>(l_.saved_keys) + (first_ * l_.key_heads + key_head_) * l_.dim;
    for (int64_t row = 0; row < count_; ++row, to += l_.key_heads * l_.dim) {
      for (int64_t i = 0; i < l_.dim; ++i) from_float(keys_[row * dim_ + i], to + i);
    }
  }

  // S^T k and S^T q of every row.
  void multiply_state() {
    const int64_t begin = place_ * l_.state_place + head_ * l_.state_head;
    const float* state = static_cast<const float*>(l_.state.data) + begin;
    int64_t stride = l_.state_key;
    if (l_.state.format != kFloat32 || l_.state_value != 1 || l_.width != width_) {
      float* copy = m_.state.get(l_.dim * width_).data;
      for (int64_t i = 0; i < l_.dim; ++i) {
        for (int64_t j = 0; j < width_; ++j) {
          copy[i * width_ + j] =
              j < l_.width ? l_.state.at(begin + i * l_.state_key + j * l_.state_value) : 0.0f;
        }
      }
      state = copy;
      stride = width_;
    }
    products_ = m_.products.get(2 * count_ * width_).data;
    for (int64_t column = 0; column < width_; column += kLanes) {
      for (int64_t row = 0; row < 2 * count_; row += kTogether) {
        const int64_t rows = min(kTogether, 2 * count_ - row);
        kMultiply[rows - 1](keys_ + row * dim_, dim_, state + column, stride, l_.dim,
                            products_ + row * width_ + column, width_);
      }
    }
  }

  void recur() {
    const float rate = -std::exp(l_.decay_log.at(head_)), bias = l_.decay_bias.at(head_);
    const T *a = static_cast<const T*>(r_.a) + head_, *b = static_cast<const T*>(r_.b) + head_;
    double* decays = m_.decays.get(count_).data;
    float* updates = m_.sums.get((count_ + 1) * width_).data;
    float* out = updates + count_ * width_;
    for (int64_t row = 0; row < count_; ++row) {
      const float* key = keys_ + row * dim_;
      const float* query = queries_ + row * dim_;
      const float x = to_float(a[source(row) * r_.a_row]) + bias;
      const float gate = rate * (x > 20.0f ? x : std::log1p(std::exp(x)));
      const float beta = 1.0f / (1.0f + std::exp(-to_float(b[source(row) * r_.b_row])));
      const int64_t parent = above_[row];
      decays[row] = double(gate) + (parent < 0 ? 0.0 : decays[parent]);
      const float own = exp_of(float(decays[row]));
      float* update = updates + row * width_;
      for (int64_t i = 0; i < width_; i += kLanes) {
        const Floats told = own * load(products_ + row * width_ + i);
        store(update + i, beta * (load(values_ + row * width_ + i) - told));
        store(out + i, own * load(products_ + (count_ + row) * width_ + i));
      }
      for (int64_t up = parent; up >= 0; up = above_[up]) {
        const float left = exp_of(float(decays[row] - decays[up]));
        const float* other = keys_ + up * dim_;
        const float in_update = beta * left * dot(other, key, dim_);
        const float in_out = left * dot(other, query, dim_);
        for (int64_t i = 0; i < width_; i += kLanes) {
          const Floats added = load(updates + up * width_ + i);
          store(update + i, load(update + i) - in_update * added);
          store(out + i, load(out + i) + in_out * added);
        }
      }
      const float itself = dot(key, query, dim_);
      T* to = static_cast<T*>(r_.out) + source(row) * r_.out_row + head_ * r_.out_head;
      for (int64_t i = 0; i < l_.width; ++i) {
        from_float(l_.scale * (out[i] + itself * update[i]), to + i);
      }
      const int64_t line = (first_ + row) * l_.heads + head_;
      std::memcpy(l_.updates + line * l_.width, update, 4 * l_.width);
      l_.decays[line] = decays[row];
    }
  }

  const DeltaLayerArgs& l_;
  const DeltaStepArgs& s_;
  const DeltaRowsArgs& r_;
  Scratch& m_;
  const int64_t head_, key_head_;
  const bool is_first_;  // of its key head's value heads: it saves their common keys and inputs
  const int64_t place_, first_, count_;
  int64_t channels_, dim_, width_;
  int32_t* above_;
  float *keys_, *queries_, *values_, *products_;
};

template <class T>
void run(const DeltaLayerArgs& layer, const DeltaStepArgs& step, const DeltaRowsArgs& rows) {
  Units units(step.requests * layer.heads);
#pragma omp parallel num_threads(min(rows.threads, step.requests * layer.heads))
  {
    static thread_local Scratch scratch;
    for (int64_t unit; (unit = units.take()) >= 0;) {
      Unit<T>(layer, step, rows, scratch, unit / layer.heads, unit % layer.heads);
    }
  }
}

}  // namespace
}  // namespace bastion

extern "C" BASTION_EXPORT void bastion_gated_delta(const bastion::DeltaLayerArgs* layer,
                                                   const bastion::DeltaStepArgs* step,
                                                   const bastion::DeltaRowsArgs* rows) {
  if (step->requests == 0) return;
  if (layer->format == bastion::kBf16) return bastion::run<bastion::Bf16>(*layer, *step, *rows);
  if (layer->format == bastion::kFp16) return bastion::run<bastion::Fp16>(*layer, *step, *rows);
  bastion::run<float>(*layer, *step, *rows);
}
