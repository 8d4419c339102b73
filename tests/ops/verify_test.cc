// Every declaration of ops/ before the judge: whatever it claims is true, whatever is true and not
// offered has its reason. And the judge before liars.
#include "dtensor/verify/verify.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <set>

#include "absl/strings/str_cat.h"
#include "dtensor/autograd.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"
#include "dtensor/ops/verify_reasons.h"
#include "dtensor/ops/verify_samples.h"
#include "dtensor/verify/claims.h"
#include "tests/common/thin.h"

namespace dtensor::verify_test {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;
using ::testing::Not;

TEST(Verify, EveryOpHasSamples) {
  std::set<std::string> with_samples;
  for (const VerifyCase& c : VerifyCases()) {
    EXPECT_TRUE(with_samples.insert(c.op).second) << c.op << " twice";
    EXPECT_GT(c.samples.size(), 1u) << c.op << ": one size proves little";
  }
  for (const OpDef* op : OpRegistry::All()) {
    EXPECT_THAT(with_samples, Contains(op->name()));
  }
}

// What an op does with what wraps, ends or ties as floats do not is seen in that dtype only, and
// where its values are drawn. Those of indices cannot be.
TEST(Verify, EveryOpIsJudgedInEveryDTypeThatItsKernelTakes) {
  constexpr uint32_t kIndices = DTypeBit(DType::kI64) | DTypeBit(DType::kI32);
  int judged = 0;
  for (const VerifyCase& c : VerifyCases()) {
    if (GetOp(c.op).view() != nullptr) continue;  // reads no element
    const Kernel* kernel = FindHostKernel(c.op);
    ASSERT_NE(kernel, nullptr) << c.op;
    const bool of_indices = kernel->dtypes == kIndices;
    if (of_indices) std::printf("%s: its values are given\n", c.op.c_str());
    for (const DType t : {DType::kF64, DType::kI64, DType::kI32, DType::kU8, DType::kBool}) {
      if ((kernel->dtypes & DTypeBit(t)) == 0) continue;
      const bool has = std::any_of(c.samples.begin(), c.samples.end(), [&](const VerifySample& s) {
        return s.inputs[0].dtype == t && (s.inputs[0].values.empty() || of_indices);
      });
      EXPECT_TRUE(has) << c.op << " in " << Name(t);
      ++judged;
    }
  }
  std::printf("%d ops and dtypes\n", judged);
  EXPECT_GT(judged, 500);
}

// Those that this run judges: in CI every third.
constexpr size_t kParts = 3;
template <class Case>
std::vector<Case> Part(std::vector<Case> all) {
  std::vector<Case> judged;
  for (size_t i = 0; i < all.size(); ++i) {
    if (testing::InPart(i, kParts)) judged.push_back(std::move(all[i]));
  }
  return judged;
}
std::vector<VerifyCase> Judged() { return Part(VerifyCases()); }

// Under a sanitizer the first sample of each op.
std::vector<VerifySample> Samples(const VerifyCase& c) {
  return {c.samples.begin(), testing::Thin(2) == 1 ? c.samples.end() : c.samples.begin() + 1};
}

TEST(Verify, WhatIsClaimedIsTrueAndWhatIsNotOfferedHasAReason) {
  int64_t combinations = 0;
  std::vector<std::pair<std::string, std::vector<VerifyFinding>>> missing;
  std::set<const MissingReason*> used;
  for (const VerifyCase& c : Judged()) {
    const absl::StatusOr<VerifyReport> report = VerifyOp(GetOp(c.op), Samples(c));
    ASSERT_TRUE(report.ok()) << c.op << ": " << report.status();
    EXPECT_TRUE(report->wrong.empty()) << report->ToString(c.op);
    EXPECT_GT(report->combinations, 0) << c.op;
    for (const VerifyFinding& f : report->missing) used.insert(ReasonFor(c.op, f));
    missing.emplace_back(c.op, report->missing);
    combinations += report->combinations;
  }
  // Of one sample much is true by chance.
  const bool all_samples = testing::Thin(2) == 1;
  if (all_samples) {
    EXPECT_THAT(DescribeMissing(missing), Not(HasSubstr("without a reason")));
  }
  const bool all = all_samples && missing.size() == VerifyCases().size();
  for (const MissingReason& r : MissingReasons()) {
    EXPECT_TRUE(used.count(&r) || !all)
        << "explains no row any more: " << r.ops << " " << r.pattern;
  }
  std::printf("%lld strategies\n", static_cast<long long>(combinations));
  EXPECT_GT(combinations, 3000 / testing::Thin(5));
}

// A kernel that is told where its rows begin gets them right also of segments that lie in one
// block: the judge tells it, and finds a row that the declaration does not claim.
TEST(Verify, SegmentsThatAreOneBlockAreTriedWhereAKernelIsToldItsRange) {
  for (const VerifyCase& c : VerifyCases()) {
    if (c.op != "scatter_add") continue;
    const absl::StatusOr<VerifyReport> report = VerifyOp(GetOp(c.op), c.samples);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_THAT(report->missing, Contains(Field(&VerifyFinding::pattern, HasSubstr("Segmented("))));
  }
}

TEST(Verify, GradientsAreThoseOfOneRank) {
  int64_t combinations = 0;
  for (const VerifyCase& c : Judged()) {
    if (GetOp(c.op).vjp() == nullptr) continue;
    const absl::StatusOr<VerifyReport> report = VerifyGradients(GetOp(c.op), Samples(c));
    ASSERT_TRUE(report.ok()) << c.op << ": " << report.status();
    EXPECT_TRUE(report->wrong.empty()) << report->ToString(c.op);
    EXPECT_GT(report->combinations, 0) << c.op;
    combinations += report->combinations;
  }
  std::printf("%lld backward passes\n", static_cast<long long>(combinations));
}

// Of ops and of what is made of them.
TEST(Verify, FunctionsGiveOnMeshesWhatTheyGiveOnOneRank) {
  int64_t placements = 0;
  for (FunctionCase& c : Part(FunctionCases())) {
    if (testing::Thin(2) != 1) c.samples.resize(1);
    c.options.meshes = {{3}, {2, 2}};  // of two ranks: ops_cases_test
    c.options.most = 12 / testing::Thin(3);
    const absl::StatusOr<VerifyReport> report = VerifyFunction(c.name, c.samples, c.options);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_TRUE(report->wrong.empty()) << report->ToString(c.name);
    EXPECT_GT(report->combinations, 0) << c.name;
    placements += report->combinations;
  }
  std::printf("%lld placements\n", static_cast<long long>(placements));
}

// --- liars

FunctionSample OfOne(Values (*call)(const std::vector<DTensor>&)) {
  const VerifyInput x = {{4, 6}, DType::kF64, std::vector<double>(24, 1.5)};
  return {{x}, {true}, call, "x"};
}
bool CutByRows(const DTensor& x) { return !x.mesh().is_self() && x.placements()[0] == Shard(0); }

TEST(Verify, FunctionsThatLieAreCaught) {
  const VerifyReport honest = *VerifyFunction(
      "twice", {OfOne([](const std::vector<DTensor>& in) -> Values { return {in[0] + in[0]}; })});
  EXPECT_TRUE(honest.wrong.empty()) << honest.ToString("twice");
  EXPECT_GT(honest.combinations, 30);
  const VerifyReport values =
      *VerifyFunction("liar", {OfOne([](const std::vector<DTensor>& in) -> Values {
                        return {in[0] * (CutByRows(in[0]) ? 2.0 : 1.0)};
                      })});
  std::vector<std::string> found;
  for (const VerifyFinding& f : values.wrong) found.push_back(absl::StrCat(f.row, ": ", f.why));
  EXPECT_THAT(found, Contains(AllOf(HasSubstr("x: [S(0)] on mesh 2: rank"),
                                    HasSubstr("result 0 element 0 is 3, must be 1.5"))));
  const VerifyReport gradients = *VerifyFunction(
      "liar", {OfOne([](const std::vector<DTensor>& in) -> Values {
        const DTensor x = in[0].Detach();
        const double factor = CutByRows(x) ? 2 : 1;
        const auto backward = [factor](const Values& grads) -> Values {
          return {grads[0] * factor};
        };
        return CustomFunction("liar", {in[0]}, [&]() -> Values { return {x + 1}; }, backward);
      })});
  ASSERT_FALSE(gradients.wrong.empty());
  EXPECT_THAT(gradients.wrong[0].why, HasSubstr("gradient of result 0 in input 0 element 0 is"));
}

// What is written in place is never moved: such a placement is none that was judged. Of another
// function it is a finding.
TEST(Verify, RefusalsOfFunctionsInPlaceAreNotCounted) {
  const VerifyInput x = {{4, 6}, DType::kF64, std::vector<double>(24, 1.5)};
  const FunctionSample sample = {
      {x, x},
      {false, false},
      [](const std::vector<DTensor>& in) -> Values { return {add_(in[0], in[1])}; },
      "x, y"};
  const VerifyReport allowed = *VerifyFunction("add_", {sample}, {.in_place = true});
  EXPECT_TRUE(allowed.wrong.empty()) << allowed.ToString("add_");
  EXPECT_LT(allowed.combinations, allowed.candidates);
  const VerifyReport strict = *VerifyFunction("add_", {sample});
  ASSERT_FALSE(strict.wrong.empty());
  EXPECT_THAT(strict.wrong[0].why, HasSubstr("in-place op cannot keep x"));
}

const double* In(const KernelCall& c) { return static_cast<const double*>(c.in[0].data); }
double* Out(const KernelCall& c) { return static_cast<double*>(c.out[0].data); }

void PlusOne(const KernelCall& c) {
  for (int64_t i = 0; i < NumelOf(c.out[0]); ++i) Out(c)[i] = In(c)[i] + 1;
}
void Square(const KernelCall& c) {
  for (int64_t i = 0; i < NumelOf(c.out[0]); ++i) Out(c)[i] = In(c)[i] * In(c)[i];
}
void Twice(const KernelCall& c) {
  for (int64_t i = 0; i < NumelOf(c.out[0]); ++i) Out(c)[i] = 2 * In(c)[i];
}
// Zero, but of infinities.
void Nought(const KernelCall& c) {
  for (int64_t i = 0; i < NumelOf(c.out[0]); ++i) Out(c)[i] = 0 * In(c)[i];
}
// x minus the mean of the part it was given: not pointwise at all.
void Centre(const KernelCall& c) {
  const int64_t n = NumelOf(c.out[0]);
  double mean = 0;
  for (int64_t i = 0; i < n; ++i) mean += In(c)[i] / static_cast<double>(n);
  for (int64_t i = 0; i < n; ++i) Out(c)[i] = In(c)[i] - mean;
}

const OpDef& Declare(OpDef& op, KernelFn kernel) {
  RegisterKernel(op.name(), DeviceType::kCpu,
                 {kernel, DTypeBit(DType::kF64), KernelLayout::kContiguous});
  return op;
}
const std::vector<VerifySample> kRows = {{{{{4, 6}}}}, {{{{5, 3}}}}};

std::vector<std::string> Patterns(const std::vector<VerifyFinding>& findings) {
  std::set<std::string> patterns;
  for (const VerifyFinding& f : findings) patterns.insert(f.pattern);
  return {patterns.begin(), patterns.end()};
}

TEST(Verify, LiarsAreCaught) {
  const OpDef& linear = Declare(Op("liar_linear(x)").Factors("... -> ...").Linear("x"), PlusOne);
  EXPECT_THAT(Patterns(VerifyOp(linear, kRows)->wrong), Contains("x P(sum) -> P(sum)"));
  const OpDef& pointwise = Declare(Op("liar_pointwise(x)").Factors("... -> ..."), Centre);
  EXPECT_THAT(Patterns(VerifyOp(pointwise, kRows)->wrong), Contains("x S(0) -> S(0)"));
  const OpDef& monotone =
      Declare(Op("liar_monotone(x)").Factors("... -> ...").Monotone("x"), Square);
  EXPECT_THAT(Patterns(VerifyOp(monotone, kRows)->wrong), Contains("x P(max) -> P(max)"));
}

// However few numbers a sample has: a rank with nothing holds an infinity.
TEST(Verify, WhatIsTrueOfFiniteNumbersOnlyIsCaught) {
  const OpDef& finite = Declare(Op("liar_finite(x)").Factors("... -> ...").Monotone("x"), Nought);
  for (const Shape& shape : {Shape{}, Shape{1}, Shape{2}, Shape{4, 6}}) {
    EXPECT_THAT(Patterns(VerifyOp(finite, {{{{shape}}}})->wrong),
                IsSupersetOf({"x P(max) -> P(max)", "x P(min) -> P(min)"}))
        << ToString(shape);
  }
}

// x + 1, which wraps around: the least of ranks of which one has nothing, the greatest number.
void WrappingPlusOne(const KernelCall& c) {
  const auto* in = static_cast<const uint64_t*>(c.in[0].data);
  auto* out = static_cast<uint64_t*>(c.out[0].data);
  for (int64_t i = 0; i < NumelOf(c.out[0]); ++i) out[i] = in[i] + 1;
}
// Halves the distance to 0 of what does not fit 32 bits.
void Narrowed(const KernelCall& c) {
  const auto* in = static_cast<const int64_t*>(c.in[0].data);
  auto* out = static_cast<int64_t*>(c.out[0].data);
  for (int64_t i = 0; i < NumelOf(c.out[0]); ++i) {
    out[i] = in[i] == static_cast<int32_t>(in[i]) ? in[i] : in[i] / 2;
  }
}
TEST(Verify, WhatIsTrueOfSmallIntegersOnlyIsCaught) {
  const OpDef& wraps = Op("liar_wraps(x)").Factors("... -> ...").Monotone("x");
  RegisterKernel(wraps.name(), DeviceType::kCpu,
                 {WrappingPlusOne, DTypeBit(DType::kI64), KernelLayout::kContiguous});
  const OpDef& narrow = Op("liar_narrow(x)").Factors("... -> ...").Linear("x");
  RegisterKernel(narrow.name(), DeviceType::kCpu,
                 {Narrowed, DTypeBit(DType::kI64), KernelLayout::kContiguous});
  for (const Shape& shape : {Shape{2}, Shape{4, 6}}) {
    const std::vector<VerifySample> samples = {{{{shape, DType::kI64}}}};
    EXPECT_THAT(Patterns(VerifyOp(wraps, samples)->wrong), Contains("x P(min) -> P(min)"));
    EXPECT_THAT(Patterns(VerifyOp(narrow, samples)->wrong), Contains("x P(sum) -> P(sum)"));
  }
}

// A pending sum of truth values is true where one of them is, as a pending maximum: what is
// declared as the one need not be declared as the other.
TEST(Verify, SumsOfTruthValuesAreMaxima) {
  const auto copy = [](const KernelCall& c) {
    const auto* in = static_cast<const uint8_t*>(c.in[0].data);
    std::copy_n(in, NumelOf(c.out[0]), static_cast<uint8_t*>(c.out[0].data));
  };
  const auto no = [](const KernelCall& c) {
    const auto* in = static_cast<const uint8_t*>(c.in[0].data);
    auto* out = static_cast<uint8_t*>(c.out[0].data);
    for (int64_t i = 0; i < NumelOf(c.out[0]); ++i) out[i] = in[i] == 0 ? 1 : 0;
  };
  const std::vector<VerifySample> truths = {{{{{4, 6}, DType::kBool}}}, {{{{5, 3}, DType::kBool}}}};
  const auto declared = [&](OpDef& op, KernelFn kernel) {
    RegisterKernel(op.name(), DeviceType::kCpu,
                   {kernel, DTypeBit(DType::kBool), KernelLayout::kContiguous});
    return *VerifyOp(op, truths);
  };
  const VerifyReport honest = declared(Op("same_truth(x)").Factors("... -> ...").Linear("x"), copy);
  EXPECT_TRUE(honest.wrong.empty()) << honest.ToString("same_truth");
  EXPECT_THAT(Patterns(honest.missing), ElementsAre("x P(min) -> P(min)"));
  const VerifyReport liar = declared(Op("liar_no(x)").Factors("... -> ...").Linear("x"), no);
  EXPECT_THAT(Patterns(liar.wrong), Contains("x P(sum) -> P(sum)"));
}

TEST(Verify, ModestDeclarationsAreCaught) {
  const OpDef& modest = Declare(Op("modest(x)").Factors("a [b] -> a [b]"), Twice);
  const VerifyReport report = *VerifyOp(modest, kRows);
  EXPECT_TRUE(report.wrong.empty()) << report.ToString("modest");
  EXPECT_THAT(Patterns(report.missing),
              ElementsAre("x P(max) -> P(max)", "x P(min) -> P(min)", "x P(sum) -> P(sum)",
                          "x S(1) -> S(1)", "x Segmented(1) -> Segmented(1)"));
}

// The judge draws other numbers before it calls a row missing. It leaves out those that the op
// refuses.
void TwiceOfNotTooMuch(const KernelCall& c) {
  const double sum = std::accumulate(In(c), In(c) + NumelOf(c.in[0]), 0.0);
  if (sum > 49) {  // no whole tensor that is drawn at first; of the later ones some
    c.workspace->Fail("too much");
  } else {
    Twice(c);
  }
}
TEST(Verify, NumbersThatTheOpRefusesSayNothing) {
  const OpDef& modest =
      Declare(Op("modest_and_picky(x)").Factors("a [b] -> a [b]"), TwiceOfNotTooMuch);
  const std::vector<VerifySample> finite = {{.inputs = {{{4, 6}}}, .finite = true},
                                            {.inputs = {{{5, 3}}}, .finite = true}};
  const absl::StatusOr<VerifyReport> report = VerifyOp(modest, finite);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_THAT(Patterns(report->missing), Contains("x S(1) -> S(1)"));
}

// Inputs of one shape are asked for in flat pieces all together and one by one.
TEST(Verify, EachInputAloneIsAskedForInFlatPieces) {
  const OpDef& three = Op("three(x, y, z)").Factors("..., ..., ... -> ...");
  const VerifySample sample = {{{{4, 6}}, {{4, 6}}, {{4, 6}}}};
  const absl::Status status = RunFake({.world = 2}, [&](RankContext&) {
    const auto asked = internal::AskedOnOneDim(three, sample, DeviceMesh({2}), 400);
    const Placements flat = {internal::FlatPieces(24, 2)}, whole = {Replicate()};
    EXPECT_THAT(
        asked,
        IsSupersetOf(std::vector<std::vector<Placements>>{
            {flat, flat, flat}, {flat, whole, whole}, {whole, flat, whole}, {whole, whole, flat}}));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Of a gradient that is there as a value it is right.
TEST(Verify, GradientsThatComeAsPendingSumsAreJudgedToo) {
  const auto vjp = [](VjpCall& c) {
    const bool pending = !c.grad().mesh().is_self() && c.grad().placements()[0].is_partial();
    c.set(0, c.grad() * (pending ? 4.0 : 2.0));
  };
  const OpDef& liar =
      Declare(Op("liar_pending(x)").Factors("... -> ...").Linear("x").Vjp(vjp), Twice);
  const VerifyReport report = *VerifyGradients(liar, kRows);
  ASSERT_FALSE(report.wrong.empty());
  for (const VerifyFinding& f : report.wrong)
    EXPECT_THAT(f.why, HasSubstr("gradient of x element"));
  const auto right = [](VjpCall& c) { c.set(0, c.grad() * 2.0); };
  const OpDef& honest =
      Declare(Op("honest_pending(x)").Factors("... -> ...").Linear("x").Vjp(right), Twice);
  const VerifyReport no = *VerifyGradients(honest, kRows);
  EXPECT_TRUE(no.wrong.empty()) << no.ToString("honest_pending");
}

TEST(Verify, AReproducerRepeatsItsFinding) {
  const OpDef& liar = Declare(
      Op("liar_again(x, n; s, axes)").Factors("... -> ...").Factors("..., -> ...").Linear("x"),
      PlusOne);
  const VerifySample sample = {
      {{{4, 2}}, {{}, DType::kI64, {3}}}, {FloatAttr(0.5), Attr()}, {0, 1}, 1};
  const VerifyReport report = *VerifyOp(liar, {sample});
  ASSERT_FALSE(report.wrong.empty());
  const std::string code =
      "EXPECT_TRUE(VerifyStrategy(**OpRegistry::Find(\"liar_again\"), "
      "VerifySample{{VerifyInput{{4, 2}}, VerifyInput{{}, DType::kI64, {3}}}, "
      "{FloatAttr(0.5), Attr()}, {0, 1}, 1}, {2}, "
      "{Placements{Partial()}, Placements{Replicate()}}, {Placements{Partial()}}).ok());";
  std::vector<std::string> all;
  for (const VerifyFinding& f : report.wrong) all.push_back(f.reproducer);
  EXPECT_THAT(all, Contains(code));
  // The same text, compiled; false, because the declaration lies.
  EXPECT_FALSE(VerifyStrategy(**OpRegistry::Find("liar_again"),
                              VerifySample{{VerifyInput{{4, 2}}, VerifyInput{{}, DType::kI64, {3}}},
                                           {FloatAttr(0.5), Attr()},
                                           {0, 1},
                                           1},
                              {2}, {Placements{Partial()}, Placements{Replicate()}},
                              {Placements{Partial()}})
                   .ok());  // NOLINT
  // And one that is true, of another op.
  GetOp("matmul");
  EXPECT_TRUE(VerifyStrategy(**OpRegistry::Find("matmul"),
                             VerifySample{{VerifyInput{{4, 6}}, VerifyInput{{6, 5}}}}, {2},
                             {Placements{Shard(1)}, Placements{Shard(0)}}, {Placements{Partial()}})
                  .ok());  // NOLINT
}

TEST(Verify, StrategiesThatNoKernelCanRunAreRefused) {
  const absl::Status status = VerifyStrategy(GetOp("matmul"), {{{{4, 6}}, {{6, 5}}}}, {2},
                                             {{Shard(1)}, {Replicate()}}, {{Partial()}});
  EXPECT_THAT(std::string(status.message()), HasSubstr("parts of these shapes"));
}

// Where rows are given by hand and shapes by a function, a kernel gets sizes that it says belong
// together: it may walk its input and write its output without asking.
TEST(Verify, AKernelOfRowsByHandGetsShapesThatBelongTogether) {
  static int64_t others;
  others = 0;
  const OpDef& op = Declare(
      Op("rows_by_hand(x)")
          .Shapes([](const OpCall& c) { return std::vector<Shape>{c.shape(0)}; })
          .Strategies({{{Replicate()}, {Replicate()}}, {{Shard(1)}, {Shard(1)}}}),
      [](const KernelCall& c) {
        const TensorRef &x = c.in[0], &y = c.out[0];
        const int64_t rows = y.sizes[0], columns = y.sizes[1];
        auto* to = static_cast<double*>(y.data);
        others += x.sizes[0] != rows || x.sizes[1] != columns ? 1 : 0;
        std::fill(to, to + rows * columns, 0.0);
        if (x.sizes[0] != rows || x.sizes[1] != columns) return;
        for (int64_t i = 0; i < rows * columns; ++i) {
          to[i] = static_cast<const double*>(x.data)[i] + (i < columns ? 0 : to[i - columns]);
        }
      });
  const VerifyReport report = *VerifyOp(op, {{{{{4, 6}}}}, {{{{5, 3}}}}});
  EXPECT_TRUE(report.wrong.empty());
  EXPECT_EQ(others, 0);
}

// A row by hand is asked for as it stands: in units here, which its result is not in.
TEST(Verify, RowsByHandAreAskedForInTheirUnits) {
  const auto doubled = [](const KernelCall& c) {
    const auto count = [](const TensorRef& t) { return t.sizes[0] * t.sizes[1]; };
    auto* to = static_cast<double*>(c.out[0].data);
    std::fill(to, to + count(c.out[0]), -1.0);
    for (int64_t i = 0; i < std::min(count(c.in[0]), count(c.out[0])); ++i) {
      to[i] = 2 * static_cast<const double*>(c.in[0].data)[i];
    }
  };
  for (const int64_t unit : {1, 2}) {
    const OpDef& op = Declare(
        Op(absl::StrCat("rows_in_units_", unit, "(x)"))
            .Shapes([](const OpCall& c) { return std::vector<Shape>{c.shape(0)}; })
            .Strategies({{{Replicate()}, {Replicate()}}, {{Shard(0, 2)}, {Shard(0, unit)}}}),
        doubled);
    const absl::StatusOr<VerifyReport> report = VerifyOp(op, {{{{{6, 3}}}}, {{{{5, 2}}}}});
    if (unit == 2) {
      ASSERT_TRUE(report.ok()) << report.status();
      EXPECT_TRUE(report->wrong.empty());
    } else {
      EXPECT_TRUE(!report.ok() || !report->wrong.empty());
    }
  }
}

// The largest of minima is not the minimum of the largest: found by the judge, once declared.
TEST(Verify, APendingMinimumDoesNotPassAMaximum) {
  const VerifySample sample = {{{{4, 6}}}, {Attr(), BoolAttr(false)}, {1}, 0};
  EXPECT_FALSE(VerifyStrategy(GetOp("amax"), sample, {2}, {{Partial(ReduceOp::kMin)}},
                              {{Partial(ReduceOp::kMin)}})
                   .ok());
  EXPECT_TRUE(VerifyStrategy(GetOp("amax"), sample, {2}, {{Partial(ReduceOp::kMax)}},
                             {{Partial(ReduceOp::kMax)}})
                  .ok());
}

}  // namespace
}  // namespace dtensor::verify_test
