// SPDX-License-Identifier: Apache-2.0
// Memory: device allocations are pages of this process, and count against the device's size.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "fake.h"

struct Alloc {
  size_t size;
  Kind kind;
  unsigned flags;
  unsigned long long id;
};

// By address.
static std::map<uintptr_t, Alloc> allocations;
static size_t device_bytes = 0;
static unsigned long long next_alloc = 1;
static uintptr_t va_hint = 0x302000000000ull;

// The allocation that holds an address, or end().
static std::map<uintptr_t, Alloc>::iterator find(const void* p) {
  auto it = allocations.upper_bound((uintptr_t)p);
  if (it == allocations.begin()) return allocations.end();
  --it;
  return (uintptr_t)p < it->first + it->second.size ? it : allocations.end();
}

Kind kind(const void* p) {
  auto it = find(p);
  return it == allocations.end() ? (Kind)0 : it->second.kind;
}

const char* kname(const void* p) {
  switch (kind(p)) {
    case DEV:
    case RESERVED:
      return "D";
    case PINNED:
    case REGISTERED:
      return "H";
    default:
      return "pageable";
  }
}

// Pages that take no memory before they are written, 2 MiB at a time as on a GPU.
static void* map_pages(size_t n) {
  size_t a = 2u << 20, len = (n + a - 1) / a * a;
  void* p = mmap((void*)va_hint, len, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  va_hint += len;
  return p;
}

CUresult dev_alloc(void** out, size_t n) {
  if (!n) return CUDA_ERROR_INVALID_VALUE;
  if (device_bytes + n > total_bytes - (600ull << 20)) return CUDA_ERROR_OUT_OF_MEMORY;
  void* p = map_pages(n);
  if (!p) return CUDA_ERROR_OUT_OF_MEMORY;
  allocations[(uintptr_t)p] = {n, DEV, 0, next_alloc++};
  device_bytes += n;
  *out = p;
  count("alloc:device");
  count("alloc:device_bytes", n);
  return CUDA_SUCCESS;
}

static CUresult dev_free(void* p) {
  if (!p) return CUDA_SUCCESS;
  auto it = allocations.find((uintptr_t)p);
  if (it == allocations.end() || it->second.kind != DEV) return CUDA_ERROR_INVALID_VALUE;
  size_t a = 2u << 20;
  munmap(p, (it->second.size + a - 1) / a * a);
  device_bytes -= it->second.size;
  allocations.erase(it);
  count("free:device");
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuMemAlloc_v2)(CUdeviceptr* p, size_t n) {
  LOCK;
  UNSAFE("cuMemAlloc");
  return dev_alloc((void**)p, n);
}

DRIVER_CALL(cuMemFree_v2)(CUdeviceptr p) {
  LOCK;
  UNSAFE("cuMemFree");
  synced("memFree");
  return dev_free((void*)p);
}

DRIVER_CALL(cuMemAllocPitch_v2)(CUdeviceptr* p, size_t* pitch, size_t w, size_t h, unsigned) {
  LOCK;
  *pitch = (w + 511) / 512 * 512;
  return dev_alloc((void**)p, *pitch * h);
}

DRIVER_CALL(cuMemAllocManaged)(CUdeviceptr* p, size_t n, unsigned) {
  LOCK;
  return dev_alloc((void**)p, n);
}

DRIVER_CALL(cuMemAllocAsync)(CUdeviceptr* p, size_t n, CUstream) {
  LOCK;
  return dev_alloc((void**)p, n);
}

DRIVER_CALL(cuMemAllocFromPoolAsync)(CUdeviceptr* p, size_t n, CUmemoryPool, CUstream) {
  LOCK;
  return dev_alloc((void**)p, n);
}

DRIVER_CALL(cuMemFreeAsync)(CUdeviceptr p, CUstream) {
  LOCK;
  return dev_free((void*)p);
}

DRIVER_CALL(cuMemGetInfo_v2)(size_t* f, size_t* t) {
  LOCK;
  *t = total_bytes;
  *f = total_bytes - (600ull << 20) - device_bytes;
  count("memGetInfo");
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuMemGetAddressRange_v2)(CUdeviceptr* b, size_t* n, CUdeviceptr p) {
  LOCK;
  auto it = find((void*)p);
  if (it == allocations.end()) return CUDA_ERROR_INVALID_VALUE;
  if (b) *b = it->first;
  if (n) *n = it->second.size;
  return CUDA_SUCCESS;
}

static CUresult host_alloc(void** p, size_t n, unsigned flags) {
  UNSAFE("cuMemHostAlloc");
  void* q = nullptr;
  if (posix_memalign(&q, 4096, n ? n : 1)) return CUDA_ERROR_OUT_OF_MEMORY;
  memset(q, 0, n);
  allocations[(uintptr_t)q] = {n, PINNED, flags, next_alloc++};
  *p = q;
  count("alloc:pinned");
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuMemAllocHost_v2)(void** p, size_t n) {
  LOCK;
  return host_alloc(p, n, 0);
}

DRIVER_CALL(cuMemHostAlloc)(void** p, size_t n, unsigned f) {
  LOCK;
  return host_alloc(p, n, f);
}

DRIVER_CALL(cuMemFreeHost)(void* p) {
  LOCK;
  UNSAFE("cuMemFreeHost");
  auto it = allocations.find((uintptr_t)p);
  if (it == allocations.end()) return CUDA_ERROR_INVALID_VALUE;
  allocations.erase(it);
  free(p);
  count("free:pinned");
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuMemHostRegister_v2)(void* p, size_t n, unsigned f) {
  LOCK;
  allocations[(uintptr_t)p] = {n, REGISTERED, f, next_alloc++};
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuMemHostUnregister)(void* p) {
  LOCK;
  allocations.erase((uintptr_t)p);
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuMemHostGetDevicePointer_v2)(CUdeviceptr* d, void* p, unsigned) {
  LOCK;
  Kind k = kind(p);
  if (k != PINNED && k != REGISTERED) return CUDA_ERROR_INVALID_VALUE;
  *d = (CUdeviceptr)p;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuMemHostGetFlags)(unsigned* f, void* p) {
  LOCK;
  auto it = find(p);
  if (it == allocations.end()) return CUDA_ERROR_INVALID_VALUE;
  *f = it->second.flags;
  return CUDA_SUCCESS;
}

// ---- virtual memory management: reserved ranges are mapped from the start

// Ranges that were unmapped and whose addresses are still reserved. What is mapped there next holds
// other bytes: a GPU promises nothing about them.
static std::map<uintptr_t, size_t> unmapped;

DRIVER_CALL(cuMemGetAllocationGranularity)(size_t* g, const CUmemAllocationProp*,
                                           CUmemAllocationGranularity_flags) {
  *g = 2u << 20;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuMemAddressReserve)(CUdeviceptr* p, size_t n, size_t, CUdeviceptr,
                                 unsigned long long) {
  LOCK;
  void* q = map_pages(n);
  if (!q) return CUDA_ERROR_OUT_OF_MEMORY;
  allocations[(uintptr_t)q] = {n, RESERVED, 0, next_alloc++};
  *p = (CUdeviceptr)q;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuMemAddressFree)(CUdeviceptr p, size_t n) {
  LOCK;
  allocations.erase(p);
  unmapped.erase(unmapped.lower_bound(p), unmapped.lower_bound(p + n));
  munmap((void*)p, n);
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuMemCreate)(CUmemGenericAllocationHandle* h, size_t n, const CUmemAllocationProp*,
                         unsigned long long) {
  LOCK;
  UNSAFE("cuMemCreate");
  device_bytes += n;
  *h = (unsigned long long)new size_t(n);
  count("alloc:device");
  count("alloc:device_bytes", n);
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuMemRelease)(CUmemGenericAllocationHandle h) {
  LOCK;
  device_bytes -= *(size_t*)h;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuMemMap)(CUdeviceptr p, size_t n, size_t, CUmemGenericAllocationHandle,
                      unsigned long long) {
  LOCK;
  if (unmapped.erase(p)) memset((void*)p, 0xCD, n);
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuMemUnmap)(CUdeviceptr p, size_t n) {
  LOCK;
  madvise((void*)p, n, MADV_DONTNEED);
  unmapped[p] = n;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuMemSetAccess)(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) {
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuMemAdvise)(CUdeviceptr, size_t, int, int) { return CUDA_SUCCESS; }

DRIVER_CALL(cuMemPrefetchAsync)(CUdeviceptr, size_t, CUdevice, CUstream) { return CUDA_SUCCESS; }

// ---- pools: there is one
static int the_pool;

DRIVER_CALL(cuDeviceGetDefaultMemPool)(CUmemoryPool* p, CUdevice) {
  *p = (CUmemoryPool)&the_pool;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuDeviceGetMemPool)(CUmemoryPool* p, CUdevice) {
  *p = (CUmemoryPool)&the_pool;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuDeviceSetMemPool)(CUdevice, CUmemoryPool) { return CUDA_SUCCESS; }

DRIVER_CALL(cuMemPoolCreate)(CUmemoryPool* p, const CUmemPoolProps*) {
  *p = (CUmemoryPool)&the_pool;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuMemPoolDestroy)(CUmemoryPool) { return CUDA_SUCCESS; }

DRIVER_CALL(cuMemPoolSetAttribute)(CUmemoryPool, CUmemPool_attribute, void*) {
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuMemPoolGetAttribute)(CUmemoryPool, CUmemPool_attribute, void* v) {
  *(unsigned long long*)v = 0;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuMemPoolSetAccess)(CUmemoryPool, const CUmemAccessDesc*, size_t) {
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuMemPoolTrimTo)(CUmemoryPool, size_t) { return CUDA_SUCCESS; }

// ---- pointers
static bool attribute(void* data, CUpointer_attribute a, const void* p) {
  auto it = find(p);
  bool known = it != allocations.end();
  bool dev = known && (it->second.kind == DEV || it->second.kind == RESERVED);
  switch (a) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      *(void**)data = known ? &the_context : nullptr;
      break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *(unsigned*)data = !known ? 0 : dev ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
      break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      *(CUdeviceptr*)data = known ? (CUdeviceptr)p : 0;
      break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      *(const void**)data = known && !dev ? p : nullptr;
      break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      *(unsigned long long*)data = known ? it->second.id : 0;
      break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      *(unsigned*)data = 0;
      break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *(int*)data = known ? 0 : -2;
      break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      *(CUdeviceptr*)data = known ? it->first : 0;
      break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      *(size_t*)data = known ? it->second.size : 0;
      break;
    case CU_POINTER_ATTRIBUTE_MAPPED:
      *(unsigned*)data = known;
      break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
      *(unsigned*)data = 0;
      break;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
      *(unsigned long long*)data = 0;
      break;
    default:
      *(unsigned*)data = 0;
  }
  return known;
}

DRIVER_CALL(cuPointerGetAttribute)(void* d, CUpointer_attribute a, CUdeviceptr p) {
  LOCK;
  return attribute(d, a, (void*)p) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

DRIVER_CALL(cuPointerGetAttributes)(unsigned n, CUpointer_attribute* a, void** d, CUdeviceptr p) {
  LOCK;
  for (unsigned i = 0; i < n; i++) attribute(d[i], a[i], (void*)p);
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuPointerSetAttribute)(const void*, CUpointer_attribute, CUdeviceptr) {
  return CUDA_SUCCESS;
}
