#include "dtensor/tensor/device_graph.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/cleanup/cleanup.h"
#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "dtensor/tensor/device_memory.h"
#include "dtensor/tensor/rank_state.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

// The shift of generators comes first.
constexpr int64_t kFirstNumber = sizeof(uint64_t);

std::atomic<uint64_t> graphs{0};

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceGraph>> DeviceGraph::Create(DeviceType type) {
  RankDevice* device = nullptr;
  if (IsRemote(type)) {
    DT_ASSIGN_OR_RETURN(device, RankDevices::Current().Get(type));
  }
  if (device == nullptr || device->table().capture == nullptr) {
    return absl::UnimplementedError(absl::StrCat("device ", DeviceName(type), " has no graphs"));
  }
  std::unique_ptr<DeviceGraph> graph(new DeviceGraph(*device));
  DT_ASSIGN_OR_RETURN(graph->block_, Buffer::Allocate(graph->memory_, kNumberBlockBytes));
  graph->host_.resize(kNumberBlockBytes);
  graph->numbers_ = {graph->host_.data(),
                     static_cast<char*>(graph->block_.data()),
                     kNumberBlockBytes,
                     kFirstNumber,
                     false,
                     nullptr};
  return graph;
}

DeviceGraph::DeviceGraph(RankDevice& device)
    : device_(device), number_(++graphs), memory_(device.NewMemory()) {}

DeviceGraph::~DeviceGraph() {
  if (!captured_) return;
  try {
    (void)device_.Synchronize();
  } catch (const Error&) {  // a device that fails here fails whoever uses it next
  }
  if (graph_ != nullptr) (void)device_.table().graph_free(graph_);
}

void DeviceGraph::InItsMemory(absl::FunctionRef<void()> fn) {
  const std::shared_ptr<Allocator> outer = device_.ExchangeMemory(memory_);
  const absl::Cleanup back = [&] { device_.ExchangeMemory(outer); };
  fn();
}

absl::Status DeviceGraph::Meet(const absl::Status& mine) const {
  return together_.meet == nullptr ? mine : together_.meet(mine);
}
bool DeviceGraph::Holds(int64_t rank) const { return absl::c_linear_search(together_.ranks, rank); }

// From here on what this rank queues is captured. The others come in behind the first's beginning.
absl::Status DeviceGraph::Begin() {
  const StreamHandle stream = device_.stream();
  const PhysicalDevice& device = *device_.device();
  const auto begin = [&] {
    return device.Check(device.table().capture(stream, &numbers_), "capturing a graph");
  };
  const bool first = &First() == this;
  absl::Status begun;
  if (first) {
    begun = begin();
    if (begun.ok()) fork_ = device_.Record();
  }
  begun = Meet(begun);
  if (first || !begun.ok()) return begun;
  First().fork_.OrderBefore(stream);
  return begin();
}

// A rank that failed alone meets nobody any more: the others hear of it as of any that is gone.
absl::Status DeviceGraph::End(absl::Status status) {
  const bool first = &First() == this, alone = IsRankLocal(status);
  if (!first && !alone) join_ = device_.Record();
  if (!alone) status = Meet(status);
  if (first) {
    for (const DeviceGraph* graph : together_.graphs) {
      if (graph != this && !alone) device_.OrderAfter(graph->join_);
    }
    const PhysicalDevice& device = *device_.device();
    status.Update(device.Check(device.table().capture_end(device_.stream(), &graph_),
                               "ending the capture of a graph"));
  }
  return alone ? status : Meet(status);
}

absl::Status DeviceGraph::Capture(const Start& start, absl::FunctionRef<void()> fn,
                                  Together together) {
  RankState& state = RankState::Current();
  if (state.capture != nullptr || captured_) {
    return absl::FailedPreconditionError("a graph is captured once, and one at a time");
  }
  start_ = start;
  together_ = std::move(together);
  if (together_.graphs.empty()) together_.graphs = {this};
  DT_RETURN_IF_ERROR(Meet(device_.Synchronize()));
  if (&First() != this) number_ = First().number_;
  state.capture = this;
  const absl::Cleanup done = [&] { state.capture = nullptr; };
  absl::Status status;
  try {
    status = Begin();
    captured_ = status.ok();
    if (!captured_) {
      if (&First() == this) (void)device_.table().capture_end(device_.stream(), &graph_);
      return status;
    }
    InItsMemory(fn);
  } catch (...) {
    status = CurrentException();
  }
  return End(std::move(status));
}

void DeviceGraph::AddPart(Part part) {
  const auto same = [&](const Part& p) { return p.whose == part.whose; };
  if (std::none_of(parts_.begin(), parts_.end(), same)) parts_.push_back(std::move(part));
}

// The first launches when all are there; the others' later work comes after that.
absl::Status DeviceGraph::LaunchAll() {
  if (&First() != this) return absl::OkStatus();
  absl::InlinedVector<const NumberBlock*, 1> blocks;
  for (const DeviceGraph* graph : together_.graphs) {
    blocks.push_back(&graph->numbers_);
    if (graph != this) device_.OrderAfter(graph->before_);
  }
  DT_RETURN_IF_ERROR(device_.device()->Check(
      device_.table().graph_launch(graph_, blocks.data(), static_cast<int>(blocks.size()),
                                   device_.stream()),
      "launching a graph"));
  if (blocks.size() > 1 || !parts_.empty()) after_ = device_.Record();
  return absl::OkStatus();
}

absl::Status DeviceGraph::Launch(const Change& change) {
  absl::Status status;
  for (const Part& part : parts_) status.Update(part.may());
  const auto blocks = static_cast<uint64_t>(change.words / 4);
  std::memcpy(numbers_.host, &blocks, sizeof(blocks));
  const int64_t used = numbers_.used;
  numbers_.only = true;
  for (const Filled& f : fills_) {
    numbers_.used = f.from;
    f.fill(change, &numbers_);
  }
  numbers_.only = false;
  numbers_.used = used;
  device_.OrderAfterAll();
  before_ = device_.Record();
  DT_RETURN_IF_ERROR(Meet(status));
  DT_RETURN_IF_ERROR(Meet(LaunchAll()));
  if (&First() != this) device_.OrderAfter(First().after_);
  for (const Part& part : parts_) part.launched(before_, after_);
  return absl::OkStatus();
}

absl::Status DeviceGraph::Allows(absl::string_view what) {
  const DeviceGraph* const graph = Current();
  if (graph == nullptr) return absl::OkStatus();
  // As a function's: whoever calls it from an op gives that one's name.
  return InFunction("graph",
                    absl::UnimplementedError(absl::StrCat("device ", graph->device_.table().name,
                                                          " cannot capture this: ", what)));
}

const uint64_t* DeviceGraph::shift() const {
  return reinterpret_cast<const uint64_t*>(numbers_.device);
}

}  // namespace dtensor
