// Every op of ops/, on the samples of the judge, on the far device: the bits of the CPU, values and
// gradients, on 1 and on 4 ranks, and in fewer bits than the samples' float64 on one. Or on another
// device (DT_TEST_DEVICE): the values of the CPU, and its bits but for the ops of a list; of ops
// without a kernel, which may only become fewer, the list names all (tests/data/cuda_ops.txt for
// cuda).
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "dtensor/autograd.h"
#include "dtensor/dispatch.h"
#include "dtensor/distribute.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"
#include "dtensor/ops/verify_samples.h"
#include "dtensor/rng/generator.h"
#include "dtensor/tensor/convert.h"
#include "tests/common/remote_device.h"
#include "tests/common/thin.h"

namespace dtensor::far_bits_test {
namespace {

constexpr int kVariants = 3;  // placements of the inputs of a sample

// What one rank holds of a value, and how.
struct Held {
  std::string spec;
  DType dtype;
  std::string bytes;
};
// The values of a call and its gradients; or why there are no more.
struct Outcome {
  std::vector<Held> values;
  std::string error;
};

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
  outcome->values.push_back({t.spec().ToString(), t.dtype(), std::move(bytes)});
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
    outcome.error = e.what();
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

// How far two elements may be apart, of numbers around 1 and below.
double Tolerance(DType t) {
  if (!IsFloating(t)) return 0;
  return t == DType::kF64 ? 1e-12 : t == DType::kF32 ? 2e-5 : t == DType::kF16 ? 4e-3 : 3e-2;
}
enum class Match { kBits, kNear, kNot, kNoKernel };
// A NaN is a NaN: processors differ in its sign and payload. `where`: the first difference, if any,
// or the one that is too large, which it is beyond `least` too.
Match CompareValues(const Held& here, const Held& there, double least, std::string* where) {
  if (here.spec != there.spec || here.bytes.size() != there.bytes.size()) return Match::kNot;
  Match match = Match::kBits;
  VisitDType(here.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    for (size_t i = 0; match != Match::kNot && i < here.bytes.size(); i += sizeof(T)) {
      T a, b;
      std::memcpy(&a, &here.bytes[i], sizeof(T));
      std::memcpy(&b, &there.bytes[i], sizeof(T));
      if (std::memcmp(&a, &b, sizeof(T)) == 0) continue;
      const auto x = static_cast<double>(AsNumber(a)), y = static_cast<double>(AsNumber(b));
      if (std::isnan(x) && std::isnan(y)) continue;
      const double most = std::max(least, Tolerance(here.dtype)) * std::max(1.0, std::fabs(x));
      match = x == y || std::fabs(x - y) <= most ? Match::kNear : Match::kNot;
      if (!where->empty() && match != Match::kNot) continue;
      *where = absl::StrFormat("element %d of %s %s: %a on the CPU, %a there", i / sizeof(T),
                               Name(here.dtype), here.spec, x, y);
    }
  });
  return match;
}
Match Compare(const Outcome& here, const Outcome& there, bool same_errors, double least,
              std::string* where) {
  if (there.error.find("no kernel is registered") != std::string::npos) return Match::kNoKernel;
  const bool errors =
      same_errors ? here.error == there.error : here.error.empty() == there.error.empty();
  if (!errors || here.values.size() != there.values.size()) return Match::kNot;
  Match match = Match::kBits;
  for (size_t i = 0; i < here.values.size() && match != Match::kNot; ++i) {
    match = std::max(match, CompareValues(here.values[i], there.values[i], least, where));
  }
  return match;
}
std::string Told(const Outcome& o) {
  if (!o.error.empty()) return o.error;
  return o.values.empty() ? "nothing" : o.values.front().spec;
}

// Whether all samples are in the op's domain with values on both sides of 0.
bool TakesNegative(const VerifyCase& c) {
  absl::Status status;
  const auto all = RunCase(c, 1, DeviceType::kCpu, false, &status);
  if (!status.ok()) return false;
  for (const Outcome& o : all[0]) {
    if (!o.error.empty()) return false;
  }
  return true;
}

// What a case came to, over all of its calls: the worst, and how many were compared.
struct Tally {
  Match worst = Match::kBits;
  std::string where;  // the first difference
  int64_t compared = 0, refused = 0;
};
Tally CompareCase(const VerifyCase& c, int64_t ranks, DeviceType device, double least = 0) {
  Tally tally;
  const bool positive = !TakesNegative(c);
  absl::Status status;
  const auto here = RunCase(c, ranks, DeviceType::kCpu, positive, &status);
  EXPECT_TRUE(status.ok()) << status;
  const auto there = RunCase(c, ranks, device, positive, &status);
  EXPECT_TRUE(status.ok()) << status;
  for (size_t r = 0; status.ok() && r < here.size(); ++r) {
    EXPECT_EQ(here[r].size(), there[r].size());
    for (size_t k = 0; k < here[r].size(); ++k) {
      ++(here[r][k].error.empty() ? tally.compared : tally.refused);
      const Match match =
          Compare(here[r][k], there[r][k], testing::HasCpuBits(device), least, &tally.where);
      if (match == Match::kNot && tally.worst != Match::kNot) {
        ADD_FAILURE() << c.op << ", rank " << r << " of " << ranks << ", call " << k << ": "
                      << Told(here[r][k]) << " on the CPU, " << Told(there[r][k]) << " there; "
                      << tally.where;
      }
      tally.worst = std::max(tally.worst, match);
    }
  }
  return tally;
}

// Lines "op: missing" and "op: near" of the device's list.
std::map<std::string, Match> ReadList(DeviceType device) {
  std::map<std::string, Match> list;
  if (testing::HasCpuBits(device)) return list;
  const char* const folder = std::getenv("DT_TEST_DATA");  // of scripts/gpu_bundle
  std::ifstream file(
      absl::StrCat(folder != nullptr ? folder : DT_TEST_DATA, "/", DeviceName(device), "_ops.txt"));
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.empty() || line[0] == '#' || colon == std::string::npos) continue;
    list[line.substr(0, colon)] =
        line.substr(colon + 2) == "missing" ? Match::kNoKernel : Match::kNear;
  }
  EXPECT_FALSE(list.empty()) << "no list for " << DeviceName(device);
  return list;
}

TEST(FarBits, EveryOpGivesTheBitsOfTheCpu) {
  const DeviceType device = testing::RemoteDevice();
  const std::map<std::string, Match> list = ReadList(device);
  int64_t calls = 0, refused = 0, missing = 0, near = 0;
  size_t number = 0;
  for (const VerifyCase& c : VerifyCases()) {
    const size_t turn = number++;
    if (!testing::InTurn(turn, 4) || (!list.empty() && !testing::InPart(turn, 8))) continue;
    SCOPED_TRACE(c.op);
    Match worst = Match::kBits;
    std::string where;
    for (const int64_t ranks : {1, 4}) {
      const Tally tally = CompareCase(c, ranks, device);
      EXPECT_GT(tally.compared, 0) << "on " << ranks << " ranks nothing was computed";
      if (where.empty()) where = tally.where;
      calls += tally.compared;
      refused += tally.refused;
      worst = std::max(worst, tally.worst);
    }
    missing += worst == Match::kNoKernel;
    near += worst == Match::kNear;
    const auto known = list.find(c.op);
    const Match at_worst = known == list.end() ? Match::kBits : known->second;
    if (worst == Match::kNear) {
      EXPECT_EQ(at_worst, Match::kNear)
          << c.op << ": not the CPU's bits, and not on the list; " << where;
    } else if (worst == Match::kNoKernel) {
      EXPECT_EQ(at_worst, Match::kNoKernel) << c.op << ": has no kernel, and is not on the list";
    } else if (at_worst == Match::kNoKernel) {
      ADD_FAILURE() << c.op << " has a kernel now: take it off the list";
    }
  }
  std::printf("%lld calls, %lld refused on both; of the ops %lld near, %lld without a kernel\n",
              static_cast<long long>(calls), static_cast<long long>(refused),
              static_cast<long long>(near), static_cast<long long>(missing));
  if (!list.empty()) return;
  EXPECT_GT(calls, 5000 / testing::Thin(8));
  EXPECT_LT(refused * 20, calls);
}

// The samples of a case, whose floats are float64, in another dtype, where its kernel takes that.
VerifyCase InDType(const VerifyCase& c, DType dtype) {
  VerifyCase other{.op = c.op, .samples = {}};
  const Kernel* const kernel = FindHostKernel(c.op);
  if (kernel == nullptr || (kernel->dtypes & DTypeBit(dtype)) == 0) return other;
  for (VerifySample sample : c.samples) {
    bool floats = false;
    for (VerifyInput& in : sample.inputs) {
      if (in.dtype != DType::kF64) continue;
      in.dtype = dtype;
      floats = true;
    }
    if (floats) other.samples.push_back(std::move(sample));
  }
  return other;
}

// Of these there is no list: what is computed wider may be rounded the other way.
TEST(FarBits, FewerBitsAreNearTheCpu) {
  const DeviceType device = testing::RemoteDevice();
  int64_t calls = 0, ops = 0;
  size_t number = 0;
  for (const VerifyCase& c : VerifyCases()) {
    const size_t turn = number++;
    if (!testing::InTurn(turn, 4)) continue;
    if (!testing::HasCpuBits(device) && !testing::InPart(turn, 8)) continue;
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      const VerifyCase in = InDType(c, dtype);
      if (in.samples.empty()) continue;
      SCOPED_TRACE(absl::StrCat(c.op, " in ", std::string(Name(dtype))));
      // Statistics may have more bits than what they are of.
      const Tally tally = CompareCase(in, 1, device, Tolerance(dtype));
      EXPECT_NE(tally.worst, Match::kNoKernel) << "no kernel takes it there";
      if (tally.compared == 0) {  // statistics of 16-bit inputs, say, are of another dtype
        std::printf("left out: %s in %s: refused\n", c.op.c_str(), Name(dtype).data());
        continue;
      }
      calls += tally.compared;
      ++ops;
    }
  }
  std::printf("%lld calls of %lld ops and dtypes\n", static_cast<long long>(calls),
              static_cast<long long>(ops));
  if (testing::HasCpuBits(device)) {
    EXPECT_GT(ops, 600 / testing::Thin(4));
  }
}

// Products of floats in every layout: operands transposed, cut out of wider ones, broadcast over a
// batch, and sizes that no tile divides.
TEST(FarBits, ProductsOfEveryTypeAreNearTheCpu) {
  const DeviceType device = testing::RemoteDevice();
  const auto products = [](DType dtype) {
    const auto make = [dtype](IntSpan shape, int64_t salt) {
      std::vector<double> values;
      for (int64_t i = 0; i < Numel(shape); ++i) {
        values.push_back(static_cast<double>((i * 37 + salt * 11) % 101 - 50) / 64);
      }
      return FromVector(values, shape, {.dtype = dtype});
    };
    std::vector<DTensor> all;
    for (const auto& [m, k, n] : {std::array<int64_t, 3>{1, 5, 7}, {16, 64, 8}, {33, 70, 17}}) {
      const DTensor a = make({m, k}, 1), b = make({k, n}, 2);
      const DTensor at = make({k, m}, 3), bt = make({n, k}, 4);
      all.push_back(matmul(a, b));
      all.push_back(matmul(transpose(at, 0, 1), b));
      all.push_back(matmul(a, transpose(bt, 0, 1)));
      all.push_back(matmul(transpose(at, 0, 1), transpose(bt, 0, 1)));
      all.push_back(linear(a, bt, make({n}, 5)));
      all.push_back(matmul(make({3, m, k}, 6), make({3, k, n}, 7)));
      all.push_back(matmul(make({2, 1, m, k}, 8), make({3, k, n}, 9)));
      all.push_back(matmul(slice(make({m, k + 3}, 10), 1, 2, k + 2), b));
      all.push_back(matmul(make({k}, 11), b));
      for (const Activation activation :
           {Activation::kRelu, Activation::kGelu, Activation::kGeluTanh, Activation::kSilu}) {
        const DTensor bias = make({n}, 5), leaf = make({m, k}, 1).RequiresGrad();
        all.push_back(linear_activation(a, bt, bias, activation));
        all.push_back(linear_activation(a, bt, {}, activation));
        for (const DTensor& added : {bias, DTensor()}) {  // the product is kept
          const DTensor y = linear_activation(leaf, bt, added, activation);
          y.Backward(make({m, n}, 12));
          all.push_back(y.Detach());
        }
        all.push_back(leaf.grad());
      }
    }
    return all;
  };
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    Outcome here, there;
    for (const auto& [on, to] : {std::pair{DeviceType::kCpu, &here}, {device, &there}}) {
      SpmdOptions options;
      options.device = on;
      const absl::Status status = RunSpmd(
          1,
          [&, to = to](RankContext&) -> absl::Status {
            for (const DTensor& t : products(dtype)) Add(t, to);
            return absl::OkStatus();
          },
          options);
      ASSERT_TRUE(status.ok()) << status;
    }
    ASSERT_EQ(here.values.size(), 87u);
    std::string where;
    const Match match = Compare(here, there, true, 0, &where);
    EXPECT_LE(match, testing::HasCpuBits(device) ? Match::kBits : Match::kNear)
        << Name(dtype) << ": " << where;
  }
}

}  // namespace
}  // namespace dtensor::far_bits_test
