// Every declaration of ops/ before the judge: whatever it claims must be true. And the judge before
// a liar.
#include "dtensor/verify.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>

#include "ops/ops.h"
#include "ops/rules.h"
#include "ops/verify_samples.h"

namespace dtensor {
namespace {

using ::testing::HasSubstr;

TEST(Verify, NoDeclarationClaimsWhatIsNotTrue) {
  int64_t combinations = 0, ops = 0;
  for (const VerifyCase& c : VerifyCases()) {
    const absl::StatusOr<VerifyReport> report = VerifyOp(GetOp(c.op), c.samples);
    ASSERT_TRUE(report.ok()) << c.op << ": " << report.status();
    EXPECT_TRUE(report->wrong.empty()) << report->ToString(c.op);
    EXPECT_GT(report->combinations, 0) << c.op;
    combinations += report->combinations;
    ++ops;
  }
  std::printf("%lld ops, %lld strategies, none wrong\n", static_cast<long long>(ops),
              static_cast<long long>(combinations));
  EXPECT_GT(combinations, 10000);
}

void PlusOne(const KernelCall& call) {
  const auto* x = static_cast<const double*>(call.in[0].data);
  auto* y = static_cast<double*>(call.out[0].data);
  int64_t n = 1;
  for (int d = 0; d < call.out[0].ndim; ++d) n *= call.out[0].sizes[d];
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] + 1;
}

// x minus the mean of the part it was given: not pointwise at all.
void Centre(const KernelCall& call) {
  const auto* x = static_cast<const double*>(call.in[0].data);
  auto* y = static_cast<double*>(call.out[0].data);
  int64_t n = 1;
  for (int d = 0; d < call.out[0].ndim; ++d) n *= call.out[0].sizes[d];
  double mean = 0;
  for (int64_t i = 0; i < n; ++i) mean += x[i] / static_cast<double>(n);
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] - mean;
}

TEST(Verify, LiarsAreCaught) {
  Op("liar_linear(x)").Factors("... -> ...").Linear("x");
  Op("liar_pointwise(x)").Factors("... -> ...");
  for (const char* name : {"liar_linear", "liar_pointwise"}) {
    RegisterKernel(name, DeviceType::kCpu,
                   {std::string(name) == "liar_linear" ? PlusOne : Centre, DTypeBit(DType::kF64),
                    KernelLayout::kContiguous});
    const VerifyReport report =
        *VerifyOp(**OpRegistry::Find(name), {VerifySample{.inputs = {{.shape = {4, 6}}}}});
    EXPECT_FALSE(report.wrong.empty()) << name;
    EXPECT_THAT(report.ToString(name), HasSubstr("WRONG"));
  }
}

}  // namespace
}  // namespace dtensor
