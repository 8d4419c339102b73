// The ops of optimizers on tensors as they come: strided, narrow, in pieces; and what they refuse.
// Their numbers against torch: tests/parallel/optim_test.cc.
#include "dtensor/ops/optim/optim.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <vector>

#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "tests/common/message.h"

namespace dtensor::optim_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::MessageOf;

DTensor Numbers(DType dtype, double first) {
  return reshape(arange(first, first + 12, 1, {.dtype = dtype}), {3, 4}) * 0.25;
}

// Parameter and states transposed, or the gradient: the same numbers.
TEST(Optim, TakesStridedTensors) {
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16}) {
    std::vector<std::vector<double>> results;
    for (const int strided : {0, 1, 2}) {
      const NoGrad no_grad;
      const auto make = [&](double first, bool transposed) {
        const DTensor t = Numbers(dtype, first);
        return transposed ? transpose(clone(transpose(t, 0, 1)), 0, 1) : t;
      };
      const DTensor p = make(1, strided == 1), m = make(2, strided == 1), v = make(3, strided == 1);
      adamw_({p}, {m}, {v}, {}, {make(-4, strided == 2)}, {3}, {.lr = 0.5});
      sgd_({p}, {m}, {make(-4, strided == 2)}, {2}, {.lr = 0.25, .momentum = 0.5});
      scale_({v}, full({}, 0.5, {.dtype = DType::kF64}));
      results.push_back(p.ToVector<double>());
      for (const DTensor& t : {m, v}) {
        const std::vector<double> values = t.ToVector<double>();
        results.back().insert(results.back().end(), values.begin(), values.end());
      }
    }
    EXPECT_EQ(results[0], results[1]);
    EXPECT_EQ(results[0], results[2]);
    EXPECT_NE(results[0][0], 0.25);
  }
}

// bfloat16 is updated in pieces: each element is that of a float32 update, rounded once.
TEST(Optim, NarrowOnesAreFloat32OnesRounded) {
  const NoGrad no_grad;
  const DTensor first = to(randn({3, 3001}), DType::kBF16),
                grad = to(randn({3, 3001}) * 0.1, DType::kBF16);
  std::vector<std::vector<double>> results;
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const DTensor p = clone(to(first, dtype)), g = to(grad, dtype);
    const DTensor m = clone(g * 0.5), v = clone(abs(g)), b = clone(g);
    adamw_({p}, {m}, {v}, {}, {g}, {3}, {.lr = 0.5});
    const DTensor q = clone(to(first, dtype));
    sgd_({q}, {b}, {g}, {2}, {.lr = 0.25, .momentum = 0.5});
    for (const DTensor& t : {p, m, v, q, b}) {
      results.push_back(to(t, DType::kBF16).ToVector<double>());
    }
  }
  for (size_t i = 0; i < 5; ++i) EXPECT_EQ(results[i], results[i + 5]) << i;
  EXPECT_NE(results[0], first.ToVector<double>());
}

// What is written stays where it is; the gradient is brought to it.
TEST(Optim, MovesOnlyWhatItReads) {
  const absl::Status status = RunSpmd(3, [](RankContext&) -> absl::Status {
    const NoGrad no_grad;
    const DeviceMesh mesh({3}, {"dp"});
    const auto make = [&](double first, const Placement& p) {
      return DistributeTensor(Numbers(DType::kF32, first), mesh, {p});
    };
    const DTensor one = Numbers(DType::kF32, 1), one_m = Numbers(DType::kF32, 2);
    const SGDOptions options = {.lr = 0.5, .momentum = 0.5};
    sgd_({one}, {one_m}, {Numbers(DType::kF32, 3)}, {2}, options);
    for (const Placement& where : {Shard(1), FlatShard({5, 0, 7}), Replicate()}) {
      const DTensor p = make(1, where), m = make(2, where);
      sgd_({p}, {m}, {make(3, Shard(0))}, {2}, options);
      EXPECT_EQ(p.placements()[0], where);
      EXPECT_EQ(p.ToVector<double>(), one.ToVector<double>());
      EXPECT_EQ(m.ToVector<double>(), one_m.ToVector<double>());
    }
    EXPECT_THAT(MessageOf([&] {
                  sgd_({make(1, Shard(0))}, {make(2, Shard(1))}, {make(3, Shard(0))}, {1}, options);
                }),
                HasSubstr("in-place"));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Optim, PowerSums) {
  const DTensor x = FromVector<double>({3, -4, 0}, {3});
  EXPECT_EQ(power_sum(x, 2).Item(), 25);
  EXPECT_EQ(power_sum(x, 1).Item(), 7);
  EXPECT_EQ(power_sum(x, HUGE_VAL).Item(), 4);
  EXPECT_EQ(power_sum(x, 2).dtype(), DType::kF64);
  EXPECT_EQ(power_sum(zeros({0}), HUGE_VAL).Item(), 0);
  EXPECT_TRUE(std::isnan(power_sum(FromVector<double>({1, NAN, 9}, {3}), HUGE_VAL).Item()));
  EXPECT_THAT(MessageOf([&] { power_sum(x, 0); }), HasSubstr("p must be positive"));
  EXPECT_THAT(MessageOf([&] { power_sum(to(x, DType::kI64), 2); }), HasSubstr("int64"));
}

// As in torch: no decay is none, also of what 0 times is no number.
TEST(Optim, InfiniteValuesWithoutDecayStayInfinite) {
  const NoGrad no_grad;
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16}) {
    const auto made = [&](double a, double b) {
      return FromVector<double>({a, b}, {2}, {.dtype = dtype});
    };
    const DTensor g = made(0.5, 0.5);
    const std::vector<std::function<void(const DTensor&)>> updates = {
        [&](const DTensor& p) { sgd_({p}, {}, {g}, {1}, {.lr = 0.5}); },
        [&](const DTensor& p) { sgd_({p}, {made(0, 0)}, {g}, {1}, {.lr = 0.5, .momentum = 0.5}); },
        [&](const DTensor& p) {
          adam_({p}, {made(0, 0)}, {made(0, 0)}, {}, {g}, {1}, {.lr = 0.5});
        },
        [&](const DTensor& p) {
          adamw_({p}, {made(0, 0)}, {made(0, 0)}, {}, {g}, {1}, {.lr = 0.5, .weight_decay = 0});
        },
        [&](const DTensor& p) { adagrad_({p}, {made(0, 0)}, {g}, {1}, {.lr = 0.5}); },
        [&](const DTensor& p) { rmsprop_({p}, {made(0, 0)}, {}, {}, {g}, {.lr = 0.5}); },
    };
    for (size_t i = 0; i < updates.size(); ++i) {
      const DTensor p = made(-HUGE_VAL, 1);
      updates[i](p);
      const std::vector<double> after = p.ToVector<double>();
      EXPECT_EQ(after[0], -HUGE_VAL) << i;
      EXPECT_LT(after[1], 1) << i;
    }
    const DTensor p = made(-HUGE_VAL, 1);
    sgd_({p}, {}, {g}, {1}, {.lr = 0.5, .weight_decay = 0.5});
    EXPECT_TRUE(std::isnan(p.ToVector<double>()[0]));  // minus infinity, plus half of it
  }
}

TEST(Optim, WhatDoesNotFitIsRefused) {
  const DTensor x = zeros({2, 3}), y = zeros({3}), wide = zeros({2, 3}, {.dtype = DType::kF64});
  EXPECT_THAT(MessageOf([&] { sgd_({x, x}, {}, {x}, {1}, {}); }),
              HasSubstr("[sgd_] lists of different lengths: 2 and 1"));
  EXPECT_THAT(MessageOf([&] { sgd_({x}, {}, {y}, {1}, {}); }),
              AllOf(HasSubstr("g [3] must have the shape [2, 3] of p")));
  EXPECT_THAT(MessageOf([&] { adamw_({x}, {x}, {x}, {}, {wide}, {1}, {}); }), HasSubstr("dtype"));
  EXPECT_THAT(MessageOf([&] {
                const NoGrad no_grad;
                adamw_({x}, {clone(x)}, {x}, {}, {clone(x)}, {1}, {});
              }),
              HasSubstr("are one tensor, and both are changed in place"));
  EXPECT_THAT(MessageOf([&] { adamw_({x}, {x}, {x}, {}, {x}, {1}, {.amsgrad = true}); }),
              HasSubstr("lengths"));
  EXPECT_THAT(MessageOf([&] { scale_({x}, zeros({})); }), HasSubstr("float64 tensor without dims"));
  for (const double bad : {-1.0, -HUGE_VAL, static_cast<double>(NAN)}) {
    EXPECT_THAT(MessageOf([&] { clip_grad_value_({x}, bad); }),
                HasSubstr("[clip_grad_value_] clip_value must not be negative, got "));
  }
  clip_grad_value_({x}, 0);
}

}  // namespace
}  // namespace dtensor::optim_test
