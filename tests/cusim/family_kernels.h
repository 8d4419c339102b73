// Calls a kernel of the CUDA plugin on device memory, and the CPU's kernel of the same name, and
// compares what they write.
#pragma once

#include <string>
#include <vector>

#include "dtensor/tensor/kernel.h"
#include "dtensor/tensor/shape.h"

namespace dtensor::testing {

struct Operand {
  Shape sizes;
  DType dtype = DType::kF32;
  double low = -2, high = 2;        // of its values; integers are whole numbers from low to high
  Shape strides = {};               // none: contiguous. Only for kernels that take any
  std::vector<double> values = {};  // of floats: instead of these, over and over
  int64_t behind =
      0;  // elements between a boundary of 64 bytes and its first one, at most 64 bytes
};

struct KernelCase {
  const char* op;
  std::vector<Operand> in, out;
  std::vector<Attr> attrs = {};
  std::vector<FactorRange> factors = {};
  // Largest difference in units of the last place of the largest value of that output; 0: same
  // bits.
  double ulps = 0;
  bool each = false;        // units of each value itself instead
  int writes = 0;           // an in-place op: its outputs are the first so many inputs
  KernelFn host = nullptr;  // instead of the CPU's kernel
};

inline Attr Int(int64_t i) { return {Attr::Kind::kInt, i, static_cast<double>(i), nullptr, 0}; }
inline Attr Number(double d) {
  return {Attr::Kind::kFloat, static_cast<int64_t>(d), d, nullptr, 0};
}
inline Attr Ints(const std::vector<int64_t>& v) {  // v must live on
  return {Attr::Kind::kInts, 0, 0, v.data(), static_cast<int64_t>(v.size())};
}

// Fails the test where they differ, or where anything but the outputs was written. What the device
// found wrong with the data comes back, as "op: text"; the CPU must have found something, too.
std::string Compare(const KernelCase& call);

// What the device writes to each output, where it finds nothing wrong with the data.
std::vector<std::vector<char>> OutputsOf(const KernelCase& call);

// The same of a fill by the device's table.
void CompareFill(const Operand& to, double value);

}  // namespace dtensor::testing
