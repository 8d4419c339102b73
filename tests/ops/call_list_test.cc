// Lists of tensors that a device takes whole (dtensor/call_list.h): the bits of single calls, the
// order of the program where calls touch each other, and how few launches there are.
#include "dtensor/call_list.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <vector>

#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "tests/common/cuda_counters.h"
#include "tests/common/far_device.h"
#include "tests/common/remote_device.h"

namespace dtensor::call_list_test {
namespace {

using List = std::vector<DTensor>;
using Numbers = std::vector<std::vector<double>>;

DeviceType Far() { return testing::RemoteDevice(); }

Numbers On(DeviceType device, const std::function<List()>& fn) {
  Numbers all;
  const absl::Status status = RunSpmd(1,
                                      [&](RankContext&) -> absl::Status {
                                        const NoGrad no_grad;
                                        for (const DTensor& t : fn())
                                          all.push_back(t.ToVector<double>());
                                        return absl::OkStatus();
                                      },
                                      {.device = device});
  EXPECT_TRUE(status.ok()) << status;
  return all;
}

DTensor Make(IntSpan shape, int64_t salt, DType dtype, double low = -1) {
  std::vector<double> values;
  for (int64_t i = 0; i < Numel(shape); ++i) {
    const double unit = static_cast<double>((i * 37 + salt * 11) % 101) / 101;
    values.push_back(low + unit * (1 - low));
  }
  return FromVector(values, shape, {.dtype = dtype});
}
DTensor Transposed(const DTensor& t) { return transpose(clone(transpose(t, 0, 1)), 0, 1); }

// Of every kind that a list may meet: long, short, empty, none of one run, other dtypes.
List Mixed(int64_t salt, double low = -1) {
  List all;
  int64_t k = salt;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF32, DType::kF64, DType::kF16}) {
    for (const Shape& shape : {Shape{3}, Shape{70, 130}, Shape{}, Shape{0, 4}, Shape{4096}}) {
      all.push_back(Make(shape, ++k, dtype, low));
    }
    all.push_back(Transposed(Make({33, 5}, ++k, dtype, low)));
  }
  return all;
}

TEST(CallList, UpdatesGiveTheBitsOfTheCpu) {
  const auto run = [] {
    const List p = Mixed(1), m = Mixed(2), v = Mixed(3, 0), x = Mixed(4, 0), g = Mixed(5);
    std::vector<int64_t> steps(p.size(), 3);
    steps[2] = steps[8] = 7;  // parameters that came later
    adamw_(p, m, v, {}, g, steps, {.lr = 0.1});
    adam_(p, m, v, x, g, steps, {.lr = 0.1, .weight_decay = 0.5, .amsgrad = true});
    sgd_(p, m, g, steps, {.lr = 0.5, .momentum = 0.5, .nesterov = true});
    sgd_(p, {}, g, steps, {.lr = 0.5, .maximize = true});
    adagrad_(p, v, g, steps, {.lr = 0.1});
    rmsprop_(p, v, m, {}, g, {.lr = 0.1, .momentum = 0.5});
    scale_(g, full({}, 0.3, {.dtype = DType::kF64}));
    List all;
    for (const List* list : {&p, &m, &v, &x, &g}) all.insert(all.end(), list->begin(), list->end());
    return all;
  };
  const Numbers here = On(DeviceType::kCpu, run), there = On(Far(), run);
  ASSERT_EQ(here.size(), 150u);
  EXPECT_NE(here[0][0], here[0][1]);
  for (size_t i = 0; i < here.size(); ++i) EXPECT_EQ(there[i], here[i]) << i;
}

// More than one launch takes.
TEST(CallList, TakesAnyNumber) {
  const auto run = [] {
    List p, g;
    for (int64_t i = 0; i < 801; ++i) {
      p.push_back(Make({i % 5 + 1}, i, DType::kF32));
      g.push_back(Make({i % 5 + 1}, i + 7, DType::kF32));
    }
    sgd_(p, {}, g, std::vector<int64_t>(801, 1), {.lr = 0.5});
    p.push_back(get_total_norm(p));
    return p;
  };
  Numbers here = On(DeviceType::kCpu, run), there = On(Far(), run);
  ASSERT_EQ(here.size(), 802u);
  EXPECT_NEAR(there.back()[0], here.back()[0], 1e-12);
  there.back() = here.back();
  EXPECT_EQ(there, here);
}

// Whoever reads or writes what a kept call writes comes after it.
TEST(CallList, KeepsTheOrderOfTheProgram) {
  const auto run = [] {
    const DTensor a = Make({40}, 1, DType::kF32), b = Make({40}, 2, DType::kF32);
    const DTensor c = Make({40}, 3, DType::kF32), g = Make({40}, 4, DType::kF32);
    const SGDOptions options = {.lr = 0.5};
    sgd_({a, a, b}, {}, {g, b, a}, {1, 1, 1}, options);
    const DTensor left = slice(c, 0, 0, 25), right = slice(c, 0, 15, 40);
    sgd_({left, right}, {}, {slice(g, 0, 0, 25), slice(g, 0, 0, 25)}, {1, 1}, options);
    CallList list;
    const DTensor sum = power_sum(a, 2), doubled = sum + sum;  // another op reads it
    list.Run();
    return List{a, b, c, floor(doubled)};
  };
  EXPECT_EQ(On(Far(), run), On(DeviceType::kCpu, run));
}

// In a list and alone: the order of a sum does not depend on it.
TEST(CallList, PowersHaveTheBitsOfSingleCalls) {
  for (const double p : {2.0, 3.0, HUGE_VAL}) {
    const auto alone = [p] {
      List sums;
      for (const DTensor& t : Mixed(1)) sums.push_back(power_sum(t, p));
      return sums;
    };
    const auto together = [p] {
      CallList list;
      List sums;
      for (const DTensor& t : Mixed(1)) sums.push_back(power_sum(t, p));
      list.Run();
      return sums;
    };
    const Numbers one = On(Far(), alone);
    EXPECT_GT(one[1][0], 0);
    EXPECT_EQ(On(Far(), together), one) << p;
  }
}

TEST(CallList, AMisfitLeavesWhatCameBefore) {
  const Numbers there = On(Far(), [] {
    const DTensor a = ones({3}), b = ones({4}), g = ones({3});
    EXPECT_THROW(sgd_({a, b}, {}, {g, g}, {1, 1}, {.lr = 0.5}), Error);
    return List{a, b, power_sum(a, 2)};  // no list is open
  });
  EXPECT_EQ(there, (Numbers{{0.5, 0.5, 0.5}, {1, 1, 1, 1}, {0.75}}));
}

TEST(CallList, TakesOneLaunch) {
  const bool far = testing::HasCpuBits(Far());
  On(Far(), [] { return List{Make({1}, 1, DType::kF32)}; });  // the device's library is loaded
  if (!far && testing::FindCudaCounters() == nullptr) GTEST_SKIP() << "this device does not count";
  On(Far(), [far] {
    List p, m, v, g;
    for (int64_t i = 0; i < 20; ++i) {
      for (List* list : {&p, &m, &v, &g}) list->push_back(Make({i + 1}, i, DType::kF32, 0));
    }
    const auto kernels = [far](const std::function<void()>& fn) {
      if (!far) return testing::CudaCountsOf(fn).at("cudaLaunchKernel");
      const int64_t before = testing::GetFarStats().kernels;
      fn();
      return testing::GetFarStats().kernels - before;
    };
    const std::vector<int64_t> steps(20, 2);
    EXPECT_EQ(kernels([&] { adamw_(p, m, v, {}, g, steps, {}); }), 1);
    EXPECT_EQ(kernels([&] { sgd_(p, m, g, steps, {.momentum = 0.5}); }), 1);
    EXPECT_EQ(kernels([&] { get_total_norm(g); }), 3);  // powers, their sum, the root
    const DTensor by = ones({}, {.dtype = DType::kF64});
    EXPECT_EQ(kernels([&] { scale_(g, by); }), 1);
    return List{};
  });
}

}  // namespace
}  // namespace dtensor::call_list_test
