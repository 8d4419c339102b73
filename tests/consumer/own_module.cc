// A user's own module and style: own parameter names, a tied weight, a buffer, a named input.
#include <dtensor/dtensor.h>

#include <cmath>
#include <cstdio>

using namespace dtensor;  // NOLINT: as a user writes it

struct Table : Module {  // rows of a table, or with `onto` products with them
  Parameter& rows = AddParameter("rows", {6, 4}, Init::Uniform(-1, 1));
  Values Forward(const Values& in) override {
    const DTensor onto = in.Named("onto");
    return {onto.defined() ? linear(onto, rows) : embedding(in[0], rows)};
  }
};
struct Model : Module {
  Table &read = AddChild<Table>("read"), &score = AddChild<Table>("score");
  Parameter& scale = AddBuffer("scale", full({1}, 0.5));
  Model() { Tie(read.rows, score.rows); }
  Values Forward(const Values& in) override {
    return score(Values().Add("onto", read(in[0]) * scale));
  }
};
// Rows cut over the ranks; what goes in is whole.
const Style kByRows = {"ByRows", [](Module& m) -> absl::StatusOr<ModuleLayout> {
                         return ModuleLayout{.parameters = {{m.FindParameter("rows"), Shard(0)}},
                                             .inputs = {Replicate()},
                                             .kwargs = {{"onto", Replicate()}}};
                       }};

double Train(const DeviceMesh& mesh) {
  Model model;
  if (!mesh.is_self()) {
    ThrowIfError(ParallelizeModule(model, mesh, {{"read", kByRows}, {"score", kByRows}}));
  }
  Materialize(model);
  AdamW optim(model.NamedParameters(), {.lr = 0.1});
  const DTensor ids = arange(0, 6, 1, {DType::kI64, mesh});
  for (int step = 0; step < 3; ++step) {
    optim.ZeroGrad();
    cross_entropy(model(ids), ids).Backward();
    optim.Step();
  }
  return model.score.rows.tensor().Detach().ToVector<double>()[5];
}

int main() {
  const double one = Train(DeviceMesh::Self());
  const absl::Status status = RunSpmd(2, [&](RankContext& rank) {
    const double two = Train(DeviceMesh({2}, {"tp"}));
    if (rank.rank() == 0) std::printf("one rank %.6f, two %.6f\n", one, two);
    return std::abs(one - two) < 1e-5 ? absl::OkStatus() : absl::InternalError("differs");
  });
  std::printf("%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
