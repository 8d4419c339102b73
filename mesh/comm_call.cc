#include "dtensor/mesh/comm_call.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/mesh/call_tag.h"
#include "dtensor/mesh/comm_backend.h"
#include "dtensor/mesh/comm_time.h"
#include "dtensor/mesh/comm_work.h"
#include "dtensor/mesh/flight.h"
#include "dtensor/mesh/kept_call.h"
#include "dtensor/tensor/status.h"
#include "dtensor/tensor/text.h"

namespace dtensor {
namespace {

struct CapName {
  bool CommCaps::* cap;
  absl::string_view name;
};
constexpr CapName kCaps[] = {
    {&CommCaps::peers, "peers"},
    {&CommCaps::strided, "strided"},
    {&CommCaps::many_pieces, "many_pieces"},
    {&CommCaps::overlap, "overlap"},
    {&CommCaps::deferred_pull, "deferred_pull"},
    {&CommCaps::rank_order, "rank_order"},
    {&CommCaps::same_bits, "same_bits"},
    {&CommCaps::graphs, "graphs"},
    {&CommCaps::graphs_together, "graphs_together"},
};

}  // namespace

std::string ToString(const CommCaps& caps) {
  std::vector<absl::string_view> has;
  for (const CapName& c : kCaps) {
    if (caps.*c.cap) has.push_back(c.name);
  }
  return absl::StrJoin(has, ", ");
}

CommCaps operator&(const CommCaps& a, const CommCaps& b) {
  CommCaps both;
  for (const CapName& c : kCaps) both.*c.cap = a.*c.cap && b.*c.cap;
  return both;
}

std::string_view Name(CollectiveKind kind) {
  static constexpr std::string_view kNames[] = {"all_reduce", "all_gather", "reduce_scatter",
                                                "exchange",   "broadcast",  "send",
                                                "recv",       "barrier",    "host_exchange"};
  return kNames[static_cast<int>(kind)];
}

std::string Describe(const CollectiveCall& call, absl::Span<const int64_t> ranks) {
  KeptTag tag;
  if (call.tag != nullptr) tag.Keep(*call.tag);
  return Describe(call, tag, ranks);
}

std::string Describe(const CollectiveCall& call, const KeptTag& tag,
                     absl::Span<const int64_t> ranks) {
  FlightEntry entry;
  entry.kind = call.kind;
  entry.op = call.op;
  entry.root = call.root;
  entry.deferred = call.options.overlap;
  entry.sends = static_cast<int>(call.sends.size());
  entry.recvs = static_cast<int>(call.recvs.size());
  if (const Tensor& t = call.in.defined() ? call.in : call.out; t.defined()) {
    entry.dtype = t.dtype();
    entry.shape = t.shape();
  }
  std::string text = CallText(entry, ranks);
  if (!call.counts.empty()) {
    text.pop_back();
    absl::StrAppend(&text, ", counts [", JoinSome(call.counts), "])");
  }
  const std::string what_for = tag.ToString();
  return what_for.empty() ? text : absl::StrCat(text, " for ", what_for);
}

int64_t ReceivedBytes(const CollectiveCall& call, int64_t n, int me) {
  switch (call.kind) {
    case CollectiveKind::kAllReduce: {  // so rounded that the sum over the ranks is exact
      const int64_t all = 2 * call.in.nbytes() * (n - 1);
      return all * (me + 1) / n - all * me / n;
    }
    case CollectiveKind::kAllGather:
      return call.out.nbytes() - call.in.nbytes();
    case CollectiveKind::kReduceScatter:
      return call.out.nbytes() * (n - 1);
    case CollectiveKind::kBroadcast:
      return call.root == me ? 0 : call.out.nbytes();
    case CollectiveKind::kRecv:
      return call.out.nbytes();
    case CollectiveKind::kExchange: {
      int64_t bytes = 0;
      for (const Piece& p : call.recvs) bytes += p.peer == me ? 0 : p.view.nbytes();
      return bytes;
    }
    default:
      return 0;
  }
}

int64_t PayloadBytes(const CollectiveCall& call) {
  int64_t bytes = std::max(call.in.nbytes(), call.out.nbytes());
  for (const Piece& p : call.sends) bytes = std::max(bytes, p.view.nbytes());
  for (const Piece& p : call.recvs) bytes = std::max(bytes, p.view.nbytes());
  return bytes;
}

std::string Excess(const CollectiveCall& call, const CommCaps& caps) {
  const auto strided = [&](const Tensor& t) {
    return !caps.strided && t.defined() && !t.is_contiguous();
  };
  if (strided(call.in) || strided(call.out)) return "a tensor is not contiguous";
  for (const std::vector<Piece>* pieces : {&call.sends, &call.recvs}) {
    absl::flat_hash_set<int> peers;
    for (const Piece& p : *pieces) {
      if (strided(p.view)) return "a piece is not contiguous";
      if (!caps.many_pieces && !peers.insert(p.peer).second) {
        return absl::StrCat("two pieces of group index ", p.peer);
      }
    }
  }
  return "";
}

KeptCall::KeptCall(const CollectiveCall& call)
    : in_(call.in),
      out_(call.out),
      call_{.kind = call.kind,
            .in = in_,
            .out = out_,
            .counts = call.counts,
            .op = call.op,
            .root = call.root,
            .sends = call.sends,
            .recvs = call.recvs,
            .options = call.options,
            .sequence = call.sequence,
            .before = call.before,
            .fingerprint = call.fingerprint} {
  if (call.tag != nullptr) tag_.Keep(*call.tag);
}

bool KeptCall::Reads(const Buffer& buffer) const {
  if (in_.defined() && in_.buffer().SharesWith(buffer)) return true;
  return std::any_of(call_.sends.begin(), call_.sends.end(),
                     [&](const Piece& p) { return p.view.buffer().SharesWith(buffer); });
}

absl::Status KeptCall::CopyInputs() {
  if (in_.defined()) {
    DT_ASSIGN_OR_RETURN(in_, in_.Clone());
  }
  for (Piece& piece : call_.sends) {
    DT_ASSIGN_OR_RETURN(piece.view, piece.view.Clone());
  }
  return absl::OkStatus();
}

Work::Work(std::shared_ptr<State> state) : state_(std::move(state)) {}
bool Work::StateDone() const { return state_->Done(); }
std::shared_ptr<Loan> Work::TheLoan() const { return state_ ? state_->TheLoan() : nullptr; }
absl::Status Work::StateWait(absl::Duration timeout) {
  RankContext* const context = RankContext::InsideRank() ? &RankContext::Current() : nullptr;
  const TimedComm timed(context);
  absl::Status status = state_->Wait(timeout);
  if (context != nullptr && !status.ok()) context->HearOfFailure();
  return status;
}

}  // namespace dtensor
