// SPDX-License-Identifier: Apache-2.0
// Attention of a step's rows, some of which are nodes of draft trees, over vLLM's packed CPU cache.
//
// A unit of work is a KV head of a request and up to kRows of the rows that read it. Query heads
// that share a KV head count as separate rows. A unit processes the cached tokens in tiles: scores,
// exponentials relative to the largest score so far, weighted sums of values. A row sees a range
// [low, high) of cached tokens. It ends with the row itself for a causal row, and where the tree
// begins for a node.
//
// The tree's own rows come last, ancestors in the order of their depth, in float32. A row's result
// therefore depends only on its path, bit for bit, not on the rest of the tree.
#include <cmath>

#include "attention_tiles.h"
#include "attention_vectors.h"

namespace bastion {
namespace {

// softcap * tanh(x / softcap). F: float or Floats.
template <class F>
F capped(F x, float softcap) {
  const F zero{};
  x = x * 2.0f / softcap;
  x = larger(x, zero - 40.0f);
  x = -larger(-x, zero - 40.0f);
  const F power = exp_of(x);
  return softcap * (power - 1.0f) / (power + 1.0f);
}

// All bits set in lanes begin <= index + lane < end.
Ints live(int64_t index, int64_t begin, int64_t end) {
  const Ints lanes = lane_numbers() + int32_t(index);
  return (lanes >= int32_t(begin)) & (lanes < int32_t(end));
}

void store_bf16(uint16_t* to, Floats x) {
  typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
  const Ints bits = bit_cast<Ints>(x);
  const Ints rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16;
  const Halves halves = __builtin_convertvector(rounded, Halves);
  std::memcpy(to, &halves, sizeof(halves));
}

template <class T>
void read_row(const void* base, int64_t offset, Span<float> to) {
  const T* from = static_cast<const T*>(base) + offset;
  for (int64_t c = 0; c < to.size; ++c) to[c] = to_float(from[c]);
}

void read_row(int64_t format, const void* base, int64_t offset, Span<float> to) {
  if (format == kFloat32) return read_row<float>(base, offset, to);
  if (format == kBf16) return read_row<Bf16>(base, offset, to);
  return read_row<Fp16>(base, offset, to);
}

template <class T>
void write_row(Span<float> from, void* base, int64_t offset) {
  T* to = static_cast<T*>(base) + offset;
  for (int64_t c = 0; c < from.size; ++c) from_float(from[c], &to[c]);
}

void write_row(int64_t format, Span<float> from, void* base, int64_t offset) {
  if (format == kFloat32) return write_row<float>(from, base, offset);
  if (format == kBf16) return write_row<Bf16>(from, base, offset);
  return write_row<Fp16>(from, base, offset);
}

// The units of a step, numbered by request, KV head and block of rows.
struct Plan {
  const LayerArgs& layer;
  const StepArgs& step;
  int64_t group;       // query heads of a KV head
  int64_t block = kRows;  // rows of a unit
  int64_t units = 0;

  Plan(const LayerArgs& layer, const StepArgs& step, int64_t threads)
      : layer(layer), step(step), group(layer.heads / layer.kv_heads) {
    // Few units are divided further.
    while ((units = count()) < 3 * threads && block > kGroup) block /= 2;
  }

  int64_t rows(int64_t request) const { return step.starts[request + 1] - step.starts[request]; }
  int64_t blocks(int64_t request) const { return ceil_div(rows(request) * group, block); }

  int64_t count() const {
    int64_t total = 0;
    for (int64_t r = 0; r < step.requests; ++r) total += blocks(r) * layer.kv_heads;
    return total;
  }
};

template <class Reader, class T>
class Worker {
 public:
  Worker(const Plan& plan, const RowsArgs& io, const Scratch& scratch)
      : plan_(plan),
        layer_(plan.layer),
        step_(plan.step),
        io_(io),
        work_(scratch),
        reader_(plan.layer, scratch),
        wide_(ceil_div(plan.layer.dim, kGroup) * kGroup),
        limit_(max(kChain, plan.step.nodes)) {}

  void run(Units& units) {
    // A thread's units ascend, and so do their requests.
    int64_t request = 0, before = 0;
    for (int64_t unit; (unit = units.take()) >= 0;) {
      int64_t blocks = plan_.blocks(request);
      while (unit >= before + blocks * layer_.kv_heads) {
        before += blocks * layer_.kv_heads;
        blocks = plan_.blocks(++request);
      }
      begin(request, (unit - before) / blocks, (unit - before) % blocks * plan_.block);
      add_context();
      add_tree();
    }
  }

 private:
  struct Row {
    int64_t low, high;  // cached tokens that it sees
    float top, mass;    // largest score so far, and the sum of powers relative to it
    int64_t seen;       // nodes of the tree
  };

  // The step's row and the query head of row i.
  int64_t row_of(int64_t i) const { return (packed_ + i) / plan_.group; }
  int64_t head_of(int64_t i) const { return head_ * plan_.group + (packed_ + i) % plan_.group; }
  // Its node in the tree; < 0: a causal row before the tree.
  int64_t node_of(int64_t i) const { return row_of(i) - (count_ - tail_); }

  // Start a unit; `packed` is its first row.
  void begin(int64_t request, int64_t head, int64_t packed) {
    request_ = request;
    head_ = head;
    packed_ = packed;
    count_ = plan_.rows(request);
    length_ = step_.lengths[request];
    rows_ = min(plan_.block, count_ * plan_.group - packed);
    slot_ = step_.slots[request];
    tail_ = step_.tails[request];
    if (slot_ < 0 || tail_ < 2) {
      slot_ = -1;
      tail_ = count_ <= kChain ? count_ : 0;
    }
    CHECK(tail_ <= limit_ && tail_ <= count_ && length_ <= step_.table_row * layer_.page);
    root_ = length_ - tail_;
    depths_ = {};
    if (layer_.window && slot_ >= 0 && step_.depths != nullptr) {
      CHECK(slot_ < step_.bits_slots);
      depths_ = {step_.depths + slot_ * step_.depths_slot, step_.nodes - 1};
    }
    for (int64_t i = 0; i < rows_; ++i) begin_row(i);
    std::memset(work_.sums.at(0, rows_ * wide_), 0, rows_ * wide_ * sizeof(float));
  }

  void begin_row(int64_t i) {
    const int64_t dim = layer_.dim, node = node_of(i);
    int64_t position = length_ - count_ + row_of(i);
    if (depths_.data != nullptr && node > 0) position = root_ + depths_[node - 1];
    const int64_t low = layer_.window ? max(position + 1 - layer_.window, 0) : 0;
    row_[i] = {low, node >= 0 ? root_ : position + 1, kLowest, 0, 0};
    const int64_t source = (step_.starts[request_] + row_of(i)) * io_.query_row +
                           head_of(i) * io_.query_head;
    read_row(layer_.query_format, io_.query, source, work_.query.part(i * dim, dim));
    if constexpr (Reader::kTiles) {
      std::memcpy(work_.query_bits.at(i * dim, dim),
                  static_cast<const uint16_t*>(io_.query) + source, 2 * dim);
    }
  }

  // The cached tokens before each row.
  void add_context() {
    int64_t start = length_, end = 0;
    for (int64_t i = 0; i < rows_; ++i) {
      start = min(start, row_[i].low);
      end = max(end, row_[i].high);
    }
    const Blocks<T> blocks(layer_, step_, request_, head_);
    Tokens tokens{start / kGroup * kGroup, 0};
    for (; tokens.first < end; tokens.first += tokens.count) {
      // Tiles begin at the same tokens in every unit, because rounding depends on the order of a
      // sum.
      tokens.count = min(kTile - tokens.first % kTile, end - tokens.first);
      reader_.find(blocks, tokens, true);
      for (int64_t first = 0; first < rows_; first += kGroup) {
        reader_.score(first, rows_, tokens);
        for (int64_t i = first; i < min(first + kGroup, rows_); ++i) soften(i, i - first, tokens);
        reader_.mix(first, rows_, tokens);
      }
    }
  }

  // Turn row i's scores of a tile, line `line` of the scratch memory, into weights.
  void soften(int64_t i, int64_t line, Tokens tokens) {
    Row& row = row_[i];
    const int64_t width = tokens.groups() * kGroup;
    const int64_t begin = max(row.low - tokens.first, 0);
    const int64_t end = min(row.high - tokens.first, tokens.count);
    float* scores = work_.scores.at(line * kTile, width);
    float scale = layer_.scale;
    if (layer_.softcap > 0) {
      for (int64_t at = 0; at < width; at += kLanes) {
        store(scores + at, capped(load(scores + at) * scale, layer_.softcap));
      }
      scale = 1;
    }
    const float best = scale * largest_of(scores, begin, end, width);
    if (best > row.top && begin < end) {
      const float factor = std::exp(row.top - best);
      row.top = best;
      row.mass *= factor;
      float* sums = work_.sums.at(i * wide_, wide_);
      for (int64_t c = 0; c < wide_; ++c) sums[c] *= factor;
    }
    row.mass += weigh(line, begin, end, width, scale, row.top);
  }

  // The largest of scores[begin:end]; `width` is their padded number.
  static float largest_of(const float* scores, int64_t begin, int64_t end, int64_t width) {
    Floats top = splat(kLowest);
    for (int64_t at = 0; at < width; at += kLanes) {
      const Floats x = live(at, begin, end) ? load(scores + at) : splat(kLowest);
      top = larger(x, top);
    }
    return largest(top);
  }

  // exp(scale * score - top) inside [begin, end) of a line, 0 elsewhere; returns the sum.
  float weigh(int64_t line, int64_t begin, int64_t end, int64_t width, float scale, float top) {
    float* scores = work_.scores.at(line * kTile, width);
    Floats total{};
    for (int64_t at = 0; at < width; at += kLanes) {
      const Floats power = exp_of(load(scores + at) * scale - top);
      const Floats weight = live(at, begin, end) ? power : Floats{};
      total += weight;
      if constexpr (Reader::kTiles) {
        store_bf16(work_.weights.at(line * kTile + at, kLanes), weight);
      } else {
        store(scores + at, weight);
      }
    }
    return sum(total);
  }

  // The tree's own rows, and the results.
  void add_tree() {
    const Blocks<T> blocks(layer_, step_, request_, head_);
    for (int64_t node = 0; node < tail_; ++node) {
      reader_.value(blocks, root_ + node, work_.values.at(node * wide_, layer_.dim));
    }
    const int64_t start = root_ / kGroup * kGroup, end = tail_ ? length_ : start;
    for (int64_t first = 0; first < rows_; first += kGroup) {
      const int64_t last = min(first + kGroup, rows_);
      for (int64_t tile = start; tile < end; tile += kTile) {
        const Tokens tokens{tile, min(kTile, end - tile)};
        // One tile serves all rows.
        if (first == 0 || end - start > kTile) reader_.find(blocks, tokens, false);
        reader_.score(first, rows_, tokens);
        for (int64_t i = first; i < last; ++i) see(i, i - first, tokens);
      }
      for (int64_t i = first; i < last; ++i) finish(i, i - first);
    }
  }

  // Record the nodes of a tile that row i sees, and their scores.
  void see(int64_t i, int64_t line, Tokens tokens) {
    const int64_t node = node_of(i);
    for (int64_t word = 0; 32 * word <= node; ++word) {
      for (uint32_t mask = ancestors(node, word); mask != 0; mask &= mask - 1) {
        const int64_t other = 32 * word + __builtin_ctz(mask);
        const int64_t depth = depths_.data != nullptr && other > 0 ? depths_[other - 1] : other;
        const int64_t at = root_ + other - tokens.first;
        if (at < 0 || at >= tokens.count || root_ + depth < row_[i].low) continue;
        const float score = layer_.scale * work_.scores[line * kTile + at];
        const int64_t to = line * limit_ + row_[i].seen++;
        work_.kept[to] = layer_.softcap > 0 ? capped(score, layer_.softcap) : score;
        work_.seen[to] = int32_t(other);
      }
    }
  }

  // Of 32 nodes from 32 * word on, those on the path to a node, itself included. A chain has no
  // bits.
  uint32_t ancestors(int64_t node, int64_t word) const {
    const bool own = word == node / 32;
    const uint32_t mask = own ? 0xFFFFFFFFu >> (31 - node % 32) : 0xFFFFFFFFu;
    if (slot_ < 0) return mask;
    const Span<const int32_t> bits{step_.bits, step_.bits_slots * step_.bits_slot};
    const uint32_t path = bits[slot_ * step_.bits_slot + node * step_.bits_row + word];
    return mask & (path | (own ? 1u << node % 32 : 0));
  }

  // Row i's result: add its nodes and its sink to the sums, then divide.
  void finish(int64_t i, int64_t line) {
    const Row& row = row_[i];
    const Span<float> kept = work_.kept.part(line * limit_, row.seen);
    const float sink = layer_.sinks != nullptr ? layer_.sinks[head_of(i)] : kLowest;
    float top = larger(row.top, sink);
    for (int64_t n = 0; n < row.seen; ++n) top = larger(top, kept[n]);
    const float factor = exp_of(row.top - top);
    float total = row.mass * factor;
    if (sink > kLowest) total += exp_of(sink - top);
    for (int64_t n = 0; n < row.seen; ++n) {
      kept[n] = exp_of(kept[n] - top);
      total += kept[n];
    }
    add_nodes(i, line, factor, layer_.value_scale / total);
    const int64_t target = (step_.starts[request_] + row_of(i)) * io_.out_row +
                           head_of(i) * io_.out_head;
    write_row(layer_.query_format, work_.sums.part(i * wide_, layer_.dim), io_.out, target);
  }

  // sums = (factor * sums + kept @ values[seen]) * scale, nodes in order.
  void add_nodes(int64_t i, int64_t line, float factor, float scale) {
    const Span<float> kept = work_.kept.part(line * limit_, row_[i].seen);
    const Span<int32_t> seen = work_.seen.part(line * limit_, row_[i].seen);
    for (int64_t c = 0; c < wide_; c += 2 * kLanes) {
      float* sums = work_.sums.at(i * wide_ + c, 2 * kLanes);
      Floats left = load(sums) * factor, right = load(sums + kLanes) * factor;
      for (int64_t n = 0; n < kept.size; ++n) {
        const float* value = work_.values.at(seen[n] * wide_ + c, 2 * kLanes);
        left += kept[n] * load(value);
        right += kept[n] * load(value + kLanes);
      }
      store(sums, left * scale);
      store(sums + kLanes, right * scale);
    }
  }

  const Plan& plan_;
  const LayerArgs& layer_;
  const StepArgs& step_;
  const RowsArgs& io_;
  const Scratch& work_;
  Reader reader_;
  const int64_t wide_, limit_;

  // The unit.
  int64_t request_ = 0, head_ = 0, packed_ = 0, rows_ = 0;
  int64_t count_ = 0, length_ = 0;  // rows of the request, and its cached tokens
  int64_t slot_ = -1, tail_ = 0;    // its request slot or -1, and rows of its tree
  int64_t root_ = 0;                // the tree's first token
  Span<const int32_t> depths_;
  Row row_[kRows];
};

struct Memory {
  Buffer<float> query, scores, sums, panel, values, kept;
  Buffer<uint16_t> query_bits, weights, last;
  Buffer<int32_t> seen;

  Scratch get(int64_t dim, int64_t limit) {
    const int64_t wide = ceil_div(dim, kGroup) * kGroup;
    return {query.get(kRows * dim),      query_bits.get(kRows * dim),
            scores.get(kGroup * kTile),  weights.get(kGroup * kTile),
            sums.get(kRows * wide),      panel.get(kTile * (dim + wide)),
            last.get(kGroup * wide),     values.get(limit * wide),
            seen.get(kGroup * limit),    kept.get(kGroup * limit)};
  }
};

template <class Reader, class T>
void attention(const LayerArgs& layer, const StepArgs& step, const RowsArgs& io) {
  const Plan plan(layer, step, io.threads);
  if (plan.units == 0) return;
  Units units(plan.units);
#pragma omp parallel num_threads(min(io.threads, plan.units))
  {
    static thread_local Memory memory;
    const Scratch scratch = memory.get(layer.dim, max(kChain, step.nodes));
    Worker<Reader, T>(plan, io, scratch).run(units);
  }
}

}  // namespace
}  // namespace bastion

// Whether this build has tile registers; 2 if they are emulated.
extern "C" BASTION_EXPORT int bastion_has_tiles() {
#if defined(BASTION_EMULATE_TILES)
  return 2;
#elif defined(BASTION_TILES)
  return 1;
#else
  return 0;
#endif
}

extern "C" BASTION_EXPORT void bastion_tree_attention(const bastion::LayerArgs* layer,
                                                      const bastion::StepArgs* step,
                                                      const bastion::RowsArgs* io) {
  using namespace bastion;
#ifdef BASTION_TILES
  if (layer->tiles) {
    return attention<TileReader, Bf16>(*layer, *step, *io);
  }
#endif
  switch (layer->cache_format) {
    case kFloat32:
      return attention<VectorReader<float>, float>(*layer, *step, *io);
    case kBf16:
      return attention<VectorReader<Bf16>, Bf16>(*layer, *step, *io);
    case kFp16:
      return attention<VectorReader<Fp16>, Fp16>(*layer, *step, *io);
    case kE4M3:
      return attention<VectorReader<E4M3>, E4M3>(*layer, *step, *io);
    case kE5M2:
      return attention<VectorReader<E5M2>, E5M2>(*layer, *step, *io);
  }
}
