// Every style that ships: output and gradients are those of one rank bit for bit, whatever the mesh
// and however it divides, and what is communicated is exactly what the style says.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/match.h"
#include "absl/strings/str_join.h"
#include "dtensor/mesh/expect_comm.h"
#include "dtensor/mesh_scope.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/module/layers.h"
#include "dtensor/parallel/plan/plan.h"
#include "dtensor/parallel/plan/tp_info.h"
#include "tests/parallel/support.h"

namespace dtensor::style_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::Integers;
using testing::MessageOf;

constexpr int64_t kBatch = 4, kSeq = 6, kIn = 8, kOut = 10, kVocab = 11;

// A norm's shape of work in whole numbers: x * weight + bias over the last dim.
class Scale : public Module {
 public:
  explicit Scale(int64_t size)
      : weight_(AddParameter("weight", {size}, Init::Ones())),
        bias_(AddParameter("bias", {size}, Init::Zeros())) {}
  std::string type_name() const override { return "Scale"; }

 protected:
  Values Forward(const Values& in) override { return {in[0] * weight_ + bias_}; }

 private:
  Parameter &weight_, &bias_;
};

using Expectations = std::vector<CommExpectation>;
constexpr auto kF = CommPhase::kForward, kB = CommPhase::kBackward;
constexpr auto kAllReduce = CollectiveKind::kAllReduce;
constexpr auto kAllGather = CollectiveKind::kAllGather;
constexpr auto kReduceScatter = CollectiveKind::kReduceScatter;

struct StyleCase {
  std::string name;
  std::function<std::unique_ptr<Module>()> build;
  Style style;
  bool looks_up = false;
  Placement input = {}, output = {};  // on the plan's mesh dim; the output's with its unit left out
  Expectations comm = {};             // on that mesh dim
  bool local = false;                 // the input comes as a local tensor, the output leaves as one
};

template <class M>
std::function<std::unique_ptr<Module>()> Make(int64_t in, int64_t out) {
  return [=] { return std::make_unique<M>(in, out); };
}
std::unique_ptr<Module> MakeScale() { return std::make_unique<Scale>(kIn); }

// What cases expect, and how values lie over the plan's mesh dim.
const CommExpectation reduce_f = {.kind = kAllReduce, .phase = kF, .count = 1};
const CommExpectation reduce_b = {.kind = kAllReduce, .phase = kB, .count = 1};
const CommExpectation scatter_f = {.kind = kReduceScatter, .phase = kF, .count = 1};
const CommExpectation scatter_b = {.kind = kReduceScatter, .phase = kB, .count = 1};
const CommExpectation gather_f = {.kind = kAllGather, .phase = kF, .count = 1};
const CommExpectation gather_b = {.kind = kAllGather, .phase = kB, .count = 1};
const Placement whole = Replicate(), by_sequence = Shard(1), by_feature = Shard(2);

std::vector<StyleCase> Cases() {
  const auto linear = Make<Linear>(kIn, kOut);
  const auto table = Make<Embedding>(kVocab, kIn);
  return {
      {"colwise linear", linear, ColwiseParallel(), false, whole, by_feature, {reduce_b}},
      {"colwise linear of a sharded input",
       linear,
       ColwiseParallel({.input = Shard(1)}),
       false,
       by_sequence,
       by_feature,
       {gather_f, scatter_b}},
      {"colwise linear, whole output",
       linear,
       ColwiseParallel({.output = Replicate()}),
       false,
       whole,
       whole,
       {gather_f, reduce_b}},
      {"colwise embedding", table, ColwiseParallel(), true, whole, by_feature, {}},
      {"rowwise linear", linear, RowwiseParallel(), false, by_feature, whole, {reduce_f}},
      {"rowwise linear to shards",
       linear,
       RowwiseParallel({.output = Shard(1)}),
       false,
       by_feature,
       by_sequence,
       {scatter_f, gather_b}},
      {"rowwise embedding", table, RowwiseParallel(), true, whole, whole, {reduce_f}},
      {"rowwise embedding to shards",
       table,
       RowwiseParallel({.output = Shard(1)}),
       true,
       whole,
       by_sequence,
       {scatter_f, gather_b}},
      {"sequence parallel",
       MakeScale,
       SequenceParallel(),
       false,
       by_sequence,
       by_sequence,
       {reduce_b}},
      {"sequence parallel over dim 0",
       MakeScale,
       SequenceParallel(0),
       false,
       Shard(0),
       Shard(0),
       {reduce_b}},
      {"prepared input",
       linear,
       PrepareModuleInput({.input_layouts = {Shard(1)}, .desired_input_layouts = {Replicate()}}),
       false,
       by_sequence,
       whole,
       {gather_f}},
      {"prepared output",
       linear,
       PrepareModuleOutput({.output_layouts = {Replicate()}, .desired_output_layouts = {Shard(1)}}),
       false,
       whole,
       by_sequence,
       {gather_b}},
      {"prepared input and output",
       linear,
       PrepareModuleInputOutput(
           {{.input_layouts = {Shard(1)}, .desired_input_layouts = {Replicate()}},
            {.output_layouts = {Replicate()}, .desired_output_layouts = {Shard(1)}}}),
       false,
       by_sequence,
       by_sequence,
       {gather_f, gather_b}},
      {"prepared by hand",
       linear,
       PrepareModule({.inputs = {Replicate()}, .outputs = {Shard(1)}}),
       false,
       by_sequence,
       by_sequence,
       {gather_f, gather_b}},
      {"colwise linear of dim 0",
       linear,
       ColwiseParallel(),
       false,
       Shard(0),
       by_feature,
       {gather_f, scatter_b}},
      {"rowwise linear to dim 0",
       linear,
       RowwiseParallel({.output = Shard(0)}),
       false,
       by_feature,
       Shard(0),
       {scatter_f, gather_b}},
      {"no parallel", linear, NoParallel(), false, whole, whole, {}},
      {"no parallel between shards",
       linear,
       NoParallel({.input_layout = Shard(1), .output_layout = Shard(1)}),
       false,
       by_sequence,
       by_sequence,
       {gather_f, gather_b}},
  };
}

// The same styles between local tensors: of uneven sizes too, which nobody says.
std::vector<StyleCase> LocalCases() {
  const auto linear = Make<Linear>(kIn, kOut);
  const auto table = Make<Embedding>(kVocab, kIn);
  const auto part = [](const Placement& p) { return ValueLayout(p, /*as_local=*/true); };
  std::vector<StyleCase> cases = {
      {.name = "colwise linear",
       .build = linear,
       .style = ColwiseParallel({.input = part(Replicate()), .use_local_output = true}),
       .input = whole,
       .output = by_feature,
       .comm = {reduce_b}},
      {.name = "colwise linear of a sharded input",
       .build = linear,
       .style = ColwiseParallel({.input = part(Shard(1)), .use_local_output = true}),
       .input = by_sequence,
       .output = by_feature,
       .comm = {gather_f, scatter_b}},
      {.name = "rowwise linear",
       .build = linear,
       .style = RowwiseParallel({.input = part(Shard(-1)), .use_local_output = true}),
       .input = by_feature,
       .output = whole,
       .comm = {reduce_f}},
      {.name = "rowwise linear to shards",
       .build = linear,
       .style = RowwiseParallel({.input = part(Shard(-1)), .output = part(Shard(1))}),
       .input = by_feature,
       .output = by_sequence,
       .comm = {scatter_f, gather_b}},
      {.name = "rowwise embedding to shards",
       .build = table,
       .style = RowwiseParallel({.input = part(Replicate()), .output = part(Shard(1))}),
       .looks_up = true,
       .input = whole,
       .output = by_sequence,
       .comm = {scatter_f, gather_b}},
      {.name = "sequence parallel",
       .build = MakeScale,
       .style = SequenceParallel(1, /*use_local_output=*/true),
       .input = by_sequence,
       .output = by_sequence,
       .comm = {reduce_b}},
      {.name = "prepared input and output",
       .build = linear,
       .style = PrepareModuleInputOutput(
           {{.input_layouts = {Shard(1)}, .desired_input_layouts = {Replicate()}},
            {.output_layouts = {Replicate()},
             .desired_output_layouts = {Shard(1)},
             .use_local_output = true}}),
       .input = by_sequence,
       .output = by_sequence,
       .comm = {gather_f, gather_b}},
      {.name = "no parallel between shards",
       .build = linear,
       .style = NoParallel(
           {.input_layout = Shard(1), .output_layout = Shard(1), .use_local_output = true}),
       .input = by_sequence,
       .output = by_sequence,
       .comm = {gather_f, gather_b}},
  };
  for (StyleCase& c : cases) {
    c.name += ", local";
    c.local = true;
  }
  return cases;
}

void FillWithIntegers(Module& model) {
  StateDict state;
  int64_t seed = 1;
  for (const NamedParameter& p : model.NamedParameters()) {
    state.emplace_back(p.fqn,
                       FromVector(Integers(p.parameter->numel(), ++seed), p.parameter->shape()));
  }
  model.LoadStateDict(state);
}

DTensor InputOf(const StyleCase& c) {
  if (!c.looks_up) return FromVector(Integers(kBatch * kSeq * kIn, 3), {kBatch, kSeq, kIn});
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < kBatch * kSeq; ++i) ids.push_back((i * 5 + 2) % kVocab);
  return FromVector(ids, {kBatch, kSeq});
}

// Output, gradient of the input and of every parameter, whole.
std::vector<std::vector<double>> Whole(const DTensor& y, const DTensor& x, const Module& model) {
  std::vector<std::vector<double>> all = {y.ToVector<double>()};
  if (x.requires_grad()) all.push_back(x.grad().ToVector<double>());
  for (const auto& [name, values] : testing::Gather(model, /*gradients=*/true)) {
    all.push_back(values);
  }
  return all;
}

DTensor WeightsOf(const DTensor& y) {  // of the loss sum(y * weights)
  return FromVector(Integers(y.numel(), 5), y.shape());
}

std::vector<std::vector<double>> OnOneRank(const StyleCase& c) {
  const std::unique_ptr<Module> model = c.build();
  Materialize(*model);
  FillWithIntegers(*model);
  DTensor x = InputOf(c);
  if (!c.looks_up) x.RequiresGrad();
  const DTensor y = (*model)(x);
  y.Backward(WeightsOf(y));
  return Whole(y, x, *model);
}

// The style on one dim of a mesh, `batch` over the others.
absl::Status RunCase(const StyleCase& c, const DeviceMesh& mesh, int mesh_dim,
                     const Placement& batch, const std::vector<std::vector<double>>& expected) {
  const std::string label(mesh.names()[mesh_dim]);
  SCOPED_TRACE(absl::StrCat(c.name, " over ", label, " of ", mesh.ToString(), ", elsewhere ",
                            batch.ToString()));
  const std::unique_ptr<Module> model = c.build();
  NamedLayouts elsewhere;
  for (const std::string& other : mesh.names()) {
    if (other != label) elsewhere.emplace(other, batch);
  }
  DT_RETURN_IF_ERROR(ParallelizeModule(
      *model, mesh, c.style, {.mesh_dim = label, .warn = false, .local_layouts = elsewhere}));
  Materialize(*model);
  FillWithIntegers(*model);
  Placements placements(mesh.ndim(), batch);
  placements[mesh_dim] = c.input;
  DTensor x = DistributeTensor(InputOf(c), mesh, placements).Detach();
  if (!c.looks_up) x.RequiresGrad();
  const StrictRedistribute strict;
  CommTrace trace;
  DTensor y = (*model)(c.local ? x.ToLocal() : x);
  if (c.local) {
    EXPECT_TRUE(y.mesh().is_self());
    placements[mesh_dim] = c.output;
    const auto numel = static_cast<int64_t>(expected[0].size());
    y = FromLocal(y, mesh, placements, {.shape = {kBatch, kSeq, numel / (kBatch * kSeq)}});
  }
  EXPECT_EQ(y.placements()[mesh_dim], c.output) << y.spec().ToString();
  y.Backward(DistributeTensor(WeightsOf(y), mesh, y.placements()));
  const std::string everywhere = absl::StrJoin(mesh.names(), ",");
  // Gradients of parameters that are whole everywhere: over both mesh dims at once.
  const bool with_the_batch = c.style.name == "SequenceParallel" && mesh.ndim() > 1;
  // Where both mesh dims cut the same dim, the style's first, what is whole on the style's is cut
  // elsewhere than before: all ranks exchange pieces, there and back, and nothing is gathered.
  const bool inside = mesh_dim + 1 < mesh.ndim() && (c.input == batch || c.output == batch);
  Expectations comm;
  int64_t exchanged = 0;
  for (CommExpectation e : c.comm) {
    e.mesh_dims = with_the_batch ? everywhere : label;
    if (inside && e.kind == kAllGather) {
      ++exchanged;
    } else {
      comm.push_back(e);
    }
  }
  for (const CommPhase phase : {kF, kB}) {
    comm.push_back({.kind = CollectiveKind::kExchange,
                    .mesh_dims = everywhere,
                    .phase = phase,
                    .count = exchanged});
  }
  if (c.local && (c.input.cuts() || mesh.ndim() > 1)) {  // the sizes of what comes in
    comm.push_back(
        {.kind = CollectiveKind::kHostExchange, .mesh_dims = everywhere, .phase = kF, .count = 1});
  }
  // The other mesh dim, where the batch is, sees the gradients of all parameters in one bucket.
  int64_t bucket = 0;
  for (const NamedParameter& p : model->NamedParameters()) {
    bucket += p.parameter->tensor().local().nbytes();
  }
  for (const std::string& other : mesh.names()) {
    if (other == label || with_the_batch) continue;
    comm.push_back(
        {.kind = kAllReduce, .mesh_dims = other, .phase = kB, .count = 1, .bytes = bucket});
  }
  for (const CommEvent& e : trace.events()) EXPECT_FALSE(e.implicit) << e.op;
  const std::string mismatch = CommMismatch(trace, comm);
  EXPECT_EQ(mismatch, "");
  EXPECT_EQ(Whole(y, x, *model), expected);
  return absl::OkStatus();
}

TEST(Styles, AreOneRankBitForBitAndCommunicateWhatTheySay) {
  std::vector<StyleCase> cases = Cases();
  for (StyleCase& c : LocalCases()) cases.push_back(std::move(c));
  std::vector<std::vector<std::vector<double>>> expected;
  for (const StyleCase& c : cases) expected.push_back(OnOneRank(c));
  for (const int64_t ranks : {2, 3, 4}) {
    const absl::Status status = RunSpmd(ranks, [&](RankContext&) -> absl::Status {
      for (size_t i = 0; i < cases.size(); ++i) {
        DT_RETURN_IF_ERROR(
            RunCase(cases[i], DeviceMesh({ranks}, {"tp"}), 0, Shard(0), expected[i]));
        if (ranks != 4) continue;
        const DeviceMesh square({2, 2}, {"dp", "tp"});
        for (const int mesh_dim : {0, 1}) {
          for (const Placement& batch : {Shard(0), Shard(1)}) {
            DT_RETURN_IF_ERROR(RunCase(cases[i], square, mesh_dim, batch, expected[i]));
          }
        }
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// --- a block of a Llama under the plan with sequence parallel ------------------------------------

constexpr int64_t kHidden = 16, kHeads = 4, kKvHeads = 2, kHeadSize = 4, kInner = 24;

struct Attention : Module {
  Linear& wq = AddChild<Linear>("wq", kHidden, kHeads* kHeadSize, false);
  Linear& wk = AddChild<Linear>("wk", kHidden, kKvHeads* kHeadSize, false);
  Linear& wv = AddChild<Linear>("wv", kHidden, kKvHeads* kHeadSize, false);
  Linear& wo = AddChild<Linear>("wo", kHeads* kHeadSize, kHidden, false);
  Values Forward(const Values& x) override {
    const auto heads = [&](Linear& w) {
      return transpose(unflatten(w(x[0]), -1, {-1, kHeadSize}), 1, 2);
    };
    const DTensor y =
        scaled_dot_product_attention(heads(wq), heads(wk), heads(wv), {}, true, {}, true);
    return {wo(flatten(transpose(y, 1, 2), 2, 3))};
  }
};

struct FeedForward : Module {
  Linear& w1 = AddChild<Linear>("w1", kHidden, kInner, false);
  Linear& w2 = AddChild<Linear>("w2", kInner, kHidden, false);
  Linear& w3 = AddChild<Linear>("w3", kHidden, kInner, false);
  Values Forward(const Values& x) override { return {w2(silu(w1(x[0])) * w3(x[0]))}; }
};

struct Block : Module {
  RMSNorm& attention_norm = AddChild<RMSNorm>("attention_norm", kHidden);
  Attention& attention = AddChild<Attention>("attention");
  RMSNorm& ffn_norm = AddChild<RMSNorm>("ffn_norm", kHidden);
  FeedForward& feed_forward = AddChild<FeedForward>("feed_forward");
  Values Forward(const Values& in) override {
    const DTensor x = in[0] + attention(attention_norm(in[0]));
    return {x + feed_forward(ffn_norm(x))};
  }
};

Plan BlockPlan() {
  const auto whole =
      PrepareModuleInput({.input_layouts = {Shard(1)}, .desired_input_layouts = {Replicate()}});
  const int64_t group = kHeadSize * kHeads / kKvHeads;
  return {{"*.attention_norm", SequenceParallel()},
          {"*.attention", whole},
          {"*.attention.wq", ColwiseParallel({.unit = group})},
          {"*.attention.w[kv]", ColwiseParallel({.unit = kHeadSize})},
          {"*.attention.wo", RowwiseParallel({.unit = group, .output = Shard(1)})},
          {"*.ffn_norm", SequenceParallel()},
          {"*.feed_forward", whole},
          {"*.feed_forward.w[13]", ColwiseParallel()},
          {"*.feed_forward.w2", RowwiseParallel({.output = Shard(1)})}};
}

std::unique_ptr<Sequential> TwoBlocks() {
  auto model = std::make_unique<Sequential>();
  model->Append<Block>();
  model->Append<Block>();
  SetDType(*model, DType::kF64);
  return model;
}

DTensor Tokens() {
  return FromVector(Integers(2 * 8 * kHidden, 4), {2, 8, kHidden}, {.dtype = DType::kF64});
}

std::vector<std::vector<double>> TrainedOnce(Module& model, const DeviceMesh& mesh) {
  ManualSeed(11);
  Materialize(model);
  DTensor x = Tokens();
  if (!mesh.is_self()) {
    x = DistributeTensor(x, mesh, {Shard(0), Shard(1)}).Detach();
  }
  x.RequiresGrad();
  const DTensor y = model(x);
  const DTensor c = FromVector(Integers(y.numel(), 5), y.shape(), {.dtype = DType::kF64});
  y.Backward(mesh.is_self() ? c : DistributeTensor(c, mesh, y.placements()));
  return Whole(y, x, model);
}

// All that two blocks send, in bytes: [2, 8, kHidden] of float64, cut over dp and gathered and
// scattered over tp; four norms whose weights are whole everywhere; the rest, whole over dp.
Expectations TrafficOfTwoBlocks(const Module& model, const DTensor& x, int64_t dp, int64_t tp) {
  const int64_t whole = 2 / dp * 8 * kHidden * 8, part = x.local().nbytes();
  const int64_t gathered = whole - part, scattered = (tp - 1) * part;
  if (8 % tp == 0) {
    EXPECT_EQ(gathered, whole * (tp - 1) / tp);
    EXPECT_EQ(scattered, whole * (tp - 1) / tp);
  }
  Expectations comm;
  for (const CommPhase phase : {kF, kB}) {
    for (const char* block : {"0", "1"}) {
      CommExpectation e = {.mesh_dims = "tp", .phase = phase, .module = block, .count = 2};
      e.kind = kAllGather;
      e.bytes = 2 * gathered;
      comm.push_back(e);
      e.kind = kReduceScatter;
      e.bytes = 2 * scattered;
      comm.push_back(e);
    }
  }
  int64_t weights = 0;
  for (const NamedParameter& p : model.NamedParameters()) {
    if (!absl::StrContains(p.fqn, "norm")) weights += p.parameter->tensor().local().nbytes();
  }
  // Twice (n - 1) / n of the norms' weights; 3 does not divide that, so ranks differ by a byte.
  const int64_t n = dp * tp, me = RankContext::Current().rank();
  const int64_t all = 2 * (n - 1) * (2 * 2 * kHidden * 8);
  CommExpectation bucket = {.kind = kAllReduce, .phase = kB, .op = "gradient", .count = 1};
  bucket.mesh_dims = dp > 1 ? "dp,tp" : "tp";
  bucket.bytes = all * (me + 1) / n - all * me / n;
  comm.push_back(bucket);
  if (dp > 1) {
    bucket.mesh_dims = "dp";
    bucket.bytes = 2 * weights * (dp - 1) / dp;
    comm.push_back(bucket);
  }
  return comm;
}

TEST(SequenceParallelBlock, GathersAndScattersTwiceEachWayAndNormsInOneBucket) {
  const std::unique_ptr<Sequential> alone = TwoBlocks();
  const auto expected = TrainedOnce(*alone, DeviceMesh::Self());
  for (const std::pair<int64_t, int64_t> shape : {std::pair{1, 2}, {1, 3}, {1, 4}, {2, 2}}) {
    const absl::Status status =
        RunSpmd(shape.first * shape.second, [&](RankContext&) -> absl::Status {
          const DeviceMesh mesh = testing::DpTp(shape.first, shape.second);
          SCOPED_TRACE(mesh.ToString());
          const std::unique_ptr<Sequential> model = TwoBlocks();
          DT_RETURN_IF_ERROR(
              ParallelizeModule(*model, mesh, BlockPlan(), {.warn = false, .strict = true}));
          const StrictRedistribute strict;
          const auto got = TrainedOnce(*model, mesh);
          DTensor x = DistributeTensor(Tokens(), mesh, {Shard(0), Shard(1)}).Detach();
          x.RequiresGrad();
          CommTrace trace;
          const DTensor y = (*model)(x);
          y.Backward(ones(y.shape(), {.dtype = DType::kF64, .mesh = mesh}));
          for (const CommEvent& e : trace.events()) EXPECT_FALSE(e.implicit) << e.op;
          EXPECT_EQ(CommMismatch(trace, TrafficOfTwoBlocks(*model, x, shape.first, shape.second)),
                    "");
          EXPECT_EQ(got.size(), expected.size());
          for (size_t i = 0; i < got.size(); ++i) {
            for (size_t k = 0; k < got[i].size(); ++k) {
              EXPECT_NEAR(got[i][k], expected[i][k], 1e-9 * (1 + std::abs(expected[i][k])));
            }
          }
          return absl::OkStatus();
        });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// --- layouts by position and by name, local parts ------------------------------------------------

// sum of its inputs and of "extra"; gives the sum and the first input.
struct Adds : Module {
  Values Forward(const Values& in) override {
    seen = in;
    DTensor total = in[0];
    for (size_t i = 1; i < in.size(); ++i) total = total + in[i];
    return {total, in[0]};
  }
  Values seen;
};

absl::Status OnTwo(const std::function<absl::Status(const DeviceMesh&)>& body) {
  return RunSpmd(2, [&](RankContext&) { return body(DeviceMesh({2}, {"tp"})); });
}

TEST(PreparedValues, ByPositionAndByNameNullLeavesAlone) {
  const absl::Status status = OnTwo([](const DeviceMesh& mesh) -> absl::Status {
    Adds model;
    DT_RETURN_IF_ERROR(ParallelizeModule(
        model, mesh,
        PrepareModuleInputOutput(
            {{.input_layouts = {Shard(0), {}},
              .desired_input_layouts = {Replicate(), {}},
              .input_kwarg_layouts = {{"extra", Shard(1)}},
              .desired_input_kwarg_layouts = {{"extra", Replicate()}}},
             {.output_layouts = {{}, Replicate()}, .desired_output_layouts = {{}, Shard(0)}}})));
    const DTensor whole = FromVector(Integers(16, 1), {4, 4});
    const DTensor rows = DistributeTensor(whole, mesh, {Shard(0)});
    const DTensor columns = DistributeTensor(whole, mesh, {Shard(1)});
    const Values out = model(Values{rows, columns}.Add("extra", columns));
    EXPECT_EQ(model.seen[0].placements()[0], Replicate());
    EXPECT_EQ(model.seen[1].placements()[0], Shard(1));
    EXPECT_EQ(model.seen[2].placements()[0], Replicate());
    EXPECT_EQ(out[1].placements()[0], Shard(0));
    EXPECT_EQ(out[0].ToVector<double>(), (whole * 3).ToVector<double>());
    // Parts that come as tensors on Self are what the layouts say.
    const Values local = model(Values{rows.ToLocal(), columns}.Add("extra", columns.ToLocal()));
    EXPECT_EQ(local[0].ToVector<double>(), (whole * 3).ToVector<double>());
    EXPECT_THAT(MessageOf([&] { model({rows}); }),
                AllOf(HasSubstr("the call has 1"), HasSubstr("layouts for 2")));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(PreparedValues, LocalPartsInside) {
  const absl::Status status = OnTwo([](const DeviceMesh& mesh) -> absl::Status {
    Adds model;
    DT_RETURN_IF_ERROR(ParallelizeModule(
        model, mesh,
        PrepareModuleInputOutput({{.input_layouts = {Replicate()},
                                   .desired_input_layouts = {Shard(0)},
                                   .use_local_output = true},
                                  {.output_layouts = {Shard(0), Shard(0)},
                                   .desired_output_layouts = {Replicate(), Shard(1)},
                                   .use_local_output = true}})));
    const DTensor whole = FromVector(Integers(16, 1), {4, 4});
    const Values out = model({DistributeTensor(whole, mesh)});
    EXPECT_TRUE(model.seen[0].mesh().is_self());
    EXPECT_EQ(model.seen[0].shape(), Shape({2, 4}));
    EXPECT_EQ(out[0].ToVector<double>(), whole.ToVector<double>());
    EXPECT_EQ(out[1].shape(), Shape({4, 2}));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(PreparedValues, ListsMustMatch) {
  Adds model;
  const auto why = [&](const Style& style) {
    return std::string(ParallelizeModule(model, DeviceMesh({1}, {"tp"}), style).message());
  };
  EXPECT_THAT(why(PrepareModuleInput({.input_layouts = {Shard(0)}})),
              HasSubstr("1 input_layouts and 0 desired_input_layouts"));
  EXPECT_THAT(why(PrepareModuleInput({.input_layouts = {Shard(0), {}},
                                      .desired_input_layouts = {Shard(0), Replicate()}})),
              HasSubstr("input 1 has no layout and a desired one"));
  EXPECT_THAT(why(PrepareModuleInput({.input_kwarg_layouts = {{"mask", Shard(0)}}})),
              HasSubstr("input \"mask\" is not in desired_input_kwarg_layouts"));
  EXPECT_THAT(why(PrepareModuleOutput({.desired_output_layouts = {Shard(0)}})),
              HasSubstr("0 output_layouts and 1 desired_output_layouts"));
  EXPECT_THAT(why(Style("Empty", nullptr)), HasSubstr("the style \"Empty\" has no function"));
}

// --- plans ---------------------------------------------------------------------------------------

TEST(StrictPlans, NameWhatNoStylePlaces) {
  const DeviceMesh mesh({1}, {"tp"});
  Sequential model;
  model.Append<Block>();
  Plan plan = BlockPlan();
  plan.erase(plan.begin());  // the first norm
  const absl::Status status = ParallelizeModule(model, mesh, plan, {.strict = true});
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("no style places 0.attention_norm.weight"), HasSubstr("NoParallel")));
  EXPECT_TRUE(model.FindParameter("0.attention.wq.weight")->mesh().is_self());
  EXPECT_TRUE(ParallelizeModule(model, mesh, BlockPlan(), {.strict = true}).ok());
}

TEST(OptionalPatterns, MayMatchNothing) {
  const DeviceMesh mesh({1}, {"tp"});
  Linear layer(4, 4);
  const Plan plan = {{"", ColwiseParallel()}, {"lm_head", Optional(ColwiseParallel())}};
  EXPECT_TRUE(ParallelizeModule(layer, mesh, plan).ok());
  EXPECT_EQ(layer.weight().placements()[0], Shard(0));
}

template <class P>
concept TakenAsPlan = requires(Module& m, const DeviceMesh& mesh, const P& plan) {
  ParallelizeModule(m, mesh, plan);
};
static_assert(TakenAsPlan<Plan> && TakenAsPlan<Style>);
static_assert(!TakenAsPlan<std::string> && !TakenAsPlan<int> && !TakenAsPlan<Placement> &&
              !TakenAsPlan<std::vector<Style>> && !TakenAsPlan<ParallelOptions> &&
              !TakenAsPlan<std::map<std::string, Style>>);  // a plan has an order

TEST(DistributeModule, FunctionsForPartsInputsOutputsAndBuffers) {
  struct Shifted : Module {
    Parameter& shift = AddParameter("shift", {4}, Init::Ones());
    Parameter& table = AddBuffer("table", {4}, Init::Ones());
    Values Forward(const Values& in) override { return {in[0] + shift + table}; }
  };
  const absl::Status status = OnTwo([](const DeviceMesh& mesh) -> absl::Status {
    Shifted model;
    const auto first = [](const NamedParameter&) { return Placements{Shard(0)}; };
    DT_RETURN_IF_ERROR(DistributeModule(
        model, mesh, first,
        [](Module&, const Values& in, const DeviceMesh& on) -> Values {
          return {DistributeTensor(in[0], on, {Shard(-1)})};
        },
        [](Module&, const Values& out, const DeviceMesh&) -> Values {
          return {out[0].FullTensor()};
        },
        first));
    EXPECT_EQ(model.shift.placements()[0], Shard(0));
    EXPECT_EQ(model.table.placements()[0], Shard(0));
    Materialize(model);
    const DTensor y = model(ones({3, 4}));
    EXPECT_TRUE(y.mesh().is_self());
    EXPECT_EQ(y.ToVector<double>(), std::vector<double>(12, 3.0));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// --- making things distributed -------------------------------------------------------------------

TEST(MeshScope, IsTheDefault) {
  EXPECT_THAT(MessageOf([] { DistributeTensor(ones({2})); }), HasSubstr("no MeshScope is open"));
  const absl::Status status = OnTwo([](const DeviceMesh& mesh) -> absl::Status {
    EXPECT_FALSE(CurrentMesh().defined());
    const MeshScope scope(mesh);
    EXPECT_EQ(DistributeTensor(ones({4})).placements()[0], Replicate());
    EXPECT_EQ(DistributeTensor(ones({4}), {Shard(0)}).local().shape(), Shape({2}));
    {
      const MeshScope inner(DeviceMesh({1, 2}, {"dp", "tp"}));
      EXPECT_EQ(CurrentMesh().ndim(), 2);
    }
    EXPECT_TRUE(CurrentMesh() == mesh);
    Linear a(4, 4), b(4, 4), c(4, 4), d(4, 4), e(4, 4);
    DT_RETURN_IF_ERROR(ParallelizeModule(a, {{"", ColwiseParallel()}}));
    DT_RETURN_IF_ERROR(DistributeModule(b));
    DT_RETURN_IF_ERROR(ParallelizeModule(c, ColwiseParallel()));
    struct Holder : Module {
      Linear& up = AddChild<Linear>("up", 4, 4);
      Values Forward(const Values& in) override { return {up(in[0])}; }
    } holder;
    DT_RETURN_IF_ERROR(ParallelizeModule(holder, TPInfo().ShardRow("up")));
    DT_RETURN_IF_ERROR(
        DistributeModule(d, [](const NamedParameter&) { return Placements{Shard(0)}; }));
    EXPECT_EQ(a.weight().placements()[0], Shard(0));
    EXPECT_EQ(b.weight().placements()[0], Replicate());
    EXPECT_EQ(c.weight().placements()[0], Shard(0));
    EXPECT_EQ(holder.up.weight().placements()[0], Shard(1));
    EXPECT_EQ(d.weight().placements()[0], Shard(0));
    EXPECT_THAT(std::string(ParallelizeModule(e, DeviceMesh(), ColwiseParallel()).message()),
                AllOf(HasSubstr("the mesh is null"), HasSubstr("MeshScope")));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(DistributeTensor, OfDistributedOnesOfHistoriesAndFromOneRank) {
  const absl::Status status = RunSpmd(2, [](RankContext& rank) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    const DTensor t = DistributeTensor(ones({4, 2}), mesh, {Shard(-1)});
    EXPECT_EQ(DistributeTensor(t, mesh, {Shard(1)}).impl(), t.impl());
    EXPECT_THAT(MessageOf([&] { DistributeTensor(t, mesh, {Shard(0)}); }),
                AllOf(HasSubstr("distributed already"), HasSubstr("Redistribute")));
    EXPECT_THAT(
        MessageOf([&] { DistributeTensor(t, DeviceMesh({1, 2}), {Shard(0), Replicate()}); }),
        HasSubstr("distributed already"));
    DTensor x = FromVector(Integers(4, 1), {4});
    x.RequiresGrad();
    const DTensor y = DistributeTensor(x * 2, mesh, {Shard(0)});  // no leaf: recorded
    sum(y * 3).Backward();
    EXPECT_EQ(x.grad().ToVector<double>(), std::vector<double>(4, 6.0));
    // Rank 1's values, whatever the others have.
    DTensor mine = full({4}, static_cast<double>(rank.rank() + 1));
    EXPECT_EQ(DistributeTensor(mine, mesh, {Shard(0)}, 1).ToVector<double>(),
              std::vector<double>(4, 2.0));
    mine.RequiresGrad();
    EXPECT_TRUE(DistributeTensor(mine, mesh, {Shard(0)}, 0).requires_grad());
    EXPECT_THAT(MessageOf([&] { DistributeTensor(x * 2, mesh, {Shard(0)}, 0); }),
                HasSubstr("Detach()"));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// What one rank's tensor is does not part the ranks: they agree before anything is sent.
TEST(DistributeTensor, FromOneRankTakesItsFlagAndAllHearOfAHistory) {
  const absl::Status status = RunSpmd(3, [](RankContext& rank) -> absl::Status {
    const DeviceMesh mesh({3}, {"tp"});
    for (const int64_t source : {0, 1}) {
      DTensor mine = full({5}, static_cast<double>(rank.rank() + 1));
      if (rank.rank() == 0) mine.RequiresGrad();
      DTensor t = DistributeTensor(mine, mesh, {Shard(0)}, source);
      EXPECT_EQ(t.requires_grad(), source == 0);
      EXPECT_EQ(t.ToVector<double>(), std::vector<double>(5, static_cast<double>(source + 1)));
      if (source != 0) continue;
      sum(t * t).Backward();
      EXPECT_EQ(t.grad().ToVector<double>(), std::vector<double>(5, 2.0));
    }
    DTensor x = ones({4});
    if (rank.rank() == 1) x = x.RequiresGrad() * 2;
    EXPECT_THAT(MessageOf([&] { DistributeTensor(x, mesh, {Shard(0)}, 0); }),
                AllOf(HasSubstr(rank.rank() == 1 ? "" : "on rank 1"), HasSubstr("Detach()")));
    EXPECT_EQ(sum(DistributeTensor(ones({4}), mesh, {Shard(0)}, 2)).Item(), 4);  // all goes on
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// All ranks of a mesh of two dims agree, not those of one of them.
TEST(DistributeTensor, FromOneRankOfAGrid) {
  const absl::Status status = RunSpmd(4, [](RankContext& rank) -> absl::Status {
    const DeviceMesh mesh({2, 2}, {"dp", "tp"});
    const Placements cut = {Shard(0), Shard(1)};
    DTensor mine = full({3, 2}, static_cast<double>(rank.rank() + 1));
    if (rank.rank() == 3) mine.RequiresGrad();
    const DTensor t = DistributeTensor(mine, mesh, cut, 3);
    EXPECT_TRUE(t.requires_grad());
    EXPECT_EQ(t.ToVector<double>(), std::vector<double>(6, 4.0));
    DTensor x = ones({4, 2});
    if (rank.rank() == 2) x = x.RequiresGrad() * 2;
    EXPECT_THAT(MessageOf([&] { DistributeTensor(x, mesh, cut, 0); }),
                AllOf(HasSubstr(rank.rank() == 2 ? "" : "on rank 2"), HasSubstr("Detach()")));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace dtensor::style_test
