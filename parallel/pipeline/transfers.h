// What the stages of a pipeline hand each other during a step, as one rank sees it.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "dtensor/distributed_tensor.h"
#include "dtensor/mesh/comm.h"
#include "dtensor/mesh/mesh.h"
#include "dtensor/mesh/world.h"

namespace dtensor::internal {

// A tensor between two stages, as both know it before it is there.
struct StagePort {
  SpecRef spec;
  bool requires_grad = false;
  Strides memory = {};  // MemoryStrides: random numbers are drawn in that order; empty: as it lies
  std::string name = {};  // among Values

  static StagePort Of(const DTensor& t);
  static std::vector<StagePort> OfAll(const Values& values);
  // What the next stage works on: a leaf, whose gradient goes back.
  DTensor Leaf(Tensor local) const;
  // `t`, as if its values lay in memory like those of the port's tensor.
  DTensor InItsOrder(DTensor t) const;
  friend bool operator==(const StagePort&, const StagePort&) = default;
};

// Values on their way to this rank.
class Incoming {
 public:
  Values Wait();  // until they are here

 private:
  friend class StageTransfers;
  Values values_;
  std::vector<Work> works_;
};

// Each message goes from a rank to the one at its place in the other stage's mesh; `what` names it
// in traces, and to a peer that expects another one. Functions throw Error.
class StageTransfers {
 public:
  // `stages`: the meshes of all stages, which outlive this. `group`: of every two ranks.
  StageTransfers(const DeviceMesh& mesh, absl::Span<const DeviceMesh> stages,
                 const GroupOptions& group)
      : mesh_(mesh), stages_(stages), group_(group) {}

  void Send(int from, int to, const std::string& what, absl::Span<const DTensor> values);
  // ports: what `to` takes, on its mesh.
  Incoming Receive(int from, int to, const std::string& what, absl::Span<const StagePort> ports);
  // Until all that was sent has arrived.
  void WaitForSent();

 private:
  struct Sent {
    Work work;
    Tensor data;  // its memory is the message's until that has arrived
  };
  Comm& CommOf(int from, int to, int* peer) const;
  template <class Post>
  void Transfer(int from, int to, const std::string& what, const Post& post) const;

  const DeviceMesh& mesh_;
  const absl::Span<const DeviceMesh> stages_;
  const GroupOptions group_;
  std::deque<Sent> sent_;
};

}  // namespace dtensor::internal
