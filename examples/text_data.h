// Bytes of a text file as training batches.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "dtensor/tensor/tensor.h"

namespace dtensor {

// ids and targets [batch, seq] int64; targets are the ids one place later.
struct Batch {
  Tensor ids, targets;
};

class TextData {
 public:
  // Errors: NotFound for what is no regular file that can be read; InvalidArgument for one above
  // 1 GiB and for one with too few bytes for
  // a sequence of `seq` and its targets.
  static absl::StatusOr<TextData> Read(const std::string& path, int64_t seq);
  int64_t size() const { return static_cast<int64_t>(bytes_.size()); }
  // The same on every rank: sequences at places that follow from seed and step.
  Batch Sample(uint64_t seed, int64_t step, int64_t batch, int64_t seq) const;

 private:
  std::string bytes_;
};

}  // namespace dtensor
