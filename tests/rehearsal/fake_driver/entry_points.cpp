// SPDX-License-Identifier: Apache-2.0
// Errors by name, and how the CUDA runtime finds a call of the driver.
#include <cstring>
#include <unordered_map>

#include "fake.h"

static const std::map<int, std::pair<const char*, const char*>> error_texts = {
    {0, {"CUDA_SUCCESS", "no error"}},
    {1, {"CUDA_ERROR_INVALID_VALUE", "invalid argument"}},
    {2, {"CUDA_ERROR_OUT_OF_MEMORY", "out of memory"}},
    {201, {"CUDA_ERROR_INVALID_CONTEXT", "invalid device context"}},
    {400, {"CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"}},
    {401, {"CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"}},
    {500, {"CUDA_ERROR_NOT_FOUND", "named symbol not found"}},
    {600, {"CUDA_ERROR_NOT_READY", "device not ready"}},
    {701, {"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"}},
    {801, {"CUDA_ERROR_NOT_SUPPORTED", "operation not supported"}},
    {900,
     {"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"}},
    {901,
     {"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
      "operation failed due to a previous error during capture"}},
    {904, {"CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "unjoined work"}},
    {905,
     {"CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
      "dependency created on uncaptured work in another stream"}},
    {907,
     {"CUDA_ERROR_CAPTURED_EVENT",
      "operation not permitted on an event last recorded in a capturing stream"}}};

DRIVER_CALL(cuGetErrorString)(CUresult e, const char** s) {
  auto it = error_texts.find(e);
  *s = it == error_texts.end() ? "fake error" : it->second.second;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuGetErrorName)(CUresult e, const char** s) {
  auto it = error_texts.find(e);
  *s = it == error_texts.end() ? "CUDA_ERROR_FAKE" : it->second.first;
  return CUDA_SUCCESS;
}

// Written by generate.py.
struct Entry {
  const char* name;
  void* function;
};

extern "C" __attribute__((visibility("hidden"))) Entry fk_table[];
extern "C" __attribute__((visibility("hidden"))) int fk_table_size;

struct Alias {
  const char* base;
  int version;
  const char* name;
};

extern "C" __attribute__((visibility("hidden"))) Alias fk_aliases[];
extern "C" __attribute__((visibility("hidden"))) int fk_aliases_size;

static void* find_symbol(const std::string& n) {
  static std::unordered_map<std::string, void*> T;
  LOCK;
  if (T.empty())
    for (int i = 0; i < fk_table_size; i++) T[fk_table[i].name] = fk_table[i].function;
  auto it = T.find(n);
  return it == T.end() ? nullptr : it->second;
}

// The newest version of a call that CUDA of version v knows.
static CUresult address_of(const char* n, void** p, int v, CUdriverProcAddressQueryResult* st) {
  std::string name = n;
  int best = -1;
  for (int i = 0; i < fk_aliases_size; i++)
    if (!strcmp(fk_aliases[i].base, n) && fk_aliases[i].version <= v &&
        fk_aliases[i].version > best) {
      best = fk_aliases[i].version;
      name = fk_aliases[i].name;
    }
  void* f = find_symbol(name);
  if (!f) f = find_symbol(n);
  *p = f;
  if (st) *st = f ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  log_line(f ? 3 : 2, "cuGetProcAddress %s %d -> %s %p", n, v, name.c_str(), f);
  return f ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

DRIVER_CALL(cuGetProcAddress)(const char* n, void** p, int v, cuuint64_t) {
  return address_of(n, p, v, nullptr);
}

DRIVER_CALL(cuGetProcAddress_v2)(const char* n, void** p, int v, cuuint64_t,
                                 CUdriverProcAddressQueryResult* st) {
  return address_of(n, p, v, st);
}

// What generate.py makes of a call that no file here defines.
extern "C" __attribute__((visibility("hidden"))) CUresult fk_unimplemented(const char* name) {
  LOCK;
  static std::set<std::string> seen;
  count("unimplemented");
  if (seen.insert(name).second) log_line(0, "NOT IMPLEMENTED: %s", name);
  return CUDA_ERROR_NOT_SUPPORTED;
}
