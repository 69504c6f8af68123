// SPDX-License-Identifier: Apache-2.0
// Modules and functions: what a cubin says of its kernels' registers, memory and parameters.
#include <elf.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "fake.h"

static Func* get_func(Module* m, const char* name) {
  auto& f = m->funcs[name];
  if (!f) {
    f = new Func;
    f->name = name;
    f->mod = m;
  }
  return f;
}

// Reads a cubin, as cuobjdump does: a function has a section `.text.NAME`, and `.nv.info.NAME`
// holds its attributes. Other images (fat binaries of libraries) have functions of any name,
// unchecked.
static void parse_elf(Module* m, const unsigned char* b) {
  auto* eh = (const Elf64_Ehdr*)b;
  auto* sh = (const Elf64_Shdr*)(b + eh->e_shoff);
  const char* names = (const char*)b + sh[eh->e_shstrndx].sh_offset;
  m->elf = true;
  std::map<uint32_t, std::string> sym;
  for (int i = 0; i < eh->e_shnum; i++)
    if (sh[i].sh_type == SHT_SYMTAB) {
      const char* st = (const char*)b + sh[sh[i].sh_link].sh_offset;
      auto* s = (const Elf64_Sym*)(b + sh[i].sh_offset);
      for (uint32_t k = 0; k < sh[i].sh_size / sizeof *s; k++) sym[k] = st + s[k].st_name;
    }
  for (int i = 0; i < eh->e_shnum; i++) {
    std::string n = names + sh[i].sh_name;
    if (n.rfind(".text.", 0) == 0) get_func(m, n.c_str() + 6)->parsed = true;
  }
  auto walk = [&](int i, Func* f) {
    const unsigned char *p = b + sh[i].sh_offset, *e = p + sh[i].sh_size;
    while (p + 4 <= e) {
      int fmt = p[0], at = p[1], v = p[2] | p[3] << 8;
      p += 4;
      if (fmt != 4) continue;
      // EIATTR_KPARAM_INFO: ordinal, offset and size of a parameter
      if (f && at == 0x17 && v >= 12) {
        uint32_t w = *(uint32_t*)(p + 8);
        Param q{*(uint16_t*)(p + 6), int(w >> 18)};
        unsigned ord = *(uint16_t*)(p + 4);
        if (f->params.size() <= ord) f->params.resize(ord + 1);
        f->params[ord] = q;
      }
      // EIATTR_MAX_THREADS, EIATTR_REQNTID
      if (f && (at == 0x05 || at == 0x10) && v >= 12)
        f->max_threads = ((uint32_t*)p)[0] * ((uint32_t*)p)[1] * ((uint32_t*)p)[2];
      // EIATTR_REGCOUNT
      if (!f && at == 0x2f && v >= 8) {
        auto it = m->funcs.find(sym[*(uint32_t*)p]);
        if (it != m->funcs.end()) it->second->regs = *(uint32_t*)(p + 4);
      }
      p += v;
    }
  };
  for (int i = 0; i < eh->e_shnum; i++) {
    std::string n = names + sh[i].sh_name;
    if (n == ".nv.info")
      walk(i, nullptr);
    else if (n.rfind(".nv.info.", 0) == 0) {
      auto it = m->funcs.find(n.substr(9));
      if (it != m->funcs.end()) walk(i, it->second);
    } else if (n.rfind(".nv.shared.", 0) == 0) {
      auto it = m->funcs.find(n.substr(11));
      if (it != m->funcs.end()) it->second->shared = sh[i].sh_size;
    }
  }
}

Module* new_module(const void* image) {
  auto* m = new Module;
  count("module:load");
  if (image && !memcmp(image, "\177ELF", 4)) parse_elf(m, (const unsigned char*)image);
  return m;
}

DRIVER_CALL(cuModuleLoadData)(CUmodule* m, const void* i) {
  LOCK;
  *m = (CUmodule)new_module(i);
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuModuleLoadDataEx)(CUmodule* m, const void* i, unsigned, void*, void**) {
  LOCK;
  *m = (CUmodule)new_module(i);
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuModuleLoadFatBinary)(CUmodule* m, const void* i) {
  LOCK;
  *m = (CUmodule)new_module(i);
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuModuleLoad)(CUmodule* m, const char* path) {
  LOCK;
  FILE* f = fopen(path, "rb");
  if (!f) return CUDA_ERROR_FILE_NOT_FOUND;
  std::string s;
  char b[65536];
  size_t n;
  while ((n = fread(b, 1, sizeof b, f))) s.append(b, n);
  fclose(f);
  *m = (CUmodule)new_module(s.data());
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuModuleUnload)(CUmodule) { return CUDA_SUCCESS; }

DRIVER_CALL(cuModuleGetLoadingMode)(CUmoduleLoadingMode* m) {
  *m = CU_MODULE_LAZY_LOADING;
  return CUDA_SUCCESS;
}

static CUresult lookup(Module* m, const char* n, Func** f) {
  if (m->elf && !m->funcs.count(n)) return CUDA_ERROR_NOT_FOUND;
  *f = get_func(m, n);
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuModuleGetFunction)(CUfunction* f, CUmodule m, const char* n) {
  LOCK;
  return lookup((Module*)m, n, (Func**)f);
}

static CUresult global(Module* m, const char* n, CUdeviceptr* p, size_t* s) {
  auto& g = m->globals[n];
  if (!g.first) {
    CUresult r = dev_alloc(&g.first, 1 << 20);
    if (r) return r;
    g.second = 1 << 20;
  }
  if (p) *p = (CUdeviceptr)g.first;
  if (s) *s = g.second;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuModuleGetGlobal_v2)(CUdeviceptr* p, size_t* s, CUmodule m, const char* n) {
  LOCK;
  return global((Module*)m, n, p, s);
}

DRIVER_CALL(cuLibraryLoadData)(CUlibrary* l, const void* i, void*, void**, unsigned, void*, void**,
                               unsigned) {
  LOCK;
  *l = (CUlibrary)new_module(i);
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuLibraryUnload)(CUlibrary) { return CUDA_SUCCESS; }

DRIVER_CALL(cuLibraryGetKernel)(CUkernel* k, CUlibrary l, const char* n) {
  LOCK;
  return lookup((Module*)l, n, (Func**)k);
}

DRIVER_CALL(cuLibraryGetModule)(CUmodule* m, CUlibrary l) {
  *m = (CUmodule)l;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuLibraryGetGlobal)(CUdeviceptr* p, size_t* s, CUlibrary l, const char* n) {
  LOCK;
  return global((Module*)l, n, p, s);
}

DRIVER_CALL(cuLibraryGetManaged)(CUdeviceptr* p, size_t* s, CUlibrary l, const char* n) {
  LOCK;
  return global((Module*)l, n, p, s);
}

DRIVER_CALL(cuLibraryGetUnifiedFunction)(void**, CUlibrary, const char*) {
  return CUDA_ERROR_NOT_FOUND;
}

DRIVER_CALL(cuKernelGetFunction)(CUfunction* f, CUkernel k) {
  *f = (CUfunction)k;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuKernelGetName)(const char** n, CUkernel k) {
  *n = ((Func*)k)->name.c_str();
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuFuncGetName)(const char** n, CUfunction k) {
  *n = ((Func*)k)->name.c_str();
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuKernelGetLibrary)(CUlibrary* l, CUkernel k) {
  *l = (CUlibrary)((Func*)k)->mod;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuFuncGetModule)(CUmodule* m, CUfunction f) {
  *m = (CUmodule)((Func*)f)->mod;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuFuncIsLoaded)(int* s, CUfunction) {
  *s = 1;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuFuncLoad)(CUfunction) { return CUDA_SUCCESS; }

static CUresult get_attribute(int* v, CUfunction_attribute a, Func* f) {
  switch (a) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      *v = f->max_threads;
      break;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
      *v = f->shared;
      break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
      *v = f->regs;
      break;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
      *v = capability == 89 ? 86 : capability;
      break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      *v = f->dyn;
      break;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      *v = -1;
      break;
    default:
      *v = 0;
  }
  return CUDA_SUCCESS;
}

static CUresult set_attribute(Func* f, CUfunction_attribute a, int v) {
  // One that this header does not know. Triton 3.8 then falls back to those below.
  if (a >= CU_FUNC_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
  if (a == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
    if (v < 0 || v + f->shared > shared_memory_limit) {
      fault("%s: dynamic shared memory %d + static %d > %d", f->name.c_str(), v, f->shared,
            shared_memory_limit);
      return CUDA_ERROR_INVALID_VALUE;
    }
    f->dyn = v;
  }
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuFuncGetAttribute)(int* v, CUfunction_attribute a, CUfunction f) {
  LOCK;
  return get_attribute(v, a, (Func*)f);
}

DRIVER_CALL(cuKernelGetAttribute)(int* v, CUfunction_attribute a, CUkernel f, CUdevice) {
  LOCK;
  return get_attribute(v, a, (Func*)f);
}

DRIVER_CALL(cuFuncSetAttribute)(CUfunction f, CUfunction_attribute a, int v) {
  LOCK;
  return set_attribute((Func*)f, a, v);
}

DRIVER_CALL(cuKernelSetAttribute)(CUfunction_attribute a, int v, CUkernel f, CUdevice) {
  LOCK;
  return set_attribute((Func*)f, a, v);
}

DRIVER_CALL(cuFuncSetCacheConfig)(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }

DRIVER_CALL(cuKernelSetCacheConfig)(CUkernel, CUfunc_cache, CUdevice) { return CUDA_SUCCESS; }

DRIVER_CALL(cuFuncSetSharedMemConfig)(CUfunction, int) { return CUDA_SUCCESS; }

static CUresult param_info(Func* f, size_t i, size_t* o, size_t* s) {
  if (!f->parsed || i >= f->params.size()) return CUDA_ERROR_INVALID_VALUE;
  if (o) *o = f->params[i].offset;
  if (s) *s = f->params[i].size;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuFuncGetParamInfo)(CUfunction f, size_t i, size_t* o, size_t* s) {
  LOCK;
  return param_info((Func*)f, i, o, s);
}

DRIVER_CALL(cuKernelGetParamInfo)(CUkernel f, size_t i, size_t* o, size_t* s) {
  LOCK;
  return param_info((Func*)f, i, o, s);
}

static CUresult occupancy(int* n, Func* f, int block, size_t dyn) {
  if (block <= 0) return CUDA_ERROR_INVALID_VALUE;
  int by_threads = 2048 / block, by_regs = 65536 / std::max(1, f->regs * ((block + 31) / 32 * 32)),
      sm = f->shared + dyn + 1024, by_sm = 233472 / sm;
  *n = std::max(0, std::min({by_threads, by_regs, by_sm, 32}));
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuOccupancyMaxActiveBlocksPerMultiprocessor)(int* n, CUfunction f, int b, size_t d) {
  LOCK;
  return occupancy(n, (Func*)f, b, d);
}

DRIVER_CALL(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags)(int* n, CUfunction f, int b,
                                                                  size_t d, unsigned) {
  LOCK;
  return occupancy(n, (Func*)f, b, d);
}

DRIVER_CALL(cuOccupancyMaxPotentialBlockSize)(int* g, int* b, CUfunction f, CUoccupancyB2DSize,
                                              size_t, int limit) {
  LOCK;
  *b = limit ? std::min(limit, ((Func*)f)->max_threads) : ((Func*)f)->max_threads;
  *g = 132 * 2;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuOccupancyMaxPotentialBlockSizeWithFlags)(int* g, int* b, CUfunction f,
                                                       CUoccupancyB2DSize, size_t, int limit,
                                                       unsigned) {
  LOCK;
  *b = limit ? std::min(limit, ((Func*)f)->max_threads) : ((Func*)f)->max_threads;
  *g = 132 * 2;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuOccupancyMaxActiveClusters)(int* n, CUfunction, const CUlaunchConfig*) {
  *n = 66;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuOccupancyMaxPotentialClusterSize)(int* n, CUfunction, const CUlaunchConfig*) {
  *n = 8;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuOccupancyAvailableDynamicSMemPerBlock)(size_t* n, CUfunction, int, int) {
  *n = 49152;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuTensorMapEncodeTiled)(CUtensorMap* t) {
  memset(t, 0, sizeof *t);
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuTensorMapEncodeIm2col)(CUtensorMap* t) {
  memset(t, 0, sizeof *t);
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuTensorMapReplaceAddress)(CUtensorMap*, void*) { return CUDA_SUCCESS; }
