// SPDX-License-Identifier: Apache-2.0
// Common parts of all kernels: views with optional bounds checks, memory per thread, units of work.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#ifdef BASTION_CHECK
#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) {                                                              \
      std::fprintf(stderr, "%s:%d: check failed: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                  \
    }                                                                                \
  } while (false)
#else
#define CHECK(condition) ((void)0)
#endif

#define BASTION_EXPORT __attribute__((visibility("default")))

namespace bastion {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

template <class To, class From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// `size` elements from `data` on. A build with BASTION_CHECK checks every access against the size.
template <class T>
struct Span {
  T* data = nullptr;
  int64_t size = 0;

  T& operator[](int64_t i) const {
    CHECK(0 <= i && i < size);
    return data[i];
  }

  // A pointer to `count` elements from `first` on.
  T* at(int64_t first, [[maybe_unused]] int64_t count) const {
    CHECK(0 <= first && 0 <= count && first + count <= size);
    return data + first;
  }

  Span part(int64_t first, int64_t count) const { return {at(first, count), count}; }
};

// Memory that a thread keeps between calls: page faults can cost more than the work.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  // At least `size` elements, aligned to a cache line; zeros, or the content of an earlier call.
  Span<T> get(int64_t size) {
    if (size > size_) {
      std::free(data_);
      const size_t bytes = ceil_div(size * int64_t(sizeof(T)), 64) * 64;
      data_ = static_cast<T*>(std::aligned_alloc(64, bytes));
      if (data_ == nullptr) {
        std::fprintf(stderr, "vllm-bastion: out of memory\n");
        std::abort();
      }
      std::memset(static_cast<void*>(data_), 0, bytes);
      size_ = size;
    }
    return {data_, size};
  }

 private:
  T* data_ = nullptr;
  int64_t size_ = 0;
};

// Numbers of work units, distributed to threads on demand.
class Units {
 public:
  explicit Units(int64_t count) : count_(count) {}

  // The next unit's number, or -1 when all are taken.
  int64_t take() {
    const int64_t unit = next_.fetch_add(1, std::memory_order_relaxed);
    return unit < count_ ? unit : -1;
  }

 private:
  std::atomic<int64_t> next_{0};
  const int64_t count_;
};

}  // namespace bastion
