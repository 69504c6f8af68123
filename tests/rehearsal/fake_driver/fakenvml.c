// SPDX-License-Identifier: Apache-2.0
// NVML: the same H100 of 80 GB (or another by FAKECUDA_CC), idle. vLLM asks it for the platform.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int nvmlInit_v2() { return 0; }

int nvmlInit() { return 0; }

int nvmlInitWithFlags(unsigned f) { return 0; }

int nvmlShutdown() { return 0; }

const char* nvmlErrorString(int r) { return r ? "fake nvml error" : "Success"; }

int nvmlDeviceGetCount_v2(unsigned* n) {
  *n = 1;
  return 0;
}

int nvmlDeviceGetCount(unsigned* n) {
  *n = 1;
  return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned i, void** h) {
  if (i) return 2;
  *h = (void*)1;
  return 0;
}

int nvmlDeviceGetHandleByIndex(unsigned i, void** h) { return nvmlDeviceGetHandleByIndex_v2(i, h); }

int nvmlDeviceGetHandleByUUID(const char* u, void** h) {
  *h = (void*)1;
  return 0;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char* u, void** h) {
  *h = (void*)1;
  return 0;
}

int nvmlDeviceGetIndex(void* h, unsigned* i) {
  *i = 0;
  return 0;
}

int nvmlDeviceGetMinorNumber(void* h, unsigned* i) {
  *i = 0;
  return 0;
}

int nvmlDeviceGetName(void* h, char* s, unsigned n) {
  snprintf(s, n, "NVIDIA H100 80GB HBM3");
  return 0;
}

int nvmlDeviceGetUUID(void* h, char* s, unsigned n) {
  snprintf(s, n, "GPU-face0102-0304-0506-0708-090a0b0c0d0e");
  return 0;
}

int nvmlDeviceGetMemoryInfo(void* h, unsigned long long* m) {
  m[0] = 85520809984ull;
  m[2] = 600ull << 20;
  m[1] = m[0] - m[2];
  return 0;
}

int nvmlDeviceGetMemoryInfo_v2(void* h, unsigned long long* m) {
  m[1] = 85520809984ull;
  m[2] = 500ull << 20;
  m[4] = 100ull << 20;
  m[3] = m[1] - m[2] - m[4];
  return 0;
}

int nvmlDeviceGetCudaComputeCapability(void* h, int* a, int* b) {
  const char* c = getenv("FAKECUDA_CC");
  int v = c ? atoi(c) : 90;
  *a = v / 10;
  *b = v % 10;
  return 0;
}

int nvmlSystemGetDriverVersion(char* s, unsigned n) {
  snprintf(s, n, "580.65.06");
  return 0;
}

int nvmlSystemGetNVMLVersion(char* s, unsigned n) {
  snprintf(s, n, "13.580.65.06");
  return 0;
}

int nvmlSystemGetCudaDriverVersion_v2(int* v) {
  *v = 13000;
  return 0;
}

int nvmlSystemGetCudaDriverVersion(int* v) {
  *v = 13000;
  return 0;
}

int nvmlDeviceGetP2PStatus(void* a, void* b, int i, int* s) {
  *s = 0;
  return 0;
}

int nvmlDeviceGetNumaNodeId(void* h, unsigned* n) {
  *n = 0;
  return 0;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void* h, unsigned* n, void* p) {
  *n = 0;
  return 0;
}

int nvmlDeviceGetComputeRunningProcesses_v2(void* h, unsigned* n, void* p) {
  *n = 0;
  return 0;
}

int nvmlDeviceGetUtilizationRates(void* h, unsigned* u) {
  u[0] = u[1] = 0;
  return 0;
}

int nvmlDeviceGetTemperature(void* h, int t, unsigned* u) {
  *u = 40;
  return 0;
}

int nvmlDeviceGetPowerUsage(void* h, unsigned* u) {
  *u = 100000;
  return 0;
}

int nvmlDeviceGetTotalEnergyConsumption(void* h, unsigned long long* u) {
  *u = 0;
  return 0;
}

int nvmlDeviceGetMigMode(void* h, unsigned* a, unsigned* b) {
  *a = *b = 0;
  return 0;
}

int nvmlDeviceGetMaxMigDeviceCount(void* h, unsigned* n) {
  *n = 0;
  return 0;
}

typedef struct {
  char legacy[16];
  unsigned domain, bus, device, pciDeviceId, sub;
  char id[32];
} Pci;

int nvmlDeviceGetPciInfo_v3(void* h, Pci* p) {
  memset(p, 0, sizeof *p);
  p->bus = 0x1b;
  p->pciDeviceId = 0x233010de;
  strcpy(p->id, "00000000:1B:00.0");
  strcpy(p->legacy, "0000:1B:00.0");
  return 0;
}

int nvmlDeviceGetPciInfo(void* h, Pci* p) { return nvmlDeviceGetPciInfo_v3(h, p); }

int nvmlDeviceGetClockInfo(void* h, int t, unsigned* u) {
  *u = 1980;
  return 0;
}

int nvmlDeviceGetMaxClockInfo(void* h, int t, unsigned* u) {
  *u = 1980;
  return 0;
}

int nvmlDeviceGetNvLinkState(void* h, unsigned l, unsigned* s) {
  *s = 0;
  return 3;
}

int nvmlDeviceGetCpuAffinity(void* h, unsigned n, unsigned long* s) {
  for (unsigned i = 0; i < n; i++) s[i] = 3;
  return 0;
}

int nvmlDeviceGetMemoryAffinity(void* h, unsigned n, unsigned long* s, int k) {
  for (unsigned i = 0; i < n; i++) s[i] = 1;
  return 0;
}

int nvmlDeviceGetArchitecture(void* h, unsigned* a) {
  *a = 9;
  return 0;
}
