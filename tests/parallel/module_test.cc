// The module tree: names, recipes, hooks, state dict, and what is said when they are misused.
#include "dtensor/parallel/module/module.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dtensor/ops/ops.h"
#include "dtensor/parallel/module/layers.h"
#include "dtensor/rng/generator.h"
#include "tests/parallel/support.h"

namespace dtensor::module_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::MessageOf;

class Pair : public Module {
 public:
  Pair() : a_(AddChild<Linear>("a", 3, 2)), scale_(AddParameter("scale", {2}, Init::Ones())) {}
  using Module::AddChild;
  using Module::AddParameter;

 protected:
  Values Forward(const Values& in) override { return {a_(in[0]) * scale_, in[0]}; }

 private:
  Linear& a_;
  Parameter& scale_;
};

std::vector<std::string> Names(const Module& m) {
  std::vector<std::string> names;
  for (const NamedParameter& p : m.NamedParameters()) names.push_back(p.fqn);
  return names;
}

TEST(Module, NamesFollowConstruction) {
  Sequential root;
  root.Append<Pair>();
  Pair& second = root.Append<Pair>();
  EXPECT_THAT(Names(root), ElementsAre("0.scale", "0.a.weight", "0.a.bias", "1.scale", "1.a.weight",
                                       "1.a.bias"));
  EXPECT_EQ(second.fqn(), "1");
  EXPECT_EQ(root.FindModule("1.a")->fqn(), "1.a");
  EXPECT_EQ(root.FindModule("1.b"), nullptr);
  EXPECT_EQ(root.FindParameter("1.a.bias")->shape(), Shape({2}));
  EXPECT_EQ(root.FindParameter("1.a.c"), nullptr);
  EXPECT_EQ(root.NamedModules().size(), 5u);
  EXPECT_EQ(root.NumElements(), 2 * (2 + 6 + 2));
}

// Every natural way to call a module compiles and means what it looks like.
TEST(Module, CallForms) {
  class Add : public Module {
    Values Forward(const Values& in) override {
      DTensor total = in[0];
      for (size_t i = 1; i < in.size(); ++i) total = total + in[i];
      return {total};
    }
  };
  Add add;
  Pair pair;
  Materialize(pair);
  const DTensor x = ones({2, 3}), one = ones({1, 3});
  const std::vector<double> twos(6, 2);
  const DTensor plain = add(x);
  EXPECT_EQ(plain.ToVector<double>(), x.ToVector<double>());
  EXPECT_EQ(add({x})[0].ToVector<double>(), x.ToVector<double>());
  EXPECT_EQ(add({x, one})[0].ToVector<double>(), twos);
  EXPECT_EQ(add(Values{x, one})[0].ToVector<double>(), twos);
  EXPECT_EQ(add(x, one).ToVector<double>(), twos);
  EXPECT_EQ(add(x, one * 0.5, one * 0.5).ToVector<double>(), twos);
  EXPECT_EQ(add(ones({2, 2}), pair.own_parameters()[0]->tensor()).numel(), 4);
  EXPECT_EQ(add(ones({2, 2}), *pair.own_parameters()[0]).ToVector<double>()[0], 2);
  EXPECT_EQ(pair({x}).size(), 2u);
  EXPECT_THAT(MessageOf([&] { pair(x); }), HasSubstr("gives 2 values where one was asked for"));
  EXPECT_THAT(MessageOf([&] { add({}); }), HasSubstr("] needs 1 or more inputs, got 0"));
}

TEST(Module, RecipesHoldNothing) {
  ManualSeed(3);
  const int64_t before = RankContext::Current().allocator()->stats().in_use_bytes;
  Linear big(1 << 12, 1 << 12);
  EXPECT_EQ(RankContext::Current().allocator()->stats().in_use_bytes, before);
  EXPECT_THAT(MessageOf([&] { big(ones({1, 1 << 12})); }),
              AllOf(HasSubstr("is a recipe without values"), HasSubstr("Materialize(model)")));
}

TEST(Module, MaterializeDrawsInConstructionOrder) {
  ManualSeed(7);
  Pair pair;
  Materialize(pair);
  ManualSeed(7);
  const double bound = 1 / std::sqrt(3.0);
  const DTensor weight = empty({2, 3}), bias = empty({2});
  uniform_(weight, -bound, bound);
  uniform_(bias, -bound, bound);
  EXPECT_EQ(pair.FindParameter("a.weight")->tensor().ToVector<double>(), weight.ToVector<double>());
  EXPECT_EQ(pair.FindParameter("a.bias")->tensor().ToVector<double>(), bias.ToVector<double>());
  EXPECT_TRUE(pair.FindParameter("scale")->tensor().requires_grad());
}

TEST(Module, HooksRunInOrder) {
  Pair pair;
  Materialize(pair);
  std::string order;
  pair.AddPreHook([&](Module&, const Values& in) {
    order += "a";
    return Values{in[0] * 2};
  });
  pair.AddPreHook([&](Module&, const Values& in) {
    order += "b";
    return in;
  });
  pair.AddPostHook([&](Module&, const Values& in, const Values& out) {
    order += "c";
    EXPECT_EQ(in[0].ToVector<double>()[0], 2);
    return Values{out[1]};
  });
  EXPECT_EQ(pair(ones({1, 3})).ToVector<double>(), (std::vector<double>{2, 2, 2}));
  EXPECT_EQ(order, "abc");
}

TEST(Module, OneValueWhereTwoCome) {
  Pair pair;
  Materialize(pair);
  EXPECT_THAT(MessageOf([&] { pair(ones({1, 3})); }), HasSubstr("Module gives 2 values"));
}

TEST(Module, NamesAreChecked) {
  Pair pair;
  EXPECT_THAT(MessageOf([&] { pair.AddParameter("a", {2}, Init::Ones()); }),
              HasSubstr("\"a\" is a child already"));
  EXPECT_THAT(MessageOf([&] { pair.AddParameter("x.y", {2}, Init::Ones()); }),
              HasSubstr("without dots"));
  EXPECT_THAT(MessageOf([&] { pair.AddParameter("n", {int64_t{1} << 40, int64_t{1} << 40}, {}); }),
              AllOf(HasSubstr("parameter n"), HasSubstr("more than 2^63 - 1 elements")));
}

TEST(Module, StateDictGoesThereAndBack) {
  Pair from, to;
  ManualSeed(1);
  Materialize(from);
  Materialize(to);
  to.LoadStateDict(from.GetStateDict());
  EXPECT_EQ(testing::Gather(from), testing::Gather(to));
}

TEST(Module, StateDictIsStrictAndAllOrNothing) {
  Pair pair;
  Materialize(pair);
  const testing::NamedValues before = testing::Gather(pair);
  StateDict state = pair.GetStateDict();
  state[0].second = zeros({2});    // right
  state[1].second = ones({3, 3});  // another shape
  state[2].first = "a.bia";        // unknown, and a.bias is missing
  const std::string message = MessageOf([&] { pair.LoadStateDict(state); });
  EXPECT_THAT(message,
              AllOf(HasSubstr("a.weight is [3, 3], must be [2, 3]"),
                    HasSubstr("unexpected a.bia (nearest: a.bias)"), HasSubstr("missing a.bias")));
  EXPECT_EQ(testing::Gather(pair), before);
  // Where all names are others, all are said, and what is near of the first few.
  StateDict others;
  for (int i = 0; i < 30; ++i) others.emplace_back("model." + std::to_string(i), zeros({2}));
  const std::string many = MessageOf([&] { pair.LoadStateDict(others); });
  EXPECT_THAT(many,
              AllOf(HasSubstr("unexpected model.9 (near"), HasSubstr("unexpected model.29;")));
  // Only what is wrong is said.
  state = pair.GetStateDict();
  state[0].second = zeros({2}, {.dtype = DType::kF64});
  EXPECT_THAT(MessageOf([&] { pair.LoadStateDict(state); }),
              ::testing::EndsWith("nothing was loaded: scale is float64, must be float32"));
  state = pair.GetStateDict();
  state[0].second = empty({2}, {.mesh = DeviceMesh::Self(DeviceType::kMeta)});
  EXPECT_THAT(MessageOf([&] { pair.LoadStateDict(state); }),
              HasSubstr("scale is without values (on a meta mesh), must be one that has them"));
  EXPECT_THAT(MessageOf([&] { pair.own_parameters()[0]->Set(zeros({3})); }),
              HasSubstr("the new value of parameter scale is [3], must be [2]"));
  EXPECT_EQ(testing::Gather(pair), before);
}

TEST(Module, DTypeBelongsToTheRecipe) {
  Pair pair;
  SetDType(pair, DType::kF64);
  EXPECT_THAT(MessageOf([&] { SetDType(pair, DType::kI64); }), HasSubstr("floating"));
  Materialize(pair);
  EXPECT_EQ(pair.FindParameter("scale")->tensor().dtype(), DType::kF64);
  EXPECT_THAT(MessageOf([&] { SetDType(pair, DType::kF32); }), HasSubstr("has values already"));
}

TEST(Layers, LinearAndEmbeddingAreTorchs) {
  Linear layer(2, 3);
  Materialize(layer);
  layer.weight().Set(FromVector<double>({1, 2, 3, 4, 5, 6}, {3, 2}));
  layer.bias()->Set(FromVector<double>({10, 20, 30}, {3}));
  EXPECT_THAT(layer(FromVector<double>({1, -1}, {1, 2})).ToVector<double>(),
              ElementsAre(9, 19, 29));
  Embedding table(3, 2);
  Materialize(table);
  table.weight().Set(FromVector<double>({0, 1, 2, 3, 4, 5}, {3, 2}));
  EXPECT_THAT(table(FromVector<int64_t>({2, 0}, {2}, {.dtype = DType::kI64})).ToVector<double>(),
              ElementsAre(4, 5, 0, 1));
}

TEST(Layers, AttentionSeesOnlyThePast) {
  ManualSeed(5);
  CausalSelfAttention attention(8, 2);
  Materialize(attention);
  const DTensor x = randn({1, 4, 8});
  DTensor changed = clone(x);
  copy_(slice(changed, 1, 3, 4), zeros({1, 1, 8}));
  const std::vector<double> a = slice(attention(x), 1, 0, 3).ToVector<double>();
  const std::vector<double> b = slice(attention(changed), 1, 0, 3).ToVector<double>();
  EXPECT_EQ(a, b);
  EXPECT_NE(attention(x).ToVector<double>(), attention(changed).ToVector<double>());
  EXPECT_THAT(MessageOf([] { CausalSelfAttention(8, 3); }), HasSubstr("3 heads do not divide"));
}

}  // namespace
}  // namespace dtensor::module_test
