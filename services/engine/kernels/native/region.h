// Memory that holds weights and scratch.
#pragma once

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include "stack.h"

namespace headrace {

// Zeroed memory of its own, on huge pages where the system gives them: a step reads all weights once, and with small
// pages it would wait for address translation.
class Region {
 public:
  Region() = default;
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region() { free(); }

  void allocate(int64_t bytes) {
    free();
    constexpr int64_t kHuge = 2 << 20;
    size_ = round_up(bytes, kHuge) + kHuge;
    void* at = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(at != MAP_FAILED, "no memory for ", bytes, " bytes");
    base_ = static_cast<char*>(at);
    data_ = reinterpret_cast<char*>(round_up(reinterpret_cast<int64_t>(base_), kHuge));
    used_ = 0;
    madvise(data_, size_ - kHuge, MADV_HUGEPAGE);
  }

  template <class T>
  T* take(int64_t count) {
    char* at = data_ + used_;
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    TORCH_CHECK(data_ + used_ <= base_ + size_, "more was taken than allocated");
    return reinterpret_cast<T*>(at);
  }

  void rewind() { used_ = 0; }
  int64_t used() const { return used_; }

 private:
  void free() {
    if (base_) munmap(base_, size_);
    base_ = nullptr;
  }
  char *base_ = nullptr, *data_ = nullptr;
  int64_t size_ = 0, used_ = 0;
};

}  // namespace headrace
