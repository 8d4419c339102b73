// What an operator[] of DTensor takes: Python's indices.
#pragma once

#include <cstdint>
#include <optional>

namespace dtensor {

// start:end:step as Python reads it: both may be missing or count from the end. step > 0.
struct Slice {
  Slice(std::optional<int64_t> from = {}, std::optional<int64_t> to = {},  // NOLINT: Slice() is all
        int64_t by = 1)
      : start(from), end(to), step(by) {}
  std::optional<int64_t> start, end;
  int64_t step;
};

class Index {
 public:
  enum class Kind : uint8_t { kNumber, kSlice, kEllipsis, kNewDim };
  Index(int64_t number) : number_(number) {}                         // NOLINT: 1 is an index
  Index(int number) : number_(number) {}                             // NOLINT
  Index(const Slice& slice) : kind_(Kind::kSlice), slice_(slice) {}  // NOLINT: so is a slice
  explicit Index(Kind kind) : kind_(kind) {}
  Kind kind() const { return kind_; }
  int64_t number() const { return number_; }
  const Slice& slice() const { return slice_; }

 private:
  Kind kind_ = Kind::kNumber;
  int64_t number_ = 0;
  Slice slice_;
};

// All dims that no other index is for; at most one per indexing. And a new dim of size 1.
inline const Index kEllipsis{Index::Kind::kEllipsis}, kNewDim{Index::Kind::kNewDim};

}  // namespace dtensor
