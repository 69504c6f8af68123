// SPDX-License-Identifier: Apache-2.0
// Advance the states of all gated delta layers along the accepted paths.
#include <algorithm>

#include "gated_delta.h"

namespace bastion {
namespace {

struct Scratch {
  Buffer<int64_t> rows;
  Buffer<float> weights, updates, line;
};

// The accepted rows of a request: those before the root, the root and the nodes of the path.
Span<int64_t> accepted(const CommitArgs& a, int64_t request, Scratch& scratch) {
  const int64_t first = a.starts[request], last = a.starts[request + 1];
  const int64_t tail = a.logits[request + 1] - a.logits[request];
  const int32_t* path = a.path + request * a.path_row;
  const int64_t limit = a.lengths == nullptr ? a.depths : min(a.depths, a.lengths[request]);
  int64_t length = 0;
  while (length < limit && path[length] >= 0 && path[length] < tail) ++length;
  // A request without a state may have a tail but no rows.
  const int64_t root = max(first, last - tail);
  if (length == 0 || first == last) return {};
  const Span<int64_t> rows = scratch.rows.get(root - first + length);
  int64_t count = 0;
  for (int64_t row = first; row < root; ++row) rows[count++] = row;
  for (int64_t depth = 0; depth < length; ++depth) rows[count++] = root + path[depth];
  return rows.part(0, count);
}

// Calls work(layer, part, rows, from, to, scratch) for every state to write, in any order. rows:
// the accepted rows; from, to: rows of the layer's states.
template <class Work>
void for_each(const CommitArgs& a, int64_t parts, Work work) {
  const int64_t total = a.layers * a.requests * parts;
  Units units(total);
#pragma omp parallel num_threads(min(a.threads, total))
  {
    static thread_local Scratch scratch;
    for (int64_t unit; (unit = units.take()) >= 0;) {
      const int64_t part = unit % parts, request = unit / parts % a.requests;
      const int64_t layer = unit / parts / a.requests, group = a.table[2 * layer + 1];
      const int64_t from = a.places[group * a.places_group + request];
      const int64_t to = a.into[group * a.into_group + request];
      if (from < 0 || to < 0) continue;
      const Span<int64_t> rows = accepted(a, request, scratch);
      if (rows.size > 0) work(layer, part, rows, from, to, scratch);
    }
  }
}

// S <- e^{G_a} S + sum_j e^{G_a - G_j} k_j u_j^T of one head.
void move_head(const DeltaCommitArgs& a, int64_t layer, int64_t head, Span<int64_t> rows,
               int64_t from, int64_t to, Scratch& scratch) {
  const int64_t count = rows.size, wide = whole_vectors(a.width);
  const int64_t key_head = head / (a.heads / a.key_heads);
  const double* decays = a.decays + layer * a.decays_layer + head;
  const double last = decays[rows[count - 1] * a.heads];
  float* weights = scratch.weights.get(a.dim * count).data;  // [K, count]
  float* updates = scratch.updates.get(count * wide).data;
  for (int64_t j = 0; j < count; ++j) {
    const float left = exp_of(float(last - decays[rows[j] * a.heads]));
    const int64_t key = layer * a.keys_layer + rows[j] * a.keys_row + key_head * a.keys_head;
    for (int64_t i = 0; i < a.dim; ++i) weights[i * count + j] = left * a.keys.at(key + i);
    const float* update = a.updates + layer * a.updates_layer + (rows[j] * a.heads + head) * a.width;
    std::memcpy(updates + j * wide, update, 4 * a.width);
    std::fill(updates + j * wide + a.width, updates + (j + 1) * wide, 0.0f);
  }
  const float own = exp_of(float(last));
  const Numbers state = {reinterpret_cast<const void*>(a.paths.table[2 * layer]), a.state_format};
  const bool direct = a.state_format == kFloat32 && a.state_value == 1 && a.width == wide;
  float* line = scratch.line.get(wide).data;
  for (int64_t i = 0; i < a.dim; ++i) {
    const int64_t within = head * a.state_head + i * a.state_key;
    const int64_t source = from * a.state_place + within, target = to * a.state_place + within;
    const float* old = static_cast<const float*>(state.data) + source;
    float* moved = static_cast<float*>(const_cast<void*>(state.data)) + target;
    if (!direct) {
      for (int64_t v = 0; v < a.width; ++v) line[v] = state.at(source + v * a.state_value);
      old = moved = line;
    }
    for (int64_t v = 0; v < wide; v += kLanes) {
      Floats total = own * load(old + v);
      for (int64_t j = 0; j < count; ++j) {
        total += weights[i * count + j] * load(updates + j * wide + v);
      }
      store(moved + v, total);
    }
    if (!direct) {
      for (int64_t v = 0; v < a.width; ++v) state.set(target + v * a.state_value, line[v]);
    }
  }
}

// The last inputs of the accepted text.
void keep_inputs(const ConvCommitArgs& a, int64_t layer, Span<int64_t> rows, int64_t from,
                 int64_t to, Scratch& scratch) {
  const Numbers state = {reinterpret_cast<const void*>(a.paths.table[2 * layer]), a.state_format};
  float* kept = scratch.line.get(a.kept).data;
  for (int64_t channel = 0; channel < a.channels; ++channel) {
    for (int64_t column = 0; column < a.kept; ++column) {
      const int64_t at = rows.size - a.kept + column;
      const int64_t place = from * a.state_place + channel * a.state_channel;
      kept[column] = at < 0 ? state.at(place + (a.kept + at) * a.state_column)
                            : a.inputs.at(layer * a.inputs_layer + rows[at] * a.inputs_row + channel);
    }
    const int64_t place = to * a.state_place + channel * a.state_channel;
    for (int64_t column = 0; column < a.kept; ++column) {
      state.set(place + column * a.state_column, kept[column]);
    }
  }
}

}  // namespace
}  // namespace bastion

extern "C" BASTION_EXPORT void bastion_gated_delta_commit(const bastion::DeltaCommitArgs* args) {
  using namespace bastion;
  if (args->paths.requests == 0) return;
  for_each(args->paths, args->heads,
           [&](int64_t layer, int64_t head, Span<int64_t> rows, int64_t from, int64_t to,
               Scratch& scratch) { move_head(*args, layer, head, rows, from, to, scratch); });
}

extern "C" BASTION_EXPORT void bastion_short_conv_commit(const bastion::ConvCommitArgs* args) {
  using namespace bastion;
  if (args->paths.requests == 0) return;
  for_each(args->paths, 1,
           [&](int64_t layer, int64_t, Span<int64_t> rows, int64_t from, int64_t to,
               Scratch& scratch) { keep_inputs(*args, layer, rows, from, to, scratch); });
}
