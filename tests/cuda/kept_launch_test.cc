// Calls of which the plan holds the launch (dtensor/kept_launch.cc): they give what other calls
// give, and what does not fit goes the ordinary way.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "dtensor/dispatch.h"
#include "dtensor/distribute.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"
#include "dtensor/tensor/device.h"
#include "dtensor/watch.h"

namespace dtensor {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

void OnCuda(int64_t ranks, const std::function<void()>& fn) {
  const absl::Status status = RunSpmd(ranks,
                                      [&](RankContext&) -> absl::Status {
                                        fn();
                                        return absl::OkStatus();
                                      },
                                      {.device = DeviceType::kCuda});
  EXPECT_TRUE(status.ok()) << status;
}

// How many of the calls in `fn` took a launch from their plans.
int64_t Kept(const std::function<void()>& fn) {
  const int64_t before = GetDispatchStats().kept_launches;
  fn();
  return GetDispatchStats().kept_launches - before;
}

DTensor Of(const std::vector<float>& values) {
  return FromVector(values, {static_cast<int64_t>(values.size())});
}
std::vector<float> Values(const DTensor& t) { return t.ToVector<float>(); }

TEST(KeptLaunch, HasTheAddressesAndNumbersOfItsCall) {
  OnCuda(1, [] {
    const DTensor a = Of({1, 2, 3, 4, 5}), b = Of({10, 20, 30, 40, 50}), c = Of({7, 7, 7, 7, 7});
    EXPECT_THAT(Values(a + b), ElementsAre(11, 22, 33, 44, 55));
    EXPECT_EQ(Kept([&] {
                EXPECT_THAT(Values(b + c), ElementsAre(17, 27, 37, 47, 57));
                EXPECT_THAT(Values(a + a), ElementsAre(2, 4, 6, 8, 10));
                // The factor is no part of the plan's key.
                EXPECT_THAT(Values(add(a, b, -2)), ElementsAre(-19, -38, -57, -76, -95));
                EXPECT_THAT(Values(add(a, b, 0.5)), ElementsAre(6, 12, 18, 24, 30));
                EXPECT_THAT(Values(a + b), ElementsAre(11, 22, 33, 44, 55));
              }),
              5);
    // What came out first is its own.
    const DTensor first = a + b, second = b + c;
    EXPECT_THAT(Values(first), ElementsAre(11, 22, 33, 44, 55));
    EXPECT_THAT(Values(second), ElementsAre(17, 27, 37, 47, 57));
  });
}

TEST(KeptLaunch, IsOfOneInputTwoOrThreeAndOfBools) {
  OnCuda(1, [] {
    const DTensor a = Of({1, -2, 3}), b = Of({3, -3, 1});
    const auto all = [&] {
      EXPECT_THAT(Values(relu(a)), ElementsAre(1, 0, 3));
      EXPECT_THAT(Values(a * 4), ElementsAre(4, -8, 12));
      EXPECT_THAT(Values(a - b), ElementsAre(-2, 1, 2));
      EXPECT_THAT((lt(a, b)).ToVector<int64_t>(), ElementsAre(1, 0, 0));
      EXPECT_THAT(Values(where(lt(a, b), a, b)), ElementsAre(1, -3, 1));
    };
    all();
    EXPECT_EQ(Kept(all), 6);
  });
}

TEST(KeptLaunch, LeavesOtherLayoutsAlone) {
  OnCuda(1, [] {
    const DTensor a = FromVector<float>({0, 1, 2, 3}, {2, 2});
    const DTensor b = FromVector<float>({10, 20, 30, 40}, {2, 2});
    const auto sum = [&](const DTensor& x) { return Values(x + b); };
    EXPECT_THAT(sum(a), ElementsAre(10, 21, 32, 43));
    const NoGrad no_grad;
    EXPECT_EQ(Kept([&] {
                EXPECT_THAT(sum(transpose(a, 0, 1)), ElementsAre(10, 22, 31, 43));
                const DTensor wide = FromVector<float>({9, 0, 1, 9, 2, 3}, {2, 3});
                EXPECT_THAT(sum(slice(wide, 1, 1, 3)), ElementsAre(10, 21, 32, 43));
                // Row-major, but it begins 4 bytes after 16.
                const DTensor flat = Of({9, 0, 1, 2, 3});
                EXPECT_THAT(sum(view(slice(flat, 0, 1, 5), {2, 2})), ElementsAre(10, 21, 32, 43));
              }),
              0);
    // A view that is a row-major run from a good place.
    EXPECT_EQ(Kept([&] { sum(view(Of({0, 1, 2, 3}), {2, 2})); }), 1);
  });
}

TEST(KeptLaunch, IsNotForWhatIsRecordedOrWatched) {
  OnCuda(1, [] {
    const DTensor a = Of({1, 2, 3}), b = Of({4, 5, 6});
    DTensor w = Of({7, 8, 9});
    {
      const DTensor one = a * b, two = a * b, three = a * b;
    }  // memory that is at hand then
    w.RequiresGrad();
    EXPECT_EQ(Kept([&] {
                const DTensor y = w * b;
                y.Backward(Of({1, 10, 100}));
                EXPECT_THAT(Values(w.grad()), ElementsAre(4, 50, 600));
              }),
              1);  // the gradient's product
    std::vector<std::string> seen;
    {
      const WatchCalls watch(
          [&](const OpDef& op, Inputs, absl::Span<const Attr>) { seen.emplace_back(op.name()); });
      EXPECT_EQ(Kept([&] { EXPECT_THAT(Values(a * b), ElementsAre(4, 10, 18)); }), 0);
    }
    EXPECT_THAT(seen, ElementsAre("mul"));
    EXPECT_EQ(Kept([&] { a* b; }), 1);
  });
}

TEST(KeptLaunch, TellsOfBadDataAndOfNoMemory) {
  OnCuda(1, [] {
    const DTensor x = FromVector<int64_t>({7, 8}, {2}), two = FromVector<int64_t>({2, 2}, {2});
    const DTensor zero = FromVector<int64_t>({2, 0}, {2});
    for (int i = 0; i < 3; ++i) {
      EXPECT_THAT(floor_divide(x, two).ToVector<int64_t>(), ElementsAre(3, 4));
      try {
        floor_divide(x, zero).ToVector<int64_t>();
        ADD_FAILURE() << "a whole number was divided by 0";
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), HasSubstr("a whole number is divided by 0"));
      }
    }
    const DTensor a = Of({1, 2}), b = Of({3, 4});
    a + b;
    Allocator& memory = *RankContext::Current().device_allocator();
    memory.SetLimit(memory.stats().in_use_bytes);
    try {
      a + b;
      ADD_FAILURE() << "more than the limit was given";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("limit"));
    }
    memory.SetLimit(0);
    EXPECT_EQ(Kept([&] { EXPECT_THAT(Values(a + b), ElementsAre(4, 6)); }), 1);
  });
}

// A kernel of the program's that calls two of the device's: neither's launch is the plan's.
void TwiceKernel(const KernelCall& call) {
  const Attr one = IntAttr(1);
  DeviceCall device = *call.device;
  device.num_attrs = 0;
  FindKernel("mul", DeviceType::kCuda)
      ->fn({call.in, call.out, &one, {}, call.stream, call.workspace, &device});
  device.num_attrs = 1;
  const TensorRef again[] = {call.out[0], call.out[0]};
  FindKernel("add", DeviceType::kCuda)
      ->fn({again, call.out, &one, {}, call.stream, call.workspace, &device});
}

TEST(KeptLaunch, IsNotThatOfAKernelThatAKernelCalls) {
  Op("test_twice(x, y) -> z").Factors("..., ... -> ...").Pointwise();
  RegisterKernel("test_twice", DeviceType::kCuda,
                 {TwiceKernel, DTypeBit(DType::kF32), KernelLayout::kStrided});
  OnCuda(1, [] {
    const DTensor a = Of({1, 2, 3}), b = Of({4, 5, 6});
    const DTensor* inputs[] = {&a, &b};
    for (int i = 0; i < 3; ++i) {
      EXPECT_THAT(Values(Call1(GetOp("test_twice"), inputs)), ElementsAre(8, 20, 36));
    }
  });
}

TEST(KeptLaunch, IsARanksOwn) {
  OnCuda(2, [] {
    const DeviceMesh mesh({2}, {"dp"});
    const DTensor x = DistributeTensor(Of({1, 2, 3, 4}), mesh, {Shard(0)});
    x + x;
    EXPECT_EQ(Kept([&] {
                const DTensor y = x + x;
                EXPECT_THAT(Values(y.Redistribute({Replicate()})), ElementsAre(2, 4, 6, 8));
              }),
              1);
  });
}

}  // namespace
}  // namespace dtensor
