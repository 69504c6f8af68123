// SPDX-License-Identifier: Apache-2.0
// Arguments and constants of tree attention.
#pragma once

#include "vectors.h"

namespace bastion {

constexpr int64_t kTile = 256;     // cached tokens scored at once
constexpr int64_t kGroup = 32;     // tokens with adjacent keys; rows scored at once
constexpr int64_t kRows = 128;     // rows of a unit of work, which share each tile of the cache
constexpr int64_t kChain = 64;     // a causal run of at most this many rows is computed as a chain
constexpr float kLowest = -1e30f;  // of a score

enum Layout : int64_t { kOther, kVector, kAmx };

// Arguments of a layer, the same in every step. Strides are in elements.
struct LayerArgs {
  int64_t heads;     // of queries: Hq
  int64_t kv_heads;  // Hkv
  int64_t dim;       // d
  int64_t query_format;
  const void* cache;  // [blocks, Hkv, page * 2d], packed as `layout` says
  int64_t cache_format;
  int64_t blocks;
  int64_t page;  // tokens of a block
  int64_t cache_block;
  int64_t cache_head;
  int64_t layout;
  int64_t tiles;          // whether to read layout AMX with tile registers
  const int32_t* offsets;  // [page, 2d]: offsets of a token's key and value in a head's block
  int64_t window;         // depths that a row sees, itself included; 0 = all
  const float* sinks;     // [Hq] or null
  float scale;            // of scores
  float softcap;          // 0 = none
  float value_scale;
};

// Arguments of a step, the same for every layer. A slot is a request slot.
struct StepArgs {
  int64_t requests;
  const int32_t* table;  // [requests, table_row]
  int64_t table_row;
  const int32_t* starts;   // [requests + 1]: the requests' first rows
  const int32_t* lengths;  // [requests]: cached tokens, this step's included
  const int32_t* tails;    // [requests]: rows of the tree, its root included
  const int64_t* slots;    // [requests]; < 0: causal
  const int32_t* bits;     // [slots, nodes, words]: ancestors
  int64_t bits_slots;
  int64_t bits_slot;
  int64_t bits_row;
  int64_t nodes;          // of the largest tree
  const int32_t* depths;  // [slots, nodes - 1] or null: of nodes from 1 on
  int64_t depths_slot;
};

struct RowsArgs {
  int64_t threads;
  const void* query;  // [rows, Hq, d]
  int64_t query_row;
  int64_t query_head;
  void* out;  // [rows, Hq, d]; written
  int64_t out_row;
  int64_t out_head;
};

// Scratch of a thread. Rows are a unit's: a query's row and head.
struct Scratch {
  Span<float> query;          // [kRows, d]
  Span<uint16_t> query_bits;  // [kRows, d] bf16, for tile registers
  Span<float> scores;         // [kGroup, kTile]; then weights
  Span<uint16_t> weights;     // [kGroup, kTile] bf16, for tile registers
  Span<float> sums;           // [kRows, wide]: weighted sums of values
  Span<float> panel;          // keys [kTile * d] and values [kTile * wide] of a tile, rearranged
  Span<uint16_t> last;        // [16 * kGroup * d / 16]: a tile's last values, for tile registers
  Span<float> values;         // [limit, wide]: of the tree's rows
  Span<int32_t> seen;         // [kGroup, limit]: nodes that a row sees
  Span<float> kept;           // [kGroup, limit]: their scores, then their weights
};

// Cached tokens [first, first + count) of a request.
struct Tokens {
  int64_t first;
  int64_t count;
  int64_t groups() const { return ceil_div(count, kGroup); }
};

// A head's part of a request's blocks in the cache.
template <class T>
struct Blocks {
  Span<T> cache;
  Span<const int32_t> table;
  int64_t page, stride, offset;

  Blocks(const LayerArgs& layer, const StepArgs& step, int64_t request, int64_t head)
      : cache{static_cast<T*>(const_cast<void*>(layer.cache)),
              (layer.blocks - 1) * layer.cache_block + (layer.kv_heads - 1) * layer.cache_head +
                  layer.page * 2 * layer.dim},
        table{step.table + request * step.table_row, step.table_row},
        page(layer.page),
        stride(layer.cache_block),
        offset(head * layer.cache_head) {}

  // The index of the first element of the block that holds a token.
  int64_t begin(int64_t token) const { return table[token / page] * stride + offset; }
};

}  // namespace bastion
