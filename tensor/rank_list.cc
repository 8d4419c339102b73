#include "dtensor/tensor/rank_list.h"

#include <new>
#include <utility>

#include "dtensor/tensor/buffer.h"
#include "dtensor/tensor/status.h"
#include "dtensor/tensor/tensor.h"

namespace dtensor::internal {
namespace {

// Lies before the memory, in a line of its own.
struct alignas(64) Head {
  Buffer buffer;
};

}  // namespace

void* TakeRankMemory(int64_t bytes) {
  const int64_t all = bytes + static_cast<int64_t>(sizeof(Head));
  Buffer buffer = ValueOrThrow(Buffer::Allocate(CurrentAllocator(), all));
  void* const memory = buffer.data();
  return new (memory) Head{std::move(buffer)} + 1;
}

void GiveRankMemory(void* memory) noexcept {
  Head* const head = static_cast<Head*>(memory) - 1;
  const Buffer buffer = std::move(head->buffer);  // lies in what it frees
  head->~Head();
}

}  // namespace dtensor::internal
