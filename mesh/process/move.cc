#include "dtensor/mesh/process/move.h"

#include <unistd.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "dtensor/mesh/local/move.h"
#include "dtensor/mesh/process/nodes.h"
#include "dtensor/mesh/process/process_world.h"
#include "dtensor/tensor/cpu/kernels/runs.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

// A broadcast of more goes in parts, which the receivers pass on: the root alone would send it to
// everybody.
constexpr int64_t kPassOnBytes = 64 << 10;

// How much of the others' terms a turn of a reduction moves: they are in the cache when they are
// added up. A quarter of a part, so that there are turns; of large parts no more than the caches
// hold, of small ones no less than pays for its messages. Measured at 64 MiB on a Zen 3: over gloo
// turns of 4 MiB take 0.73 of the time that turns of 1 MiB take, and those of 16 MiB no less than
// they; over MPI a tenth more, of a third of what a plain call takes. At 1 MiB on a Zen 5 one turn
// of 512 KiB takes 0.87 of the time of four over MPI, and 0.7 over gloo.
constexpr int64_t kMostTurnBytes = 4 << 20, kLeastTurnBytes = 512 << 10, kLeastTermBytes = 4 << 10;
int64_t TurnBytes(int64_t part_bytes, int members) {
  const int64_t terms = members - 1;
  const int64_t turn = std::clamp(part_bytes * terms / 4, kLeastTurnBytes, kMostTurnBytes);
  return std::max(turn / terms / 64 * 64, kLeastTermBytes);
}

// What is gathered fills the caches from so much on: the own part goes past them, which leaves
// others' lines where they are. Measured: on an Intel, whose cores share a slow third level, it
// saves a tenth of the time of a gather of 1 MiB; on a Zen 4 it costs half as much again there, and
// saves a tenth where what is gathered and given by all ranks no longer fits the third level.
int64_t LargeGather() {
  static const int64_t bytes = [] {
    constexpr int64_t kMiB = 1 << 20;
    if (__builtin_cpu_is("intel")) return kMiB;
    const int64_t third_level = sysconf(_SC_LEVEL3_CACHE_SIZE);
    return third_level > 0 ? third_level / 2 : 16 * kMiB;
  }();
  return bytes;
}

int64_t RowBytes(const Tensor& t) {
  return t.ndim() == 0 || t.size(0) == 0 ? 0 : t.nbytes() / t.size(0);
}

// A call as one member makes it.
class Mover {
 public:
  Mover(const CollectiveCall& call, ProcessGroup& group, AwaitData await)
      : call_(call), group_(group), await_(await), n_(group.size()), me_(group.me()) {}

  absl::Status AllReduce();
  absl::Status AllGather();
  absl::Status ReduceScatter();
  absl::Status Broadcast();
  absl::Status Exchange();
  absl::Status HostExchange();

 private:
  int64_t World(int peer) const { return group_.ranks()[static_cast<size_t>(peer)]; }
  absl::Status Send(Transfers& transfers, int peer, const void* data, int64_t bytes) {
    return transfers.Send(World(peer), group_.channel(ProcessGroup::kData, call_), data, bytes);
  }
  absl::Status Recv(Transfers& transfers, int peer, void* data, int64_t bytes) {
    return transfers.Recv(World(peer), group_.channel(ProcessGroup::kData, call_), data, bytes);
  }
  struct Part {
    int64_t start, count;  // elements
  };
  // Part r of `in` goes to member r; the parts of all that come here are reduced into `out`, turn
  // by turn. `after` each: the pieces of all parts that are reduced now.
  using Turn = absl::Span<const Part>;
  absl::Status ReduceParts(
      const std::vector<Part>& parts, void* out,
      absl::FunctionRef<absl::Status(Turn)> after = [](Turn) { return absl::OkStatus(); });
  // `mine` goes to all others, at [starts[me], starts[me + 1]) bytes of their `whole`; theirs come
  // here; `meanwhile` is done on the way.
  absl::Status GatherParts(
      const std::vector<int64_t>& starts, char* whole, const void* mine,
      absl::FunctionRef<void()> meanwhile = [] {});

  const CollectiveCall& call_;
  ProcessGroup& group_;
  const AwaitData await_;
  const int n_, me_;
};

// In turns: while the terms of one are added up, those of the next are on their way.
absl::Status Mover::ReduceParts(const std::vector<Part>& parts, void* out,
                                absl::FunctionRef<absl::Status(Turn)> after) {
  const DType dtype = call_.in.dtype();
  const int64_t size = SizeOf(dtype);
  int64_t most = 0;
  for (const Part& part : parts) most = std::max(most, part.count);
  const int64_t step = TurnBytes(most * size, n_) / size;
  const int64_t term_bytes = (std::min(step, most) * size + 63) / 64 * 64;
  const auto terms = group_.MemoryOf(call_, ProcessGroup::kTerms, 2 * term_bytes);
  // Of a part, what its turn moves.
  const auto cut = [&](int r, int64_t turn) -> Part {
    const int64_t start = std::min(turn * step, parts[r].count);
    return {parts[r].start + start, std::min(step, parts[r].count - start)};
  };
  const auto term = [&](int r, int64_t turn) { return terms->part(r) + turn % 2 * term_bytes; };
  std::optional<Transfers> under_way[2];
  const auto begin = [&](int64_t turn) -> absl::Status {
    Transfers& transfers = under_way[turn % 2].emplace(group_.world().endpoint(), terms, &call_);
    for (int k = 1; k < n_; ++k) {  // not all to one at the same time
      const int r = (me_ + k) % n_;
      DT_RETURN_IF_ERROR(Recv(transfers, r, term(r, turn), cut(me_, turn).count * size));
    }
    for (int k = 1; k < n_; ++k) {
      const Part theirs = cut((me_ + k) % n_, turn);
      DT_RETURN_IF_ERROR(
          Send(transfers, (me_ + k) % n_, At(call_.in, theirs.start * size), theirs.count * size));
    }
    return absl::OkStatus();
  };
  std::vector<const void*> in(static_cast<size_t>(n_));
  std::vector<Part> now(static_cast<size_t>(n_));
  for (int64_t turn = 0; turn * step < most; ++turn) {
    if (turn == 0) DT_RETURN_IF_ERROR(begin(0));
    if ((turn + 1) * step < most) DT_RETURN_IF_ERROR(begin(turn + 1));
    DT_RETURN_IF_ERROR(await_(*under_way[turn % 2]));
    for (int r = 0; r < n_; ++r) now[r] = cut(r, turn);
    const Part mine = now[me_];
    if (mine.count > 0) {
      for (int r = 0; r < n_; ++r) {
        in[r] = r == me_ ? At(call_.in, mine.start * size) : term(r, turn);
      }
      void* to = static_cast<char*>(out) + turn * step * size;
      ReduceContiguous({in.data(), n_, &to, 1, mine.count, dtype, call_.op, /*bypass=*/false});
    }
    DT_RETURN_IF_ERROR(after(now));
  }
  return absl::OkStatus();
}

absl::Status Mover::GatherParts(const std::vector<int64_t>& starts, char* whole, const void* mine,
                                absl::FunctionRef<void()> meanwhile) {
  Transfers sends(group_.world().endpoint(), nullptr, &call_);
  Transfers receives(group_.world().endpoint(), nullptr, &call_);
  for (int r = 0; r < n_; ++r) {
    if (r == me_) continue;
    DT_RETURN_IF_ERROR(Recv(receives, r, whole + starts[r], starts[r + 1] - starts[r]));
  }
  for (int k = 1; k < n_; ++k) {
    DT_RETURN_IF_ERROR(Send(sends, (me_ + k) % n_, mine, starts[me_ + 1] - starts[me_]));
  }
  // A library that moves only while it is asked has nothing to do while the others take `mine`.
  DT_RETURN_IF_ERROR(await_(receives));
  meanwhile();
  return await_(sends);
}

// What a turn has reduced goes to all at once, while it is in the cache. It may be received where
// `in` is: whoever sends a reduced piece has this member's term of it.
absl::Status Mover::AllReduce() {
  const int64_t size = SizeOf(call_.in.dtype());
  std::vector<Part> parts;
  for (int r = 0; r < n_; ++r) {
    const ReducedPart part = PartOfAllReduce(call_.in, n_, r);
    parts.push_back({part.start, part.count});
  }
  Transfers gather(group_.world().endpoint(), nullptr, &call_);
  const auto pass_on = [&](Turn now) -> absl::Status {
    for (int k = 1; k < n_; ++k) {
      const int r = (me_ + k) % n_;
      DT_RETURN_IF_ERROR(Recv(gather, r, At(call_.out, now[r].start * size), now[r].count * size));
    }
    for (int k = 1; k < n_; ++k) {
      DT_RETURN_IF_ERROR(Send(gather, (me_ + k) % n_, At(call_.out, now[me_].start * size),
                              now[me_].count * size));
    }
    return absl::OkStatus();
  };
  DT_RETURN_IF_ERROR(ReduceParts(parts, At(call_.out, parts[me_].start * size), pass_on));
  return await_(gather);
}

absl::Status Mover::ReduceScatter() {
  const int64_t row = RowBytes(call_.in) / SizeOf(call_.in.dtype());
  std::vector<Part> parts;
  int64_t start = 0;
  for (const int64_t rows : call_.counts) {
    parts.push_back({start, rows * row});
    start += rows * row;
  }
  return ReduceParts(parts, call_.out.numel() == 0 ? nullptr : At(call_.out, 0));
}

absl::Status Mover::AllGather() {
  if (call_.out.numel() == 0) return absl::OkStatus();
  const Tensor& out = call_.out;
  const int64_t rows = call_.counts[static_cast<size_t>(me_)];
  int64_t before = 0;
  for (int r = 0; r < me_; ++r) before += call_.counts[static_cast<size_t>(r)];
  const Tensor mine = out.Slice(0, before, rows);
  const auto copy = [&] {
    if (out.nbytes() < LargeGather() || mine.nbytes() < 64 || mine.data() == call_.in.data()) {
      return CopyUnlessSame(call_.in, mine);
    }
    out.buffer().BumpVersion();
    ActiveRuns().stream(mine.data(), call_.in.data(), mine.nbytes());
  };
  const std::vector<int64_t> starts = RowStarts(call_, out);
  if (!call_.in.buffer().SharesWith(out.buffer())) {
    return GatherParts(starts, At(out, 0), call_.in.data(), copy);
  }
  copy();  // what comes may be written over it
  return GatherParts(starts, At(out, 0), At(out, starts[static_cast<size_t>(me_)]));
}

absl::Status Mover::Broadcast() {
  const Tensor& t = call_.out;
  const int64_t bytes = t.nbytes();
  const int root = call_.root;
  if (bytes == 0) return absl::OkStatus();
  const bool whole = n_ == 2 || bytes <= kPassOnBytes;
  // Part k belongs to the k-th member that is not the root.
  const auto start = [&](int k) { return bytes * k / (n_ - 1) / 64 * 64; };
  const auto end = [&](int k) { return k + 1 == n_ - 1 ? bytes : start(k + 1); };
  const auto index = [&](int r) { return r < root ? r : r - 1; };
  Transfers transfers(group_.world().endpoint(), nullptr, &call_);
  if (me_ == root) {
    for (int r = 0; r < n_; ++r) {
      if (r == root) continue;
      const int64_t at = whole ? 0 : start(index(r)), to = whole ? bytes : end(index(r));
      DT_RETURN_IF_ERROR(Send(transfers, r, At(call_.in, at), to - at));
    }
    return await_(transfers);
  }
  const int64_t at = whole ? 0 : start(index(me_)), to = whole ? bytes : end(index(me_));
  DT_RETURN_IF_ERROR(Recv(transfers, root, At(t, at), to - at));
  DT_RETURN_IF_ERROR(await_(transfers));
  if (whole) return absl::OkStatus();
  Transfers more(group_.world().endpoint(), nullptr, &call_);
  for (int r = 0; r < n_; ++r) {
    if (r == root || r == me_) continue;
    DT_RETURN_IF_ERROR(Recv(more, r, At(t, start(index(r))), end(index(r)) - start(index(r))));
    DT_RETURN_IF_ERROR(Send(more, r, At(t, at), to - at));
  }
  return await_(more);
}

absl::Status Mover::Exchange() {
  Transfers transfers(group_.world().endpoint(), nullptr, &call_);
  for (const Piece& p : call_.recvs) {
    if (p.peer != me_) DT_RETURN_IF_ERROR(Recv(transfers, p.peer, p.view.data(), p.view.nbytes()));
  }
  size_t next = 0;  // of those that stay here
  for (const Piece& p : call_.sends) {
    if (p.peer != me_) {
      DT_RETURN_IF_ERROR(Send(transfers, p.peer, p.view.data(), p.view.nbytes()));
      continue;
    }
    while (call_.recvs[next].peer != me_) ++next;
    const Tensor& to = call_.recvs[next++].view;
    if (to.numel() > 0 && to.data() != p.view.data()) Copy(p.view, to);
  }
  return await_(transfers);
}

// The others' sizes came with their calls.
absl::Status Mover::HostExchange() {
  ProcessGroup::HostBytes& bytes = *group_.host_bytes;
  Transfers transfers(group_.world().endpoint(), group_.host_bytes);
  for (int r = 0; r < n_; ++r) {
    if (r == me_) continue;
    std::string& from = bytes.all[static_cast<size_t>(r)];
    DT_RETURN_IF_ERROR(Recv(transfers, r, from.data(), static_cast<int64_t>(from.size())));
  }
  for (int r = 0; r < n_; ++r) {
    if (r == me_) continue;
    DT_RETURN_IF_ERROR(
        Send(transfers, r, bytes.mine.data(), static_cast<int64_t>(bytes.mine.size())));
  }
  return await_(transfers);
}

}  // namespace

std::vector<int64_t> RowStarts(const CollectiveCall& call, const Tensor& whole) {
  std::vector<int64_t> starts = {0};
  for (const int64_t rows : call.counts) starts.push_back(starts.back() + rows * RowBytes(whole));
  return starts;
}

absl::Status MoveBetweenProcesses(const CollectiveCall& call, ProcessGroup& group,
                                  AwaitData await) {
  const CostModel& cost = group.world().cost_model();
  const Nodes nodes(group.ranks(), group.me(), cost.ranks_per_node);
  if (PaysByNodes(call, nodes, cost)) return MoveByNodes(call, nodes, group, await);
  Mover mover(call, group, await);
  switch (call.kind) {
    case CollectiveKind::kAllReduce:
      return mover.AllReduce();
    case CollectiveKind::kAllGather:
      return mover.AllGather();
    case CollectiveKind::kReduceScatter:
      return mover.ReduceScatter();
    case CollectiveKind::kBroadcast:
      return mover.Broadcast();
    case CollectiveKind::kExchange:
      return mover.Exchange();
    case CollectiveKind::kHostExchange:
      return mover.HostExchange();
    default:
      return absl::OkStatus();
  }
}

}  // namespace dtensor
