#include "dtensor/parallel/train/graphed_step.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dtensor/impl.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/parallel/io/tensor_folder.h"
#include "dtensor/rng/generator.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

[[noreturn]] void Misfit(absl::string_view why) {
  Throw(absl::FailedPreconditionError(
      absl::StrCat("[graphed step] ", why, " since it was captured; make another GraphedStep")));
}

}  // namespace

DTensor GraphedStep::operator()() {
  if (!captured()) optimizer_.ZeroGrad();
  if (graph_ == nullptr) {
    absl::StatusOr<std::unique_ptr<DeviceGraph>> graph =
        DeviceGraph::Create(RankDevices::Current().type());
    if (!graph.ok()) Throw(Prefixed("[graphed step]", graph.status()));
    DTensor loss;
    (*graph)->InItsMemory([&] { loss = step_().Detach(); });
    graph_ = *std::move(graph);
    return loss;
  }
  if (captured()) {
    Launch();
  } else {
    Capture();
  }
  return loss_;
}

// With whom this rank captures one graph: the ranks of its parameters' mesh (of several: of the
// world), if it is each other's hosts that queue their collectives.
absl::StatusOr<DeviceGraph::Together> GraphedStep::Partners() const {
  RankContext& context = RankContext::Current();
  const std::vector<DTensor> written = optimizer_.Written();
  if (written.empty()) return DeviceGraph::Together();
  DeviceMesh mesh = written[0].mesh();
  for (const DTensor& t : written) {
    if (!(t.mesh() == mesh)) mesh = DeviceMesh({context.world_size()}, {"world"});
  }
  if (mesh.is_self()) return DeviceGraph::Together();
  std::vector<int> dims(mesh.ndim());
  std::iota(dims.begin(), dims.end(), 0);
  DT_ASSIGN_OR_RETURN(Comm * comm, context.CommFor(mesh, dims));
  if (comm->size() == 1 || !comm->caps().graphs_together) return DeviceGraph::Together();
  // They are threads of one process, and come to every meeting before one of them is gone.
  DeviceGraph* const mine = graph_.get();
  std::string bytes(sizeof(mine), '\0');
  std::memcpy(bytes.data(), &mine, sizeof(mine));
  DT_ASSIGN_OR_RETURN(const std::vector<std::string> all,
                      context.Exchange(mesh, dims, "graphed_step: capture", bytes));
  DeviceGraph::Together together = {{comm->ranks().begin(), comm->ranks().end()}, {}, nullptr};
  for (const std::string& theirs : all) {
    DeviceGraph* graph = nullptr;
    std::memcpy(&graph, theirs.data(), sizeof(graph));
    together.graphs.push_back(graph);
  }
  together.meet = [mesh](const absl::Status& status) {
    return Agree(mesh, "graphed_step", status);
  };
  return together;
}

void GraphedStep::Capture() {
  Generator& generator = DefaultGenerator();
  seed_ = generator.seed();
  first_offset_ = generator.offset();
  counts_ = optimizer_.StepCounts();
  DTensor loss;
  absl::StatusOr<DeviceGraph::Together> partners = Partners();
  absl::Status status = partners.status();
  if (status.ok()) {
    status = graph_->Capture(
        {.seed = seed_, .offset = first_offset_, .lr = optimizer_.lr()},
        [&] { loss = step_().Detach(); }, *std::move(partners));
  }
  made_ = optimizer_.StepCounts();
  for (size_t i = 0; i < made_.size(); ++i) made_[i] -= counts_[i];
  if (status.ok()) status = CheckUpdates();
  if (!status.ok()) {
    graph_.reset();
    ThrowIfError(generator.SetOffset(first_offset_));
    optimizer_.SetStepCounts(counts_);
    optimizer_.ZeroGrad();
    Throw(Prefixed("[graphed step]", status));
  }
  words_ = generator.offset() - first_offset_;
  written_ = optimizer_.Written();
  ThrowIfError(graph_->Launch({.lr = optimizer_.lr()}));
  loss_ = loss;
}

void GraphedStep::RequireTheSame() const {
  if (DefaultGenerator().seed() != seed_) Misfit("the generator has got another seed");
  const std::vector<DTensor> written = optimizer_.Written();
  bool same = written.size() == written_.size();
  for (size_t i = 0; same && i < written.size(); ++i)
    same = written[i].impl() == written_[i].impl();
  if (!same) Misfit("the optimizer has got other tensors (LoadStateDict)");
}

// A launch tells all updates of a graph one number, by how much their counts are further.
absl::Status GraphedStep::CheckUpdates() const {
  int64_t most = 0;
  for (const int64_t made : made_) most = std::max(most, made);
  for (const int64_t made : made_) {
    if (made == 0 || made == most) continue;
    return absl::UnimplementedError(absl::StrCat("a step updates some parameters ", made,
                                                 " times and others ", most,
                                                 " times; a graph updates all alike, or never"));
  }
  return absl::OkStatus();
}

// How many updates since the capture; parameters that the step does not update do not count.
int64_t GraphedStep::Advance(const std::vector<int64_t>& counts) const {
  std::optional<int64_t> advance;
  for (size_t i = 0; i < counts.size(); ++i) {
    if (made_[i] == 0) continue;
    const int64_t its = counts[i] - counts_[i];
    if (its != advance.value_or(its)) Misfit("some parameters were updated and others were not");
    advance = its;
  }
  return advance.value_or(0);
}

void GraphedStep::Launch() {
  Generator& generator = DefaultGenerator();
  std::vector<int64_t> counts = optimizer_.StepCounts();
  RequireTheSame();
  DeviceGraph::Change change = {.lr = optimizer_.lr()};
  change.words = static_cast<int64_t>(generator.offset() - first_offset_);
  change.steps = Advance(counts);
  ThrowIfError(graph_->Launch(change));
  ThrowIfError(generator.SetOffset(generator.offset() + words_));
  for (size_t i = 0; i < counts.size(); ++i) counts[i] += made_[i];
  optimizer_.SetStepCounts(counts);
  for (const DTensor& t : written_) t.impl()->local.buffer().BumpVersion();
}

}  // namespace dtensor
