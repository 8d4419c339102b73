// RankList: a list on the host that grows with the data of tensors. Its memory is the rank's
// allocator's, whose limit, statistics and errors it has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dtensor {

namespace internal {
// Of CurrentAllocator(); 64-byte aligned. Throws Error (ResourceExhausted).
void* TakeRankMemory(int64_t bytes);
void GiveRankMemory(void* memory) noexcept;
}  // namespace internal

template <class T>
struct RankMemory {
  using value_type = T;
  RankMemory() = default;
  template <class U>
  RankMemory(const RankMemory<U>&) {}  // NOLINT: as the standard asks
  T* allocate(size_t n) {
    return static_cast<T*>(internal::TakeRankMemory(static_cast<int64_t>(n * sizeof(T))));
  }
  void deallocate(T* memory, size_t) noexcept { internal::GiveRankMemory(memory); }
  friend bool operator==(const RankMemory&, const RankMemory&) { return true; }
};

template <class T>
using RankList = std::vector<T, RankMemory<T>>;

}  // namespace dtensor
