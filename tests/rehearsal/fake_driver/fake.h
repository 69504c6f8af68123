// SPDX-License-Identifier: Apache-2.0
// The state that all parts of the fake driver share. Device memory is host memory; a kernel does
// nothing; what CUDA refuses is refused and noted as a fault. `LOCK` guards everything below.
#pragma once

#include <cuda.h>
#include <pthread.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

// Defines a call of the driver. generate.py exports each as `name`, and every other call of cuda.h
// as one that is not implemented. The signatures are cuda.h's, loosened where nothing is read.
#define DRIVER_CALL(name) extern "C" __attribute__((visibility("hidden"))) CUresult fk_##name
#define EXPORTED extern "C" __attribute__((visibility("default")))
#define LOCK std::lock_guard<std::recursive_mutex> lock_guard_(mutex)
// Leaves the function with an error if a capture forbids the call.
#define UNSAFE(what)                 \
  do {                               \
    CUresult result_ = unsafe(what); \
    if (result_) return result_;     \
  } while (0)

extern std::recursive_mutex mutex;

// ---- settings, counters, faults: state.cpp

extern const int driver_version;       // as cuDriverGetVersion reports it
extern const int capability;           // FAKECUDA_CC: 80, 89 or 90
extern const int shared_memory_limit;  // opt-in bytes of a block
extern const size_t total_bytes;       // of device memory
extern double clock_ms;                // made-up time, moved on by every call

void log_line(int level, const char* format, ...);  // shown up to level FAKECUDA_LOG
void count(const char* what, uint64_t n = 1);
void fault(const char* format, ...);
// The host waits for the device: for everything, or up to the event of that order.
void synced(const char* what, const char* detail = "", uint64_t order = ~0ull);

// Events are done in the order in which they are recorded. From the first fakecuda_begin_step on,
// the device is taken to be one step behind the host: what this step and the one before recorded is
// not done until the host waits for it.
uint64_t next_order();
bool is_done(uint64_t order);

// ---- objects

struct Stream;
struct Graph;
struct Module;
// By stream: how many operations happened before.
typedef std::map<Stream*, int> Clock;

struct Capture {
  unsigned long long id;
  CUstreamCaptureMode mode;
  pthread_t thread;
  Stream* origin;
  Graph* graph;
  std::set<Stream*> members;
  bool invalid = false;
};

struct Stream {
  unsigned flags = 0;
  int priority = 0;
  unsigned long long id = 0;
  Capture* cap = nullptr;
  Clock clock;
};

struct Event {
  unsigned flags = 0;
  bool recorded = false;
  uint64_t order = 0;
  int queries = 0;
  double time_ms = 0;
  // While the capture that recorded it lasts.
  Capture* cap = nullptr;
  unsigned long long capid = 0;
  Clock clock;
};

struct Param {
  int offset, size;
};

struct Func {
  std::string name;
  Module* mod;
  int regs = 32, shared = 0, max_threads = 1024, dyn = 49152;
  std::vector<Param> params;
  bool parsed = false;  // read from an ELF image, so that its parameters are known
};

struct Module {
  std::map<std::string, Func*> funcs;
  std::map<std::string, std::pair<void*, size_t>> globals;
  bool elf = false;
};

enum NodeType {
  N_KERNEL = 0,
  N_MEMCPY = 1,
  N_MEMSET = 2,
  N_HOST = 3,
  N_EMPTY = 5,
  N_RECORD = 7,
  N_CALLBACK = 100,  // the emulation's
};

struct Node {
  int type;
  void* dst = nullptr;
  const void* src = nullptr;
  size_t n = 0;
  unsigned val = 0;
  int width = 1;
  CUhostFn host = nullptr;
  void* user = nullptr;
  int64_t id = -1;
  double time_ms = 0.0;  // of a kernel
  Event* ev = nullptr;
};

struct Graph {
  std::vector<Node*> nodes;
};

struct Context {
  std::map<void*, void*> storage;
};

extern Context the_context;
extern bool context_active;
extern thread_local Context* current_context;
extern Stream default_stream, per_thread_stream;
extern std::set<Capture*> captures;
extern thread_local CUstreamCaptureMode capture_mode;
// Called when a replay reaches a callback node.
extern void (*node_hook)(int64_t id);
extern const unsigned char device_uuid[16];

Stream* stream_of(CUstream s);
// Ends a capture with a fault.
CUresult invalidate(Capture* c, const char* why);
// Whether a capture forbids a call that CUDA names "potentially unsafe".
CUresult unsafe(const char* what);
bool anybody_capturing_here();
// Appends to the graph that the stream is captured into.
void add(Stream* s, Node* n);

// ---- memory.cpp and copies.cpp

enum Kind { DEV = 1, PINNED = 2, REGISTERED = 3, RESERVED = 4 };

Kind kind(const void* p);          // 0 for memory that the driver does not know
const char* kname(const void* p);  // "D", "H" or "pageable"
CUresult dev_alloc(void** out, size_t n);
void fill(void* d, unsigned v, size_t n, int width);

// ---- device.cpp and modules.cpp

bool device_visible();

Module* new_module(const void* image);
