// SPDX-License-Identifier: Apache-2.0
// NgramDrafts and fills, at once or as nodes of a graph.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "fake.h"

// Writes n numbers of `width` bytes. Large zeroed ranges are given back to the system instead, so
// that an empty KV cache takes no memory.
void fill(void* d, unsigned v, size_t n, int width) {
  if (v == 0 && n * width > (1u << 20) && kind(d) == DEV) {
    uintptr_t a = ((uintptr_t)d + 4095) & ~4095ull, e = ((uintptr_t)d + n * width) & ~4095ull;
    madvise((void*)a, e - a, MADV_DONTNEED);
    memset(d, 0, a - (uintptr_t)d);
    memset((void*)e, 0, (uintptr_t)d + n * width - e);
    return;
  }
  if (width == 1)
    memset(d, v, n);
  else if (width == 2)
    std::fill_n((uint16_t*)d, n, (uint16_t)v);
  else
    std::fill_n((uint32_t*)d, n, v);
}

// name: "HtoD", "DtoH", "DtoD", or "any" where the caller leaves it to the addresses; st: null for
// the legacy stream. A copy to pageable memory makes the host wait even if it is asynchronous.
static CUresult copy(void* d, const void* s, size_t n, Stream* st, bool async, const char* name) {
  if (!n) return CUDA_SUCCESS;
  const char *ks = kname(s), *kd = kname(d);
  if ((name[0] == 'D' && ks[0] != 'D') || (strstr(name, "toD") && kd[0] == 'p')) {
    fault("memcpy %s of %zu: src %p is %s, dst %p is %s", name, n, s, ks, d, kd);
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::string key = std::string("memcpy:") + ks + "to" + kd + (async ? "" : ":blocking");
  if (st && st->cap) {
    if (!async) return invalidate(st->cap, "synchronous memcpy on a capturing stream");
    if (ks[0] == 'p' || kd[0] == 'p')
      return invalidate(st->cap, "memcpy with pageable memory captured");
    auto* node = new Node{N_MEMCPY};
    node->dst = d;
    node->src = s;
    node->n = n;
    add(st, node);
    count("captured:memcpy");
    return CUDA_SUCCESS;
  }
  if (!async) UNSAFE("synchronous memcpy");
  if (async && anybody_capturing_here())
    log_line(1, "memcpy outside of the capture of this thread");
  count(key.c_str());
  if (!async || (async && kd[0] == 'p'))
    synced(!async ? "memcpy" : "memcpyAsync to pageable", name);
  memmove(d, s, n);
  clock_ms += 0.002;
  return CUDA_SUCCESS;
}

#define pointer(p) ((void*)(uintptr_t)(p))

DRIVER_CALL(cuMemcpy)(CUdeviceptr d, CUdeviceptr s, size_t n) {
  LOCK;
  return copy(pointer(d), pointer(s), n, nullptr, false, "any");
}

DRIVER_CALL(cuMemcpyAsync)(CUdeviceptr d, CUdeviceptr s, size_t n, CUstream st) {
  LOCK;
  return copy(pointer(d), pointer(s), n, stream_of(st), true, "any");
}

DRIVER_CALL(cuMemcpyHtoD_v2)(CUdeviceptr d, const void* s, size_t n) {
  LOCK;
  return copy(pointer(d), s, n, nullptr, false, "HtoD");
}

DRIVER_CALL(cuMemcpyDtoH_v2)(void* d, CUdeviceptr s, size_t n) {
  LOCK;
  return copy(d, pointer(s), n, nullptr, false, "DtoH");
}

DRIVER_CALL(cuMemcpyDtoD_v2)(CUdeviceptr d, CUdeviceptr s, size_t n) {
  LOCK;
  return copy(pointer(d), pointer(s), n, nullptr, true, "DtoD");
}

DRIVER_CALL(cuMemcpyHtoDAsync_v2)(CUdeviceptr d, const void* s, size_t n, CUstream st) {
  LOCK;
  return copy(pointer(d), s, n, stream_of(st), true, "HtoD");
}

DRIVER_CALL(cuMemcpyDtoHAsync_v2)(void* d, CUdeviceptr s, size_t n, CUstream st) {
  LOCK;
  return copy(d, pointer(s), n, stream_of(st), true, "DtoH");
}

DRIVER_CALL(cuMemcpyDtoDAsync_v2)(CUdeviceptr d, CUdeviceptr s, size_t n, CUstream st) {
  LOCK;
  return copy(pointer(d), pointer(s), n, stream_of(st), true, "DtoD");
}

DRIVER_CALL(cuMemcpyPeerAsync)(CUdeviceptr d, CUcontext, CUdeviceptr s, CUcontext, size_t n,
                               CUstream st) {
  LOCK;
  return copy(pointer(d), pointer(s), n, stream_of(st), true, "any");
}

// Rows of a pitched copy; captured as a node each.
static CUresult copy2d(const CUDA_MEMCPY2D* p, Stream* st, bool async) {
  char* d = p->dstMemoryType == CU_MEMORYTYPE_HOST ? (char*)p->dstHost : (char*)p->dstDevice;
  const char* s =
      p->srcMemoryType == CU_MEMORYTYPE_HOST ? (const char*)p->srcHost : (const char*)p->srcDevice;
  d += p->dstY * p->dstPitch + p->dstXInBytes;
  s += p->srcY * p->srcPitch + p->srcXInBytes;
  count(async ? "memcpy2d" : "memcpy2d:blocking");
  if (st && st->cap) {
    for (size_t y = 0; y < p->Height; y++) {
      auto* node = new Node{N_MEMCPY};
      node->dst = d + y * p->dstPitch;
      node->src = s + y * p->srcPitch;
      node->n = p->WidthInBytes;
      add(st, node);
    }
    return CUDA_SUCCESS;
  }
  if (!async) {
    UNSAFE("memcpy2D");
    synced("memcpy2D");
  }
  for (size_t y = 0; y < p->Height; y++)
    memmove(d + y * p->dstPitch, s + y * p->srcPitch, p->WidthInBytes);
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuMemcpy2D_v2)(const CUDA_MEMCPY2D* p) {
  LOCK;
  return copy2d(p, nullptr, false);
}

DRIVER_CALL(cuMemcpy2DUnaligned_v2)(const CUDA_MEMCPY2D* p) {
  LOCK;
  return copy2d(p, nullptr, false);
}

DRIVER_CALL(cuMemcpy2DAsync_v2)(const CUDA_MEMCPY2D* p, CUstream st) {
  LOCK;
  return copy2d(p, stream_of(st), true);
}

static CUresult set_memory(CUdeviceptr d, unsigned v, size_t n, int w, Stream* st, bool async) {
  if (!n) return CUDA_SUCCESS;
  if (st && st->cap) {
    auto* node = new Node{N_MEMSET};
    node->dst = pointer(d);
    node->val = v;
    node->n = n;
    node->width = w;
    add(st, node);
    count("captured:memset");
    return CUDA_SUCCESS;
  }
  if (!async) UNSAFE("synchronous memset");
  if (!kind(pointer(d))) {
    fault("memset of unknown %p", pointer(d));
    return CUDA_ERROR_INVALID_VALUE;
  }
  count("memset");
  fill(pointer(d), v, n, w);
  clock_ms += 0.002;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuMemsetD8_v2)(CUdeviceptr d, unsigned char v, size_t n) {
  LOCK;
  return set_memory(d, v, n, 1, nullptr, false);
}

DRIVER_CALL(cuMemsetD16_v2)(CUdeviceptr d, unsigned short v, size_t n) {
  LOCK;
  return set_memory(d, v, n, 2, nullptr, false);
}

DRIVER_CALL(cuMemsetD32_v2)(CUdeviceptr d, unsigned v, size_t n) {
  LOCK;
  return set_memory(d, v, n, 4, nullptr, false);
}

DRIVER_CALL(cuMemsetD8Async)(CUdeviceptr d, unsigned char v, size_t n, CUstream s) {
  LOCK;
  return set_memory(d, v, n, 1, stream_of(s), true);
}

DRIVER_CALL(cuMemsetD16Async)(CUdeviceptr d, unsigned short v, size_t n, CUstream s) {
  LOCK;
  return set_memory(d, v, n, 2, stream_of(s), true);
}

DRIVER_CALL(cuMemsetD32Async)(CUdeviceptr d, unsigned v, size_t n, CUstream s) {
  LOCK;
  return set_memory(d, v, n, 4, stream_of(s), true);
}

DRIVER_CALL(cuMemsetD2D8Async)(CUdeviceptr d, size_t pitch, unsigned char v, size_t w, size_t h,
                               CUstream s) {
  LOCK;
  for (size_t y = 0; y < h; y++) {
    CUresult r = set_memory(d + y * pitch, v, w, 1, stream_of(s), true);
    if (r) return r;
  }
  return CUDA_SUCCESS;
}
