// SPDX-License-Identifier: Apache-2.0
// cuBLAS, preloaded: the real one checks its own results when it starts. Here every product is the
// launch of one kernel, which the fake driver counts.
#include <cuda.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INTERNAL_ERROR = 14 };

typedef struct {
  CUstream stream;
  int math_mode, pointer_mode;
} Handle;

static int launch(const char* name, CUstream stream) {
  static CUmodule module;
  CUfunction kernel;
  if (!module) cuModuleLoadData(&module, "");
  cuModuleGetFunction(&kernel, module, name);
  return cuLaunchKernel(kernel, 1, 1, 1, 128, 1, 1, 0, stream, 0, 0) ? INTERNAL_ERROR : SUCCESS;
}

// ---- cublas

int cublasCreate_v2(Handle** handle) {
  *handle = calloc(1, sizeof **handle);
  return SUCCESS;
}

int cublasDestroy_v2(Handle* handle) {
  free(handle);
  return SUCCESS;
}

int cublasSetStream_v2(Handle* handle, CUstream stream) {
  handle->stream = stream;
  return SUCCESS;
}

int cublasGetStream_v2(Handle* handle, CUstream* stream) {
  *stream = handle->stream;
  return SUCCESS;
}

int cublasSetWorkspace_v2(Handle* handle, void* workspace, size_t bytes) { return SUCCESS; }

int cublasSetMathMode(Handle* handle, int mode) {
  handle->math_mode = mode;
  return SUCCESS;
}

int cublasGetMathMode(Handle* handle, int* mode) {
  *mode = handle->math_mode;
  return SUCCESS;
}

int cublasSetPointerMode_v2(Handle* handle, int mode) {
  handle->pointer_mode = mode;
  return SUCCESS;
}

int cublasGetPointerMode_v2(Handle* handle, int* mode) {
  *mode = handle->pointer_mode;
  return SUCCESS;
}

int cublasSetSmCountTarget(Handle* handle, int count) { return SUCCESS; }

int cublasGetSmCountTarget(Handle* handle, int* count) {
  *count = 0;
  return SUCCESS;
}

#define PRODUCT(name) \
  int name(Handle* handle) { return launch("cublas:" #name, handle->stream); }
PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasSdot_v2)
PRODUCT(cublasDotEx)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasDgemv_v2)
PRODUCT(cublasHgemm)
PRODUCT(cublasHgemmStridedBatched)

// ---- cublasLt

static int create(void** object) {
  *object = calloc(1, 64);
  return SUCCESS;
}

static int destroy(void* object) {
  free(object);
  return SUCCESS;
}

size_t cublasLtGetVersion(void) { return 130101; }

int cublasLtCreate(void** handle) { return create(handle); }

int cublasLtDestroy(void* handle) { return destroy(handle); }

int cublasLtMatmulDescCreate(void** description) { return create(description); }

int cublasLtMatmulDescDestroy(void* description) { return destroy(description); }

int cublasLtMatmulDescSetAttribute() { return SUCCESS; }

int cublasLtMatmulPreferenceCreate(void** preference) { return create(preference); }

int cublasLtMatmulPreferenceDestroy(void* preference) { return destroy(preference); }

int cublasLtMatmulPreferenceSetAttribute() { return SUCCESS; }

int cublasLtMatrixLayoutCreate(void** layout) { return create(layout); }

int cublasLtMatrixLayoutDestroy(void* layout) { return destroy(layout); }

int cublasLtMatrixLayoutSetAttribute() { return SUCCESS; }

int cublasLtMatmulAlgoGetHeuristic(void* handle, void* description, void* a, void* b, void* c,
                                   void* d, void* preference, int wanted, void* results,
                                   int* found) {
  const size_t result_bytes = 96;  // of a cublasLtMatmulHeuristicResult_t
  memset(results, 0, result_bytes);
  *found = 1;
  return SUCCESS;
}

int cublasLtMatmul(void* handle, void* description, void* alpha, void* a, void* a_layout, void* b,
                   void* b_layout, void* beta, void* c, void* c_layout, void* d, void* d_layout,
                   void* algorithm, void* workspace, size_t workspace_bytes, CUstream stream) {
  return launch("cublas:cublasLtMatmul", stream);
}
