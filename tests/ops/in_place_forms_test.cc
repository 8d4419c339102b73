// The in-place forms that pointwise.h makes: self holds what the function gives, keeps its dtype
// and placement, and passes gradients on; errors name the form.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "tests/common/message.h"

namespace dtensor {
namespace {

using ::testing::HasSubstr;
using testing::MessageOf;

struct Form {
  std::string name;
  bool integers;
  std::function<DTensor(const DTensor&, const DTensor&)> plain, in_place;
};

#define FORM(name, integers, arguments)                                                         \
  {#name, integers, [](const DTensor& x, const DTensor& y) { return (void)y, name arguments; }, \
   [](const DTensor& x, const DTensor& y) { return (void)y, name##_ arguments; }}

// Every function of elementwise.inc that has one.
std::vector<Form> Forms() {
#define FORM_Hidden(name)
#define FORM_Backward(name)
#define FORM_Real(name) FORM(name, false, (x)),
#define FORM_Same(name) FORM(name, false, (x)),
#define FORM_NotBool(name) FORM(name, false, (x)),
#define FORM_Two(name) FORM(name, false, (x, y)),
#define FORM_TwoReal(name) FORM(name, false, (x, y)),
#define FORM_TwoInt(name) FORM(name, true, (x, y)),
#define FORM_Compared(name) FORM(name, false, (x, y)),
#define FORM_Mixed(name) FORM(name, false, (x, y)),
#define FORM_MixedReal(name) FORM(name, false, (x, y)),
#define FORM_MixedInt(name) FORM(name, true, (x, y)),
#define DT_POINTWISE(kind, user, name, ...) FORM_##user(name)
  return {
#include "dtensor/ops/pointwise/elementwise.inc"
      FORM(clamp, false, (x, 0.25, 0.5)), FORM(lerp, false, (x, y, 0.25)),
      FORM(pow, false, (x, y)),           FORM(gelu, false, (x)),
      FORM(softplus, false, (x, 2.0)),    FORM(fill, false, (x, 3)),
      FORM(addcmul, false, (x, y, y)),    FORM(round, false, (x, 1)),
      FORM(true_divide, false, (x, y)),   FORM(sub, false, (x, y, 3)),
      FORM(cumsum, false, (x, 1)),        FORM(cumprod, false, (x, 1)),
      FORM(mul, false, (x, y)),           FORM(add, false, (x, y, 2)),
      FORM(div, false, (x, y)),
  };
}

DTensor Make(DType t, double first, const DeviceMesh& mesh, const Placements& p) {
  std::vector<double> v;
  for (int i = 0; i < 12; ++i) v.push_back(IsFloating(t) ? first + i * 0.05 : i + 1);
  const Tensor full = ValueOrThrow(Tensor::FromVector(v, {3, 4}, t));
  return DistributeTensor(full, mesh, p);
}

// NaN too.
bool SameBits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}

TEST(InPlaceForms, WriteWhatTheFunctionGives) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    for (const Form& f : Forms()) {
      const DType t = f.integers ? DType::kI64 : DType::kF64;
      const DTensor x = Make(t, 0.15, mesh, {Shard(1)}), y = Make(t, 0.2, mesh, {Replicate()});
      const std::vector<double> want = to(f.plain(x, y), t).ToVector<double>();
      const DTensor view = reshape(x, {12});
      const DTensor got = f.in_place(x, y);
      EXPECT_TRUE(SameBits(x.ToVector<double>(), want)) << f.name;
      EXPECT_EQ(got.impl(), x.impl()) << f.name;
      EXPECT_EQ(x.dtype(), t) << f.name;
      EXPECT_EQ(x.placements()[0], Shard(1)) << f.name;
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

using Function = std::function<DTensor(const DTensor&, const DTensor&)>;

// Of the sum of fn(x, y) on a mesh, that sum on another one; where the rank has them.
std::vector<double> GradientsOf(const Function& fn, bool writes, bool of_y, const DeviceMesh& mesh,
                                const DeviceMesh& result_mesh) {
  const Placements p(mesh.ndim());
  DTensor x = Make(DType::kF64, 0.15, mesh, p).RequiresGrad();
  DTensor y = Make(DType::kF64, 0.2, mesh, p).RequiresGrad(of_y);
  const DTensor z = fn(writes ? x * 1.0 : x, y);
  if (z.requires_grad()) {
    sum(to(z, DType::kF64)).Redistribute(result_mesh, Placements(result_mesh.ndim())).Backward();
  }
  std::vector<double> all;
  for (const DTensor& t : {x, y}) {
    const DTensor g = t.grad().defined() ? t.grad() : zeros_like(t);
    if (!g.has_values()) continue;
    for (const double v : g.ToVector<double>()) all.push_back(v);
  }
  return all;
}

TEST(InPlaceForms, HaveTheGradientsOfTheFunction) {
  const DeviceMesh self = DeviceMesh::Self();
  for (const Form& f : Forms()) {
    for (const bool of_y : {true, false}) {
      if (f.integers) continue;
      EXPECT_TRUE(SameBits(GradientsOf(f.in_place, true, of_y, self, self),
                           GradientsOf(f.plain, false, of_y, self, self)))
          << f.name;
    }
  }
}

// Ranks outside of the mesh take part in forward and backward, without memory that is written to.
TEST(InPlaceForms, HaveThemOnAMeshThatLeavesOutRanks) {
  const absl::Status status = RunSpmd(2, [](RankContext& context) -> absl::Status {
    const DeviceMesh world({2}), first = *DeviceMesh::FromRanks({1}, {0});
    const DeviceMesh self = DeviceMesh::Self();
    for (const Form& f : Forms()) {
      for (const bool of_y : {true, false}) {
        if (f.integers) continue;
        const std::vector<double> got = GradientsOf(f.in_place, true, of_y, first, world);
        const std::vector<double> want = GradientsOf(f.plain, false, of_y, self, self);
        EXPECT_TRUE(context.rank() == 0 ? SameBits(got, want) : got.empty()) << f.name;
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Those of other families, which take more than x and y.
TEST(InPlaceForms, OfProductsAndOfWhatIsIndexed) {
  const auto of = [](const std::vector<double>& v, const Shape& shape) {
    return FromVector(v, shape, {.dtype = DType::kF64});
  };
  const DTensor m = of({1, 2, 3, 4}, {2, 2}), v = of({5, 6}, {2}), at = of({1, 1}, {2});
  const DTensor b = reshape(m, {1, 2, 2}), self = of({1, 1, 1, 1}, {2, 2});
  const auto same = [](const DTensor& got, const DTensor& x, const DTensor& want) {
    EXPECT_EQ(got.impl(), x.impl());
    EXPECT_EQ(x.ToVector<double>(), want.ToVector<double>());
  };
#define SAME(form, self, ...)                                  \
  {                                                            \
    const DTensor x = clone(self);                             \
    same(form##_(x, __VA_ARGS__), x, form(self, __VA_ARGS__)); \
  }
  SAME(addmm, self, m, m, 2, 3)
  SAME(addmv, v, m, v, 2, 3)
  SAME(baddbmm, b, b, b, 2, 3)
  SAME(addbmm, self, b, b, 2, 3)
  SAME(addr, self, v, v, 2, 3)
  const DTensor ids = to(at, DType::kI64);
  SAME(scatter, v, 0, ids, v, "multiply")
  SAME(scatter, v, 0, ids, 7, "add")
  SAME(index_fill, m, 1, ids, of({9}, {}))
#undef SAME
  EXPECT_EQ(zero_(m).ToVector<double>(), std::vector<double>(4, 0));
  EXPECT_THAT(MessageOf([&] { addmm_(v, self, self); }),
              HasSubstr("[addmm_] the result is [2, 2], self [2], whose shape cannot change"));
  EXPECT_THAT(MessageOf([&] { cumsum_(full({2}, 1, {.dtype = DType::kBool}), 0); }),
              HasSubstr("[cumsum_] self is bool and cannot hold the int64 result"));
}

// x += x * w: what is saved of x has no part in the history that x gets.
TEST(InPlaceForms, DoNotKeepWhatTheyChangeAlive) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2});
    const DTensor start = full({1000}, 2.0, {.mesh = mesh, .placements = {Shard(0)}});
    const DTensor turned = transpose(full({20, 50}, 2.0, {.mesh = mesh}), 0, 1);
    DTensor w = full({1000}, 3.0, {.mesh = mesh}).RequiresGrad();
    const std::function<DTensor()> made[] = {
        [&] { return start * 1.0; },
        [&] { return start.Redistribute({Replicate()}, {.async = true}); },
        [&] { return empty_like(turned); },
    };
    for (const auto& make : made) {
      const int64_t before = CurrentAllocator()->stats().in_use_bytes;
      constexpr int kTimes = 30;
      for (int k = 0; k < kTimes; ++k) {
        const DTensor x = make();
        add_(x, x * reshape(w, x.shape()));
      }
      const int64_t left = CurrentAllocator()->stats().in_use_bytes - before;
      EXPECT_LT(left, kTimes / 2 * 4000);  // a peer may still read some of the last ones
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(InPlaceForms, SayWhatTheyCannotHold) {
  const DTensor i = full({3}, 2, {.dtype = DType::kI64}), row = ones({3}), matrix = ones({2, 3});
  EXPECT_THAT(MessageOf([&] { sin_(i); }),
              HasSubstr("[sin_] self is int64 and cannot hold the float32 result"));
  EXPECT_THAT(MessageOf([&] { hypot_(row, matrix); }), HasSubstr("the result is [2, 3], self [3]"));
  DTensor leaf = ones({3}).RequiresGrad();
  EXPECT_THAT(MessageOf([&] { exp_(leaf); }), HasSubstr("[exp_]"));
  EXPECT_THAT(MessageOf([&] { exp_(DTensor()); }), HasSubstr("[exp_] input self is null"));
  lt_(row, 2);
  EXPECT_EQ(row.ToVector<double>(), std::vector<double>(3, 1));
  div_(i, full({3}, 2, {.dtype = DType::kI64}), "floor");
  EXPECT_EQ(i.ToVector<int64_t>(), std::vector<int64_t>(3, 1));
}

}  // namespace
}  // namespace dtensor
