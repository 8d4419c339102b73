// Test support for ops: inputs with known values, naive comparison, and gradients against central
// differences, all on one rank (the Self mesh) in float64.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/ops.h"
#include "gtest/gtest.h"
#include "tests/common/message.h"

namespace dtensor::testing {

// One operand of an op under test.
struct Operand {
  Shape shape;
  std::vector<double> values;
  DType dtype = DType::kF64;
  bool grad = true;  // differentiated (floating operands only)

  bool differentiable() const { return grad && IsFloating(dtype); }
  DTensor Make() const {
    DTensor t = FromVector(values, shape, {dtype, DeviceMesh::Self(), {}});
    if (differentiable()) t.RequiresGrad();
    return t;
  }
};

// Values without pattern in (-1, 1), the same for the same seed.
inline std::vector<double> Noise(int64_t n, uint64_t seed) {
  std::vector<double> v(static_cast<size_t>(n));
  uint64_t state = seed * 0x9E3779B97F4A7C15u + 0x1234567;
  for (double& x : v) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    x = static_cast<double>(state >> 11) * (2.0 / 9007199254740992.0) - 1;
  }
  return v;
}

inline Operand Float(Shape shape, uint64_t seed) {
  const int64_t n = Numel(shape);
  return {std::move(shape), Noise(n, seed)};
}
inline Operand Ints(Shape shape, std::vector<double> values) {
  return {std::move(shape), std::move(values), DType::kI64, false};
}

using OpFn = std::function<DTensor(const std::vector<DTensor>&)>;

// The weights with which an output of n elements enters the scalar that is differentiated.
inline std::vector<double> Cotangent(int64_t n) { return Noise(n, 99); }

inline std::vector<DTensor> MakeAll(const std::vector<Operand>& operands) {
  std::vector<DTensor> tensors;
  for (const Operand& o : operands) tensors.push_back(o.Make());
  return tensors;
}

inline double Weighted(const OpFn& fn, const std::vector<Operand>& operands) {
  const DTensor y = fn(MakeAll(operands));
  const std::vector<double> v = y.ToVector<double>(), w = Cotangent(y.numel());
  double total = 0;
  for (size_t i = 0; i < v.size(); ++i) total += v[i] * w[i];
  return total;
}

// Runs fn and its backward from Cotangent; the gradients of all operands (empty where none).
inline std::vector<std::vector<double>> Gradients(const OpFn& fn,
                                                  const std::vector<DTensor>& inputs) {
  const DTensor y = fn(inputs);
  y.Backward(FromVector(Cotangent(y.numel()), y.shape(), {y.dtype(), y.mesh(), {}}));
  std::vector<std::vector<double>> grads;
  for (const DTensor& x : inputs) {
    const DTensor g = x.requires_grad() ? x.grad() : DTensor();
    grads.push_back(g.defined() ? g.ToVector<double>() : std::vector<double>());
  }
  return grads;
}

// Every gradient against central differences.
inline void CheckGradients(const OpFn& fn, std::vector<Operand> operands, double tolerance = 1e-6) {
  const auto grads = Gradients(fn, MakeAll(operands));
  constexpr double kStep = 1e-5;
  for (size_t i = 0; i < operands.size(); ++i) {
    if (!operands[i].differentiable()) continue;
    ASSERT_EQ(grads[i].size(), operands[i].values.size()) << "operand " << i;
    for (size_t k = 0; k < operands[i].values.size(); ++k) {
      double& x = operands[i].values[k];
      const double was = x;
      x = was + kStep;
      const double up = Weighted(fn, operands);
      x = was - kStep;
      const double down = Weighted(fn, operands);
      x = was;
      EXPECT_NEAR(grads[i][k], (up - down) / (2 * kStep), tolerance)
          << "operand " << i << " element " << k;
    }
  }
}

// Values of `got` against `want`, relative to the largest.
inline void ExpectClose(const std::vector<double>& got, const std::vector<double>& want,
                        double tolerance = 1e-10) {
  ASSERT_EQ(got.size(), want.size());
  double scale = 1;
  for (double w : want) {
    if (std::isfinite(w)) scale = std::max(scale, std::fabs(w));
  }
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] == want[i] || (std::isnan(got[i]) && std::isnan(want[i]))) continue;
    EXPECT_NEAR(got[i], want[i], tolerance * scale) << "element " << i;
  }
}

}  // namespace dtensor::testing
