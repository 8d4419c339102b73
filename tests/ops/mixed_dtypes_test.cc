// Every registered op with floating inputs of two dtypes: an error, or the answer of the same
// numbers in float64. A kernel that takes all its inputs for the dtype of the first would read
// other numbers, or past the end.
#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dtensor/dispatch.h"
#include "dtensor/distribute.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"
#include "dtensor/ops/verify_samples.h"
#include "dtensor/tensor/status.h"
#include "dtensor/verify/draws.h"
#include "dtensor/verify/simulate.h"
#include "gtest/gtest.h"

namespace dtensor::mixed_dtypes_test {
namespace {

// Of a sample, its floating inputs in the dtypes given. Values are multiples of 2^-8 below 2 or so:
// every dtype but the 16-bit ones has them exactly.
std::vector<DTensor> InputsOf(const VerifySample& sample, const std::vector<DType>& dtypes) {
  std::vector<DTensor> inputs;
  for (size_t i = 0; i < sample.inputs.size(); ++i) {
    const VerifyInput& in = sample.inputs[i];
    const auto values = internal::Drawn(in, 7 + i, internal::Draw::kPositive);
    inputs.push_back(OnSelf(ValueOrThrow(Tensor::FromVector(values, in.shape, dtypes[i]))));
  }
  return inputs;
}

absl::StatusOr<Values> Outcome(const OpDef& op, const VerifySample& sample,
                               const std::vector<DType>& dtypes) {
  const std::vector<DTensor> inputs = InputsOf(sample, dtypes);
  std::vector<const DTensor*> pointers;
  for (const DTensor& t : inputs) pointers.push_back(&t);
  const Attrs attrs = internal::AttrsOf(sample);
  return Dispatch(op, pointers, attrs);
}

// "" or how the results differ by more than float32 explains.
std::string Differ(const Values& got, const Values& want) {
  for (size_t o = 0; o < want.size(); ++o) {
    const std::vector<double> g = got[o].ToVector<double>(), w = want[o].ToVector<double>();
    if (g.size() != w.size()) return absl::StrCat("output ", o, " has ", g.size(), " elements");
    double scale = 1;
    for (const double v : w) scale = std::max(scale, std::isfinite(v) ? std::fabs(v) : 0);
    for (size_t i = 0; i < w.size(); ++i) {
      if (g[i] == w[i] || (!std::isfinite(g[i]) && !std::isfinite(w[i]))) continue;
      if (std::fabs(g[i] - w[i]) > 1e-3 * scale) {
        return absl::StrCat("output ", o, " element ", i, " is ", g[i], ", must be ", w[i]);
      }
    }
  }
  return "";
}

TEST(MixedDTypes, AnErrorOrTheAnswerInFloat64) {
  int calls = 0, answers = 0;
  for (const VerifyCase& c : VerifyCases()) {
    const OpDef& op = GetOp(c.op);
    const VerifySample& sample = c.samples[0];
    std::vector<DType> all;
    std::vector<size_t> floats;
    for (const VerifyInput& in : sample.inputs) {
      if (IsFloating(in.dtype)) floats.push_back(all.size());
      all.push_back(IsFloating(in.dtype) ? DType::kF64 : in.dtype);
    }
    if (floats.size() < 2) continue;
    const absl::StatusOr<Values> want = Outcome(op, sample, all);
    if (!want.ok()) continue;  // such values are refused
    for (const size_t other : floats) {
      for (const DType one : {DType::kF32, DType::kF64}) {
        std::vector<DType> dtypes = all;
        for (const size_t i : floats) {
          dtypes[i] = (i == other) == (one == DType::kF32) ? DType::kF32 : DType::kF64;
        }
        ++calls;
        const absl::StatusOr<Values> got = Outcome(op, sample, dtypes);
        if (!got.ok()) {
          EXPECT_EQ(got.status().code(), absl::StatusCode::kInvalidArgument) << got.status();
          continue;
        }
        ++answers;
        EXPECT_EQ(Differ(*got, *want), "")
            << c.op << ", input " << op.InputName(static_cast<int>(other)) << " in "
            << Name(dtypes[other]) << ", other floats in "
            << Name(dtypes[floats[0] == other ? floats[1] : floats[0]]);
      }
    }
  }
  std::printf("%d calls, %d answers\n", calls, answers);
  EXPECT_GT(calls, 400);
  EXPECT_GT(answers, 0);  // most refuse: the functions above them have promoted
}

// Rounded to float16 first, 65536 would be infinite.
TEST(MixedDTypes, NumbersWithoutDimsCountAsTheyAre) {
  const auto half = [] {
    return to(FromVector(std::vector<double>{0.5, -0.25, 3}, {3}), DType::kF16);
  };
  const DTensor large = full({}, 65536.0), whole = full({}, int64_t{65536}, {DType::kI64});
  const std::vector<double> quotients = {0x1p-17, -0x1p-18, 3 * 0x1p-16},
                            products = {32768, -16384, HUGE_VAL};
  EXPECT_EQ(div(half(), large).ToVector<double>(), quotients);
  EXPECT_EQ(mul(half(), whole).ToVector<double>(), products);
  EXPECT_EQ(mul(large, half()).ToVector<double>(), products);
  EXPECT_EQ(add(mul(half(), 20000), full({}, -70000.0)).ToVector<double>(),
            (std::vector<double>{-60000, -HUGE_VAL, -10000}));
  EXPECT_EQ(sub(mul(half(), 20000), full({}, 70000.0)).ToVector<double>(),
            (std::vector<double>{-60000, -HUGE_VAL, -10000}));
  EXPECT_EQ(div_(half(), large).ToVector<double>(), quotients);
  EXPECT_EQ(mul_(half(), whole).ToVector<double>(), products);
  const DTensor x = half().Detach().RequiresGrad();
  sum(div(x, large)).Backward();
  EXPECT_EQ(x.grad().ToVector<double>(), std::vector<double>(3, 0x1p-16));
  EXPECT_EQ(x.grad().dtype(), DType::kF16);
}

// The sum is between 1 and 1 + 2^-23, nearer to the latter; other rounded first gives a tie.
TEST(MixedDTypes, InPlaceIsComputedInTheWiderType) {
  const DTensor other =
      FromVector(std::vector<double>{0x1p-24 + 0x1p-50}, {1}, {.dtype = DType::kF64});
  EXPECT_EQ(add_(ones({1}), other).ToVector<double>()[0], 1 + 0x1p-23);
  EXPECT_EQ(sub_(ones({1}), mul(other, -1)).ToVector<double>()[0], 1 + 0x1p-23);
  EXPECT_EQ(mul_(ones({1}), add(other, 1)).ToVector<double>()[0], 1 + 0x1p-23);
  EXPECT_EQ(div_(ones({1}), div(1, add(other, 1))).ToVector<double>()[0], 1 + 0x1p-23);
  // The gradient of self is that of the sum, of other in its own dtype.
  const DTensor x = ones({1}).RequiresGrad(), y = other.Detach().RequiresGrad();
  sum(add_(mul(x, 2), y, 3)).Backward();
  EXPECT_EQ(x.grad().ToVector<double>()[0], 2);
  EXPECT_EQ(y.grad().ToVector<double>()[0], 3);
  EXPECT_EQ(y.grad().dtype(), DType::kF64);
}

TEST(MixedDTypes, MeanWithoutNansIsComputedInTheDtypeAskedFor) {
  const DTensor x = FromVector(std::vector<double>{1, std::nan(""), 0x1p-30, 0}, {4});
  EXPECT_EQ(nanmean(x, {}, false, DType::kF64).ToVector<double>()[0], (1 + 0x1p-30) / 3);
}

}  // namespace
}  // namespace dtensor::mixed_dtypes_test
