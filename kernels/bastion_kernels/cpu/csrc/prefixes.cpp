// SPDX-License-Identifier: Apache-2.0
// A lattice of prefixes for a head with a GRU, all depths in one call; see draft/prefix_lattice.py.
//
// A round has four phases, each distributed over the threads: gather the rows to multiply, advance
// the states, project them, and score and choose per request. A token or state shared by several
// prefixes is multiplied once. A state is multiplied with the GRU's weights only if one of its
// children is kept.
#include "prefixes.h"

namespace bastion {
namespace {

template <class T>
class Rounds {
 public:
  Rounds(const PrefixArgs& args, Shared& memory) : a_(args), most_(args.reqs * args.width) {
    const int64_t per = kPerWord<T>;
    state_blocks_ = ceil_div(a_.state, kLanes);
    state_words_ = ceil_div(a_.state, per);
    input_stride_ = padded(a_.hidden_words);
    state_stride_ = padded(state_blocks_ * kLanes / per);
    latent_stride_ = padded(a_.rank_columns / per);
    prefixes_ = memory.prefixes.get(most_);
    found_ = memory.found.get(most_);
    inputs_ = memory.inputs.get(most_ * input_stride_);
    gates_ = memory.gates.get(most_ * state_stride_);
    states_ = memory.states.get(most_ * state_stride_);
    old_ = memory.old.get(most_ * state_stride_);
    latents_ = memory.latents.get(most_ * latent_stride_);
    next_ = memory.next.get(kPhases * a_.depth);
    counts_ = memory.counts.get(a_.reqs);
    starts_ = memory.starts.get(a_.reqs);
    table_bits_ = 2;
    while ((int64_t(1) << table_bits_) < 2 * most_) ++table_bits_;
    table_ = memory.table.get(int64_t(1) << table_bits_);
    std::fill(next_.data, next_.data + next_.size, 0);
    for (int64_t req = 0; req < a_.reqs; ++req) {
      counts_[req] = 1;
      found_[req * a_.width] = {int32_t(req), 0, int32_t(req * block()), 0, 0, 0.0f};
    }
  }

  // Run by every thread.
  void run(Scratch& scratch) {
    for (int64_t depth = 0; depth < a_.depth; ++depth) {
      const bool corrected = depth >= a_.corrected_from;
      share(depth, 0, 1, [&](int64_t) { gather(depth); });
      share(depth, 1, state_blocks_, [&](int64_t block) { advance(depth, block, scratch); });
      const int64_t blocks = corrected ? a_.rank_columns / kLanes : 0;
      share(depth, 2, blocks, [&](int64_t block) { project(depth, block, scratch); });
      share(depth, 3, a_.reqs, [&](int64_t req) { extend(depth, req, corrected, scratch); });
    }
  }

 private:
  int64_t block() const { return 1 + a_.depth * a_.candidates; }

  // Threads take units of a phase; all finish it before the next one.
  template <class Work>
  void share(int64_t depth, int64_t phase, int64_t units, Work work) {
    int64_t* next = &next_[kPhases * depth + phase];
    for (int64_t unit; (unit = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < units;) work(unit);
#pragma omp barrier
  }

  // List the new prefixes, and copy the rows that they need, each once.
  void gather(int64_t depth) {
    std::swap(states_, old_);
    count_ = input_rows_ = gate_rows_ = 0;
    std::fill(table_.data, table_.data + table_.size, -1);
    for (int64_t req = 0; req < a_.reqs; ++req) {
      const int32_t start = starts_[req];
      starts_[req] = int32_t(count_);
      int32_t parent = -1;  // children are in the order of their parents
      for (int64_t i = 0; i < counts_[req]; ++i) {
        Prefix prefix = found_[req * a_.width + i];
        if (depth > 0 && prefix.parent != parent) {
          parent = prefix.parent;
          std::memcpy(gates_.at(gate_rows_ * state_stride_, state_stride_),
                      old_.at((start + parent) * state_stride_, state_stride_), 4 * state_stride_);
          ++gate_rows_;
        }
        prefix.gate_row = int32_t(gate_rows_ - 1);
        prefix.input_row = input_row(prefix.token, count_);
        prefixes_[count_++] = prefix;
      }
    }
  }

  // The index of a token's embedding among the rows to multiply; copied if it is new.
  int32_t input_row(int32_t token, int64_t count) {
    const int64_t mask = (int64_t(1) << table_bits_) - 1, id = a_.tokens[token];
    int64_t slot = (uint64_t(id) * 0x9E3779B97F4A7C15u) >> (64 - table_bits_);
    for (; table_[slot] >= 0; slot = (slot + 1) & mask) {
      const Prefix& other = prefixes_[table_[slot]];
      if (a_.tokens[other.token] == id) return other.input_row;
    }
    table_[slot] = int32_t(count);
    std::memcpy(inputs_.at(input_rows_ * input_stride_, a_.hidden_words),
                a_.embedded + token * a_.hidden_words, 4 * a_.hidden_words);
    return int32_t(input_rows_++);
  }

  // 16 columns of all states.
  void advance(int64_t depth, int64_t block, Scratch& scratch) {
    if (count_ == 0) return;
    const int64_t input_size = kLanes * input_rows_, gate_size = kLanes * gate_rows_;
    const Span<float> products = scratch.products.get(3 * (input_size + gate_size));
    float *inputs = products.data, *gates = products.data + 3 * input_size;
    const int64_t input_block = kLanes * a_.hidden_words, gate_block = kLanes * state_words_;
    multiply<3>({inputs_.data, input_stride_, a_.of_input + block * input_block,
                         state_blocks_ * input_block, a_.hidden_words, inputs, input_size},
                        input_rows_);
    if (gate_rows_ > 0) {
      multiply<3>({gates_.data, state_stride_, a_.of_state + block * gate_block,
                           state_blocks_ * gate_block, state_words_, gates, gate_size},
                          gate_rows_);
    }
    for (int64_t i = 0; i < count_; ++i) {
      const Prefix& prefix = prefixes_[i];
      const float* input = inputs + kLanes * prefix.input_row;
      Floats gate[3] = {}, old = {};
      if (prefix.gate_row >= 0) {
        const float* from = gates + kLanes * prefix.gate_row;
        for (int64_t j = 0; j < 3; ++j) gate[j] = load(from + j * gate_size);
        old = widen(columns(gates_, state_stride_, prefix.gate_row, block));
      }
      const Floats reset = sigmoid(load(input) + gate[0]);
      const Floats keep = sigmoid(load(input + input_size) + gate[1]);
      const Floats fresh = 2.0f * sigmoid(2.0f * (load(input + 2 * input_size) + reset * gate[2]));
      round_to(columns(states_, state_stride_, i, block), (1.0f - keep) * (fresh - 1.0f) + keep * old);
    }
  }

  template <int kBlocks>
  void multiply(const Panel& panel, int64_t rows) {
#ifdef BASTION_TILES
    if (a_.tiles && rows >= kFewestTileRows && panel.words % kTileWords == 0) {
      return multiply_tiles<kBlocks>(panel, rows);
    }
#endif
    multiply_rows<T, kBlocks>(panel, rows);
  }

  T* columns(Span<uint32_t> rows, int64_t stride, int64_t row, int64_t block) {
    return reinterpret_cast<T*>(rows.at(row * stride, stride)) + kLanes * block;
  }

  // 16 columns of the input of the last projection.
  void project(int64_t depth, int64_t block, Scratch& scratch) {
    const Span<float> sums = scratch.products.get(kLanes * count_);
    multiply<1>({states_.data, state_stride_,
                         a_.projection + block * kLanes * state_words_, 0, state_words_, sums.data,
                         0},
                        count_);
    for (int64_t i = 0; i < count_; ++i) {
      const int64_t row = prefixes_[i].req * a_.depth + depth;
      const Floats x = load(sums.data + kLanes * i) +
                       load(a_.positions + row * a_.rank_columns + kLanes * block);
      round_to(columns(latents_, latent_stride_, i, block), x * sigmoid(x));
    }
  }

  // Score the candidates after every prefix of a request, and choose the next prefixes.
  void extend(int64_t depth, int64_t req, bool corrected, Scratch& scratch) {
    const int64_t many = a_.candidates, blocks = ceil_div(many, kLanes), count = counts_[req];
    const int64_t first = req * a_.depth + depth, start = starts_[req];
    const float* base = a_.base + first * many;
    const Span<float> sums = scratch.products.get(blocks * kLanes * count);
    if (corrected) multiply_last(first * many, start, count, sums, scratch);
    const Span<float> scores = scratch.scores.get(blocks * kLanes);
    const Span<int64_t> own = scratch.own.get(many), keys = scratch.keys.get(count * many);
    int64_t found = 0;
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t m = 0; m < many; ++m) {
        const int64_t at = (m / kLanes * count + i) * kLanes + m % kLanes;
        scores[m] = corrected ? base[m] + sums[at] : base[m];
      }
      log_softmax(scores.data, many);
      std::memcpy(a_.logprobs + (first * a_.width + i) * many, scores.data, 4 * many);
      found += add_children(scores.data, many, a_.top_k, prefixes_[start + i].cost, i * many, own,
                            keys.data + found);
    }
    found = keep_best(keys.data, found, a_.width);
    int32_t* rows = a_.rows + first * a_.width * many;
    std::fill(rows, rows + count * many, -1);
    for (int64_t i = 0; i < found; ++i) {
      const int64_t place = place_of(keys[i]);
      rows[place] = int32_t(i);
      const int64_t token = req * block() + 1 + depth * many + place % many;
      found_[req * a_.width + i] = {int32_t(req), int32_t(place / many), int32_t(token), 0, 0,
                                    cost_of(keys[i])};
    }
    counts_[req] = int32_t(found);
  }

  // Products of a request's prefixes with the rows of the last projection: [blocks, count, 16].
  void multiply_last(int64_t first, int64_t start, int64_t count, Span<float> sums,
                     Scratch& scratch) {
    const int64_t words = a_.rank_columns / kPerWord<T>, blocks = ceil_div(a_.candidates, kLanes);
    const Span<uint32_t> weights = scratch.weights.get(blocks * words * kLanes);
    for (int64_t m = 0; m < blocks * kLanes; ++m) {
      uint32_t* to = weights.data + m / kLanes * words * kLanes + m % kLanes;
      const int64_t real = m < a_.candidates ? a_.last_words : 0;
      const auto from = real ? a_.last + a_.ids[first + m] * a_.last_words : nullptr;
      for (int64_t word = 0; word < words; ++word) to[word * kLanes] = word < real ? from[word] : 0;
    }
    for (int64_t block = 0; block < blocks; ++block) {
      float* out = sums.data + block * count * kLanes;
      multiply<1>({latents_.data + start * latent_stride_, latent_stride_,
                           weights.data + block * words * kLanes, 0, words, out, 0},
                          count);
    }
  }

  const PrefixArgs& a_;
  const int64_t most_;
  int64_t state_blocks_, state_words_, input_stride_, state_stride_, latent_stride_, table_bits_;
  int64_t count_ = 0, input_rows_ = 0, gate_rows_ = 0;
  Span<Prefix> prefixes_, found_;
  Span<uint32_t> inputs_, gates_, states_, old_, latents_;
  Span<int64_t> next_;
  Span<int32_t> counts_, starts_, table_;
};

template <class T>
void score_prefixes(const PrefixArgs& args) {
  static thread_local Shared shared;
  Rounds<T> rounds(args, shared);
#pragma omp parallel num_threads(args.threads)
  {
    static thread_local Scratch scratch;
    rounds.run(scratch);
  }
}

}  // namespace
}  // namespace bastion

extern "C" BASTION_EXPORT void bastion_score_prefixes(const bastion::PrefixArgs* args) {
  if (args->reqs == 0) return;
  if (args->half) {
    bastion::score_prefixes<bastion::Bf16>(*args);
  } else {
    bastion::score_prefixes<float>(*args);
  }
}
