// Every plan of docs/guide/plans.md, run: three steps of training on one device and under the plan
// give the same losses. The guide quotes this file; scripts/check_tree.py compares the two.
#include <dtensor/dtensor.h>

#include <cmath>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "dtensor/parallel/models/gpt_plan.h"

using namespace dtensor;  // NOLINT: as a user writes it

namespace {

constexpr GPTConfig config{.vocab = 60, .seq = 8, .layers = 2, .hidden = 24, .heads = 3};
constexpr int64_t head_size = 8;                    // of the GPT
constexpr int64_t h = 6, g = 3, d = 4;              // heads of q, of k and v, their size
constexpr int64_t vocab = 20, hidden = 12;          // of the tied model
constexpr int64_t in = h * d, out = 15, heads = 5;  // of a projection: units of 3 features

// Grouped heads, g of k and v for h of q, in three projections or in a fused one.
struct GroupedAttention : Module {
  GroupedAttention(int64_t kv_heads, bool fused) : kv(kv_heads * d) {
    if (fused) {
      qkv = &AddChild<Linear>("qkv", h * d, h * d + 2 * kv);
    } else {
      wq = &AddChild<Linear>("wq", h * d, h * d);
      wk = &AddChild<Linear>("wk", h * d, kv);
      wv = &AddChild<Linear>("wv", h * d, kv);
    }
    wo = &AddChild<Linear>("wo", h * d, h * d);
  }
  Values Forward(const Values& x) override {
    const Values parts = qkv != nullptr ? split((*qkv)(x[0]), {h * d, kv, kv}, -1)
                                        : Values{(*wq)(x[0]), (*wk)(x[0]), (*wv)(x[0])};
    const auto to_heads = [](const DTensor& t) {
      return transpose(unflatten(t, -1, {-1, d}), -3, -2);
    };
    const DTensor y = scaled_dot_product_attention(to_heads(parts[0]), to_heads(parts[1]),
                                                   to_heads(parts[2]), {}, /*is_causal=*/true, {},
                                                   /*enable_gqa=*/true);
    return {(*wo)(flatten(transpose(y, -3, -2), -2, -1))};
  }
  const int64_t kv;
  Linear *qkv = nullptr, *wq = nullptr, *wk = nullptr, *wv = nullptr, *wo;
};
struct Attending : Module {
  Attending(int64_t kv_heads, bool fused)
      : attn(AddChild<GroupedAttention>("attn", kv_heads, fused)) {}
  Values Forward(const Values& x) override { return {attn(x[0]) + x[0]}; }
  GroupedAttention& attn;
};

struct Model : Module {
  Embedding& tokens = AddChild<Embedding>("tokens", vocab, hidden);
  Linear& head = AddChild<Linear>("head", hidden, vocab, /*bias=*/false);
  Model() { Tie(tokens.weight(), head.weight()); }
  Values Forward(const Values& ids) override { return {head(tokens(ids[0]))}; }
};

struct Projection : Module {  // y = x kernel + offset, `heads` units of features
  Parameter& kernel = AddParameter("kernel", {in, out}, Init::Normal(0, 0.02));
  Parameter& offset = AddParameter("offset", {out}, Init::Zeros());
  std::optional<ModuleTraits> traits() override {
    return ModuleTraits{
        .weight = &kernel, .bias = &offset, .out_dim = 1, .in_dim = 0, .out_units = heads};
  }
  Values Forward(const Values& x) override { return {matmul(x[0], kernel) + offset}; }
};

// A product with a table, each of whose rows a mask weighs.
struct Table : Module {
  Parameter& rows = AddParameter("rows", {h * d, hidden}, Init::Uniform(-1, 1));
  Values Forward(const Values& x) override { return {matmul(x[0], x.Named("mask") * rows)}; }
};
const Style kByRows = {"ByRows", [](Module& m) -> absl::StatusOr<ModuleLayout> {
                         return ModuleLayout{.parameters = {{m.FindParameter("rows"), Shard(0)}},
                                             .inputs = {Replicate()},
                                             .kwargs = {{"mask", Shard(0)}}};
                       }};

using Loss = std::function<DTensor(Module& model, const DeviceMesh& mesh)>;

// Three steps from one seed; the last loss.
double Train(Module& model, const DeviceMesh& mesh, const Loss& loss) {
  Materialize(model);
  AdamW optim(model.NamedParameters(), {.lr = 0.05});
  double last = 0;
  for (int step = 0; step < 3; ++step) {
    optim.ZeroGrad();
    const DTensor now = loss(model, mesh);
    now.Backward();
    optim.Step();
    last = now.Item();
  }
  return last;
}

// The same values on any mesh; the batch over dp.
DTensor Spread(const DTensor& whole, const DeviceMesh& mesh) {
  return mesh.is_self() ? whole : DistributeTensor(whole, mesh, {Shard(0), Replicate()});
}
DTensor LanguageLoss(Module& model, const DeviceMesh& mesh) {
  const DTensor ids = Spread(
      view(
          flatten(stack({arange(0, 16, 1, {DType::kI64}), arange(4, 20, 1, {DType::kI64})}), 0, -1),
          {4, 8}),
      mesh);
  return cross_entropy(flatten(model(ids), 0, 1), flatten(ids, 0, 1));
}
DTensor SquareLoss(Module& model, const DeviceMesh& mesh) {
  const DTensor x = Spread(view(arange(0, 4 * 6 * 24) * 0.001, {4, 6, h * d}), mesh);
  const DTensor y = model(x) - 0.5;
  return mean(y * y);
}
DTensor MaskedLoss(Module& model, const DeviceMesh& mesh) {
  const DTensor x = Spread(view(arange(0, 4 * 24) * 0.01, {4, h * d}), mesh);
  const TensorOptions whole = mesh.is_self() ? TensorOptions{} : TensorOptions{.mesh = mesh};
  const DTensor mask = view(arange(0, h * d, 1, whole) * 0.1, {h * d, 1});
  const DTensor y = model(Values{x}.Add("mask", mask))[0];
  return mean(y * y);
}

// One plan of the guide: trains a new model on `mesh`, under the plan unless it is Self.
struct Lesson {
  const char* name;
  std::function<absl::StatusOr<double>(const DeviceMesh& mesh)> train;
};

absl::StatusOr<double> TensorParallel(const DeviceMesh& on) {
  if (on.is_self()) {
    GPT model(config);
    return Train(model, on, LanguageLoss);
  }
  const DeviceMesh mesh({2, 2}, {"dp", "tp"});
  GPT model(config);  // recipes: nothing is made yet
  const Plan plan = {
      {"tokens", RowwiseParallel()},  // pattern, style
      {"blocks.*.attn.w[qkv]", ColwiseParallel({.unit = head_size})},
      {"blocks.*.attn.wo", RowwiseParallel({.unit = head_size})},
      {"blocks.*.mlp.up", ColwiseParallel()},
      {"blocks.*.mlp.down", RowwiseParallel()},
      {"head", ColwiseParallel()},
  };
  DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, plan));  // on the mesh dim "tp"
  Materialize(model);                                        // this rank's parts only
  return Train(model, mesh, LanguageLoss);
}

// A model by a maker, a plan and a loss.
template <class M, class... A>
Lesson Under(const char* name, const Plan& plan, const Loss& loss, A... args) {
  return {name, [=](const DeviceMesh& mesh) -> absl::StatusOr<double> {
            M model(args...);
            if (!mesh.is_self()) DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, plan));
            return Train(model, mesh, loss);
          }};
}

absl::StatusOr<double> ShardedParameters(const DeviceMesh& mesh) {
  GPT model(config);
  if (!mesh.is_self()) {
    const Plan plan = GPTPlan(config);
    DT_RETURN_IF_ERROR(DistributeModule(model, mesh, [](const NamedParameter&) {
      return Placements{Shard(0), Replicate()};  // on dp, on tp
    }));
    DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, plan, {.warn = false}));
  }
  return Train(model, mesh, LanguageLoss);
}

absl::StatusOr<double> LocalBetween(const DeviceMesh& mesh) {
  MLP model(h * d, 41);
  if (!mesh.is_self()) {
    const Plan plan = {
        {"up", ColwiseParallel({.use_local_output = true})},
        {"down", RowwiseParallel({.input = ValueLayout(Shard(-1), /*as_local=*/true)})},
    };
    DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, plan, {.local_layouts = {{"dp", Shard(0)}}}));
  }
  return Train(model, mesh, SquareLoss);
}

std::vector<Lesson> Lessons() {
  const Plan heads_of_one_size = {
      {"attn.w[qkv]", ColwiseParallel({.unit = d})},  // h heads of size d
      {"attn.wo", RowwiseParallel({.unit = d})},      // what makes heads and what takes them
  };
  const Plan grouped = {
      {"attn.wq", ColwiseParallel({.unit = d * h / g})},  // whole groups
      {"attn.w[kv]", ColwiseParallel({.unit = d})},
      {"attn.wo", RowwiseParallel({.unit = d * h / g})},
  };
  const Plan fused = {
      {"attn.qkv", ColwiseParallel({.segments = {{h * d, d * h / g}, {g * d, d}, {g * d, d}}})},
      {"attn.wo", RowwiseParallel({.unit = d * h / g})},
  };
  const Plan sequence = [d = head_size]() -> Plan {
    return {
        {"tokens", RowwiseParallel({.output = Shard(1)})},
        {"blocks.*.attn.w[qkv]", ColwiseParallel({.unit = d, .input = Replicate()})},
        {"blocks.*.attn.wo", RowwiseParallel({.unit = d, .output = Shard(1)})},
        {"blocks.*.mlp.up", ColwiseParallel()},
        {"blocks.*.mlp.down", RowwiseParallel({.output = Shard(1)})},
        {"head", ColwiseParallel()},
    };
  }();
  const Plan plan = {{"tokens", RowwiseParallel()}, {"head", ColwiseParallel()}};
  return {
      {"tensor parallel", TensorParallel},
      Under<Attending>("heads", heads_of_one_size, SquareLoss, h, false),
      Under<Attending>("grouped heads", grouped, SquareLoss, g, false),
      Under<Attending>("fused projection", fused, SquareLoss, g, true),
      Under<GPT>("sequence parallel", sequence, LanguageLoss, config),
      Under<Model>("ties", plan, LanguageLoss),
      Under<Projection>("a layer of one's own", {{"", ColwiseParallel()}}, SquareLoss),
      Under<Table>("a style of one's own", {{"", kByRows}}, MaskedLoss),
      {"local values between", LocalBetween},
      {"several mesh dims", ShardedParameters},
  };
}

}  // namespace

int main() {
  std::vector<double> alone;
  for (const Lesson& lesson : Lessons()) {
    ManualSeed(7);
    alone.push_back(ValueOrThrow(lesson.train(DeviceMesh::Self())));
  }
  const absl::Status status = RunSpmd(4, [&](RankContext& rank) -> absl::Status {
    const DeviceMesh mesh({2, 2}, {"dp", "tp"});
    const std::vector<Lesson> lessons = Lessons();
    for (size_t i = 0; i < lessons.size(); ++i) {
      ManualSeed(7);
      DT_ASSIGN_OR_RETURN(const double spread, lessons[i].train(mesh));
      if (rank.rank() == 0) {
        std::printf("%-22s one device %.6f, four %.6f\n", lessons[i].name, alone[i], spread);
      }
      if (!(std::abs(spread - alone[i]) <= 1e-5 * std::abs(alone[i]))) {
        return absl::InternalError(absl::StrCat(lessons[i].name, ": the losses differ"));
      }
    }
    return absl::OkStatus();
  });
  std::printf("%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
