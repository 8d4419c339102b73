// DeviceGraph: work of a rank's device, captured once, launched as one as often as wanted.
//
// What is captured is queued as ever, but kept instead of run: kernels with the memory they work
// on. So a launch does to the same memory what the program did, without the program. Two things are
// others at every launch and are read from device memory: what generators add to their block
// numbers (shift), and numbers of updates that have a step or a learning rate (AddNumbers).
//
// Memory taken while it is captured comes from a pool of the graph's, so that nobody else is given
// what a launch will write to. What the host decides while it captures stays decided: nothing that
// waits for a value or brings one in can be captured. Of communicators those can be whose calls are
// the device's work (CommCaps::graphs), and those whose ranks queue them for each other, if all of
// them capture one graph together.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dtensor/tensor/buffer.h"
#include "dtensor/tensor/device.h"
#include "dtensor/tensor/rank_state.h"

namespace dtensor {

class DeviceGraph {
 public:
  // Errors: Unimplemented on a device without graphs (the CPU, meta); those of opening it.
  static absl::StatusOr<std::unique_ptr<DeviceGraph>> Create(DeviceType type);
  ~DeviceGraph();  // waits
  DeviceGraph(const DeviceGraph&) = delete;

  // Runs `fn` on the graph's memory, without capturing: what it takes and gives back will be there.
  void InItsMemory(absl::FunctionRef<void()> fn);
  // What generator and optimizer are when it is captured.
  struct Start {
    uint64_t seed = 0, offset = 0;
    double lr = 0;
  };
  // Ranks of one process that capture one graph, of which each has a part, and launch it once for
  // all: where one of them queues work that orders the others' (CommCaps::graphs_together).
  struct Together {
    std::vector<int64_t> ranks;        // of the world, in one order on all
    std::vector<DeviceGraph*> graphs;  // of each; the first begins, ends and launches
    // All come to it; the first error of any is everybody's.
    std::function<absl::Status(const absl::Status& mine)> meet;
  };
  // Captures what `fn` queues, once; with others if there are any.
  // Waits for the device first: a graph can name nothing that is under way.
  //   Errors: Unimplemented naming what cannot be captured, what `fn` throws, and those of the
  //   device and of meeting the others: then nothing has run, and the graph is good for nothing.
  absl::Status Capture(const Start& start, absl::FunctionRef<void()> fn, Together together = {});

  // What is other than when it was captured: words that the generator has given since, updates that
  // the optimizer has made, its learning rate.
  struct Change {
    int64_t words = 0, steps = 0;
    double lr = 0;
  };
  // Errors: of the device, and of meeting the others.
  absl::Status Launch(const Change& change);

  // --- for what is captured ---
  // What the calling rank captures, and its number in the process; null and 0: nothing.
  static DeviceGraph* Current() { return RankState::Current().capture; }
  static uint64_t Captured() {
    const DeviceGraph* const graph = Current();
    return graph == nullptr ? 0 : graph->number_;
  }
  // Unimplemented where the calling rank captures, saying why `what` cannot be.
  static absl::Status Allows(absl::string_view what);
  const Start& start() const { return start_; }
  bool Holds(int64_t rank) const;  // whether it is captured with that rank
  const uint64_t* shift() const;   // in device memory
  NumberBlock* numbers() { return &numbers_; }
  // Before every launch `fill` writes what it wrote first, from the same place of the block on.
  using Fill = std::function<void(const Change& change, NumberBlock* block)>;
  void AddNumbers(int64_t from, Fill fill) { fills_.push_back({from, std::move(fill)}); }
  // Who has work in the graph that somebody watches: `may` is asked before every launch, which its
  // error prevents; `launched` has the places before and after it among the rank's work.
  struct Part {
    const void* whose;
    std::function<absl::Status()> may;
    std::function<void(const Event& before, const Event& after)> launched;
  };
  void AddPart(Part part);  // unless there is one of that

 private:
  explicit DeviceGraph(RankDevice& device);
  DeviceGraph& First() { return *together_.graphs[0]; }
  absl::Status Meet(const absl::Status& mine) const;
  absl::Status Begin();
  absl::Status End(absl::Status status);
  absl::Status LaunchAll();

  RankDevice& device_;
  uint64_t number_;  // of the first
  std::shared_ptr<Allocator> memory_;
  void* graph_ = nullptr;  // the first's
  bool captured_ = false;
  Together together_;  // from Capture on: this one at least
  // Of this rank's work: where its part begins (the first's) and ends; a launch.
  Event fork_, join_, before_, after_;
  Start start_;
  Buffer block_;  // what numbers_.device is
  std::vector<char> host_;
  NumberBlock numbers_ = {};
  struct Filled {
    int64_t from;
    Fill fill;
  };
  std::vector<Filled> fills_;
  std::vector<Part> parts_;
};

}  // namespace dtensor
