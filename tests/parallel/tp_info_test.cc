// TPInfo: rules by suffix, on models with the names of GPT-2: where features go, what the tree
// says, and what is refused.
#include "dtensor/parallel/plan/tp_info.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dtensor/ops/ops.h"
#include "dtensor/parallel/module/layers.h"
#include "dtensor/rng/generator.h"
#include "tests/common/message.h"
#include "tests/parallel/support.h"

namespace dtensor::tp_info_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::Integers;
using ::testing::Not;
using ::testing::StartsWith;

constexpr int64_t kSize = 12, kHeads = 4;

// y = x weight + bias, weight [in, out]: GPT-2's Conv1D.
class Conv1D : public Module {
 public:
  Conv1D(int64_t in, int64_t out)
      : weight_(AddParameter("weight", {in, out}, Init::Normal(0, 0.2))),
        bias_(AddParameter("bias", {out}, Init::Normal(0, 0.2))) {}
  std::string type_name() const override { return "Conv1D"; }
  std::optional<ModuleTraits> traits() override {
    return ModuleTraits{.weight = &weight_, .bias = &bias_, .out_dim = 1, .in_dim = 0};
  }
  Values Forward(const Values& in) override { return {matmul(in[0], weight_) + bias_}; }

 private:
  Parameter &weight_, &bias_;
};

struct Attention : Module, HasAttributes {
  int64_t num_heads = kHeads, embed_dim = kSize, split_size = kSize;
  Conv1D& c_attn = AddChild<Conv1D>("c_attn", kSize, 3 * kSize);
  Conv1D& c_proj = AddChild<Conv1D>("c_proj", kSize, kSize);
  Dropout& attn_dropout = AddChild<Dropout>("attn_dropout", 0.25);
  Dropout& resid_dropout = AddChild<Dropout>("resid_dropout", 0.25);
  std::map<std::string, int64_t*> attributes() override {
    return {{"num_heads", &num_heads}, {"embed_dim", &embed_dim}, {"split_size", &split_size}};
  }
  // Sees whole DTensors, so it infers what it has.
  Values Forward(const Values& in) override {
    const Values qkv = split(c_attn(in[0]), {kSize, kSize, kSize}, -1);
    const auto heads = [](const DTensor& t) {
      return transpose(unflatten(t, -1, {-1, kSize / kHeads}), -3, -2);
    };
    const DTensor scores = matmul(heads(qkv[0]), transpose(heads(qkv[1]), -2, -1));
    const DTensor y = matmul(attn_dropout(softmax(scores, -1)), heads(qkv[2]));
    return {resid_dropout(c_proj(flatten(transpose(y, -3, -2), -2, -1)))};
  }
};

struct Mlp : Module {
  Conv1D& c_fc = AddChild<Conv1D>("c_fc", kSize, 4 * kSize);
  Conv1D& c_proj = AddChild<Conv1D>("c_proj", 4 * kSize, kSize);
  Dropout& dropout = AddChild<Dropout>("dropout", 0.25);
  Values Forward(const Values& in) override { return {dropout(c_proj(gelu(c_fc(in[0]))))}; }
};

struct Block : Module {
  LayerNorm& ln_1 = AddChild<LayerNorm>("ln_1", kSize);
  Attention& attn = AddChild<Attention>("attn");
  LayerNorm& ln_2 = AddChild<LayerNorm>("ln_2", kSize);
  Mlp& mlp = AddChild<Mlp>("mlp");
  Values Forward(const Values& in) override {
    const DTensor x = in[0] + attn(ln_1(in[0]));
    return {x + mlp(ln_2(x))};
  }
};

struct Gpt2 : Module {
  explicit Gpt2(int64_t layers, int64_t vocab = 50)
      : wte(AddChild<Embedding>("wte", vocab, kSize)),
        drop(AddChild<Dropout>("drop", 0.25)),
        h(AddChild<Sequential>("h")),
        ln_f(AddChild<LayerNorm>("ln_f", kSize)) {
    for (int64_t i = 0; i < layers; ++i) h.Append<Block>();
  }
  Values Forward(const Values& ids) override { return {ln_f(h(drop(wte(ids[0]))))}; }
  Embedding& wte;
  Dropout& drop;
  Sequential& h;
  LayerNorm& ln_f;
};

TPInfo Gpt2Info() {
  return TPInfo()
      .ShardCol("attn.c_attn", {.stride = 3, .unit = kSize / kHeads})
      .ShardCol("mlp.c_fc")
      .ShardRow("attn.c_proj", {.unit = kSize / kHeads})
      .ShardRow("mlp.c_proj")
      .ShardVocab("wte")
      .ReplicDrop("resid_dropout")
      .ReplicDrop("mlp.dropout")
      .ReplicDrop("drop")
      .ParallelDrop("attn_dropout")
      .Shrink(".attn", {"embed_dim", "split_size", "num_heads"});
}

constexpr char kTree[] = R"(Tensor Parallel Sharding Tree:
wte -> [tp_shard] VocabParallelEmbedding, {}
drop -> [randomizer] ('tensor',)
h
    ['0', '1', '2']
        attn -> [shrink_attr] {'embed_dim', 'num_heads', 'split_size'}
            c_attn -> [tp_shard] ColumnParallelLinear, {'stride': 3}
            c_proj -> [tp_shard] RowParallelLinear, {}
            attn_dropout -> [randomizer] ()
            resid_dropout -> [randomizer] ('tensor',)
        mlp
            c_fc -> [tp_shard] ColumnParallelLinear, {}
            c_proj -> [tp_shard] RowParallelLinear, {}
            dropout -> [randomizer] ('tensor',)
)";

TPInfo DocumentsInfo() {  // as in ATorch's own example
  return TPInfo()
      .ShardCol("attn.c_attn", {.stride = 3})
      .ShardCol("mlp.c_fc")
      .ShardRow("attn.c_proj")
      .ShardRow("mlp.c_proj")
      .ShardVocab("wte")
      .ReplicDrop("resid_dropout")
      .ReplicDrop("mlp.dropout")
      .ReplicDrop("drop")
      .ParallelDrop("attn_dropout")
      .Shrink(".attn", {"embed_dim", "split_size", "num_heads"});
}

TEST(TensorParallelTree, MergesBlocksThatAreAlike) {
  Gpt2 model(3);
  EXPECT_EQ(ValueOrThrow(TensorParallelTree(model, DocumentsInfo())), kTree);
  // With a rule of its own the middle block keeps the outer ones apart.
  const std::string odd =
      ValueOrThrow(TensorParallelTree(model, DocumentsInfo().ParallelDrop("h.1.ln_1")));
  EXPECT_THAT(odd, AllOf(HasSubstr("['0']\n"), HasSubstr("['1']\n"), HasSubstr("['2']\n"),
                         HasSubstr("ln_1 -> [randomizer] ()\n")));
}

TEST(TPInfo, ShrinksOnceWhereRulesAreAppliedAgain) {
  struct Heads : Module, HasAttributes {
    int64_t heads = 8;
    std::map<std::string, int64_t*> attributes() override { return {{"heads", &heads}}; }
    Values Forward(const Values& in) override { return in; }
  };
  struct Holder : Module {
    Heads& attn = AddChild<Heads>("attn");
    Values Forward(const Values& in) override { return attn(in); }
  };
  const absl::Status status = RunSpmd(4, [](RankContext&) -> absl::Status {
    Holder model;
    const DeviceMesh mesh({2, 2}, {"dp", "tp"});
    const TPInfo info = TPInfo().Shrink("attn", {"heads"});
    for (int i = 0; i < 2; ++i) {
      DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, info, {.mesh_dim = "tp"}));
      EXPECT_EQ(model.attn.heads, 4);
    }
    DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, info, {.mesh_dim = "dp"}));
    EXPECT_EQ(model.attn.heads, 2);  // over another mesh dim, another division
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Which rows of a column of numbers 0, 1, 2, ... each rank has.
std::vector<std::vector<double>> RowsOf(int64_t rows, int64_t ranks, const TPSplit& split) {
  std::vector<std::vector<double>> held(ranks);
  const absl::Status status = RunSpmd(ranks, [&](RankContext& rank) -> absl::Status {
    struct Holder : Module {
      explicit Holder(int64_t n) : layer(AddChild<Linear>("layer", 1, n, false)) {}
      Values Forward(const Values& in) override { return {layer(in[0])}; }
      Linear& layer;
    };
    Holder model(rows);
    DT_RETURN_IF_ERROR(ParallelizeModule(model, DeviceMesh({ranks}, {"tp"}),
                                         TPInfo().ShardCol("layer", split), {.warn = false}));
    Materialize(model);
    std::vector<double> numbers;
    for (int64_t i = 0; i < rows; ++i) numbers.push_back(static_cast<double>(i));
    model.layer.weight().Set(FromVector(numbers, {rows, 1}));
    held[rank.rank()] = model.layer.weight().tensor().local().ToVector<double>();
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  return held;
}

TEST(TPInfo, StridesAndUnequalSegments) {
  EXPECT_THAT(RowsOf(12, 2, {.stride = 3}),
              ElementsAre(ElementsAre(0, 1, 4, 5, 8, 9), ElementsAre(2, 3, 6, 7, 10, 11)));
  EXPECT_THAT(
      RowsOf(16, 2, {.segments = {8, 4, 4}}),
      ElementsAre(ElementsAre(0, 1, 2, 3, 8, 9, 12, 13), ElementsAre(4, 5, 6, 7, 10, 11, 14, 15)));
}

// Outputs and gradients of one rank, in evaluation and, with dropout, in training.
std::vector<std::vector<double>> RunGpt2(const DeviceMesh& mesh, const TPInfo& info, bool train) {
  ManualSeed(3);
  Gpt2 model(2);
  if (!mesh.is_self()) ThrowIfError(ParallelizeModule(model, mesh, info, {.warn = false}));
  Materialize(model);
  model.Train(train);
  // Ids at the edges of the shards of four ranks among them.
  const DTensor whole = FromVector<int64_t>({12, 13, 25, 26, 49, 0, 38, 39}, {2, 4});
  const DTensor ids = mesh.is_self()     ? whole
                      : mesh.ndim() == 1 ? DistributeTensor(whole, mesh, {Replicate()})
                                         : DistributeTensor(whole, mesh, {Shard(0), Replicate()});
  const DTensor y = model(ids);
  y.Backward(mesh.is_self() ? ones(y.shape())
                            : DistributeTensor(ones(y.shape()), mesh, y.placements()));
  std::vector<std::vector<double>> all = {y.ToVector<double>()};
  for (const auto& [name, values] : testing::Gather(model, /*gradients=*/true)) {
    all.push_back(values);
  }
  return all;
}

TEST(TPInfo, GivesOneRanksNumbersWithItsMasks) {
  for (const bool train : {false, true}) {
    const auto expected = RunGpt2(DeviceMesh::Self(), {}, train);
    const absl::Status status = RunSpmd(4, [&](RankContext&) {
      for (const DeviceMesh& mesh : {DeviceMesh({4}, {"tp"}), DeviceMesh({2, 2}, {"dp", "tp"})}) {
        const auto got = RunGpt2(mesh, Gpt2Info(), train);
        EXPECT_EQ(got.size(), expected.size());
        for (size_t i = 0; i < got.size(); ++i) {
          for (size_t k = 0; k < got[i].size(); ++k) {
            EXPECT_NEAR(got[i][k], expected[i][k], 2e-4 * (1 + std::abs(expected[i][k])));
          }
        }
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(TPInfo, EffectsOfSeveralRulesHold) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    Gpt2 model(1, /*vocab=*/50);
    // The attention module has two: its input is brought to Replicate, and its numbers shrink.
    DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, Gpt2Info().ReplicDrop("0.attn"), {}));
    auto& attention = static_cast<Attention&>(*model.FindModule("h.0.attn"));
    EXPECT_EQ(attention.num_heads, kHeads / 2);
    EXPECT_EQ(attention.embed_dim, kSize / 2);
    bool whole = false;
    attention.AddPreHook([&](Module&, const Values& in) {
      whole = in[0].placements()[0].is_replicate();
      return in;
    });
    Materialize(model);
    attention({randn({1, 4, kSize}, {.mesh = mesh, .placements = {Shard(1)}})});
    EXPECT_TRUE(whole);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// 50 rows on 4 ranks: 13 each but for the last; a bias after the sum counts once.
TEST(TPInfo, VocabulariesNeedNotDivideAndBiasesCountOnce) {
  const absl::Status status = RunSpmd(4, [](RankContext& rank) -> absl::Status {
    const DeviceMesh mesh({4}, {"tp"});
    Gpt2 model(1);
    DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, Gpt2Info(), {.warn = false}));
    Materialize(model);
    EXPECT_EQ(model.wte.weight().tensor().local().size(0), rank.rank() == 3 ? 11 : 13);
    Module& proj = *model.FindModule("h.0.mlp.c_proj");
    proj.FindParameter("weight")->Set(zeros({4 * kSize, kSize}));
    proj.FindParameter("bias")->Set(ones({kSize}));
    const DTensor y = proj(ones({1, 4 * kSize}, {.mesh = mesh, .placements = {Shard(1)}}));
    EXPECT_EQ(y.ToVector<double>(), std::vector<double>(kSize, 1.0));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Masks: alike over tp where they are to be, each rank's own part elsewhere.
TEST(TPInfo, ReplicatedAndParallelDropout) {
  std::vector<std::vector<double>> whole(8), part(8);
  const absl::Status status = RunSpmd(8, [&](RankContext& rank) -> absl::Status {
    const DeviceMesh mesh({2, 2, 2}, {"pp", "dp", "tp"});
    ManualSeed(1);
    struct Drops : Module {
      Dropout& replic = AddChild<Dropout>("replic", 0.5);
      Dropout& parallel = AddChild<Dropout>("parallel", 0.5);
      Values Forward(const Values& in) override { return {replic(in[0]), parallel(in[1])}; }
    };
    Drops model;
    DT_RETURN_IF_ERROR(
        ParallelizeModule(model, mesh, TPInfo().ReplicDrop("replic").ParallelDrop("parallel")));
    const DTensor x = ones({256, 64}, {.mesh = mesh, .placements = {Shard(0), Shard(0), Shard(1)}});
    const Values y = model({x, x});
    whole[rank.rank()] = y[0].local().ToVector<double>();
    part[rank.rank()] = y[1].local().ToVector<double>();
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
  for (int a = 0; a < 8; ++a) {
    for (int b = a + 1; b < 8; ++b) {
      EXPECT_EQ(whole[a] == whole[b], a / 2 == b / 2) << a << " " << b;  // tp varies fastest
      EXPECT_NE(part[a], part[b]) << a << " " << b;
    }
  }
}

TEST(TPInfo, RefusesAndChangesNothing) {
  const absl::Status status = RunSpmd(5, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({5}, {"tp"});
    Gpt2 model(2);
    const auto why = [&](const TPInfo& info) {
      return std::string(ParallelizeModule(model, mesh, info, {.warn = false}).message());
    };
    EXPECT_THAT(why(TPInfo().ShardCol("attn.c_atn")),
                AllOf(HasSubstr("ShardCol(\"attn.c_atn\")"), HasSubstr("near: attn.c_attn")));
    // Whatever follows it, what is optional may be of no module.
    EXPECT_THAT(why(TPInfo().ShardCol("attn.c_atn").Optional().ShardCol("mlp.c_fcc")),
                AllOf(HasSubstr("mlp.c_fcc"), Not(HasSubstr("c_atn"))));
    EXPECT_THAT(testing::MessageOf([] { TPInfo().Optional(); }), HasSubstr("of no rule"));
    EXPECT_THAT(why(TPInfo().ShardCol("c_proj").ShardRow("mlp.c_proj")),
                AllOf(HasSubstr("h.0.mlp.c_proj"), HasSubstr("ShardCol(\"c_proj\")"),
                      HasSubstr("ShardRow(\"mlp.c_proj\")")));
    EXPECT_THAT(why(TPInfo().ShardCol("c_fc").Shrink(".attn", {"num_heads"})),
                AllOf(HasSubstr("h.0.attn"), HasSubstr("num_heads = 4 does not divide"),
                      HasSubstr("5 ranks of tp")));
    // In the name of the function, as errors of plans, and of a mesh dim that is called otherwise.
    const absl::Status other = ParallelizeModule(model, DeviceMesh({5}, {"model"}),
                                                 TPInfo().Shrink(".attn", {"num_heads"}));
    EXPECT_THAT(std::string(other.message()),
                AllOf(StartsWith("[parallelize_module] h.0.attn"), HasSubstr("5 ranks of model")));
    EXPECT_THAT(why(TPInfo().Shrink(".attn", {"num_head"})), HasSubstr("nearest: num_heads"));
    EXPECT_THAT(why(TPInfo().Shrink(".mlp", {"size"})), HasSubstr("has no attributes"));
    EXPECT_THAT(why(TPInfo().ShardVocab("c_fc")), HasSubstr("not Conv1D"));
    EXPECT_THAT(why(TPInfo().ShardCol("c_attn", {.stride = 5})), HasSubstr("does not divide 36"));
    EXPECT_THAT(why(TPInfo().ShardCol("ln_1")), HasSubstr("not LayerNorm"));
    const Segments parts = {Segment(12), Segment(24)};
    const std::vector<std::pair<TPInfo, const char*>> splits = {
        {TPInfo().ShardRow("c_proj", {.stride = 3}), "ShardRow(\"c_proj\"): stride and segments"},
        {TPInfo().ShardRow("c_proj", {.segments = parts}), "which ShardRow leaves whole"},
        {TPInfo().ShardCol("c_attn", {.stride = 3, .segments = parts}), "both say"},
        {TPInfo().ShardCol("c_attn", {.segments = parts, .unit = 4}), "unit and segments both say"},
        {TPInfo().ShardCol("c_attn", {.stride = 0}), "stride 0 is no number of parts"},
        {TPInfo().ShardCol("c_attn", {.stride = -3}), "stride -3"},
        {TPInfo().ShardCol("c_attn", {.unit = -1}), "unit -1"}};
    for (const auto& [info, says] : splits) {
      EXPECT_THAT(why(info), HasSubstr(says));
      EXPECT_THAT(std::string(TensorParallelTree(model, info).status().message()), HasSubstr(says));
    }
    EXPECT_TRUE(model.FindParameter("h.0.mlp.c_fc.weight")->mesh().is_self());
    EXPECT_EQ(static_cast<Attention&>(*model.FindModule("h.0.attn")).num_heads, kHeads);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// A strict plan hears of everything: what nothing shards is said to stay whole.
TEST(TPInfo, StrictHoldsWithWhole) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    struct Block : Module {
      Module& norm = AddChild<LayerNorm>("norm", 4);
      Linear& up = AddChild<Linear>("w[0]", 4, 8);  // a name that is no pattern
      Linear& other = AddChild<Linear>("w0", 8, 8);
      Linear& down = AddChild<Linear>("*", 8, 4);
      Values Forward(const Values& in) override { return {down(other(up(norm(in[0]))))}; }
    };
    Block block;
    const auto apply = [&](const TPInfo& info) {
      return ParallelizeModule(block, mesh, info, {.warn = false, .strict = true});
    };
    const TPInfo some = TPInfo().ShardCol("w[0]").ShardRow("*");
    EXPECT_THAT(std::string(apply(some).message()), HasSubstr("no style places norm.weight"));
    DT_RETURN_IF_ERROR(apply(TPInfo(some).Whole("norm").Whole("w0")));
    EXPECT_EQ(block.up.weight().placements()[0], Shard(0));
    EXPECT_EQ(block.down.weight().placements()[0], Shard(1));
    EXPECT_EQ(block.other.weight().placements()[0], Replicate());
    EXPECT_EQ(block.FindParameter("norm.weight")->placements()[0], Replicate());
    EXPECT_THAT(ValueOrThrow(TensorParallelTree(block, TPInfo().Whole("norm"))),
                HasSubstr("norm -> [replicate]"));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace dtensor::tp_info_test
