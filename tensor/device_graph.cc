#include "dtensor/tensor/device_graph.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
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
  graph->numbers_ = {graph->host_.data(), static_cast<char*>(graph->block_.data()),
                     kNumberBlockBytes, kFirstNumber, false};
  return graph;
}

DeviceGraph::DeviceGraph(RankDevice& device)
    : device_(device), number_(++graphs), memory_(device.NewMemory()) {}

DeviceGraph::~DeviceGraph() {
  if (graph_ == nullptr) return;
  try {
    (void)device_.Synchronize();
  } catch (const Error&) {  // a device that fails here fails whoever uses it next
  }
  (void)device_.table().graph_free(graph_);
}

void DeviceGraph::InItsMemory(absl::FunctionRef<void()> fn) {
  const std::shared_ptr<Allocator> outer = device_.ExchangeMemory(memory_);
  const absl::Cleanup back = [&] { device_.ExchangeMemory(outer); };
  fn();
}

absl::Status DeviceGraph::Capture(const Start& start, absl::FunctionRef<void()> fn) {
  RankState& state = RankState::Current();
  if (state.capture != nullptr || graph_ != nullptr) {
    return absl::FailedPreconditionError("a graph is captured once, and one at a time");
  }
  start_ = start;
  DT_RETURN_IF_ERROR(device_.Synchronize());
  const StreamHandle stream = device_.stream();
  const PhysicalDevice& device = *device_.device();
  DT_RETURN_IF_ERROR(device.Check(device.table().capture(stream, &numbers_), "capturing a graph"));
  state.capture = this;
  absl::Status status;
  try {
    InItsMemory(fn);
  } catch (...) {
    status = CurrentException();
  }
  state.capture = nullptr;
  status.Update(
      device.Check(device.table().capture_end(stream, &graph_), "ending the capture of a graph"));
  return status;
}

void DeviceGraph::AddPart(Part part) {
  const auto same = [&](const Part& p) { return p.whose == part.whose; };
  if (std::none_of(parts_.begin(), parts_.end(), same)) parts_.push_back(std::move(part));
}

absl::Status DeviceGraph::Launch(const Change& change) {
  for (const Part& part : parts_) DT_RETURN_IF_ERROR(part.may());
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
  const Event before = device_.Record();
  DT_RETURN_IF_ERROR(device_.device()->Check(
      device_.table().graph_launch(graph_, &numbers_, device_.stream()), "launching a graph"));
  if (parts_.empty()) return absl::OkStatus();
  const Event after = device_.Record();
  for (const Part& part : parts_) part.launched(before, after);
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
