// SPDX-License-Identifier: Apache-2.0
// Streams, captures and events. A capture keeps a clock per stream, to see what was not joined.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "fake.h"

static unsigned long long next_capture = 1, next_stream = 10;

DRIVER_CALL(cuStreamCreate)(CUstream* s, unsigned f) {
  LOCK;
  auto* t = new Stream;
  t->flags = f;
  t->id = next_stream++;
  *s = (CUstream)t;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuStreamCreateWithPriority)(CUstream* s, unsigned f, int p) {
  LOCK;
  auto* t = new Stream;
  t->flags = f;
  t->priority = p;
  t->id = next_stream++;
  *s = (CUstream)t;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuStreamDestroy_v2)(CUstream) { return CUDA_SUCCESS; }

DRIVER_CALL(cuStreamGetFlags)(CUstream s, unsigned* f) {
  *f = stream_of(s)->flags;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuStreamGetPriority)(CUstream s, int* p) {
  *p = stream_of(s)->priority;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuStreamGetId)(CUstream s, unsigned long long* i) {
  *i = stream_of(s)->id;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuStreamGetCtx)(CUstream, CUcontext* c) {
  *c = (CUcontext)&the_context;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuStreamGetDevice)(CUstream, CUdevice* d) {
  *d = 0;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuStreamSynchronize)(CUstream s) {
  LOCK;
  Stream* t = stream_of(s);
  if (t->cap) return invalidate(t->cap, "cuStreamSynchronize of a capturing stream");
  UNSAFE("cuStreamSynchronize");
  synced("stream");
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuStreamQuery)(CUstream s) {
  LOCK;
  Stream* t = stream_of(s);
  if (t->cap) return invalidate(t->cap, "cuStreamQuery of a capturing stream");
  UNSAFE("cuStreamQuery");
  count("query:stream");
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuStreamAttachMemAsync)(CUstream, CUdeviceptr, size_t, unsigned) {
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuStreamSetAttribute)(CUstream, CUstreamAttrID, const CUstreamAttrValue*) {
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuStreamGetAttribute)(CUstream, CUstreamAttrID, CUstreamAttrValue* v) {
  memset(v, 0, sizeof *v);
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuStreamCopyAttributes)(CUstream, CUstream) { return CUDA_SUCCESS; }

DRIVER_CALL(cuStreamAddCallback)(CUstream s, CUstreamCallback cb, void* u, unsigned) {
  {
    LOCK;
    if (stream_of(s)->cap) return invalidate(stream_of(s)->cap, "cuStreamAddCallback");
  }
  cb(s, CUDA_SUCCESS, u);
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuStreamWriteValue32_v2)(CUstream, CUdeviceptr p, unsigned v, unsigned) {
  *(unsigned*)p = v;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuStreamWaitValue32_v2)(CUstream, CUdeviceptr, unsigned, unsigned) {
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuStreamBeginCapture_v2)(CUstream s, CUstreamCaptureMode mode) {
  LOCK;
  Stream* t = stream_of(s);
  if (t == &default_stream) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (t->cap) return CUDA_ERROR_ILLEGAL_STATE;
  auto* c = new Capture;
  c->id = next_capture++;
  c->mode = mode;
  c->thread = pthread_self();
  c->origin = t;
  c->graph = new Graph;
  c->members = {t};
  captures.insert(c);
  t->cap = c;
  t->clock.clear();
  count("capture:begin");
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuStreamBeginCaptureToGraph)(CUstream s, CUgraph g, const CUgraphNode*, const void*,
                                         size_t, CUstreamCaptureMode mode) {
  CUresult r = fk_cuStreamBeginCapture_v2(s, mode);
  if (!r) {
    LOCK;
    stream_of(s)->cap->graph = (Graph*)g;
  }
  return r;
}

DRIVER_CALL(cuStreamEndCapture)(CUstream s, CUgraph* g) {
  LOCK;
  Stream* t = stream_of(s);
  Capture* c = t->cap;
  if (g) *g = nullptr;
  if (!c) return CUDA_ERROR_ILLEGAL_STATE;
  if (c->origin != t) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
  if (c->mode != CU_STREAM_CAPTURE_MODE_RELAXED && !pthread_equal(c->thread, pthread_self()))
    return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
  CUresult r = c->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
  // Every stream that joined the capture must have been waited for since its last operation.
  for (auto* m : c->members)
    if (m != t && !r) {
      int last = m->clock.count(m) ? m->clock[m] : 0;
      int seen = t->clock.count(m) ? t->clock[m] : -1;
      if (seen < last) {
        fault("capture %llu: a forked stream was not joined (%d < %d)", c->id, seen, last);
        r = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
      }
    }
  for (auto* m : c->members) {
    m->cap = nullptr;
    m->clock.clear();
  }
  captures.erase(c);
  if (!r) {
    if (g) *g = (CUgraph)c->graph;
  }
  count("capture:end");
  return r;
}

DRIVER_CALL(cuStreamIsCapturing)(CUstream s, CUstreamCaptureStatus* st) {
  LOCK;
  Capture* c = stream_of(s)->cap;
  *st = !c           ? CU_STREAM_CAPTURE_STATUS_NONE
        : c->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                     : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  return CUDA_SUCCESS;
}

static CUresult capture_info(CUstream s, CUstreamCaptureStatus* st, cuuint64_t* id, CUgraph* g,
                             const CUgraphNode** deps, size_t* nd) {
  LOCK;
  Capture* c = stream_of(s)->cap;
  *st = !c           ? CU_STREAM_CAPTURE_STATUS_NONE
        : c->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                     : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  if (c) {
    if (id) *id = c->id;
    if (g) *g = (CUgraph)c->graph;
    auto& v = c->graph->nodes;
    if (deps) *deps = v.empty() ? nullptr : (const CUgraphNode*)&v.back();
    if (nd) *nd = v.empty() ? 0 : 1;
  }
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuStreamGetCaptureInfo)(CUstream s, CUstreamCaptureStatus* st, cuuint64_t* id) {
  return capture_info(s, st, id, nullptr, nullptr, nullptr);
}

DRIVER_CALL(cuStreamGetCaptureInfo_v2)(CUstream s, CUstreamCaptureStatus* st, cuuint64_t* id,
                                       CUgraph* g, const CUgraphNode** d, size_t* n) {
  return capture_info(s, st, id, g, d, n);
}

DRIVER_CALL(cuStreamGetCaptureInfo_v3)(CUstream s, CUstreamCaptureStatus* st, cuuint64_t* id,
                                       CUgraph* g, const CUgraphNode** d, const void** e,
                                       size_t* n) {
  if (e) *e = nullptr;
  return capture_info(s, st, id, g, d, n);
}

DRIVER_CALL(cuStreamUpdateCaptureDependencies)(CUstream, CUgraphNode*, size_t, unsigned) {
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuStreamUpdateCaptureDependencies_v2)(CUstream, CUgraphNode*, const void*, size_t,
                                                  unsigned) {
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuThreadExchangeStreamCaptureMode)(CUstreamCaptureMode* m) {
  std::swap(*m, capture_mode);
  return CUDA_SUCCESS;
}

// ---- events -------------------------------------------------------------------------------------
DRIVER_CALL(cuEventCreate)(CUevent* e, unsigned f) {
  LOCK;
  auto* v = new Event;
  v->flags = f;
  *e = (CUevent)v;
  count("event:create");
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuEventDestroy_v2)(CUevent) {
  LOCK;
  count("event:destroy");
  return CUDA_SUCCESS;
}

// While a stream is captured, an event notes how far each stream has come; flag 1 (external) makes
// it a node instead.
static CUresult record(CUevent e, CUstream s, unsigned flags) {
  LOCK;
  auto* v = (Event*)e;
  Stream* t = stream_of(s);
  if (t->cap) {
    if (t->cap->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (flags & 1) {
      auto* n = new Node{N_RECORD};
      n->ev = v;
      add(t, n);
      return CUDA_SUCCESS;
    }
    t->clock.emplace(t, 0);
    v->cap = t->cap;
    v->capid = t->cap->id;
    v->clock = t->clock;
    return CUDA_SUCCESS;
  }
  v->cap = nullptr;
  v->recorded = true;
  v->order = next_order();
  v->queries = 0;
  clock_ms += 0.001;
  v->time_ms = clock_ms;
  count("event:record");
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuEventRecord)(CUevent e, CUstream s) { return record(e, s, 0); }

DRIVER_CALL(cuEventRecordWithFlags)(CUevent e, CUstream s, unsigned f) { return record(e, s, f); }

// Whoever polls an event gets through at last.
static bool is_done(Event* v) {
  const int most_queries = 1000;
  return !v->recorded || is_done(v->order) || ++v->queries > most_queries;
}

static bool still_capturing(Event* v) {
  for (auto* c : captures)
    if (v->cap == c && v->capid == c->id) return true;
  return false;
}

DRIVER_CALL(cuEventQuery)(CUevent e) {
  LOCK;
  auto* v = (Event*)e;
  if (v->cap) {
    if (still_capturing(v)) invalidate(v->cap, "cuEventQuery of a captured event");
    return CUDA_ERROR_CAPTURED_EVENT;
  }
  UNSAFE("cuEventQuery");
  count("query:event");
  return is_done(v) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

DRIVER_CALL(cuEventSynchronize)(CUevent e) {
  LOCK;
  auto* v = (Event*)e;
  if (v->cap) {
    if (still_capturing(v)) invalidate(v->cap, "cuEventSynchronize of a captured event");
    return CUDA_ERROR_CAPTURED_EVENT;
  }
  UNSAFE("cuEventSynchronize");
  char b[64];
  snprintf(b, sizeof b, "recorded %d, flags %u", v->recorded, v->flags);
  synced("event", b, v->recorded ? v->order : 0);
  return CUDA_SUCCESS;
}

static CUresult elapsed(float* ms, CUevent a, CUevent b) {
  LOCK;
  auto *x = (Event*)a, *y = (Event*)b;
  if (x->cap || y->cap) {
    fault("elapsed time of a captured event");
    return CUDA_ERROR_CAPTURED_EVENT;
  }
  if (!x->recorded || !y->recorded || (x->flags & CU_EVENT_DISABLE_TIMING) ||
      (y->flags & CU_EVENT_DISABLE_TIMING)) {
    fault("elapsed time of an event that was not recorded or has no timing");
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (!is_done(x) || !is_done(y)) return CUDA_ERROR_NOT_READY;
  *ms = y->time_ms - x->time_ms;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuEventElapsedTime)(float* ms, CUevent a, CUevent b) { return elapsed(ms, a, b); }

DRIVER_CALL(cuEventElapsedTime_v2)(float* ms, CUevent a, CUevent b) { return elapsed(ms, a, b); }

DRIVER_CALL(cuStreamWaitEvent)(CUstream s, CUevent e, unsigned flags) {
  LOCK;
  auto* v = (Event*)e;
  Stream* t = stream_of(s);
  if (v->cap && still_capturing(v)) {
    if (t == &default_stream) return invalidate(v->cap, "legacy stream waits for a captured event");
    if (!t->cap) {
      t->cap = v->cap;
      t->clock.clear();
      t->clock[t] = 0;
      v->cap->members.insert(t);
    } else if (t->cap != v->cap) {
      invalidate(t->cap, "wait merges two captures");
      return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    for (auto& kv : v->clock) {
      int& x = t->clock[kv.first];
      x = std::max(x, kv.second);
    }
    return CUDA_SUCCESS;
  }
  if (t->cap && v->recorded && !(flags & 1)) {
    invalidate(t->cap, "wait for an event recorded outside of the capture");
    return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  }
  count("stream_wait_event");
  return CUDA_SUCCESS;
}
