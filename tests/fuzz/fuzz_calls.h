// The calls that the fuzzer makes, each fed from bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "dtensor/ops/case_samples.h"

namespace dtensor::testing {

// Numbers out of bytes; zeros after the end.
class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  uint8_t Next() { return at_ < size_ ? data_[at_++] : 0; }
  int64_t Below(int64_t n) { return Next() % n; }
  int64_t Between(int64_t low, int64_t high) { return low + Below(high - low + 1); }
  bool Chance(int of_256) { return Next() < of_256; }
  // Mostly small; now and then one that overflows what it enters.
  int64_t Int() {
    if (!Chance(8)) return Between(-4, 5);
    static constexpr int64_t kOdd[] = {std::numeric_limits<int64_t>::min(),
                                       std::numeric_limits<int64_t>::max(), int64_t{1} << 48,
                                       int64_t{1} << 62, -1000};  // nothing that memory could hold
    return kOdd[Below(5)];
  }
  double Float() {
    static constexpr double kOdd[] = {0.0,
                                      0.5,
                                      -1.5,
                                      2.0,
                                      1e30,
                                      -1e-30,
                                      std::numeric_limits<double>::infinity(),
                                      std::numeric_limits<double>::quiet_NaN()};
    return Chance(128) ? kOdd[Below(8)] : static_cast<double>(Between(-4, 4)) / 2;
  }
  Scalar Number() { return Chance(128) ? Scalar(Between(-3, 4)) : Scalar(Float()); }

 private:
  const uint8_t* data_;
  size_t size_, at_ = 0;
};

// What the fuzzer calls: a case line of ops/, or a registered op that takes no dims, through
// Dispatch (the others are checked by their functions): dtypes and shapes that functions refuse or
// convert.
struct FuzzCall {
  std::string name;
  const OpCase* line = nullptr;
  const OpDef* op = nullptr;
  std::vector<CasePattern> patterns;

  bool draws() const { return line != nullptr && (line->is & kDraws) != 0; }
  // Another sample of it: sizes, arguments and attributes from bytes, now and then such that
  // nothing fits.
  CaseSample Draw(Bytes& b) const;
  Values Run(const CaseSample& sample, const std::vector<DTensor>& inputs, Bytes& attrs) const;
};
const std::vector<FuzzCall>& FuzzCalls();

}  // namespace dtensor::testing
