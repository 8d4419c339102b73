#include "dtensor/parallel/train/graphed_step.h"

#include "absl/strings/str_cat.h"
#include "dtensor/impl.h"
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

void GraphedStep::Capture() {
  Generator& generator = DefaultGenerator();
  seed_ = generator.seed();
  first_offset_ = generator.offset();
  counts_ = optimizer_.StepCounts();
  DTensor loss;
  const absl::Status status =
      graph_->Capture({.seed = seed_, .offset = first_offset_, .lr = optimizer_.lr()},
                      [&] { loss = step_().Detach(); });
  if (!status.ok()) {
    graph_.reset();
    ThrowIfError(generator.SetOffset(first_offset_));
    optimizer_.SetStepCounts(counts_);
    optimizer_.ZeroGrad();
    Throw(Prefixed("[graphed step]", status));
  }
  words_ = generator.offset() - first_offset_;
  made_ = optimizer_.StepCounts();
  for (size_t i = 0; i < made_.size(); ++i) made_[i] -= counts_[i];
  written_ = optimizer_.Written();
  ThrowIfError(graph_->Launch({.lr = optimizer_.lr()}));
  loss_ = loss;
}

void GraphedStep::RequireTheSame(const std::vector<int64_t>& counts) const {
  if (DefaultGenerator().seed() != seed_) Misfit("the generator has got another seed");
  const std::vector<DTensor> written = optimizer_.Written();
  bool same = written.size() == written_.size();
  for (size_t i = 0; same && i < written.size(); ++i)
    same = written[i].impl() == written_[i].impl();
  if (!same) Misfit("the optimizer has got other tensors (LoadStateDict)");
  for (size_t i = 1; i < counts.size(); ++i) {
    if (counts[i] - counts_[i] == counts[0] - counts_[0]) continue;
    Misfit("some parameters were updated and others were not");
  }
}

void GraphedStep::Launch() {
  Generator& generator = DefaultGenerator();
  std::vector<int64_t> counts = optimizer_.StepCounts();
  RequireTheSame(counts);
  DeviceGraph::Change change = {.lr = optimizer_.lr()};
  change.words = static_cast<int64_t>(generator.offset() - first_offset_);
  if (!counts.empty()) change.steps = counts[0] - counts_[0];
  ThrowIfError(graph_->Launch(change));
  ThrowIfError(generator.SetOffset(generator.offset() + words_));
  for (size_t i = 0; i < counts.size(); ++i) counts[i] += made_[i];
  optimizer_.SetStepCounts(counts);
  for (const DTensor& t : written_) t.impl()->local.buffer().BumpVersion();
}

}  // namespace dtensor
