// Captures, and graphs that are launched: each stream of a capture stays one, so that works which
// nothing orders in a graph are seen to be so.
#include <algorithm>

#include "tests/cusim/runtime.h"

namespace cusim {

bool Runtime::Refuses(Stream* s, const char* call) {
  Capture* const c = s != nullptr        ? s->capture.get()
                     : captures_.empty() ? nullptr
                                         : captures_[0].get();
  if (c == nullptr) return false;
  c->broken = std::string(call) + " in a capture";
  return true;
}

uint64_t Capture::LastOf(const Stream* stream) const {
  for (size_t i = graph.nodes.size(); i-- > 0;) {
    if (streams[graph.nodes[i].lane] == stream) return graph.first_node + i;
  }
  return 0;
}

cudaError_t Runtime::Begin(Stream* s, bool relaxed) {
  if (s == nullptr) return cudaErrorInvalidResourceHandle;
  if (IsLegacy(s)) return cudaErrorStreamCaptureUnsupported;
  if (s->capture != nullptr) return cudaErrorIllegalState;
  captures_.push_back(std::make_shared<Capture>());
  s->capture = captures_.back();
  s->capture->origin = s;
  s->capture->relaxed = relaxed;
  s->capture->streams.push_back(s);
  s->capture->graph.first_node = (++begun_ << 32) + 1;
  s->captured = s->joined = 0;
  return cudaSuccess;
}

cudaError_t Runtime::End(Stream* s, Graph** graph) {
  *graph = nullptr;
  const std::shared_ptr<Capture> c = s != nullptr ? s->capture : nullptr;
  if (c == nullptr) return cudaErrorIllegalState;
  if (c->origin != s) return cudaErrorStreamCaptureUnmatched;
  cudaError_t error = c->broken.empty() ? cudaSuccess : cudaErrorStreamCaptureInvalidated;
  if (error != cudaSuccess) Say("capture", c->broken);
  for (Stream* other : c->streams) {
    if (error == cudaSuccess && other != s && other->joined < other->captured) {
      error = cudaErrorStreamCaptureUnjoined;
      Say("capture", "a stream that was forked into the capture did not join its first stream");
    }
    other->capture = nullptr;
  }
  c->ended = true;
  if (error == cudaSuccess) {
    *graph = new Graph(std::move(c->graph));
    graphs_.insert(*graph);
  }
  std::erase(captures_, c);
  return error;
}

Graph* Runtime::Instantiate(const Graph& graph) {
  auto* const instance = new Graph(graph);
  size_t lanes = 1;
  for (const Graph::Node& node : graph.nodes) lanes = std::max(lanes, node.lane + 1);
  instance->lanes.assign(lanes, nullptr);
  return instance;
}

void Runtime::Destroy(Graph* captured) {
  graphs_.erase(captured);
  delete captured;
}

cudaError_t Runtime::SetParams(Graph* instance, uint64_t node, const void* host, Dim grid,
                               Dim block, void** args, size_t shared) {
  const uint64_t first = instance->first_node, at = node - first;
  const bool lives = std::any_of(graphs_.begin(), graphs_.end(),
                                 [=](const Graph* g) { return g->first_node == first; });
  if (!lives || at >= instance->nodes.size()) return cudaErrorInvalidValue;
  Work& work = instance->nodes[at].work;
  const std::shared_ptr<const Launched> before = work.launched;
  if (before == nullptr || KernelOf(host) != before->kernel) return cudaErrorInvalidValue;
  cudaError_t error = cudaSuccess;
  auto launched =
      Checked(host, grid, block, args, shared, before->device, before->cooperative, &error);
  if (launched != nullptr) work = WorkOf(std::move(launched));
  return error;
}

cudaError_t Runtime::LaunchGraph(Graph* graph, Stream* s) {
  if (s == nullptr || s->destroyed) return cudaErrorInvalidResourceHandle;
  if (s->capture != nullptr) {  // a graph within a graph: its nodes, in their order
    s->capture->broken = "cudaGraphLaunch in a capture";
    return cudaErrorStreamCaptureUnsupported;
  }
  graph->lanes[0] = s;
  for (Stream*& lane : graph->lanes) {
    if (lane != nullptr) continue;
    lane = NewStream(s->device);
    lane->legacy_waits = false;
    lane->hidden = true;
  }
  // How far each lane was, and what it knows after each of its nodes.
  std::vector<uint64_t> base;
  std::vector<std::vector<Clock>> clocks;
  for (const Stream* lane : graph->lanes) {
    base.push_back(lane->queued);
    clocks.push_back({lane->clock});
  }
  Join(&clocks[0][0], host_);
  for (const Graph::Node& node : graph->nodes) {
    Stream* const lane = graph->lanes[node.lane];
    Work work = node.work;
    work.name = "graph: " + work.name;
    for (const auto& [other, count] : node.waits) {
      work.after.emplace_back(graph->lanes[other], base[other] + count);
      Join(&lane->clock, clocks[other].at(count));
    }
    const cudaError_t e = Queue(lane, std::move(work));
    if (e != cudaSuccess) return e;
    clocks[node.lane].push_back(lane->clock);
  }
  return cudaSuccess;
}

}  // namespace cusim
