#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/ops/ops.h"
#include "dtensor/watch.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/ops/gradcheck.h"
#include "tests/ops/sharded.h"

namespace dtensor::testing::matmul_test {
namespace {

DTensor Matmul(const std::vector<DTensor>& x) { return matmul(x[0], x[1]); }
DTensor Linear(const std::vector<DTensor>& x) { return linear(x[0], x[1], x[2]); }
DTensor LinearNoBias(const std::vector<DTensor>& x) { return linear(x[0], x[1]); }

// Row-major [m, k] x [k, n].
std::vector<double> Product(const std::vector<double>& a, const std::vector<double>& b, int64_t m,
                            int64_t k, int64_t n) {
  std::vector<double> c(m * n, 0);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t l = 0; l < k; ++l) c[i * n + j] += a[i * k + l] * b[l * n + j];
    }
  }
  return c;
}

TEST(Matmul, MatrixByMatrix) {
  const Operand x = Float({4, 3}, 1), w = Float({3, 5}, 2);
  const DTensor y = Matmul(MakeAll({x, w}));
  EXPECT_EQ(y.shape(), (Shape{4, 5}));
  ExpectClose(y.ToVector<double>(), Product(x.values, w.values, 4, 3, 5));
}

TEST(Matmul, EveryCombinationOfDims) {
  struct Form {
    Shape x, w, y;
  };
  const std::vector<Form> forms = {
      {{3}, {3}, {}},
      {{4, 3}, {3}, {4}},
      {{2, 4, 3}, {3}, {2, 4}},
      {{3}, {3, 5}, {5}},
      {{2, 4, 3}, {3, 5}, {2, 4, 5}},
      {{3}, {2, 3, 5}, {2, 5}},
      {{4, 3}, {2, 3, 5}, {2, 4, 5}},
      {{2, 4, 3}, {2, 3, 5}, {2, 4, 5}},
      {{2, 4, 3}, {1, 3, 5}, {2, 4, 5}},
      {{2, 1, 4, 3}, {3, 3, 2}, {2, 3, 4, 2}},
      {{0, 0}, {5, 0, 0}, {5, 0, 0}},
      {{5, 5, 0}, {0, 5}, {5, 5, 5}},
  };
  for (const Form& f : forms) {
    SCOPED_TRACE(ToString(f.x) + " x " + ToString(f.w));
    const Operand x = Float(f.x, 3), w = Float(f.w, 4);
    EXPECT_EQ(Matmul(MakeAll({x, w})).shape(), f.y);
    CheckGradients(Matmul, {x, w});
  }
}

TEST(Matmul, BatchesAreIndependent) {
  const Operand x = Float({2, 4, 3}, 5), w = Float({2, 3, 5}, 6);
  const std::vector<double> y = Matmul(MakeAll({x, w})).ToVector<double>();
  for (int64_t b = 0; b < 2; ++b) {
    const std::vector<double> xb(x.values.begin() + b * 12, x.values.begin() + (b + 1) * 12);
    const std::vector<double> wb(w.values.begin() + b * 15, w.values.begin() + (b + 1) * 15);
    ExpectClose({y.begin() + b * 20, y.begin() + (b + 1) * 20}, Product(xb, wb, 4, 3, 5));
  }
}

TEST(Matmul, Integers) {
  const DTensor x = Ints({2, 2}, {1, 2, 3, 4}).Make();
  EXPECT_EQ(matmul(x, x).ToVector<int64_t>(), (std::vector<int64_t>{7, 10, 15, 22}));
}

TEST(Matmul, Sharded) {
  CheckSharded(Matmul, {Float({5, 4}, 1), Float({4, 3}, 2)});
  CheckSharded(Matmul, {Float({2, 3, 4}, 1), Float({4, 5}, 2)});
  CheckSharded(Matmul, {Float({3, 4, 2}, 1), Float({3, 2, 5}, 2)});
  CheckSharded(Matmul, {Float({4}, 1), Float({4}, 2)});
}

// Batch dims are not flattened into one, in which a dim behind the first could not stay cut.
TEST(Matmul, EveryBatchDimMayStayCut) {
  CheckSharded(Matmul, {Float({2, 3, 2, 2}, 1), Float({2, 3, 2, 3}, 2)});
  CheckSharded(Matmul, {Float({2, 1, 2, 2}, 1), Float({3, 2, 3}, 2)});
  const absl::Status status = RunSpmd(4, [](RankContext&) -> absl::Status {
    const std::pair<DeviceMesh, Placements> layouts[] = {
        {DeviceMesh({4}), {Shard(1)}},
        {DeviceMesh({2, 2}), {Shard(0), Shard(1)}},
        {DeviceMesh({2, 2}), {Shard(1), Shard(1)}},
        {DeviceMesh({2, 2}), {Shard(1), Shard(0)}}};
    for (const auto& [mesh, placements] : layouts) {
      DTensor x =
          FromVector(Noise(3 * 8 * 20 * 8, 1), {3, 8, 20, 8}, {DType::kF64, mesh, placements});
      DTensor w =
          FromVector(Noise(3 * 8 * 8 * 20, 2), {3, 8, 8, 20}, {DType::kF64, mesh, placements});
      x.RequiresGrad();
      w.RequiresGrad();
      const CommTrace trace;
      const DTensor y = matmul(x, w);
      y.Backward(y.Detach());
      EXPECT_EQ(y.placements(), x.placements());
      EXPECT_EQ(trace.TotalCount(), 0) << trace.ToString();
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Linear, ValuesAndGradients) {
  const Operand x = Float({2, 3, 4}, 1), w = Float({5, 4}, 2), b = Float({5}, 3);
  const std::vector<double> y = Linear(MakeAll({x, w, b})).ToVector<double>();
  for (int64_t i = 0; i < 6; ++i) {
    for (int64_t j = 0; j < 5; ++j) {
      double want = b.values[j];
      for (int64_t k = 0; k < 4; ++k) want += x.values[i * 4 + k] * w.values[j * 4 + k];
      EXPECT_NEAR(y[i * 5 + j], want, 1e-12);
    }
  }
  CheckGradients(Linear, {x, w, b});
  CheckGradients(LinearNoBias, {x, w});
  CheckGradients(LinearNoBias, {Float({4}, 1), w});
  CheckGradients(Linear, {Float({0, 4}, 1), w, b});
  CheckGradients(LinearNoBias, {Float({3, 2}, 1), Float({2}, 2)});
}

TEST(Linear, OfOneOutput) {
  const DTensor x = FromVector<double>({1, 2, 3, 4}, {2, 2});
  const DTensor w = FromVector<double>({5, 6}, {2}), b = full({}, 0.5);
  EXPECT_THAT(linear(x, w).ToVector<double>(), ::testing::ElementsAre(17, 39));
  EXPECT_THAT(linear(x, w, b).ToVector<double>(), ::testing::ElementsAre(17.5, 39.5));
  EXPECT_EQ(linear(select(x, 0, 0), w, b).ndim(), 0);
  EXPECT_THAT(linear(x, unsqueeze(w, 0), b).ToVector<double>(), ::testing::ElementsAre(17.5, 39.5));
  EXPECT_THROW(linear(x, w, ones({1})), Error);
  CheckSharded(Linear, {Float({5, 4}, 1), Float({4}, 2), Float({}, 3)});
  CheckSharded(Linear, {Float({5, 4}, 1), Float({3, 4}, 2), Float({}, 3)});
}

TEST(Linear, Sharded) {
  CheckSharded(Linear, {Float({2, 3, 4}, 1), Float({5, 4}, 2), Float({5}, 3)});
  CheckSharded(LinearNoBias, {Float({3, 4}, 1), Float({5, 4}, 2)});
}

TEST(Linear, ColwiseThenRowwiseReducesOnce) {
  const absl::Status status = RunSpmd(2, [](RankContext&) {
    const DeviceMesh mesh({2}, {"tp"});
    const DTensor x = FromVector(Noise(8, 1), {2, 4}, {DType::kF64, mesh, {}});
    const DTensor up = FromVector(Noise(24, 2), {6, 4}, {DType::kF64, mesh, {Shard(0)}});
    const DTensor down = FromVector(Noise(24, 3), {4, 6}, {DType::kF64, mesh, {Shard(1)}});
    CommTrace trace;
    const DTensor y = linear(linear(x, up), down);
    EXPECT_EQ(y.placements()[0], Partial());
    EXPECT_EQ(trace.TotalCount(), 0) << trace.ToString();
    y.Redistribute({Replicate()});
    EXPECT_EQ(trace.TotalCount(), 1) << trace.ToString();
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

constexpr Activation kActivations[] = {Activation::kRelu, Activation::kGelu, Activation::kGeluTanh,
                                       Activation::kSilu};

DTensor TwoOps(const DTensor& x, const DTensor& w, const DTensor& b, Activation activation) {
  const DTensor y = linear(x, w, b);
  if (activation == Activation::kRelu) return relu(y);
  if (activation == Activation::kSilu) return silu(y);
  return gelu(y, activation == Activation::kGeluTanh);
}

// y, and where a gradient is wanted those of x, w and b.
using LinearFn = DTensor (*)(const DTensor&, const DTensor&, const DTensor&, Activation);
std::vector<std::vector<double>> ValuesOf(LinearFn fn, std::vector<DTensor> in, bool gradients,
                                          Activation activation) {
  for (DTensor& t : in) t = gradients && t.defined() ? clone(t).RequiresGrad() : t;
  const DTensor y = fn(in[0], in[1], in[2], activation);
  std::vector<std::vector<double>> all = {y.ToVector<double>()};
  if (!gradients) return all;
  y.Backward(to(FromVector(Noise(y.numel(), 9), y.shape()), y.dtype()));
  for (const DTensor& t : in) {
    if (t.defined()) all.push_back(t.grad().ToVector<double>());
  }
  return all;
}

// On CUDA the library does not round the product before the activation.
TEST(LinearActivation, IsTheTwoOps) {
  for (const DType t : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    // Rows of the product that the library keeps, and that it does not, and more than a tile has.
    for (const int64_t n : {16, 7, 70, 0}) {
      const auto make = [t](IntSpan shape, uint64_t seed) {
        return to(FromVector(Noise(Numel(shape), seed), shape), t);
      };
      const DTensor x = make({2, 40, 24}, 1), w = make({n, 24}, 2), b = make({n}, 3);
      const bool exact = x.local().device() != DeviceType::kCuda;
      const double tolerance = SizeOf(t) == 2 ? 4e-2 : t == DType::kF32 ? 1e-5 : 1e-12;
      for (const Activation a : kActivations) {
        for (const bool gradients : {false, true}) {
          for (const DTensor& bias : {b, DTensor()}) {
            const auto got = ValuesOf(&linear_activation, {x, w, bias}, gradients, a);
            const auto want = ValuesOf(&TwoOps, {x, w, bias}, gradients, a);
            ASSERT_EQ(got.size(), want.size());
            for (size_t i = 0; i < got.size(); ++i) {
              EXPECT_EQ(Differs(got[i], want[i], exact ? 0 : tolerance), "")
                  << Name(t) << " " << OpOf(a) << " n " << n << " value " << i;
            }
          }
        }
      }
    }
  }
}

// Also where the sum over k is pending, which the activation must not see.
TEST(LinearActivation, Sharded) {
  const auto check = [](auto fn) {
    CheckSharded(fn, {Float({2, 3, 4}, 1), Float({5, 4}, 2), Float({5}, 3)});
  };
  check(+[](const std::vector<DTensor>& x) {
    return linear_activation(x[0], x[1], x[2], Activation::kGelu);
  });
  check(+[](const std::vector<DTensor>& x) {
    return linear_activation(x[0], x[1], x[2], Activation::kRelu);
  });
  CheckSharded(
      +[](const std::vector<DTensor>& x) {
        return linear_activation(x[0], x[1], {}, Activation::kSilu);
      },
      {Float({3, 4}, 1), Float({5, 4}, 2)});
}

TEST(LinearActivation, StaysOneOpWhereTheSumIsWhole) {
  const absl::Status status = RunSpmd(2, [](RankContext&) {
    const DeviceMesh mesh({2}, {"tp"});
    const auto ops = [&](const Placement& of_x, const Placement& of_w, bool gradient,
                         Activation activation) {
      const DTensor x = FromVector(Noise(16, 1), {4, 4}, {DType::kF64, mesh, {of_x}});
      DTensor w = FromVector(Noise(24, 2), {6, 4}, {DType::kF64, mesh, {of_w}});
      if (gradient) w.RequiresGrad();
      std::vector<std::string> names;
      CommTrace trace;
      Placement placed;
      {
        const WatchCalls watch(
            [&](const OpDef& op, Inputs, absl::Span<const Attr>) { names.push_back(op.name()); });
        placed = linear_activation(x, w, {}, activation).placements()[0];
      }
      if (of_x != Shard(1)) {
        EXPECT_EQ(placed, TwoOps(x, w, {}, activation).placements()[0]);
      }
      return absl::StrCat(absl::StrJoin(names, " "), " ", placed.ToString());
    };
    EXPECT_EQ(ops(Replicate(), Shard(0), true, Activation::kGelu), "matmul_t_act_kept S(1)");
    EXPECT_EQ(ops(Replicate(), Shard(0), false, Activation::kGelu), "matmul_t_act S(1)");
    EXPECT_EQ(ops(Shard(0), Replicate(), true, Activation::kRelu), "matmul_t_relu S(0)");
    EXPECT_EQ(ops(Shard(1), Shard(1), true, Activation::kSilu), "matmul_t silu R");
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(LinearActivation, Errors) {
  const DTensor x = ones({2, 3}), w = ones({4, 3});
  EXPECT_THAT(MessageOf([&] { linear_activation(x, ones({4, 2}), {}, Activation::kRelu); }),
              ::testing::StartsWith("[linear_activation] "));
  EXPECT_THAT(MessageOf([&] { linear_activation(x, w, ones({5}), Activation::kGelu); }),
              ::testing::HasSubstr("factor n differs"));
  EXPECT_THAT(MessageOf([&] {
                linear_activation(to(x, DType::kI64), to(w, DType::kI64), {}, Activation::kRelu);
              }),
              ::testing::HasSubstr("needs a floating tensor, got int64"));
  EXPECT_THAT(MessageOf([&] { linear_activation(x, {}, {}, Activation::kRelu); }),
              ::testing::HasSubstr("input w is null"));
}

TEST(Matmul, Errors) {
  const DTensor a = Float({4, 6}, 1).Make(), b = Float({5, 8}, 2).Make();
  EXPECT_THAT(MessageOf([&] { matmul(a, b); }),
              ::testing::StartsWith("[matmul] inner sizes differ: x [4, 6], w [5, 8]"));
  EXPECT_THAT(MessageOf([&] { matmul(a, sum(b)); }), ::testing::HasSubstr("at least one dim"));
  EXPECT_THAT(MessageOf([&] { linear(a, b); }), ::testing::HasSubstr("factor k differs"));
  EXPECT_THAT(MessageOf([&] { matmul(a, to(transpose(a, 0, 1), DType::kF32)); }),
              ::testing::StartsWith("[matmul] dtypes differ: x is float64, w is float32"));
}

}  // namespace
}  // namespace dtensor::testing::matmul_test
