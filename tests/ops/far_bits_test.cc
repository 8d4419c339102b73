// Every op of ops/, on the samples of the judge, on the far device: the bits of the CPU, values and
// gradients, on 1 and on 4 ranks.
#include <gtest/gtest.h>

#include <cstring>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "dtensor/autograd.h"
#include "dtensor/dispatch.h"
#include "dtensor/distribute.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/rules.h"
#include "dtensor/ops/verify_samples.h"
#include "dtensor/rng/generator.h"
#include "tests/common/far_device.h"
#include "tests/common/thin.h"

namespace dtensor {
namespace {

constexpr int kVariants = 3;  // placements of the inputs of a sample

// What one rank holds of a value, and how: its placements and its bytes, or why there is none.
using Outcome = std::vector<std::string>;

double ValueOf(const VerifyInput& in, size_t input, int64_t i, bool positive) {
  if (!in.values.empty()) return in.values[static_cast<size_t>(i)];
  const uint64_t h = (static_cast<uint64_t>(i) * 7 + input * 31 + 3) * 0x9E3779B97F4A7C15ull;
  if (!IsFloating(in.dtype)) return static_cast<double>(h >> 62);
  const double unit = static_cast<double>((h >> 40) + 1) / static_cast<double>(1 << 24);
  return positive ? unit : 2 * unit - 1;
}

DTensor Input(const VerifyInput& in, size_t input, const DeviceMesh& mesh, int variant,
              bool positive) {
  std::vector<double> values;
  for (int64_t i = 0; i < Numel(in.shape); ++i) values.push_back(ValueOf(in, input, i, positive));
  Placements placements(mesh.ndim());
  const int choices = static_cast<int>(in.shape.size()) + 1;
  for (int m = 0; m < mesh.ndim(); ++m) {
    const int choice = (static_cast<int>(input) * 2 + variant * (m + 1) + m) % choices;
    if (choice > 0) placements[m] = Shard(choice - 1);
  }
  const Tensor whole = ValueOrThrow(Tensor::FromVector(values, in.shape, in.dtype));
  return DistributeTensor(whole, mesh, placements);
}

void Add(const DTensor& t, Outcome* outcome) {
  const Tensor here = ValueOrThrow(ValueOrThrow(t.local().Contiguous()).To(DeviceType::kCpu));
  std::string bytes(static_cast<size_t>(here.numel() * SizeOf(here.dtype())), '\0');
  if (!bytes.empty()) std::memcpy(bytes.data(), here.data(), bytes.size());
  outcome->push_back(t.spec().ToString());
  outcome->push_back(std::move(bytes));
}

Outcome CallOnce(const OpDef& op, const VerifySample& sample, const DeviceMesh& mesh, int variant,
                 bool positive) {
  Outcome outcome;
  try {
    ManualSeed(11);
    std::vector<DTensor> inputs;
    for (size_t i = 0; i < sample.inputs.size(); ++i) {
      inputs.push_back(Input(sample.inputs[i], i, mesh, variant, positive));
      const bool leaf = op.vjp() != nullptr && !op.in_place();
      if (leaf && IsFloating(inputs.back().dtype())) inputs.back().RequiresGrad();
    }
    Attrs attrs = sample.attrs;
    if (sample.ints_attr >= 0) attrs[sample.ints_attr] = IntsAttr(sample.ints);
    std::vector<const DTensor*> pointers;
    for (const DTensor& x : inputs) pointers.push_back(&x);
    const Values results = Call(op, pointers, attrs);
    for (const DTensor& y : results) Add(y, &outcome);
    if (op.in_place()) Add(inputs[0], &outcome);
    if (results.empty() || !results[0].requires_grad()) return outcome;
    const VerifyInput gradient = {results[0].shape(), results[0].dtype()};
    results[0].Backward(Input(gradient, inputs.size(), mesh, variant, positive));
    for (const DTensor& x : inputs) {
      if (x.requires_grad() && x.grad().defined()) Add(x.grad(), &outcome);
    }
  } catch (const Error& e) {
    outcome.push_back(absl::StrCat("error: ", e.what()));
  }
  return outcome;
}

// By rank, then by sample and variant.
std::vector<std::vector<Outcome>> RunCase(const VerifyCase& c, int64_t ranks, DeviceType device,
                                          bool positive, absl::Status* status) {
  std::vector<std::vector<Outcome>> all(static_cast<size_t>(ranks));
  SpmdOptions options;
  options.device = device;
  *status = RunSpmd(
      ranks,
      [&](RankContext& rank) -> absl::Status {
        const DeviceMesh mesh = ranks == 1 ? DeviceMesh({1}) : DeviceMesh({2, ranks / 2});
        for (const VerifySample& sample : c.samples) {
          for (int variant = 0; variant < (ranks == 1 ? 1 : kVariants); ++variant) {
            all[static_cast<size_t>(rank.rank())].push_back(
                CallOnce(GetOp(c.op), sample, mesh, variant, positive));
          }
        }
        return absl::OkStatus();
      },
      options);
  return all;
}

bool IsError(const Outcome& o) { return !o.empty() && o.back().rfind("error: ", 0) == 0; }

// Whether all samples are in the op's domain with values on both sides of 0.
bool TakesNegative(const VerifyCase& c) {
  absl::Status status;
  const auto all = RunCase(c, 1, DeviceType::kCpu, false, &status);
  if (!status.ok()) return false;
  for (const Outcome& o : all[0]) {
    if (IsError(o)) return false;
  }
  return true;
}

TEST(FarBits, EveryOpGivesTheBitsOfTheCpu) {
  int64_t calls = 0, refused = 0;
  size_t number = 0;
  for (const VerifyCase& c : VerifyCases()) {
    if (!testing::InTurn(number++, 4)) continue;
    SCOPED_TRACE(c.op);
    const bool positive = !TakesNegative(c);
    for (const int64_t ranks : {1, 4}) {
      absl::Status status;
      const auto here = RunCase(c, ranks, DeviceType::kCpu, positive, &status);
      ASSERT_TRUE(status.ok()) << status;
      const auto there = RunCase(c, ranks, DeviceType::kCustom, positive, &status);
      ASSERT_TRUE(status.ok()) << status;
      int64_t compared = 0;
      for (size_t r = 0; r < here.size(); ++r) {
        ASSERT_EQ(here[r].size(), there[r].size());
        for (size_t k = 0; k < here[r].size(); ++k) {
          ++(IsError(here[r][k]) ? refused : compared);
          ASSERT_TRUE(here[r][k] == there[r][k])
              << "rank " << r << " of " << ranks << ", call " << k << ": "
              << (IsError(here[r][k]) ? here[r][k].back() : here[r][k].front()) << " on the CPU, "
              << (IsError(there[r][k]) ? there[r][k].back() : there[r][k].front()) << " there";
        }
      }
      EXPECT_GT(compared, 0) << "on " << ranks << " ranks nothing was computed";
      calls += compared;
    }
  }
  std::printf("%lld calls, %lld refused on both\n", static_cast<long long>(calls),
              static_cast<long long>(refused));
  EXPECT_GT(calls, 5000 / testing::Thin(8));
  EXPECT_LT(refused * 20, calls);
}

}  // namespace
}  // namespace dtensor
