// What holds a rank's memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "dtensor/tensor/buffer.h"

namespace dtensor {

struct MemoryReport {
  enum class Held : uint8_t { kSaved, kGradient, kMemo, kNamed };
  struct Item {
    Held by;  // saved for backward, a leaf's gradient, a memoised redistribution, a module's own
    std::string module;  // that ran when it was made; "" outside of modules
    std::string op;      // that saved it; of others "gradient", "redistribute" and "parameter"
    std::string spec;    // "float32 [4, 6] on dp=2 [R]"
    int64_t bytes;
  };
  AllocatorStats stats;
  // Bytes by who holds them; what several hold counts once, in this order. The rest of
  // stats.in_use_bytes is values that the program has handles of, and scratch memory.
  int64_t saved_bytes = 0, gradient_bytes = 0, memo_bytes = 0;
  int64_t named_bytes = 0;    // parameters and buffers of modules that are not among these
  std::vector<Item> largest;  // largest first
  int64_t others = 0;         // tensors not listed

  int64_t cached_bytes() const { return stats.reserved_bytes - stats.in_use_bytes; }
  std::string ToString() const;
};

// Of the calling rank, with the `most` largest tensors that autograd and modules hold. Errors for
// want of memory end with it. Looks at every node of the tapes that are alive.
MemoryReport DescribeMemory(size_t most = 10);

}  // namespace dtensor
