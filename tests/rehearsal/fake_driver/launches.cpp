// SPDX-License-Identifier: Apache-2.0
// Launches do nothing, but are checked against the device and the kernel.
#include <sys/mman.h>

#include <algorithm>

#include "fake.h"

// Whether an address is memory of this process.
static bool mapped(uintptr_t p) {
  unsigned char v;
  return mincore((void*)(p & ~4095ull), 1, &v) == 0;
}

static CUresult launch(Func* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                       unsigned bz, unsigned sm, Stream* st, void** params, void** extra) {
  const char* n = f->name.c_str();
  if (!gx || !gy || !gz || gx > 2147483647u || gy > 65535 || gz > 65535) {
    fault("launch of %s with grid %u,%u,%u", n, gx, gy, gz);
    return CUDA_ERROR_INVALID_VALUE;
  }
  unsigned long long t = 1ull * bx * by * bz;
  if (!t || t > 1024 || bz > 64) {
    fault("launch of %s with block %u,%u,%u", n, bx, by, bz);
    return CUDA_ERROR_INVALID_VALUE;
  }
  if ((int)t > f->max_threads || (f->parsed && f->regs * t > 65536)) {
    fault("launch of %s: %llu threads of %d registers, at most %d", n, t, f->regs, f->max_threads);
    return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
  }
  if ((int)sm > std::max(f->dyn, 49152 - f->shared)) {
    fault("launch of %s: %u bytes of dynamic shared memory, at most %d", n, sm, f->dyn);
    return CUDA_ERROR_INVALID_VALUE;
  }
  // A 64-bit parameter that is an address of host memory would be an illegal access on a GPU.
  if (f->parsed && params && !f->params.empty())
    for (size_t i = 0; i < f->params.size(); i++)
      if (f->params[i].size == 8) {
        if (!params[i]) {
          fault("launch of %s: parameter %zu of %zu is missing", n, i, f->params.size());
          return CUDA_ERROR_INVALID_VALUE;
        }
        uintptr_t p = *(uintptr_t*)params[i];
        if (p > 0x100000 && p < (1ull << 47) && !kind((void*)p) && mapped(p))
          fault("launch of %s: parameter %zu, %p, is host memory", n, i, (void*)p);
      }
  // So that calibration finds rows to cost something, and trees are smaller than N.
  const double time_ms = 0.004 + 5e-5 * gx * gy * gz;
  if (st->cap) {
    if (st->cap->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    auto* node = new Node{N_KERNEL};
    node->time_ms = time_ms;
    add(st, node);
    count("captured:kernel");
    return CUDA_SUCCESS;
  }
  if (anybody_capturing_here()) {
    count("launch:outside_of_capture");
    log_line(1, "launch of %s outside of the capture of this thread", n);
  }
  count("launch");
  clock_ms += time_ms;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuLaunchKernel)(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                            unsigned by, unsigned bz, unsigned sm, CUstream s, void** p, void** e) {
  LOCK;
  return launch((Func*)f, gx, gy, gz, bx, by, bz, sm, stream_of(s), p, e);
}

DRIVER_CALL(cuLaunchCooperativeKernel)(CUfunction f, unsigned gx, unsigned gy, unsigned gz,
                                       unsigned bx, unsigned by, unsigned bz, unsigned sm,
                                       CUstream s, void** p) {
  LOCK;
  return launch((Func*)f, gx, gy, gz, bx, by, bz, sm, stream_of(s), p, nullptr);
}

DRIVER_CALL(cuLaunchKernelEx)(const CUlaunchConfig* c, CUfunction f, void** p, void** e) {
  LOCK;
  return launch((Func*)f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY,
                c->blockDimZ, c->sharedMemBytes, stream_of(c->hStream), p, e);
}

DRIVER_CALL(cuLaunchHostFunc)(CUstream s, CUhostFn fn, void* u) {
  {
    LOCK;
    Stream* st = stream_of(s);
    if (st->cap) {
      auto* node = new Node{N_HOST};
      node->host = fn;
      node->user = u;
      add(st, node);
      return CUDA_SUCCESS;
    }
    count("hostfunc");
  }
  fn(u);
  return CUDA_SUCCESS;
}
