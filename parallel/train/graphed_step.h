// GraphedStep: a whole training step as one graph of the device, which one launch does again.
//
//   const DTensor ids = zeros({8, 256}, {.dtype = DType::kI64}), targets = zeros_like(ids);
//   GraphedStep step(optimizer, [&] {
//     const DTensor loss = NextTokenLoss(model(ids), targets);
//     loss.Backward();
//     optimizer.Step();
//     return loss;
//   });
//   for (...) {
//     copy_(ids, ...);
//     copy_(targets, ...);
//     optimizer.set_lr(schedule.At(i));
//     const DTensor loss = step();
//   }
//
// What the function does is what it did when it was captured: its branches, shapes and host numbers
// stay. What goes on are the tensors that it reads and writes, the optimizer's counts and learning
// rate, and the rank's default generator: random numbers and losses are those of the plain program.
//   Source: torch.cuda.make_graphed_callables, torch.cuda.CUDAGraph.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "dtensor/distributed_tensor.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/tensor/device_graph.h"

namespace dtensor {

// For one rank's thread. `optimizer` must outlive it.
class GraphedStep {
 public:
  // `step`: forward, backward, and the steps of `optimizer`, on the rank's device
  // (RankDevices::type); returns the loss. Ranks of a mesh make and call theirs alike. What differs
  // between steps it reads from tensors that stay; it begins without gradients (ZeroGrad).
  GraphedStep(Optimizer& optimizer, std::function<DTensor()> step)
      : optimizer_(optimizer), step_(std::move(step)) {}
  GraphedStep(const GraphedStep&) = delete;

  // One step; its loss, without a history: from the second on one tensor, which the next call
  // overwrites. The first runs plainly, so that what it makes is made (states, memory); the second
  // captures and launches; each further one is one launch.
  //   Errors, thrown: Unimplemented on a device without graphs, and for what cannot be captured:
  //   what waits for a value (Item, ToVector), brings values in (FromVector), talks to ranks by a
  //   communicator without graphs (CommCaps) or to ranks that capture another, draws from another
  //   stream of numbers, or updates with another learning rate, or some parameters more often than
  //   others (never is fine: frozen, unused). Nothing was run then, the counts and the generator
  //   are where they were, and gradients are dropped. FailedPrecondition where a captured step does
  //   not fit any more: the generator was seeded, the optimizer's state loaded, or some of the
  //   parameters that it updates were updated elsewhere.
  DTensor operator()();
  bool captured() const { return loss_.defined(); }

 private:
  absl::StatusOr<DeviceGraph::Together> Partners() const;
  void Capture();
  void Launch();
  void RequireTheSame() const;
  absl::Status CheckUpdates() const;
  int64_t Advance(const std::vector<int64_t>& counts) const;

  Optimizer& optimizer_;
  const std::function<DTensor()> step_;
  std::unique_ptr<DeviceGraph> graph_;
  DTensor loss_;  // of the captured step
  // When it was captured.
  uint64_t seed_ = 0, first_offset_ = 0, words_ = 0;  // of the generator; how far a step moves it
  std::vector<int64_t> counts_, made_;                // before; how many updates a step makes
  std::vector<DTensor> written_;
};

}  // namespace dtensor
