// SPDX-License-Identifier: Apache-2.0
// Graphs: lists of nodes, which a launch runs one after the other.
#include <cstring>

#include "fake.h"

struct Exec {
  std::vector<Node*> nodes;
};

DRIVER_CALL(cuGraphCreate)(CUgraph* g, unsigned) {
  *g = (CUgraph) new Graph;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuGraphDestroy)(CUgraph) { return CUDA_SUCCESS; }

DRIVER_CALL(cuGraphClone)(CUgraph* g, CUgraph o) {
  *g = (CUgraph) new Graph(*(Graph*)o);
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuGraphGetNodes)(CUgraph g, CUgraphNode* n, size_t* k) {
  LOCK;
  auto& v = ((Graph*)g)->nodes;
  if (n)
    for (size_t i = 0; i < *k; i++) n[i] = i < v.size() ? (CUgraphNode)v[i] : nullptr;
  if (!n || *k > v.size()) *k = v.size();
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuGraphGetRootNodes)(CUgraph g, CUgraphNode* n, size_t* k) {
  LOCK;
  auto& v = ((Graph*)g)->nodes;
  if (n && *k && !v.empty()) n[0] = (CUgraphNode)v[0];
  *k = v.empty() ? 0 : 1;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuGraphGetEdges)(CUgraph, CUgraphNode*, CUgraphNode*, size_t* k) {
  *k = 0;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuGraphGetEdges_v2)(CUgraph, CUgraphNode*, CUgraphNode*, void*, size_t* k) {
  *k = 0;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuGraphNodeGetType)(CUgraphNode n, int* t) {
  int y = ((Node*)n)->type;
  *t = y >= 100 ? 3 : y;
  return CUDA_SUCCESS;
}

// The nodes stay those of the graph: no caller changes one afterwards.
static CUresult instantiate(CUgraphExec* x, CUgraph g) {
  LOCK;
  if (!g) return CUDA_ERROR_INVALID_VALUE;
  auto* e = new Exec;
  e->nodes = ((Graph*)g)->nodes;
  *x = (CUgraphExec)e;
  count("graph:instantiate");
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuGraphInstantiateWithFlags)(CUgraphExec* x, CUgraph g, unsigned long long) {
  return instantiate(x, g);
}

DRIVER_CALL(cuGraphInstantiate_v2)(CUgraphExec* x, CUgraph g, CUgraphNode*, char*, size_t) {
  return instantiate(x, g);
}

DRIVER_CALL(cuGraphInstantiate)(CUgraphExec* x, CUgraph g, CUgraphNode*, char*, size_t) {
  return instantiate(x, g);
}

DRIVER_CALL(cuGraphInstantiateWithParams)(CUgraphExec* x, CUgraph g, void* p) {
  return instantiate(x, g);
}

DRIVER_CALL(cuGraphExecGetFlags)(CUgraphExec, cuuint64_t* f) {
  *f = 0;
  return CUDA_SUCCESS;
}

DRIVER_CALL(cuGraphExecDestroy)(CUgraphExec) { return CUDA_SUCCESS; }

DRIVER_CALL(cuGraphUpload)(CUgraphExec, CUstream) { return CUDA_SUCCESS; }

DRIVER_CALL(cuGraphDebugDotPrint)(CUgraph, const char*, unsigned) { return CUDA_SUCCESS; }

DRIVER_CALL(cuGraphLaunch)(CUgraphExec x, CUstream s) {
  std::vector<Node*> nodes;
  {
    LOCK;
    if (stream_of(s)->cap) {
      auto* n = new Node{N_EMPTY};
      add(stream_of(s), n);
      return CUDA_SUCCESS;
    }
    auto* e = (Exec*)x;
    nodes = e->nodes;
    count("graph:launch");
    size_t k = 0;
    for (auto* n : nodes) {
      k += n->type == N_KERNEL;
      clock_ms += n->time_ms;
    }
    count("graph:kernels", k);
  }
  for (auto* n : nodes) switch (n->type) {
      case N_MEMCPY:
        if (!kind(n->dst) || !kind(n->src)) {
          LOCK;
          fault("graph memcpy touches freed memory");
        } else
          memmove(n->dst, n->src, n->n);
        break;
      case N_MEMSET:
        fill(n->dst, n->val, n->n, n->width);
        break;
      case N_HOST:
        n->host(n->user);
        break;
      case N_RECORD: {
        LOCK;
        n->ev->recorded = true;
        n->ev->order = next_order();
        n->ev->queries = 0;
        n->ev->cap = nullptr;
        n->ev->time_ms = clock_ms;
      } break;
      case N_CALLBACK:
        if (node_hook) node_hook(n->id);
        break;
    }
  return CUDA_SUCCESS;
}
