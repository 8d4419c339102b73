// The styles, the losses and the local regions of docs/guide/plans.md and docs/guide/local.md, run
// on one device and on two ranks; the numbers are compared. The guides quote this file;
// scripts/check_tree.py compares them.
#include <dtensor/dtensor.h>

#include <cmath>
#include <cstdio>

using namespace dtensor;  // NOLINT: as a user writes it

namespace {

constexpr int64_t hidden = 16, inner = 40, vocab = 30, seq = 8, batch = 2;

struct Block : Module {
  RMSNorm& norm = AddChild<RMSNorm>("norm", hidden);
  MLP& mlp = AddChild<MLP>("mlp", hidden, inner);
  Values Forward(const Values& in) override { return {in[0] + mlp(norm(in[0]))}; }
};

struct Reader : Module {
  Embedding& wte = AddChild<Embedding>("wte", vocab, hidden);
  Block& block = AddChild<Block>("block");
  Linear& head = AddChild<Linear>("head", hidden, vocab, /*bias=*/false);
  Values Forward(const Values& ids) override { return {head(block(wte(ids[0])))}; }
};

constexpr int64_t in = hidden, out = inner, rank = 2;
struct LoraLinear : Module {
  Linear& base = AddChild<Linear>("base", in, out);
  Parameter& a = AddParameter("a", {rank, in}, Init::Normal(0, 0.02));
  Parameter& b = AddParameter("b", {out, rank}, Init::Zeros());
  LoraLinear() { base.RequiresGrad(false); }
  Values Forward(const Values& x) override { return {base(x[0]) + linear(linear(x[0], a), b)}; }
};

DTensor Ids(const DeviceMesh& mesh) {
  const DTensor ids = view(arange(3, 3 + batch * seq, 1, {DType::kI64}), {batch, seq});
  return mesh.is_self() ? ids : DistributeTensor(ids, mesh);
}
DTensor Hidden(const DeviceMesh& mesh, const Placement& where) {
  const DTensor x = view(arange(0, batch * seq * hidden) * 0.01, {batch, seq, hidden});
  return mesh.is_self() ? x : DistributeTensor(x, mesh, {where});
}

// Sequence parallel with the styles of its parts; strict: what no style places is an error.
absl::StatusOr<double> Sequence(const DeviceMesh& mesh) {
  Block model;
  if (!mesh.is_self()) {
    const Plan plan = {
        {"norm", SequenceParallel()},
        {"mlp",
         PrepareModuleInput({.input_layouts = {Shard(1)}, .desired_input_layouts = {Replicate()}})},
        {"mlp.up", ColwiseParallel()},
        {"mlp.down", RowwiseParallel({.output = Shard(1)})},
        {"lm_head", Optional(ColwiseParallel())},
    };
    DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, plan, {.strict = true}));
  }
  Materialize(model);
  const DTensor y = model(Hidden(mesh, Shard(1)));
  return sum(y * y).Item();
}

absl::StatusOr<double> ByFunctions(const DeviceMesh& mesh) {
  Block model;
  if (!mesh.is_self()) {
    DT_RETURN_IF_ERROR(DistributeModule(
        model, mesh,
        [](const NamedParameter& p) -> Placements {  // where parameters go
          return {p.fqn == "mlp.up.weight" ? Shard(0) : Replicate()};
        },
        [](Module&, const Values& in, const DeviceMesh& on) -> Values {  // what enters
          return {DistributeTensor(in[0], on, {Shard(1)})};
        },
        [](Module&, const Values& out, const DeviceMesh&) -> Values {  // what leaves
          return {out[0].FullTensor()};
        }));
  }
  Materialize(model);
  const DTensor y = model(Hidden(DeviceMesh::Self(), Replicate()));
  return sum(y * y).Item();
}

absl::StatusOr<double> OnTheCurrentMesh(const DeviceMesh& mesh) {
  MLP model(hidden, inner);
  DTensor x = Hidden(DeviceMesh::Self(), Replicate());
  if (!mesh.is_self()) {
    const MeshScope scope(mesh);
    DT_RETURN_IF_ERROR(
        ParallelizeModule(model, {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}}));
    x = DistributeTensor(x);
  }
  Materialize(model);
  return sum(model(x)).Item();
}

absl::StatusOr<double> Loss(const DeviceMesh& mesh) {
  Reader model;
  if (!mesh.is_self()) {
    DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, Plan{{"head", ColwiseParallel()}}));
  }
  Materialize(model);
  const DTensor ids = Ids(mesh);
  const DTensor loss = token_loss(model(ids), ids,
                                  {.ignore_index = 7,
                                   .label_smoothing = 0.1,
                                   .smoothing = Smoothing::kMegatron,
                                   .z_loss = 1e-4});
  loss.Backward();
  return loss.Item();
}

absl::StatusOr<double> ScopedLoss(const DeviceMesh& mesh) {
  Reader model;
  if (!mesh.is_self()) {
    DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, Plan{{"head", ColwiseParallel()}}));
  }
  Materialize(model);
  const DTensor ids = Ids(mesh), logits = model(ids);
  const LossParallel scope;
  const DTensor loss = nll_loss(log_softmax(flatten(logits, 0, 1), -1), flatten(ids, 0, 1));
  loss.Backward();
  return loss.Item();
}

absl::StatusOr<double> BySuffixes(const DeviceMesh& mesh) {
  Reader model;
  const TPInfo info =
      TPInfo().ShardVocab("wte").ShardCol("mlp.up").ShardRow("mlp.down").ShardCol("head");
  if (!mesh.is_self()) {
    DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, info));
    DT_ASSIGN_OR_RETURN(const std::string tree, TensorParallelTree(model, info));
    if (RankContext::Current().rank() == 0) std::printf("%s", tree.c_str());
  }
  Materialize(model);
  const DTensor y = model(Ids(mesh));
  return sum(y * y).Item();
}

// The MLP by hand, on this rank's parts.
absl::StatusOr<double> ByHand(const DeviceMesh& mesh) {
  ManualSeed(3);
  DTensor x = randn({seq, hidden}), w1 = randn({hidden, inner}), w2 = randn({inner, hidden});
  for (DTensor* t : {&x, &w1, &w2}) t->RequiresGrad();
  if (mesh.is_self()) return sum(matmul(relu(matmul(x, w1)), w2)).Item();
  const auto mlp = [](const LocalRegion& region, const Values& in) -> Values {
    const DTensor h = relu(matmul(in[0], in[1]));  // R with V: V
    const DTensor terms = region.Reinterpret(matmul(h, in[2]), "tp", LocalType::kPartial);
    return {region.AllReduce(terms, "tp", LocalType::kInvariant)};  // P to I
  };
  const Values inputs = {DistributeTensor(x, mesh), DistributeTensor(w1, mesh, {Shard(1)}),
                         DistributeTensor(w2, mesh, {Shard(0)})};
  const DTensor y = LocalMap(
      mlp, inputs, {.in = {{Replicate()}, {Shard(1)}, {Shard(0)}}, .out = {{Invariant()}}})[0];
  sum(y).Backward();
  return sum(y).Item();
}

// Two steps of what is beside a frozen Linear.
absl::StatusOr<double> BesideAFrozenOne(const DeviceMesh& mesh) {
  LoraLinear model;
  if (!mesh.is_self()) {
    DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, Plan{{"base", ColwiseParallel()}}));
  }
  Materialize(model);
  SGD optim(model.NamedParameters(), {.lr = 0.1});
  for (int step = 0; step < 2; ++step) {
    const DTensor y = model(Hidden(mesh, Replicate()));
    mean(y * y).Backward();
    optim.Step();
    optim.ZeroGrad();
  }
  return sum(model(Hidden(mesh, Replicate()))).Item();
}

struct Lesson {
  const char* name;
  absl::StatusOr<double> (*run)(const DeviceMesh&);
};
constexpr Lesson kLessons[] = {{"sequence parallel", Sequence},
                               {"functions", ByFunctions},
                               {"the current mesh", OnTheCurrentMesh},
                               {"a loss", Loss},
                               {"a loss in a scope", ScopedLoss},
                               {"suffixes", BySuffixes},
                               {"a local region", ByHand},
                               {"a frozen Linear", BesideAFrozenOne}};

}  // namespace

int main() {
  std::vector<double> alone;
  for (const Lesson& lesson : kLessons) {
    ManualSeed(7);
    alone.push_back(ValueOrThrow(lesson.run(DeviceMesh::Self())));
  }
  const absl::Status status = RunSpmd(2, [&](RankContext& rank) -> absl::Status {
    size_t i = 0;
    for (const Lesson& lesson : kLessons) {
      ManualSeed(7);
      DT_ASSIGN_OR_RETURN(const double two, lesson.run(DeviceMesh({2}, {"tp"})));
      if (rank.rank() == 0) {
        std::printf("%-18s one device %.6f, two ranks %.6f\n", lesson.name, alone[i], two);
      }
      if (!(std::abs(two - alone[i]) <= 1e-4 * std::abs(alone[i]))) {
        return absl::InternalError(absl::StrCat(lesson.name, ": the numbers differ"));
      }
      ++i;
    }
    return absl::OkStatus();
  });
  std::printf("%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
