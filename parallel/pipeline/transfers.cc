#include "dtensor/parallel/pipeline/transfers.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dtensor/impl.h"
#include "dtensor/mesh/call_tag.h"
#include "dtensor/mesh/comm_trace.h"
#include "dtensor/mesh/hash.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/tensor/status.h"

namespace dtensor::internal {

StagePort StagePort::Of(const DTensor& t) {
  const IntSpan memory = MemoryStrides(t);
  return {t.spec_ref(), t.requires_grad(), Strides(memory.begin(), memory.end())};
}

std::vector<StagePort> StagePort::OfAll(const Values& values) {
  std::vector<StagePort> ports;
  for (size_t i = 0; i < values.size(); ++i) {
    ports.push_back(Of(values[i]));
    ports.back().name = std::string(values.name(i));
  }
  return ports;
}

DTensor StagePort::InItsOrder(DTensor t) const {
  if (!memory.empty()) RareOf(*t.impl()).memory_strides = memory;
  return t;
}

DTensor StagePort::Leaf(Tensor local) const {
  DTensor leaf = InItsOrder(MakeDTensor(RankContext::Current(), spec, std::move(local)));
  if (requires_grad) leaf.RequiresGrad();
  return leaf;
}

Values Incoming::Wait() {
  for (Work& work : works_) ThrowIfError(work.Wait());
  works_.clear();
  return std::move(values_);
}

// Of this rank and its peer. Both ways between two ranks have one order of calls.
Comm& StageTransfers::CommOf(int from, int to, int* peer) const {
  const int64_t me = RankContext::Current().rank();
  const bool sends = stages_[from].Contains(me);
  Dims at;
  DT_CHECK(stages_[sends ? from : to].Coordinate(me, &at));
  const int64_t other = stages_[sends ? to : from].RankAt(at);
  std::vector<int64_t> both = {std::min(me, other), std::max(me, other)};
  *peer = me < other ? 1 : 0;
  const DeviceMesh pair = ValueOrThrow(
      DeviceMesh::FromRanks({2}, both, {absl::StrCat("stage ", from, " to ", to)}, mesh_.device()));
  RankContext& context = RankContext::Current();
  if (group_.timeout == absl::ZeroDuration()) return *ValueOrThrow(context.CommFor(pair, {0}));
  return *ValueOrThrow(context.CommFor(pair, {0}, group_));
}

// Calls post(comm, peer).
template <class Post>
void StageTransfers::Transfer(int from, int to, const std::string& what, const Post& post) const {
  int peer = 0;
  Comm& comm = CommOf(from, to, &peer);
  RankContext& context = RankContext::Current();
  const ScopedPhase phase(from < to ? CommPhase::kForward : CommPhase::kBackward);
  const ScopedOp op(context.trace(), "pipeline");
  const auto text = std::make_shared<const std::string>(what);
  const ScopedCallTag tag(&context.call_tag(), text, HashRange(1, what));
  post(comm, peer);
}

void StageTransfers::Send(int from, int to, const std::string& what,
                          absl::Span<const DTensor> values) {
  Transfer(from, to, what, [&](Comm& comm, int peer) {
    for (const DTensor& value : values) {
      const Tensor local = ValueOrThrow(value.Detach().local().Contiguous());
      if (local.numel() == 0) continue;
      Work work = comm.Exchange({{peer, local}}, {}, {.overlap = true});
      if (work.Done()) {
        ThrowIfError(work.Wait());
      } else {
        sent_.push_back({std::move(work), local});
      }
    }
  });
  while (!sent_.empty() && sent_.front().work.Done()) {
    ThrowIfError(sent_.front().work.Wait());
    sent_.pop_front();
  }
}

Incoming StageTransfers::Receive(int from, int to, const std::string& what,
                                 absl::Span<const StagePort> ports) {
  Incoming in;
  Transfer(from, to, what, [&](Comm& comm, int peer) {
    for (const StagePort& port : ports) {
      const Spec& spec = *port.spec;
      Tensor local =
          ValueOrThrow(Tensor::Empty(spec.local_shape(), spec.dtype(), spec.mesh().device()));
      if (local.numel() > 0) {
        in.works_.push_back(comm.Exchange({}, {{peer, local}}, {.overlap = true}));
      }
      in.values_.Add(port.name, port.Leaf(std::move(local)));
    }
  });
  return in;
}

void StageTransfers::WaitForSent() {
  for (Sent& sent : sent_) ThrowIfError(sent.work.Wait());
  sent_.clear();
}

}  // namespace dtensor::internal
