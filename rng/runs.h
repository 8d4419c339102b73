// RunBox: a box of elements that one rank holds, as runs of consecutive g (position in memory order
// of the one-device tensor) with the place of each in the local tensor.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "dtensor/mesh/spec.h"
#include "dtensor/tensor/shape.h"

namespace dtensor {

struct RunDim {
  int64_t size, g_stride, local_stride;
};

// Elements first_g + sum(i_d * g_stride_d) at local_offset + sum(i_d * local_stride_d). Dims are
// ordered by g_stride, largest first, and merged where both strides allow; the last one is the run
// and has g_stride 1. No size is 0.
struct RunBox {
  int64_t first_g = 0, local_offset = 0;
  absl::InlinedVector<RunDim, 4> dims;

  const RunDim& run() const { return dims.back(); }
  int64_t last_g() const;
};

// The boxes of the coordinate's part. `global_strides` are dense strides of the global shape;
// `local_strides` (elements) belong to the local tensor, which is 1-D for a flat shard.
std::vector<RunBox> LocalRunBoxes(const Spec& spec, IntSpan coordinate, IntSpan global_strides,
                                  IntSpan local_strides);

// Walks the runs of a box in ascending g.
class RunCursor {
 public:
  explicit RunCursor(const RunBox& box);
  // Goes to the first run that ends after g.
  void Seek(int64_t g);
  void Next() { Skip(1); }
  // Goes `count` runs on, count <= left().
  void Skip(int64_t count);
  // Runs from this one to the last that lies row() further than the one before; at least 1.
  int64_t left() const { return outer_ == 0 ? 1 : row().size - index_[outer_ - 1]; }
  const RunDim& row() const { return box_->dims[outer_ - 1]; }  // not of a single run
  bool single() const { return outer_ == 0; }
  bool done() const { return done_; }
  int64_t begin() const { return g_; }
  int64_t end() const { return g_ + box_->run().size; }
  // Local offset of the element at g, begin() <= g < end().
  int64_t LocalAt(int64_t g) const { return local_ + (g - g_) * box_->run().local_stride; }

 private:
  void Reset(size_t from);  // indices of outer dims [from, ..) to 0, and g_, local_ to match
  // Steps outer dim limit - 1 by `count` within its size, carrying like an odometer.
  void Increment(size_t limit, int64_t count = 1);
  const RunBox* box_;
  size_t outer_;  // number of dims outside the run
  absl::InlinedVector<int64_t, 4> index_;
  int64_t g_ = 0, local_ = 0;
  bool done_ = false;
};

}  // namespace dtensor
