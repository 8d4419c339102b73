// What a user reads when a program is wrong: every rank ends with the same words, and none hangs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/tensor/device.h"

namespace dtensor::user_errors_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// The message with which a program on `ranks` ranks ends.
std::string Outcome(int64_t ranks, const std::function<void(RankContext&)>& body) {
  const absl::Status status = RunSpmd(ranks,
                                      [&](RankContext& rank) {
                                        body(rank);
                                        return absl::OkStatus();
                                      },
                                      {.timeout = absl::Seconds(20)});
  return std::string(status.message());
}

DTensor Made(Shape shape, const DeviceMesh& mesh, Placements placements) {
  return ones(shape, {.mesh = mesh, .placements = std::move(placements)});
}

TEST(UserErrors, MismatchedShapes) {
  EXPECT_THAT(
      Outcome(4,
              [](RankContext&) {
                const DeviceMesh mesh({2, 2}, {"dp", "tp"});
                matmul(Made({4, 6}, mesh, {Shard(0), Replicate()}),
                       Made({5, 8}, mesh, {Replicate(), Shard(1)}));
              }),
      AllOf(HasSubstr("[matmul]"), HasSubstr("x = float32 [4, 6] on dp=2 tp=2 [S(0), R]"),
            HasSubstr("w = float32 [5, 8]"), HasSubstr("inner sizes differ"), HasSubstr("of 4)")));
  EXPECT_THAT(Outcome(1, [](RankContext&) { ones({2, 3}) + ones({4}); }),
              AllOf(HasSubstr("[add]"), HasSubstr("do not broadcast")));
}

TEST(UserErrors, PlacementDimOutOfRange) {
  EXPECT_THAT(Outcome(2, [](RankContext&) { Made({4, 4}, DeviceMesh({2}, {"tp"}), {Shard(2)}); }),
              AllOf(HasSubstr("[ones]"), HasSubstr("S(2)"), HasSubstr("legal are -2 to 1")));
}

TEST(UserErrors, WrongNumberOfPlacements) {
  EXPECT_THAT(
      Outcome(2, [](RankContext&) { Made({4}, DeviceMesh({2}, {"tp"}), {Shard(0), Replicate()}); }),
      AllOf(HasSubstr("2 placements"), HasSubstr("1 ")));
}

TEST(UserErrors, TwoMeshesInOneOp) {
  EXPECT_THAT(Outcome(4,
                      [](RankContext&) {
                        Made({4}, DeviceMesh({4}, {"tp"}), {Shard(0)}) +
                            Made({4}, DeviceMesh({2, 2}, {"dp", "tp"}), {Shard(0), Replicate()});
                      }),
              AllOf(HasSubstr("[add]"), HasSubstr("tp=4"), HasSubstr("dp=2 tp=2")));
  EXPECT_THAT(
      Outcome(2, [](RankContext&) { Made({4}, DeviceMesh({2}, {"tp"}), {Shard(0)}) + ones({4}); }),
      AllOf(HasSubstr("[add]"), HasSubstr("DistributeTensor")));
}

TEST(UserErrors, MeshThatIsNotTheWorld) {
  EXPECT_THAT(Outcome(2,
                      [](RankContext&) {
                        Made({8}, DeviceMesh({4}, {"tp"}), {Shard(0)}).Redistribute({Replicate()});
                      }),
              AllOf(HasSubstr("tp=4"), HasSubstr("2")));
}

TEST(UserErrors, DuplicateRanksAndUnknownDims) {
  EXPECT_THAT(std::string(DeviceMesh::FromRanks({4}, {0, 1, 2, 1}).status().message()),
              AllOf(HasSubstr("1"), HasSubstr("twice")));
  EXPECT_THAT(Outcome(4, [](RankContext&) { DeviceMesh({2, 2}, {"dp", "tp"})["pp"]; }),
              AllOf(HasSubstr("\"pp\""), HasSubstr("dp"), HasSubstr("tp")));
}

TEST(UserErrors, OverflowInAShape) {
  const int64_t big = int64_t{1} << 40;
  EXPECT_THAT(Outcome(1, [&](RankContext&) { zeros({big, big}); }),
              AllOf(HasSubstr("[zeros]"), HasSubstr("2^63 - 1")));
  EXPECT_THAT(Outcome(1, [&](RankContext&) { expand(ones({1, 1}), {big, big}); }),
              HasSubstr("2^63 - 1"));
}

TEST(UserErrors, Backward) {
  EXPECT_THAT(Outcome(1, [](RankContext&) { (ones({3}).RequiresGrad() * 2).Backward(); }),
              AllOf(HasSubstr("[backward]"), HasSubstr("one element"), HasSubstr("[3]")));
  EXPECT_THAT(Outcome(1, [](RankContext&) { sum(ones({3})).Backward(); }),
              AllOf(HasSubstr("[backward]"), HasSubstr("no gradient history")));
}

TEST(UserErrors, InPlaceOnALeafAndOnASavedTensor) {
  EXPECT_THAT(Outcome(1, [](RankContext&) { add_(ones({3}).RequiresGrad(), 1); }),
              AllOf(HasSubstr("[add_"), HasSubstr("leaf")));
  EXPECT_THAT(Outcome(1,
                      [](RankContext&) {
                        DTensor w = ones({3}).RequiresGrad();
                        DTensor h = w * 2;
                        const DTensor y = sum(h * h);
                        mul_(h, 3);
                        y.Backward();
                      }),
              AllOf(HasSubstr("changed in place"), HasSubstr("clone()")));
}

// Every op function with a wrong call: the message has the name by which the user called it, what
// it was given, what is wrong, and the rank.
TEST(UserErrors, NameTheOpAndEachInputsSpec) {
  struct Wrong {
    const char* op;
    std::vector<std::string> words;
    std::function<void(const DTensor& x, const DTensor& n)> call;  // f32 [4, 6], i64 [4, 6]
  };
  const std::string x_is = "x = float32 [4, 6] on tp=2 [S(0)]", n_is = "x = int64 [4, 6] on tp=2";
  const std::vector<Wrong> all = {
      {"add", {x_is, "broadcast"}, [](auto& x, auto&) { x + transpose(x, 0, 1); }},
      {"add", {"alpha"}, [](auto&, auto& n) { add(n, n, 0.5); }},
      {"relu", {"bool", "x = bool [4, 6]"}, [](auto& x, auto&) { relu(gt(x, 0)); }},
      {"pow", {n_is, "negative"}, [](auto&, auto& n) { pow(n, -1); }},
      {"masked_fill",
       {n_is, "mask = bool"},
       [](auto&, auto& n) { masked_fill(n, gt(n, 0), 1e30); }},
      {"matmul", {x_is, "w = "}, [](auto& x, auto&) { matmul(x, x); }},
      {"bmm", {x_is}, [](auto& x, auto&) { bmm(x, x); }},
      {"linear",
       {x_is, "w = float32 [6, 4]"},
       [](auto& x, auto&) { linear(x, transpose(x, 0, 1)); }},
      {"linear", {x_is, "b = float32 [4, 6]"}, [](auto& x, auto&) { linear(x, x, x); }},
      {"sum", {x_is, "dim 2", "[-2, 1]"}, [](auto& x, auto&) { sum(x, {2}); }},
      {"mean", {n_is, "floating"}, [](auto&, auto& n) { mean(n); }},
      {"amax", {x_is, "named twice"}, [](auto& x, auto&) { amax(x, {1, 1}); }},
      {"softmax", {n_is, "floating"}, [](auto&, auto& n) { softmax(n, 0); }},
      {"log_softmax", {x_is, "dim 5"}, [](auto& x, auto&) { log_softmax(x, 5); }},
      {"layer_norm", {x_is, "normalized_shape [4]"}, [](auto& x, auto&) { layer_norm(x, {4}); }},
      {"rms_norm", {x_is, "weight = "}, [](auto& x, auto&) { rms_norm(x, {6}, x); }},
      {"embedding", {"ids = float32"}, [](auto& x, auto&) { embedding(x, x); }},
      {"embedding", {"weight must be"}, [](auto& x, auto& n) { embedding(n, sum(x, {0})); }},
      {"cross_entropy",
       {"logits = ", "target = bool", "in cross_entropy_rows"},
       [](auto& x, auto&) { cross_entropy(x, gt(sum(x, {1}), 0)); }},
      {"cross_entropy",
       {"logits = ", "label_smoothing"},
       [](auto& x, auto& n) { cross_entropy(x, sum(n, {1}), {}, -100, Reduction::kMean, 2); }},
      {"cross_entropy",
       {"target must be [4]", "target = int64 [4, 6]"},
       [](auto& x, auto& n) { cross_entropy(x, n); }},
      {"nll_loss",
       {"logp = ", "weight must be [6]"},
       [](auto& x, auto& n) { nll_loss(x, sum(n, {1}), sum(x, {1})); }},
      {"scaled_dot_product_attention",
       {"q = ", "k = ", "v = "},
       [](auto& x, auto&) { scaled_dot_product_attention(x, transpose(x, 0, 1), x); }},
      {"reshape", {x_is, "24 elements"}, [](auto& x, auto&) { reshape(x, {5, 5}); }},
      {"view", {x_is, "24 elements"}, [](auto& x, auto&) { view(x, {7}); }},
      {"flatten", {x_is, "after end_dim"}, [](auto& x, auto&) { flatten(x, 1, 0); }},
      {"unflatten", {x_is}, [](auto& x, auto&) { unflatten(x, 1, {4, 4}); }},
      {"transpose", {x_is, "dim 3"}, [](auto& x, auto&) { transpose(x, 0, 3); }},
      {"permute", {x_is, "each of the 2 dims"}, [](auto& x, auto&) { permute(x, {0}); }},
      {"squeeze", {x_is, "dim 4"}, [](auto& x, auto&) { squeeze(x, {4}); }},
      {"unsqueeze", {x_is, "dim 9"}, [](auto& x, auto&) { unsqueeze(x, 9); }},
      {"expand", {x_is, "does not expand"}, [](auto& x, auto&) { expand(x, {4, 7}); }},
      {"slice", {x_is, "step"}, [](auto& x, auto&) { slice(x, 0, 0, 2, 0); }},
      {"select", {x_is, "index 4"}, [](auto& x, auto&) { select(x, 0, 4); }},
      {"split", {x_is, "do not sum"}, [](auto& x, auto&) { split(x, {1, 2}, 0); }},
      {"cat",
       {"xs0 = float32 [4, 6]", "xs1 = float32 [6, 4]"},
       [](auto& x, auto&) { cat(std::vector<DTensor>{x, transpose(x, 0, 1)}); }},
      {"stack",
       {"xs0 = ", "xs1 = ", "shapes differ"},
       [](auto& x, auto&) { stack(std::vector<DTensor>{x, transpose(x, 0, 1)}); }},
      {"add_",
       {"self = float32", "other = float32 [6, 4]"},
       [](auto& x, auto&) { add_(x, transpose(x, 0, 1)); }},
      {"mul_", {"self = int64", "cannot hold"}, [](auto&, auto& n) { mul_(n, 0.5); }},
      {"copy_", {"self = ", "src = "}, [](auto& x, auto&) { copy_(x, transpose(x, 0, 1)); }},
      {"dropout", {x_is, "p must be"}, [](auto& x, auto&) { dropout(x, 2); }},
      {"exponential_",
       {"] lambda must be > 0", "self = float32 [4, 6] on tp=2 [S(0)]"},
       [](auto& x, auto&) { exponential_(x, 0); }},
      {"normal_", {"floating", "self = int64 [4, 6]"}, [](auto&, auto& n) { normal_(n); }},
      {"multinomial", {"row 0", "p = float32"}, [](auto& x, auto&) { multinomial(x * 0, 1); }},
      {"bernoulli_",
       {"outside of [0, 1]", "self = float32", "p = float32"},
       [](auto& x, auto&) { bernoulli_(x, x + 7); }},
  };
  for (const Wrong& w : all) {
    // Found by the kernel: a device tells it later, without the inputs' specs.
    if (w.op == std::string_view("bernoulli_") && !IsHost(ValueOrThrow(DefaultDevice()))) continue;
    const std::string message = Outcome(2, [&](RankContext&) {
      const DeviceMesh mesh({2}, {"tp"});
      const DTensor x = Made({4, 6}, mesh, {Shard(0)});
      w.call(x, to(x, DType::kI64));
    });
    EXPECT_THAT(message, AllOf(HasSubstr("[" + std::string(w.op) + "] "), HasSubstr("; inputs: "),
                               HasSubstr("of 2)")));
    for (const std::string& word : w.words) EXPECT_THAT(message, HasSubstr(word)) << w.op;
  }
}

TEST(UserErrors, AnInPlaceOpNamesWhereSelfCouldStay) {
  const std::string message =
      Outcome(2, [](RankContext&) { add_(Made({4, 6}, DeviceMesh({2}, {"tp"}), {Partial()}), 1); });
  EXPECT_THAT(message, AllOf(HasSubstr("[add_] "), HasSubstr("in-place op cannot keep"),
                             HasSubstr("self is never"),
                             HasSubstr("nearest that it can keep: [S(0)], [S(1)], [R]"),
                             HasSubstr("; inputs: self = float32 [4, 6]")));
}

TEST(UserErrors, StrictModeNamesTheOpThatTheUserCalled) {
  EXPECT_THAT(Outcome(2,
                      [](RankContext&) {
                        const DTensor x = Made({4, 4}, DeviceMesh({2}, {"tp"}), {Shard(1)});
                        const StrictRedistribute strict;
                        linear(x, transpose(x, 0, 1) + x, sum(x, {0}));
                      }),
              AllOf(HasSubstr("strict mode: needs"), HasSubstr("over tp"), HasSubstr("to bring"),
                    HasSubstr("input "), HasSubstr("x = float32 [4, 4]")));
}

TEST(UserErrors, StrictModeNamesEveryCollective) {
  const auto call = [](RankContext&) {
    const DTensor x = Made({4, 4}, DeviceMesh({2, 2}, {"dp", "tp"}), {Partial(), Shard(0)});
    const StrictRedistribute strict;
    add_(Made({4, 4}, x.mesh(), {Replicate(), Replicate()}), x);
  };
  EXPECT_THAT(
      Outcome(4, call),
      AllOf(HasSubstr("strict mode: needs reduce_scatter over dp, then exchange over dp,tp"),
            HasSubstr("[add_]"), HasSubstr("input y")));
}

TEST(UserErrors, StrictModeNamesOpInputAndCollective) {
  EXPECT_THAT(Outcome(2,
                      [](RankContext&) {
                        const DTensor x = Made({4, 4}, DeviceMesh({2}, {"tp"}), {Shard(1)});
                        const StrictRedistribute strict;
                        layer_norm(x, {4});
                      }),
              AllOf(HasSubstr("strict mode"), HasSubstr("over tp"), HasSubstr("[layer_norm]"),
                    HasSubstr("x")));
}

TEST(UserErrors, AThrowingRankEndsAll) {
  EXPECT_THAT(Outcome(4,
                      [](RankContext& rank) {
                        const DeviceMesh mesh({4}, {"tp"});
                        for (int i = 0; i < 5; ++i) {
                          if (rank.rank() == 2 && i == 3) throw std::runtime_error("out of ideas");
                          sum(Made({8}, mesh, {Shard(0)})).Item();
                        }
                      }),
              AllOf(HasSubstr("rank 2"), HasSubstr("out of ideas")));
}

TEST(UserErrors, DifferentCollectivesNameBoth) {
  const std::string message = Outcome(2, [](RankContext& rank) {
    const DeviceMesh mesh({2}, {"tp"});
    const DTensor x = Made({8, 2}, mesh, {Shard(0)});
    if (rank.rank() == 0) {
      x.Redistribute({Replicate()});
    } else {
      sum(x).Redistribute({Replicate()});
    }
  });
  EXPECT_THAT(message, AllOf(HasSubstr("all_gather"), HasSubstr("all_reduce"), HasSubstr("rank")));
}

}  // namespace
}  // namespace dtensor::user_errors_test
