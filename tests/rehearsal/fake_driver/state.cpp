// SPDX-License-Identifier: Apache-2.0
// Settings, counters and faults, the rules of captures, and what Python reads of them.
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "fake.h"

static int setting(const char* name, int fallback) {
  const char* value = getenv(name);
  return value ? atoi(value) : fallback;
}

std::recursive_mutex mutex;
const int driver_version = 13000;
const int capability = setting("FAKECUDA_CC", 90);
const int shared_memory_limit = capability == 90 ? 232448 : capability == 80 ? 166912 : 101376;
const size_t total_bytes = 85014937600ull;  // 79.18 GiB, as an H100 80GB HBM3 reports
double clock_ms = 1.0;

Context the_context;
bool context_active = false;
thread_local Context* current_context = nullptr;
Stream default_stream, per_thread_stream;
std::set<Capture*> captures;
thread_local CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
const unsigned char device_uuid[16] = {0xfa, 0xce, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14};

// ---- counters and faults

static const int log_level = setting("FAKECUDA_LOG", 1);
static std::map<std::string, uint64_t> counters;
static std::vector<std::string> faults;
static void (*sync_hook)(const char* what, const char* detail) = nullptr;
void (*node_hook)(int64_t id) = nullptr;

static void write_line(const char* text) {
  fprintf(stderr, "[fakecuda %d] %s\n", getpid(), text);
  fflush(stderr);
}

void log_line(int level, const char* format, ...) {
  if (level > log_level) return;
  char text[2048];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  write_line(text);
}

void count(const char* what, uint64_t n) { counters[what] += n; }

void fault(const char* format, ...) {
  char text[2048];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  faults.push_back(text);
  count("FAULTS");
  write_line((std::string("FAULT ") + text).c_str());
}

static uint64_t last_order = 0, done_order = ~0ull, step_order = 0;

uint64_t next_order() { return ++last_order; }

bool is_done(uint64_t order) { return order <= done_order; }

void synced(const char* what, const char* detail, uint64_t order) {
  if (done_order != ~0ull) done_order = std::max(done_order, std::min(order, last_order));
  count((std::string("sync:") + what).c_str());
  if (sync_hook) sync_hook(what, detail);
}

// ---- captures

Stream* stream_of(CUstream s) {
  if (s == nullptr || s == CU_STREAM_LEGACY) return &default_stream;
  if (s == CU_STREAM_PER_THREAD) return &per_thread_stream;
  return (Stream*)s;
}

CUresult invalidate(Capture* c, const char* why) {
  c->invalid = true;
  fault("capture %llu invalidated: %s", c->id, why);
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult unsafe(const char* what) {
  if (capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
  for (Capture* c : captures) {
    bool own =
        pthread_equal(c->thread, pthread_self()) && c->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    bool global =
        capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && c->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (own || global) return invalidate(c, what);
  }
  return CUDA_SUCCESS;
}

bool anybody_capturing_here() {
  for (Capture* c : captures)
    if (pthread_equal(c->thread, pthread_self())) return true;
  return false;
}

void add(Stream* s, Node* n) {
  s->cap->graph->nodes.push_back(n);
  s->clock[s]++;
}

// ---- what Python calls: tests/rehearsal/device.py

// Lines that a caller reads before it calls again.
static std::string lines;

EXPORTED const char* fakecuda_counters() {
  LOCK;
  lines.clear();
  for (auto& entry : counters) lines += entry.first + "\t" + std::to_string(entry.second) + "\n";
  return lines.c_str();
}

EXPORTED void fakecuda_begin_step() {
  LOCK;
  counters.clear();
  done_order = done_order == ~0ull ? last_order : std::max(done_order, step_order);
  step_order = last_order;
}

EXPORTED const char* fakecuda_faults() {
  LOCK;
  lines.clear();
  for (auto& text : faults) lines += text + "\n";
  return lines.c_str();
}

EXPORTED void fakecuda_set_sync_hook(void (*hook)(const char*, const char*)) { sync_hook = hook; }

EXPORTED void fakecuda_set_node_hook(void (*hook)(int64_t)) { node_hook = hook; }

// Appends a callback node to the graph that the stream is captured into; 0 if it is not.
EXPORTED int fakecuda_add_node(CUstream s, int64_t id) {
  LOCK;
  Stream* stream = stream_of(s);
  if (!stream->cap) return 0;
  Node* node = new Node{N_CALLBACK};
  node->id = id;
  add(stream, node);
  return 1;
}
