#include "tests/mesh/conformance.h"

#include <algorithm>
#include <cstdlib>
#include <ostream>
#include <random>

#include "absl/strings/str_cat.h"
#include "dtensor/tensor/status.h"
#include "tests/common/watchdog.h"

namespace dtensor::conformance {

std::ostream& operator<<(std::ostream& out, const Setting& setting) { return out << setting.name; }

std::vector<Setting> SettingsWithPeers() {
  std::vector<Setting> settings = Settings();
  std::erase_if(settings, [](const Setting& s) { return !s.caps.peers; });
  return settings;
}

std::string NameOf(const ::testing::TestParamInfo<std::tuple<Setting, int>>& info) {
  return absl::StrCat(std::get<0>(info.param).name, std::get<1>(info.param));
}

absl::Status OnRanks::Run(Body body, absl::Duration timeout) const {
  const Watchdog watchdog(::testing::UnitTest::GetInstance()->current_test_info()->name(),
                          std::chrono::seconds(200));
  return std::get<0>(GetParam())
      .run(
          n(),
          [&](RankContext& context) -> absl::Status {
            const DeviceMesh mesh({n()}, {"tp"});
            DT_ASSIGN_OR_RETURN(Comm * comm, context.CommFor(mesh, {0}));
            return body(context, *comm);
          },
          timeout);
}

void OnRanks::RunWell(Body body) const {
  const absl::Status status = Run([&](RankContext& context, Comm& comm) {
    absl::Status mine = body(context, comm);
    // Who sees a wrong number stops the others, which may wait for it.
    return mine.ok() && ::testing::Test::HasFailure() ? absl::InternalError("wrong") : mine;
  });
  EXPECT_TRUE(status.ok()) << status;
}

double Value(int64_t r, int64_t i, DType t) {
  return t == DType::kBool ? (r + i) % 3 == 0 : static_cast<double>((r * 7 + i) % 3 + 1);
}

namespace {

// Where the rank makes its tensors.
Tensor Here(const Tensor& t) { return ValueOrThrow(t.To(RankContext::Current().device())); }

Tensor OnHost(IntSpan shape, DType t, absl::FunctionRef<double(int64_t)> value) {
  std::vector<double> values(Numel(shape));
  for (size_t i = 0; i < values.size(); ++i) values[i] = value(static_cast<int64_t>(i));
  return ValueOrThrow(Tensor::FromVector(values, shape, t));
}

}  // namespace

Tensor Make(IntSpan shape, DType t, absl::FunctionRef<double(int64_t)> value, bool strided) {
  Tensor dense = Here(OnHost(shape, t, value));
  if (!strided || shape.size() < 2) return dense;
  Shape turned(shape.begin(), shape.end());
  std::swap(turned[0], turned[1]);
  Tensor result = ValueOrThrow(Tensor::Empty(turned, t, dense.device())).Transpose(0, 1);
  Copy(dense, result);
  return result;
}

Tensor Input(int64_t r, IntSpan shape, DType t, bool strided) {
  return Make(shape, t, [&](int64_t i) { return Value(r, i, t); }, strided);
}

Tensor Full(IntSpan shape, DType t, double value) {
  return Here(ValueOrThrow(Tensor::Full(shape, t, value)));
}

double Reduced(int64_t n, int64_t i, DType t, ReduceOp op) {
  double acc = Value(0, i, t);
  for (int64_t r = 1; r < n; ++r) {
    const double x = Value(r, i, t);
    if (op == ReduceOp::kMax) acc = std::max(acc, x);
    if (op == ReduceOp::kMin) acc = std::min(acc, x);
    if (op == ReduceOp::kProd) acc *= x;
    if (op == ReduceOp::kSum || op == ReduceOp::kAvg) acc += x;
  }
  return op == ReduceOp::kAvg ? acc / static_cast<double>(n) : acc;
}

void ExpectValues(const Tensor& tensor, absl::FunctionRef<double(int64_t)> value) {
  const std::vector<double> got = tensor.ToVector<double>();
  const std::vector<double> expected =
      OnHost(tensor.shape(), tensor.dtype(), value).ToVector<double>();
  const auto [at, other] = std::mismatch(got.begin(), got.end(), expected.begin());
  if (at == got.end()) return;
  ADD_FAILURE() << "element " << at - got.begin() << " is " << *at << ", not " << *other;
}

std::vector<int64_t> UnevenCounts(int64_t n, int64_t scale) {
  std::vector<int64_t> counts;
  for (int64_t r = 0; r < n; ++r) counts.push_back(r % 3 == 1 ? 0 : (r % 2 + 1) * scale);
  return counts;
}

int64_t RowsBefore(const std::vector<int64_t>& counts, int64_t rank) {
  int64_t rows = 0;
  for (int64_t r = 0; r < rank; ++r) rows += counts[r];
  return rows;
}

uint32_t Seed() {
  static std::mt19937 seeds(
      std::getenv("DT_SEED") != nullptr
          ? static_cast<uint32_t>(std::strtoul(std::getenv("DT_SEED"), nullptr, 10))
          : std::random_device{}());
  return static_cast<uint32_t>(seeds());
}

absl::Status AllReduce(Comm& comm, int64_t size, DType t, ReduceOp op) {
  const Tensor x = Full({size}, t, 1);
  return comm.AllReduce(x, x, op).Wait();
}

}  // namespace dtensor::conformance
