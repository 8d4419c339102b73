// What a communicator backend is: the tests of conformance_*.cc, for every setting that a program
// lists. The local backend and its limited forms: conformance_test.cc.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "absl/functional/function_ref.h"
#include "dtensor/mesh/comm.h"
#include "dtensor/mesh/launch.h"
#include "gtest/gtest.h"
#include "tests/common/thin.h"

namespace dtensor::conformance {

using SpmdBody = absl::FunctionRef<absl::Status(RankContext&)>;

// A way to run ranks that have such communicators.
struct Setting {
  std::string name;
  CommCaps caps;
  // As RunSpmd. Without peers one rank runs, the last.
  std::function<absl::Status(int64_t ranks, SpmdBody body, absl::Duration timeout)> run;
  // The flight log has a call as done when it is queued: its peers read it in order from there on.
  bool done_when_queued = false;
};
std::ostream& operator<<(std::ostream& out, const Setting& setting);

// Of the program.
std::vector<Setting> Settings();
std::vector<Setting> SettingsWithPeers();

// Tests get the group of all ranks, called "tp". What they expect, they expect on each rank: ranks
// need not share memory.
class OnRanks : public ::testing::TestWithParam<std::tuple<Setting, int>> {
 protected:
  using Body = absl::FunctionRef<absl::Status(RankContext&, Comm&)>;
  const Setting& setting() const { return std::get<0>(GetParam()); }
  const CommCaps& caps() const { return setting().caps; }
  int n() const { return std::get<1>(GetParam()); }
  absl::Status Run(Body body, absl::Duration timeout = absl::Seconds(60)) const;
  // The same where nothing goes wrong.
  void RunWell(Body body) const;
};

std::string NameOf(const ::testing::TestParamInfo<std::tuple<Setting, int>>& info);

inline constexpr DType kDTypes[] = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16,
                                    DType::kI64, DType::kI32, DType::kU8,   DType::kBool};
inline constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kProd,
                                    ReduceOp::kAvg};

// Element i of rank r: small integers, exact in every dtype, also multiplied.
double Value(int64_t r, int64_t i, DType t);
// A tensor whose i-th element, in row-major order, is value(i); strided: transposed in memory.
Tensor Make(IntSpan shape, DType t, absl::FunctionRef<double(int64_t)> value, bool strided = false);
// That of rank r.
Tensor Input(int64_t r, IntSpan shape, DType t, bool strided = false);
Tensor Full(IntSpan shape, DType t, double value);
// Element i reduced over n ranks.
double Reduced(int64_t n, int64_t i, DType t, ReduceOp op);
// Fails unless the i-th element is value(i), as the dtype holds it.
void ExpectValues(const Tensor& tensor, absl::FunctionRef<double(int64_t)> value);

// Of the cases of a test those that it tries: all, or under a sanitizer every n-th.
class Sample {
 public:
  explicit Sample(int64_t n) : n_(testing::Thin(n)) {}
  bool operator()() { return seen_++ % n_ == 0; }

 private:
  const int64_t n_;
  int64_t seen_ = 0;
};

// Row counts per rank: uneven, some 0.
std::vector<int64_t> UnevenCounts(int64_t n, int64_t scale);
int64_t RowsBefore(const std::vector<int64_t>& counts, int64_t rank);

// Another one every time, and the same on all ranks: DT_SEED, where a program of several processes
// has set it.
uint32_t Seed();

absl::Status AllReduce(Comm& comm, int64_t size, DType t = DType::kI32,
                       ReduceOp op = ReduceOp::kSum);

}  // namespace dtensor::conformance
