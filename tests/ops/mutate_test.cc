// The judge before mutants: a bounded part of `dtensor-verify --mutate --all`.
#include "dtensor/verify/mutate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>

#include "absl/strings/str_join.h"
#include "dtensor/ops/rules.h"
#include "dtensor/ops/verify_samples.h"
#include "tests/common/thin.h"

namespace dtensor::mutate_test {
namespace {

using ::testing::Contains;
using ::testing::IsSupersetOf;
using ::testing::UnorderedElementsAre;

std::vector<VerifySample> SamplesOf(const std::string& op) {
  for (const VerifyCase& c : VerifyCases()) {
    if (c.op == op) return c.samples;
  }
  ADD_FAILURE() << op;
  return {};
}

// One op of every kind of declaration.
TEST(Mutate, NearlyAllAreCaught) {
  MutationReport total;
  const std::vector<const char*> ops = {
      "matmul",   "linear",  "sum", "amax", "softmax", "layer_norm",  "embedding",
      "nll_pick", "reshape", "cat", "add",  "where",   "masked_fill", "mul_"};
  for (size_t i = 0; i < ops.size(); i += testing::Thin(5)) {
    const char* op = ops[i];
    const absl::StatusOr<MutationReport> report = MutateOp(GetOp(op), SamplesOf(op));
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_GT(report->killed(), 0) << op;
    total.Add(*report);
  }
  const auto survivors = static_cast<int64_t>(total.survivors.size());
  std::printf("%lld killed, %lld survive, %lld equivalent\n",
              static_cast<long long>(total.killed()), static_cast<long long>(survivors),
              static_cast<long long>(total.equivalent));
  EXPECT_GE(total.killed(), 49 * survivors) << absl::StrJoin(total.survivors, "\n");
  EXPECT_GT(total.wrong, 50 / testing::Thin(10));
  EXPECT_GT(total.missing, 50 / testing::Thin(10));
  EXPECT_GT(total.refused, testing::Thin(11) > 1 ? 0 : 10);
}

TEST(Mutate, FlipsEveryPartOfADeclaration) {
  std::vector<std::string> what;
  for (const char* op : {"layer_norm", "embedding", "amax", "masked_fill"}) {
    const std::vector<VerifySample> samples = SamplesOf(op);
    const absl::StatusOr<std::vector<Mutant>> mutants = MutantsOf(GetOp(op), samples);
    ASSERT_TRUE(mutants.ok()) << mutants.status();
    for (const Mutant& m : *mutants) what.push_back(m.what);
  }
  EXPECT_THAT(
      what,
      IsSupersetOf({"c no longer read whole", "c renamed in operand 1", "d read whole",
                    "d merged with v", "linear form dropped of y",
                    "y: \"g(x) + b\" became \"g * x + b\"", "y: \"g(x) + b\" became \"g * b(x)\"",
                    "y: \"g(x) + b\" became \"g + b\"", "offset of v not handed over",
                    "reduction dropped", "monotone form flipped", "monotone form dropped",
                    "condition of the linear form dropped"}));
  EXPECT_THAT(what, Contains("reduces by another: 0"));
}

TEST(Mutate, AFormIsGivenToAnOutputThatHasNone) {
  const OpDef& pair = Op("mutate_pair(x, w)").Factors("..., ... -> ...");
  const absl::StatusOr<std::vector<Mutant>> mutants = MutantsOf(pair, {{{{{4, 6}}, {{4, 6}}}}});
  ASSERT_TRUE(mutants.ok()) << mutants.status();
  std::vector<std::string> what;
  for (const Mutant& m : *mutants) what.push_back(m.what);
  EXPECT_THAT(what, IsSupersetOf({"out linear: \"x(w)\"", "out linear: \"w(x)\""}));
}

// What the op itself does not offer (here: w cut or pending, which is never read), and what follows
// from that, is not what a mutant has lost; what the op does offer is.
TEST(Mutate, WhatTheOpDoesNotOfferEitherIsNotNew) {
  const OpDef& op = Op("mutate_ignores(x, w)").Factors("a b, [c] [d] -> a b");
  RegisterKernel(op.name(), DeviceType::kCpu,
                 {[](const KernelCall& c) {
                    const auto* in = static_cast<const double*>(c.in[0].data);
                    auto* out = static_cast<double*>(c.out[0].data);
                    for (int64_t i = 0; i < NumelOf(c.out[0]); ++i) out[i] = 2 * in[i];
                  },
                  DTypeBit(DType::kF64), KernelLayout::kContiguous});
  const absl::StatusOr<MutationReport> report =
      MutateOp(op, {{{{{4, 6}}, {{4, 6}}}}, {{{{5, 3}}, {{4, 2}}}}});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_THAT(report->survivors, UnorderedElementsAre("mutate_ignores: out linear: \"x(w)\"",
                                                      "mutate_ignores: monotone in x",
                                                      "mutate_ignores: monotone in w"));
}

TEST(Mutate, DropsEachFactorStringOfThoseThatHaveSeveral) {
  int64_t dropped = 0;
  for (const VerifyCase& c : VerifyCases()) {
    const absl::StatusOr<std::vector<Mutant>> mutants = MutantsOf(GetOp(c.op), {c.samples[0]});
    ASSERT_TRUE(mutants.ok()) << c.op << ": " << mutants.status();
    dropped += std::count_if(mutants->begin(), mutants->end(),
                             [](const Mutant& m) { return m.what == "factor string 1 dropped"; });
  }
  EXPECT_GT(dropped, 0);
}

}  // namespace
}  // namespace dtensor::mutate_test
