// SPDX-License-Identifier: Apache-2.0
// One H100 of 80 GB, or another by FAKECUDA_CC, and its context.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fake.h"

DRIVER_CALL(cuInit)(unsigned) { return CUDA_SUCCESS; }

DRIVER_CALL(cuDriverGetVersion)(int* v) {
  *v = driver_version;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuDeviceGet)(CUdevice* d, int i) {
  if (i) return CUDA_ERROR_INVALID_DEVICE;
  *d = 0;
  return CUDA_SUCCESS;
}

bool device_visible() {
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  return !visible || (*visible && *visible != '-');
}

DRIVER_CALL(cuDeviceGetCount)(int* n) {
  *n = device_visible();
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuDeviceGetName)(char* s, int n, CUdevice) {
  snprintf(s, n, "NVIDIA H100 80GB HBM3");
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuDeviceGetUuid)(CUuuid* u, CUdevice) {
  memcpy(u, device_uuid, 16);
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuDeviceGetUuid_v2)(CUuuid* u, CUdevice) {
  memcpy(u, device_uuid, 16);
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuDeviceGetLuid)(char*, unsigned*, CUdevice) { return CUDA_ERROR_NOT_SUPPORTED; }

DRIVER_CALL(cuDeviceTotalMem_v2)(size_t* n, CUdevice) {
  *n = total_bytes;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuDeviceComputeCapability)(int* a, int* b, CUdevice) {
  *a = capability / 10;
  *b = capability % 10;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuDeviceCanAccessPeer)(int* a, CUdevice, CUdevice) {
  *a = 0;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuDeviceGetPCIBusId)(char* s, int n, CUdevice) {
  snprintf(s, n, "0000:1B:00.0");
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuDeviceGetByPCIBusId)(CUdevice* d, const char*) {
  *d = 0;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuDeviceGetTexture1DLinearMaxWidth)(size_t* n, int, unsigned, CUdevice) {
  *n = 268435456;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuDeviceGetGraphMemAttribute)(CUdevice, int, void* v) {
  *(unsigned long long*)v = 0;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuDeviceGraphMemTrim)(CUdevice) { return CUDA_SUCCESS; }

DRIVER_CALL(cuDeviceGetAttribute)(int* v, CUdevice_attribute a, CUdevice) {
  static const std::map<int, int> T = {
      {1, 1024},        {2, 1024},       {3, 1024},      {4, 64},      {5, 2147483647},
      {6, 65535},       {7, 65535},      {8, 49152},     {9, 65536},   {10, 32},
      {11, 2147483647}, {12, 65536},     {13, 1980000},  {14, 512},    {15, 1},
      {16, 132},        {17, 0},         {18, 0},        {19, 1},      {20, 0},
      {21, 131072},     {22, 131072},    {23, 65536},    {24, 16384},  {25, 16384},
      {26, 16384},      {27, 32768},     {28, 32768},    {29, 2048},   {30, 512},
      {31, 1},          {32, 1},         {33, 0x1b},     {34, 0},      {35, 0},
      {36, 2619000},    {37, 5120},      {38, 52428800}, {39, 2048},   {40, 3},
      {41, 1},          {42, 32768},     {43, 2048},     {44, 0},      {50, 0},
      {51, 32},         {69, 268435456}, {75, 9},        {76, 0},      {78, 1},
      {79, 1},          {80, 1},         {81, 233472},   {82, 65536},  {83, 1},
      {84, 0},          {85, 0},         {86, 0},        {87, 2},      {88, 0},
      {89, 1},          {90, 1},         {91, 1},        {92, 0},      {93, 0},
      {94, 0},          {95, 1},         {96, 1},        {97, 232448}, {98, 0},
      {99, 1},          {100, 0},        {101, 0},       {102, 1},     {103, 1},
      {104, 0},         {105, 0},        {106, 32},      {107, 1},     {108, 26214400},
      {109, 134213632}, {110, 1},        {111, 1024},    {112, 1},     {113, 1},
      {114, 1},         {115, 1},        {116, 1},       {117, 1},     {118, 100},
      {119, 1},         {120, 1},        {121, 1},       {122, 1},     {123, 1},
      {124, 1},         {125, 1},        {126, 4},       {127, 1},     {128, 0},
      {129, 1},         {130, 0},        {131, -1},      {132, 0},     {133, 0},
      {134, 0}};
  if (a == 75) {
    *v = capability / 10;
    return CUDA_SUCCESS;
  }
  if (a == 76) {
    *v = capability % 10;
    return CUDA_SUCCESS;
  }
  if (a == 97) {
    *v = shared_memory_limit;
    return CUDA_SUCCESS;
  }
  if (a == 81) {
    *v = shared_memory_limit + 1024;
    return CUDA_SUCCESS;
  }
  if (a == 120) {
    *v = capability >= 90;
    return CUDA_SUCCESS;
  }
  auto it = T.find(a);
  *v = it == T.end() ? 0 : it->second;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuDeviceGetProperties)(CUdevprop* p, CUdevice) {
  memset(p, 0, sizeof *p);
  p->maxThreadsPerBlock = 1024;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuDeviceGetP2PAttribute)(int* v, int, CUdevice, CUdevice) {
  *v = 0;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuDeviceGetExecAffinitySupport)(int* v, int, CUdevice) {
  *v = 0;
  return CUDA_SUCCESS;
}

// ---- contexts: there is one
DRIVER_CALL(cuDevicePrimaryCtxRetain)(CUcontext* c, CUdevice) {
  *c = (CUcontext)&the_context;
  context_active = true;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuDevicePrimaryCtxRelease_v2)(CUdevice) { return CUDA_SUCCESS; }

DRIVER_CALL(cuDevicePrimaryCtxReset_v2)(CUdevice) { return CUDA_SUCCESS; }

DRIVER_CALL(cuDevicePrimaryCtxSetFlags_v2)(CUdevice, unsigned) { return CUDA_SUCCESS; }

DRIVER_CALL(cuDevicePrimaryCtxGetState)(CUdevice, unsigned* f, int* a) {
  *f = 0;
  *a = context_active;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuCtxGetCurrent)(CUcontext* c) {
  *c = (CUcontext)current_context;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuCtxSetCurrent)(CUcontext c) {
  current_context = (Context*)c;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuCtxPushCurrent_v2)(CUcontext c) {
  current_context = (Context*)c;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuCtxPopCurrent_v2)(CUcontext* c) {
  if (c) *c = (CUcontext)current_context;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuCtxGetDevice)(CUdevice* d) {
  if (!current_context) return CUDA_ERROR_INVALID_CONTEXT;
  *d = 0;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuCtxGetDevice_v2)(CUdevice* d, CUcontext) {
  *d = 0;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuCtxGetId)(CUcontext, unsigned long long* i) {
  *i = 1;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuCtxGetFlags)(unsigned* f) {
  *f = 0;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuCtxGetApiVersion)(CUcontext, unsigned* v) {
  *v = 3020;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuCtxGetLimit)(size_t* v, CUlimit) {
  *v = 8u << 20;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuCtxSetLimit)(CUlimit, size_t) { return CUDA_SUCCESS; }

DRIVER_CALL(cuCtxGetCacheConfig)(CUfunc_cache* c) {
  *c = CU_FUNC_CACHE_PREFER_NONE;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuCtxSetCacheConfig)(CUfunc_cache) { return CUDA_SUCCESS; }

DRIVER_CALL(cuCtxGetStreamPriorityRange)(int* a, int* b) {
  if (a) *a = 0;
  if (b) *b = -5;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuCtxEnablePeerAccess)(CUcontext, unsigned) { return CUDA_SUCCESS; }

DRIVER_CALL(cuCtxResetPersistingL2Cache)() { return CUDA_SUCCESS; }

static CUresult synchronise_device(const char* w) {
  UNSAFE("device synchronize");
  synced(w);
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuCtxSynchronize)() {
  LOCK;
  return synchronise_device("device");
}

DRIVER_CALL(cuCtxSynchronize_v2)(CUcontext) {
  LOCK;
  return synchronise_device("device");
}

DRIVER_CALL(cuCtxCreate_v4)(CUcontext* c, void*, unsigned, CUdevice) {
  *c = (CUcontext)&the_context;
  current_context = &the_context;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuCtxCreate_v2)(CUcontext* c, unsigned, CUdevice) {
  *c = (CUcontext)&the_context;
  current_context = &the_context;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuCtxDestroy_v2)(CUcontext) { return CUDA_SUCCESS; }

DRIVER_CALL(cuProfilerStart)() { return CUDA_SUCCESS; }

DRIVER_CALL(cuProfilerStop)() { return CUDA_SUCCESS; }
