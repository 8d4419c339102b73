#include "dtensor/mesh/process/nodes.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "dtensor/mesh/local/move.h"
#include "dtensor/mesh/process/process_world.h"
#include "dtensor/tensor/cpu/kernels/runs.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

Nodes::Nodes(absl::Span<const int64_t> ranks, int me, int64_t ranks_per_node) : me_(me) {
  const int n = static_cast<int>(ranks.size());
  std::vector<int64_t> seen;
  for (int r = 0; r < n; ++r) {
    const int64_t node = ranks[r] / ranks_per_node;
    if (seen.empty() || node != seen.back()) {
      apart_ &= std::find(seen.begin(), seen.end(), node) == seen.end();
      seen.push_back(node);
      begins_.push_back(r);
    }
    if (r == me) node_ = static_cast<int>(seen.size()) - 1;
  }
  begins_.push_back(n);
  lanes_ = n;
  for (int k = 0; k < count(); ++k) lanes_ = std::min(lanes_, size(k));
  apart_ &= count() > 1 && n > count();
}

int Nodes::NodeOf(int member) const {
  return static_cast<int>(std::upper_bound(begins_.begin(), begins_.end(), member) -
                          begins_.begin()) -
         1;
}

namespace {

// What a lane adds up in one turn: of large calls no more than caches hold, of small ones no less
// than pays for its messages; turns enough that all nodes are at work.
constexpr int64_t kMostLaneBytes = 1 << 20, kLeastLaneBytes = 32 << 10;
constexpr int64_t kTurnsPerNode = 8;
constexpr int64_t kLeastPieceBytes = 16 << 10;  // of one message

int64_t LaneTurnBytes(int64_t lane_bytes, int64_t nodes) {
  return std::clamp(lane_bytes / (kTurnsPerNode * nodes), kLeastLaneBytes, kMostLaneBytes);
}

// Whether `kind` is one of those below, and how much all members together have of it.
std::optional<int64_t> BytesOf(const CollectiveCall& call) {
  switch (call.kind) {
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kReduceScatter:
      return call.in.nbytes();
    case CollectiveKind::kAllGather:
    case CollectiveKind::kBroadcast:
      return call.out.nbytes();
    default:
      return std::nullopt;
  }
}

bool Reduces(CollectiveKind kind) {
  return kind == CollectiveKind::kAllReduce || kind == CollectiveKind::kReduceScatter;
}

// What a reduction of some of the terms is kept in, so that reducing it with the others gives what
// reducing all at once does: 16-bit floats are added up and multiplied in float32, and rounded
// once.
DType PartialOf(DType dtype, ReduceOp op) {
  const bool sixteen = dtype == DType::kBF16 || dtype == DType::kF16;
  return sixteen && op != ReduceOp::kMax && op != ReduceOp::kMin ? DType::kF32 : dtype;
}

}  // namespace

// By what leaves a node, all of whose ranks share its link.
bool PaysByNodes(const CollectiveCall& call, const Nodes& nodes, const CostModel& cost) {
  const std::optional<int64_t> bytes = BytesOf(call);
  if (!nodes.apart() || !bytes || *bytes == 0) return false;
  double wider = 1;  // what is on its way than what comes out
  if (Reduces(call.kind)) {
    const DType dtype = call.in.dtype(), partial = PartialOf(dtype, call.op);
    wider = static_cast<double>(SizeOf(partial)) / static_cast<double>(SizeOf(dtype));
  }
  int largest = 0;
  for (int k = 0; k < nodes.count(); ++k) largest = std::max(largest, nodes.size(k));
  const double n = nodes.members(), count = nodes.count(), whole = static_cast<double>(*bytes);
  const bool all_reduce = call.kind == CollectiveKind::kAllReduce;
  const double rounds = all_reduce ? 2 : 1, others = (count - 1) / count;
  // Each rank of the largest node sends its part to every rank that is not on it.
  const double straight = rounds * whole * largest * (n - largest) / n;
  double once = whole * others, steps = 2;
  if (Reduces(call.kind)) {
    // A node sends sums down the chain and, of an all-reduce, those that are whole once more; the
    // first of two need not.
    once = whole * (wider + (all_reduce && count > 2 ? 1 : 0));
    steps = (all_reduce ? 2 : 1) * count;
    const int64_t lane = *bytes / nodes.lanes();
    const double turns =
        static_cast<double>(lane) / static_cast<double>(LaneTurnBytes(lane, nodes.count()));
    once *= 1 + steps / std::max(turns, 1.0);  // until all nodes are at work
  }
  const MessageCost& link = cost.inter_node;
  return steps * link.latency_us + once / link.bytes_per_us <
         rounds * link.latency_us + straight / link.bytes_per_us;
}

namespace {

// A call as one member makes it.
class NodeMover {
 public:
  NodeMover(const CollectiveCall& call, const Nodes& nodes, ProcessGroup& group, AwaitData await)
      : call_(call), nodes_(nodes), group_(group), await_(await) {}

 protected:
  using Channel = ProcessGroup::Channel;
  absl::Status Send(Transfers& transfers, Channel channel, int to, const void* data,
                    int64_t bytes) const {
    return transfers.Send(World(to), group_.channel(channel, call_), data, bytes);
  }
  absl::Status Recv(Transfers& transfers, Channel channel, int from, void* data,
                    int64_t bytes) const {
    return transfers.Recv(World(from), group_.channel(channel, call_), data, bytes);
  }
  // Runs `f` for the other members of this node, in their order.
  template <class F>
  absl::Status ForOthersHere(F f) const {
    for (int j = 0; j < nodes_.size(nodes_.node()); ++j) {
      if (j != nodes_.local()) DT_RETURN_IF_ERROR(f(nodes_.At(nodes_.node(), j)));
    }
    return absl::OkStatus();
  }

  const CollectiveCall& call_;
  const Nodes& nodes_;
  ProcessGroup& group_;
  const AwaitData await_;

 private:
  int64_t World(int member) const { return group_.ranks()[static_cast<size_t>(member)]; }
};

// Elements that one member of every node adds up, turn by turn.
struct Part {
  int64_t start, count;
  int owner;  // who gets the sums; -1: everybody
};

// By lane.
std::vector<std::vector<Part>> PartsOf(const CollectiveCall& call, const Nodes& nodes) {
  const int lanes = nodes.lanes();
  std::vector<std::vector<Part>> parts(static_cast<size_t>(lanes));
  if (call.kind == CollectiveKind::kAllReduce) {
    for (int l = 0; l < lanes; ++l) {
      const ReducedPart part = PartOfAllReduce(call.in, lanes, l);
      parts[l].push_back({part.start, part.count, -1});
    }
    return parts;
  }
  const int64_t row = call.in.numel() / call.in.size(0);
  int64_t start = 0;
  for (int owner = 0; owner < nodes.members(); ++owner) {
    const int64_t count = call.counts[static_cast<size_t>(owner)] * row;
    const int local = owner - nodes.At(nodes.NodeOf(owner), 0);
    parts[local % lanes].push_back({start, count, owner});
    start += count;
  }
  return parts;
}

// All-reduce and reduce-scatter. A lane's sums go down the chain of nodes, each of which adds what
// its ranks have, and from the last to their owners; of an all-reduce on to the first node and down
// the chain once more, each node passing them on to its ranks. Node h adds up turn t in step t + h;
// sums of an all-reduce come to it in step t + nodes + h.
class Reduction : NodeMover {
 public:
  Reduction(const CollectiveCall& call, const Nodes& nodes, ProcessGroup& group, AwaitData await);
  absl::Status Run();

 private:
  using Parts = std::vector<Part>;
  bool everybody() const { return call_.kind == CollectiveKind::kAllReduce; }
  bool last() const { return nodes_.node() == nodes_.count() - 1; }
  // Whether this member adds up a lane: its own number's.
  bool adds() const { return nodes_.local() < nodes_.lanes(); }
  int Adder(int node, int lane) const { return nodes_.At(node, lane); }
  const Parts& mine() const { return parts_[static_cast<size_t>(nodes_.local())]; }
  // What a turn has of a part.
  Part Cut(const Part& part, int64_t turn) const {
    const int64_t from = std::min(turn * step_, part.count);
    return {part.start + from, std::min(step_, part.count - from), part.owner};
  }
  bool wide() const { return partial_ != call_.in.dtype(); }
  // Where terms of `member` for part q of this member's lane wait.
  char* Slot(int member, int64_t turn, size_t q) const {
    const auto slot = turn % 2 * most_parts_ + static_cast<int64_t>(q);
    return terms_->part(member) + slot * slot_bytes_;
  }
  // And for what is as wide as sums on their way; of any turn.
  char* WideSlot(int member) const { return terms_->part(member) + 2 * most_parts_ * slot_bytes_; }
  absl::Status BeginTerms(int64_t turn);
  absl::Status Add(int64_t turn);
  absl::Status BeginSums(int64_t turn);
  absl::Status PassOn(int64_t turn);

  const std::vector<Parts> parts_;  // by lane
  const int64_t size_;              // of an element
  const DType partial_;             // of sums on their way
  int64_t step_ = 1, turns_ = 0;    // elements of a part in a turn
  int64_t slot_bytes_ = 0, most_parts_ = 0;
  std::shared_ptr<ProcessGroup::Memory> terms_;
  // Of two turns: terms that come here and go from here, sums that go on, sums that come.
  std::optional<Transfers> terms_under_way_[2], onward_[2], sums_under_way_[2];
  Transfers results_;
};

Reduction::Reduction(const CollectiveCall& call, const Nodes& nodes, ProcessGroup& group,
                     AwaitData await)
    : NodeMover(call, nodes, group, await),
      parts_(PartsOf(call, nodes)),
      size_(SizeOf(call.in.dtype())),
      partial_(PartialOf(call.in.dtype(), call.op)),
      results_(group.world().endpoint(), nullptr, &call) {
  int64_t most = 0, lane = 0;
  for (const Parts& parts : parts_) {
    int64_t all = 0;
    for (const Part& part : parts) {
      most = std::max(most, part.count);
      all += part.count;
    }
    lane = std::max(lane, all);
    most_parts_ = std::max(most_parts_, static_cast<int64_t>(parts.size()));
  }
  const int64_t wanted =
      std::max(LaneTurnBytes(lane * size_, nodes.count()) / most_parts_, kLeastPieceBytes) / 64 *
      64 / size_;
  step_ = std::max<int64_t>(std::min(wanted, most), 64 / size_);
  turns_ = (most + step_ - 1) / step_;
  slot_bytes_ = (step_ * SizeOf(partial_) + 63) / 64 * 64;
  const int64_t slots = 2 * most_parts_ + (wide() ? 1 : 0);
  terms_ = group.MemoryOf(call, ProcessGroup::kTerms, slots * slot_bytes_);
}

absl::Status Reduction::Run() {
  const int64_t nodes = nodes_.count(), h = nodes_.node();
  if (!everybody() && call_.out.numel() > 0) {
    const int here = nodes_.local() % nodes_.lanes(), from = Adder(nodes_.count() - 1, here);
    for (int64_t turn = 0; from != group_.me() && turn < turns_; ++turn) {
      const int64_t at = turn * step_, count = std::min(step_, call_.out.numel() - at);
      if (count <= 0) break;
      DT_RETURN_IF_ERROR(
          Recv(results_, Channel::kResults, from, At(call_.out, at * size_), count * size_));
    }
  }
  const auto within = [&](int64_t turn) { return turn >= 0 && turn < turns_; };
  const int64_t steps = turns_ + (everybody() ? 2 * nodes - 2 : nodes - 1);
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t turn = step - h;
    if (within(turn)) {
      if (turn == 0) DT_RETURN_IF_ERROR(BeginTerms(0));
      if (within(turn + 1)) DT_RETURN_IF_ERROR(BeginTerms(turn + 1));
      DT_RETURN_IF_ERROR(await_(*terms_under_way_[turn % 2]));
      if (adds()) DT_RETURN_IF_ERROR(Add(turn));
    }
    if (!everybody()) continue;
    const int64_t summed = last() ? turn : step - nodes - h;
    if (!last() && within(summed + 1)) DT_RETURN_IF_ERROR(BeginSums(summed + 1));
    if (within(summed)) DT_RETURN_IF_ERROR(PassOn(summed));
  }
  for (std::optional<Transfers>& onward : onward_) {
    if (onward) DT_RETURN_IF_ERROR(await_(*onward));
  }
  return await_(results_);
}

// This member's terms for the lanes of others here; for its own theirs, and what the node before
// has summed up.
absl::Status Reduction::BeginTerms(int64_t turn) {
  const int h = nodes_.node();
  Transfers& transfers =
      terms_under_way_[turn % 2].emplace(group_.world().endpoint(), terms_, &call_);
  for (int lane = 0; lane < nodes_.lanes(); ++lane) {
    const Parts& parts = parts_[static_cast<size_t>(lane)];
    if (lane != nodes_.local()) {
      for (const Part& part : parts) {
        const Part now = Cut(part, turn);
        DT_RETURN_IF_ERROR(Send(transfers, Channel::kData, Adder(h, lane),
                                At(call_.in, now.start * size_), now.count * size_));
      }
      continue;
    }
    const auto receive = [&](int from, int64_t size) -> absl::Status {
      for (size_t q = 0; q < parts.size(); ++q) {
        DT_RETURN_IF_ERROR(Recv(transfers, Channel::kData, from, Slot(from, turn, q),
                                Cut(parts[q], turn).count * size));
      }
      return absl::OkStatus();
    };
    DT_RETURN_IF_ERROR(ForOthersHere([&](int from) { return receive(from, size_); }));
    if (h > 0) DT_RETURN_IF_ERROR(receive(Adder(h - 1, lane), SizeOf(partial_)));
  }
  return absl::OkStatus();
}

// Terms of the nodes before, then of this node's ranks, in their order.
absl::Status Reduction::Add(int64_t turn) {
  const int h = nodes_.node(), me = group_.me();
  const DType dtype = call_.in.dtype();
  std::optional<Transfers>& onward = onward_[turn % 2];
  if (onward) DT_RETURN_IF_ERROR(await_(*onward));  // its slots are used again
  onward.emplace(group_.world().endpoint(), terms_, &call_);
  const auto convert = [&](DType to_dtype, void* to, DType from_dtype, const void* from,
                           int64_t n) {
    ActiveRuns().copy[static_cast<int>(from_dtype)][static_cast<int>(to_dtype)](to, 1, from, 1, n);
  };
  std::vector<const void*> in;
  for (size_t q = 0; q < mine().size(); ++q) {
    const Part now = Cut(mine()[q], turn);
    if (now.count == 0) continue;
    in.clear();
    if (h > 0) in.push_back(Slot(Adder(h - 1, nodes_.local()), turn, q));
    for (int j = 0; j < nodes_.size(h); ++j) {
      const int member = nodes_.At(h, j);
      in.push_back(member == me ? At(call_.in, now.start * size_) : Slot(member, turn, q));
      if (!wide()) continue;
      convert(partial_, WideSlot(member), dtype, in.back(), now.count);
      in.back() = WideSlot(member);
    }
    char* to = Slot(me, turn, q);
    if (last() && everybody()) to = At(call_.out, now.start * size_);
    if (last() && now.owner == me) to = At(call_.out, turn * step_ * size_);
    void* sums = wide() && last() ? WideSlot(me) : to;
    // An average is a sum until it is whole.
    const ReduceOp op = call_.op == ReduceOp::kAvg && !last() ? ReduceOp::kSum : call_.op;
    ReduceContiguous({in.data(), static_cast<int>(in.size()), &sums, 1, now.count, partial_, op,
                      /*bypass=*/false, /*terms=*/nodes_.members()});
    if (sums != to) convert(dtype, to, partial_, sums, now.count);
    if (!last()) {
      DT_RETURN_IF_ERROR(Send(*onward, Channel::kData, Adder(h + 1, nodes_.local()), to,
                              now.count * SizeOf(partial_)));
    } else if (!everybody() && now.owner != me) {
      DT_RETURN_IF_ERROR(Send(*onward, Channel::kResults, now.owner, to, now.count * size_));
    }
  }
  return absl::OkStatus();
}

// The sums of this member's lane, from the node before. They may be received where `in` is: this
// node's terms are in them.
absl::Status Reduction::BeginSums(int64_t turn) {
  Transfers& transfers =
      sums_under_way_[turn % 2].emplace(group_.world().endpoint(), nullptr, &call_);
  if (!adds()) return absl::OkStatus();
  const int before = nodes_.node() == 0 ? nodes_.count() - 1 : nodes_.node() - 1;
  const Part now = Cut(mine()[0], turn);
  return Recv(transfers, Channel::kResults, Adder(before, nodes_.local()),
              At(call_.out, now.start * size_), now.count * size_);
}

absl::Status Reduction::PassOn(int64_t turn) {
  const int h = nodes_.node(), next = last() ? 0 : h + 1;
  if (!last()) DT_RETURN_IF_ERROR(await_(*sums_under_way_[turn % 2]));
  for (int lane = 0; lane < nodes_.lanes(); ++lane) {
    const Part now = Cut(parts_[static_cast<size_t>(lane)][0], turn);
    char* const at = At(call_.out, now.start * size_);
    if (lane != nodes_.local()) {
      DT_RETURN_IF_ERROR(Recv(results_, Channel::kResults, Adder(h, lane), at, now.count * size_));
      continue;
    }
    const auto send = [&](int to) {
      return Send(results_, Channel::kResults, to, at, now.count * size_);
    };
    if (next != nodes_.count() - 1) DT_RETURN_IF_ERROR(send(Adder(next, lane)));
    DT_RETURN_IF_ERROR(ForOthersHere(send));
  }
  return absl::OkStatus();
}

// All-gather and broadcast. What a member has goes to the others of its node and, of every other
// node, to one, which passes it on.
class Spreading : NodeMover {
 public:
  using NodeMover::NodeMover;
  absl::Status AllGather();
  absl::Status Broadcast();

 private:
  // `mine`, at [starts[me], starts[me + 1]) bytes of everybody's `whole`, goes to all others and
  // theirs come here. `holder` has all of them and receives none; -1: nobody.
  absl::Status Gather(const std::vector<int64_t>& starts, char* whole, const void* mine,
                      int holder);
};

absl::Status Spreading::Gather(const std::vector<int64_t>& starts, char* whole, const void* mine,
                               int holder) {
  const int h = nodes_.node(), i = nodes_.local(), me = group_.me();
  const auto bytes = [&](int r) { return starts[r + 1] - starts[r]; };
  // Runs `f` for the members of other nodes whose data comes to member `local` of this one.
  const auto for_those_through = [&](int local, auto f) -> absl::Status {
    for (int node = 0; node < nodes_.count(); ++node) {
      if (node == h) continue;
      for (int j = 0; j < nodes_.size(node); ++j) {
        if (j % nodes_.size(h) == local) DT_RETURN_IF_ERROR(f(nodes_.At(node, j)));
      }
    }
    return absl::OkStatus();
  };
  Transfers first(group_.world().endpoint(), nullptr, &call_);
  Transfers second(group_.world().endpoint(), nullptr, &call_);
  const auto from_source = [&](int r) {
    return Recv(first, Channel::kData, r, whole + starts[r], bytes(r));
  };
  if (me != holder) {
    DT_RETURN_IF_ERROR(ForOthersHere(from_source));
    DT_RETURN_IF_ERROR(for_those_through(i, from_source));
    DT_RETURN_IF_ERROR(ForOthersHere([&](int neighbour) {
      return for_those_through(neighbour - nodes_.At(h, 0), [&](int r) {
        return Recv(second, Channel::kResults, neighbour, whole + starts[r], bytes(r));
      });
    }));
  }
  const auto send = [&](int to) {
    return to == holder ? absl::OkStatus() : Send(first, Channel::kData, to, mine, bytes(me));
  };
  for (int k = 1; k < nodes_.count(); ++k) {  // not all to one node at the same time
    const int node = (h + k) % nodes_.count();
    DT_RETURN_IF_ERROR(send(nodes_.At(node, i % nodes_.size(node))));
  }
  DT_RETURN_IF_ERROR(ForOthersHere(send));
  DT_RETURN_IF_ERROR(await_(first));
  DT_RETURN_IF_ERROR(for_those_through(i, [&](int r) {
    return ForOthersHere([&](int to) {
      if (to == holder) return absl::OkStatus();
      return Send(second, Channel::kResults, to, whole + starts[r], bytes(r));
    });
  }));
  return await_(second);
}

absl::Status Spreading::AllGather() {
  const Tensor& out = call_.out;
  const std::vector<int64_t> starts = RowStarts(call_, out);
  const auto me = static_cast<size_t>(group_.me());
  const int64_t before = starts[me] / (out.nbytes() / out.size(0));
  CopyUnlessSame(call_.in, out.Slice(0, before, call_.counts[me]));
  return Gather(starts, At(out, 0), At(out, starts[me]), /*holder=*/-1);
}

// The root gives every member a part, which all then gather.
absl::Status Spreading::Broadcast() {
  const int n = nodes_.members(), me = group_.me(), root = call_.root;
  const int64_t bytes = call_.out.nbytes();
  std::vector<int64_t> starts;
  for (int r = 0; r < n; ++r) starts.push_back(bytes * r / n / 64 * 64);
  starts.push_back(bytes);
  Transfers parts(group_.world().endpoint(), nullptr, &call_);
  const Tensor& whole = me == root ? call_.in : call_.out;
  for (int r = 0; me == root && r < n; ++r) {
    if (r == root) continue;
    DT_RETURN_IF_ERROR(
        Send(parts, Channel::kData, r, At(whole, starts[r]), starts[r + 1] - starts[r]));
  }
  if (me != root) {
    DT_RETURN_IF_ERROR(
        Recv(parts, Channel::kData, root, At(whole, starts[me]), starts[me + 1] - starts[me]));
    DT_RETURN_IF_ERROR(await_(parts));
  }
  DT_RETURN_IF_ERROR(Gather(starts, At(whole, 0), At(whole, starts[me]), root));
  return await_(parts);
}

}  // namespace

absl::Status MoveByNodes(const CollectiveCall& call, const Nodes& nodes, ProcessGroup& group,
                         AwaitData await) {
  switch (call.kind) {
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kReduceScatter:
      return Reduction(call, nodes, group, await).Run();
    case CollectiveKind::kBroadcast:
      return Spreading(call, nodes, group, await).Broadcast();
    default:
      return Spreading(call, nodes, group, await).AllGather();
  }
}

}  // namespace dtensor
