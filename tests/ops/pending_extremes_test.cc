// Pending maxima and minima, and pending sums, where numbers are at their ends: integers that wrap,
// infinities, and ranks that have nothing. A mesh gives what one rank gives; what may wait does.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "dtensor/mesh/comm_trace.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"

namespace dtensor::pending_extremes_test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
using Values64 = std::vector<double>;
using Fn = std::function<DTensor(const DTensor&)>;

bool Same(const Values64& a, const Values64& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] != b[i] && !(std::isnan(a[i]) && std::isnan(b[i]))) return false;
  }
  return true;
}

// A number on every rank of t's mesh.
DTensor Filled(const DTensor& t, double value) {
  return FromVector(Values64{value}, {}, {.dtype = t.dtype(), .mesh = t.mesh()});
}

// fn(x) with x in S(0) on 4 ranks (six elements leave the last one nothing) and cut by both dims of
// 2 x 2 is what one rank gives.
void ExpectOneRanks(const char* name, DType dtype, const Values64& x, const Fn& fn) {
  const Shape shape = {static_cast<int64_t>(x.size())};
  const Values64 want = fn(FromVector(x, shape, {.dtype = dtype})).ToVector<double>();
  const absl::Status status = RunSpmd(4, [&](RankContext&) -> absl::Status {
    const std::pair<DeviceMesh, Placements> layouts[] = {
        {DeviceMesh({4}), {Shard(0)}},
        {DeviceMesh({2, 2}), {Shard(0), Shard(0)}},
        {DeviceMesh({2, 2}), {Replicate(), Shard(0)}}};
    for (const auto& [mesh, placements] : layouts) {
      const DTensor placed = FromVector(x, shape, {dtype, mesh, placements});
      const DTensor y = fn(placed);
      const Values64 got = y.ToVector<double>();
      EXPECT_TRUE(Same(got, want))
          << name << " on " << y.spec().ToString() << ": " << got[0] << ", must be " << want[0];
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << name << ": " << status;
}

// 0 is more than -0 wherever it stands, and whatever makes zeros of other numbers keeps their
// order: which zero it is decides about the sign of what is divided by it.
TEST(PendingExtremes, ZerosAreInOrder) {
  const Values64 drawn[] = {
      {0.0, -0.0, -0.0, -0.0, -0.0, -0.0}, {-0.0, -0.0, -0.0, -0.0, 0.0, -0.0},
      {-0.0, 0.0, 0.0, 0.0, 0.0, 0.0},     {0.0, 0.0, 0.0, 0.0, 0.0, -0.0},
      {-0.3, -0.0, -0.3, -0.2, -0.1, 0.0}, {0.3, -0.0, 0.2, 0.0, 0.4, 0.1},
      {-0.0, -0.3, -0.2, -0.1, -0.3, -2},  {0.0, 0.3, 0.2, -0.0, 0.3, 2}};
  const std::pair<const char*, Fn> makers[] = {
      {"itself", [](const DTensor& v) { return v; }},
      {"neg", [](const DTensor& v) { return neg(v); }},
      {"floor", [](const DTensor& v) { return floor(v); }},
      {"ceil", [](const DTensor& v) { return ceil(v); }},
      {"trunc", [](const DTensor& v) { return trunc(v); }},
      {"round", [](const DTensor& v) { return round(v); }},
      {"floor of neg", [](const DTensor& v) { return floor(neg(v)); }},
      {"relu", [](const DTensor& v) { return relu(v); }},
      {"clamp to 0", [](const DTensor& v) { return clamp(v, 0.0, 1.0); }},
      {"clamp to -0", [](const DTensor& v) { return clamp(v, -1.0, -0.0); }},
      {"hardtanh", [](const DTensor& v) { return hardtanh(v, 0.0, 1.0); }},
      {"hardshrink", [](const DTensor& v) { return hardshrink(v, 0.25); }},
      {"softshrink", [](const DTensor& v) { return softshrink(v, 0.25); }},
      {"tanhshrink", [](const DTensor& v) { return floor(neg(tanhshrink(v))); }},
      {"times 2^-200", [](const DTensor& v) { return mul(v, 0x1p-200); }},
      {"times -2^-200", [](const DTensor& v) { return mul(v, -0x1p-200); }},
      {"maximum with 0", [](const DTensor& v) { return maximum(v, Filled(v, 0.0)); }},
      {"minimum with -0", [](const DTensor& v) { return minimum(v, Filled(v, -0.0)); }},
      {"fmax with -0", [](const DTensor& v) { return fmax(v, Filled(v, -0.0)); }},
      {"fmin with 0", [](const DTensor& v) { return fmin(v, Filled(v, 0.0)); }}};
  for (const DType t : {DType::kF32, DType::kF64, DType::kBF16}) {
    for (const Values64& x : drawn) {
      for (const auto& [name, make] : makers) {
        ExpectOneRanks(name, t, x, [&](const DTensor& v) { return reciprocal(make(amax(v))); });
        ExpectOneRanks(name, t, x, [&](const DTensor& v) { return reciprocal(make(amin(v))); });
      }
    }
  }
  // Long rows too, of which several elements are looked at together.
  for (const double zero : {0.0, -0.0}) {
    for (const int64_t at : {0, 7, 31, 64, 99}) {
      Values64 x(100, -zero);
      x[at] = zero;
      const DTensor row = FromVector(x, {100});
      EXPECT_FALSE(std::signbit(amax(row).Item())) << at;
      EXPECT_TRUE(std::signbit(amin(row).Item())) << at;
    }
  }
}

TEST(PendingExtremes, IntegersWrapOnRanksThatHaveNothing) {
  const Values64 x = {1, 2, 3, 4, 5, 6};
  for (const DType t : {DType::kI32, DType::kI64}) {
    ExpectOneRanks("amax - 1", t, x, [](const DTensor& v) { return amax(v) - 1; });
    ExpectOneRanks("amax * 3", t, x, [](const DTensor& v) { return amax(v) * 3; });
    ExpectOneRanks("amax * -1", t, x, [](const DTensor& v) { return amax(v) * -1; });
    ExpectOneRanks("neg", t, x, [](const DTensor& v) { return neg(amax(v)); });
    ExpectOneRanks("10 - amax", t, x, [](const DTensor& v) { return 10 - amax(v); });
    ExpectOneRanks("amax + tensor", t, x,
                   [](const DTensor& v) { return add(amax(v), Filled(amax(v), -5)); });
    ExpectOneRanks("relu", t, x, [](const DTensor& v) { return relu(amax(v)); });
    ExpectOneRanks("to a narrower integer", t, x,
                   [](const DTensor& v) { return to(amax(v), DType::kU8); });
    ExpectOneRanks("in place", t, x, [](const DTensor& v) {
      DTensor y = amax(v).Redistribute(Placements(v.mesh().ndim()));
      return add_(y, Filled(y, -7));
    });
  }
  const Values64 bytes = {10, 1, 2, 2, 0, 3};
  ExpectOneRanks("uint8 - 3", DType::kU8, bytes, [](const DTensor& v) { return amax(v) - 3; });
  ExpectOneRanks("uint8 + 250", DType::kU8, bytes, [](const DTensor& v) { return amax(v) + 250; });
  ExpectOneRanks("neg uint8", DType::kU8, bytes, [](const DTensor& v) { return neg(amax(v)); });
}

TEST(PendingExtremes, InfiniteNumbersMeetInfinities) {
  const Values64 x = {1, 2, 3, 4, 5, 6};
  for (const double s : {kInf, -kInf, 0., 1e300, -2.}) {
    for (const DType t : {DType::kF64, DType::kF32}) {
      ExpectOneRanks("+", t, x, [s](const DTensor& v) { return amax(v) + s; });
      ExpectOneRanks("*", t, x, [s](const DTensor& v) { return amax(v) * s; });
      ExpectOneRanks("/", t, x, [s](const DTensor& v) { return amax(v) / s; });
      ExpectOneRanks("s -", t, x, [s](const DTensor& v) { return s - amax(v); });
      ExpectOneRanks("+ tensor", t, x,
                     [s](const DTensor& v) { return add(amax(v), Filled(amax(v), s)); });
    }
  }
  const Values64 nan = {1, std::nan(""), 3, 4, 5, 6};
  ExpectOneRanks("NaN > 2", DType::kF64, nan, [](const DTensor& v) { return gt(amax(v), 2); });
  ExpectOneRanks("NaN < 2", DType::kF64, nan, [](const DTensor& v) { return lt(amax(v), 2); });
}

// What amax of x [6] cut over a mesh dim gives there, after `fn`: over the one dim of 2, over both
// of 2 x 2, and over one of them where the other has it all.
void ExpectKept(DType dtype, const Fn& fn, const Placement& want) {
  const auto expect = [&](const Dims& shape, const std::vector<bool>& cut) {
    const absl::Status status = RunSpmd(Numel(shape), [&](RankContext&) -> absl::Status {
      const Values64 x = {1, 2, 3, 4, 5, 6};
      Placements in, out;
      for (const bool c : cut) {
        in.push_back(c ? Shard(0) : Replicate());
        out.push_back(c ? want : Replicate());
      }
      DT_ASSIGN_OR_RETURN(const DeviceMesh mesh, DeviceMesh::Create(shape));
      CommTrace trace;
      const DTensor y = fn(FromVector(x, {6}, {dtype, mesh, in}));
      EXPECT_EQ(y.placements(), out) << ToString(in) << " gives " << ToString(y.placements());
      EXPECT_EQ(trace.TotalCount() > 0, want == Replicate()) << trace.ToString();
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  };
  expect({2}, {true});
  expect({2, 2}, {true, true});
  expect({2, 2}, {false, true});
  expect({2, 2}, {true, false});
}

TEST(PendingExtremes, WhatMayWaitWaits) {
  const DType f = DType::kF32, i = DType::kI32;
  const Placement max = Partial(ReduceOp::kMax), min = Partial(ReduceOp::kMin);
  const auto least = [](const DTensor& v) { return neg(amax(neg(v))); };  // P(min)
  ExpectKept(f, [](const DTensor& v) { return amax(v) * 2; }, max);
  ExpectKept(f, [](const DTensor& v) { return amax(v) * -2; }, min);
  ExpectKept(f, [](const DTensor& v) { return amax(v) / 4; }, max);
  ExpectKept(f, [](const DTensor& v) { return amax(v) / -4 + 1; }, min);
  ExpectKept(f, [](const DTensor& v) { return 1 - amax(v); }, min);
  ExpectKept(f, [](const DTensor& v) { return maximum(amax(v), amax(v * v)); }, max);
  ExpectKept(f, [&](const DTensor& v) { return minimum(least(v), least(v * v)); }, min);
  ExpectKept(
      f, [](const DTensor& v) { return cat({amax(v, {0}, true), amax(v * v, {0}, true)}, 0); },
      max);
  ExpectKept(f, [](const DTensor& v) { return to(amax(v), DType::kBF16); }, max);
  ExpectKept(i, [](const DTensor& v) { return to(amax(v), DType::kI64); }, max);
  ExpectKept(i, [](const DTensor& v) { return to(amax(v), DType::kF64); }, max);
  // "Is everything below 9?" is a byte to reduce instead of four.
  ExpectKept(f, [](const DTensor& v) { return lt(amax(v), 9); }, min);
  ExpectKept(f, [&](const DTensor& v) { return ge(least(v), Filled(v, 2)); }, min);
  ExpectKept(f, [&](const DTensor& v) { return le(Filled(v, 2), least(v)); }, min);
  ExpectKept(f, [&](const DTensor& v) { return log(least(v)); }, min);
  // Not: what has no value of its own would turn into one.
  ExpectKept(f, [](const DTensor& v) { return to(amax(v), DType::kI64); }, Replicate());
  ExpectKept(i, [](const DTensor& v) { return amax(v) + 1; }, Replicate());
  ExpectKept(f, [](const DTensor& v) { return gt(amax(v), 2); }, Replicate());
}

// A value on every rank may be taken as a sum (the value on one rank, zeros on the others) where a
// pending one is added to it; but zeros times infinity are no zeros.
TEST(PendingExtremes, ZerosThatADispatchPutsInMeetNoInfinity) {
  const absl::Status status = RunSpmd(4, [](RankContext&) -> absl::Status {
    const std::pair<DeviceMesh, Placements> meshes[] = {
        {DeviceMesh({4}), {Partial()}},
        {DeviceMesh({2, 2}), {Partial(), Partial()}},
        {DeviceMesh({2, 2}), {Replicate(), Partial()}}};
    for (const auto& [mesh, pending] : meshes) {
      const TensorOptions options = {DType::kF64, mesh, {}};
      const DTensor x = FromVector(Values64{1, 1}, {1, 2}, options);
      const DTensor w = FromVector(Values64{kInf, 1, 1, 1}, {2, 2}, options);
      const DTensor b = FromVector(Values64{1, 2}, {2}, options).Redistribute(pending);
      EXPECT_EQ(linear(x, w, b).ToVector<double>(), (Values64{kInf, 4}));
      // Where the zeros stay among themselves nothing has to be reduced.
      CommTrace trace;
      const DTensor sum = add(x, b);
      EXPECT_EQ(sum.placements()[mesh.ndim() - 1], Partial());
      EXPECT_EQ(where(lt(x, 2), b, x).placements()[mesh.ndim() - 1], Partial());
      EXPECT_EQ(trace.TotalCount(), 0) << trace.ToString();
      EXPECT_EQ(sum.ToVector<double>(), (Values64{2, 3}));
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace dtensor::pending_extremes_test
