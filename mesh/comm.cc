#include "dtensor/mesh/comm.h"

#include <algorithm>
#include <utility>

#include "absl/base/attributes.h"
#include "absl/strings/str_cat.h"
#include "dtensor/mesh/call_tag.h"
#include "dtensor/mesh/comm_time.h"
#include "dtensor/mesh/comm_work.h"
#include "dtensor/mesh/flight.h"
#include "dtensor/mesh/hash.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/tensor/device_graph.h"
#include "dtensor/tensor/status.h"
#include "dtensor/tensor/text.h"
#include "dtensor/tensor/trace.h"

namespace dtensor {
namespace {

std::string TensorName(const Tensor& t) {
  return absl::StrCat(View(Name(t.dtype())), " ", ToString(t.shape()));
}

bool IsReduction(CollectiveKind kind) {
  return kind == CollectiveKind::kAllReduce || kind == CollectiveKind::kReduceScatter;
}

bool IsPointToPoint(CollectiveKind kind) {
  return kind == CollectiveKind::kSend || kind == CollectiveKind::kRecv;
}

// Whether some tensor of the call is, or is not, on meta.
ABSL_ATTRIBUTE_ALWAYS_INLINE inline bool SomeOnMeta(const CollectiveCall& call, bool is) {
  auto some = [is](const Tensor& t) { return t.defined() && t.has_data() != is; };
  auto piece = [&](const Piece& p) { return some(p.view); };
  if (call.kind != CollectiveKind::kExchange) return some(call.in) || some(call.out);
  return std::any_of(call.sends.begin(), call.sends.end(), piece) ||
         std::any_of(call.recvs.begin(), call.recvs.end(), piece);
}

// Of everything that must agree between the ranks of one call: the collective, the name of the mesh
// dims it runs over, what it is for, and its place among overlapped and other calls.
uint64_t Fingerprint(const CollectiveCall& call, uint64_t label) {
  const bool shaped =
      call.kind != CollectiveKind::kBarrier && call.kind != CollectiveKind::kExchange;
  // Gather's inputs differ by rank, everybody's output is the whole; scatter the other way.
  const Tensor& whole = call.kind == CollectiveKind::kAllGather ? call.out : call.in;
  const uint64_t dtype = shaped ? static_cast<uint64_t>(whole.dtype()) : 0;
  // A third of HashMix: peers wait for this. It separates any two calls that differ in one number,
  // and others but for one in 2^64.
  uint64_t h = label ^ (call.tag == nullptr ? 0 : call.tag->hash);
  const auto mix = [&h](uint64_t v) {
    h = (h ^ v) * 0x9E3779B97F4A7C15ull;
    h ^= h >> 32;
  };
  mix(static_cast<uint64_t>(call.options.overlap) << 56 | static_cast<uint64_t>(call.kind) << 48 |
      static_cast<uint64_t>(call.op) << 40 | dtype << 32 | static_cast<uint64_t>(call.root));
  mix(call.before);  // both sorts of calls have numbers of their own: this orders them
  if (!shaped) return h;
  for (const int64_t size : whole.shape()) mix(static_cast<uint64_t>(size));
  for (const int64_t count : call.counts) mix(static_cast<uint64_t>(count));
  mix(call.counts.size());
  return h;
}

uint64_t HashText(const std::string& text) {
  uint64_t h = 0;
  for (char c : text) h = HashMix(h, static_cast<unsigned char>(c));
  return h;
}

const Tensor& NoTensor() {
  static const Tensor none;
  return none;
}

// A group of one rank: nothing to agree on, nothing to wait for.
absl::Status RunAlone(const CollectiveCall& call, const std::string& label) {
  if (call.kind == CollectiveKind::kBarrier) return absl::OkStatus();
  if (call.kind != CollectiveKind::kExchange) {
    CopyUnlessSame(call.in, call.out);
    return absl::OkStatus();
  }
  for (size_t k = 0; k < std::max(call.sends.size(), call.recvs.size()); ++k) {
    if (k >= call.sends.size() || k >= call.recvs.size() ||
        call.sends[k].view.dtype() != call.recvs[k].view.dtype() ||
        call.sends[k].view.shape() != call.recvs[k].view.shape()) {
      return absl::FailedPreconditionError(absl::StrCat("[comm ", label, "] exchange: piece ", k,
                                                        " sent and received do not match"));
    }
    CopyUnlessSame(call.sends[k].view, call.recvs[k].view);
  }
  return absl::OkStatus();
}

}  // namespace

Comm::Comm(RankContext* context, std::unique_ptr<CommBackend> backend, std::vector<int64_t> ranks,
           int index, std::string label)
    : context_(context),
      backend_(std::move(backend)),
      ranks_(std::move(ranks)),
      index_(index),
      label_(std::move(label)),
      label_hash_(HashText(label_)),
      caps_(backend_->caps()),
      restricted_(!caps_.strided || !caps_.many_pieces),
      flight_(backend_->flight()),
      flight_label_(flight_.AddLabel(label_)) {}

Comm::~Comm() = default;

Work Comm::AllReduce(const Tensor& in, const Tensor& out, ReduceOp op, CommOptions options) {
  CollectiveCall call = {
      .kind = CollectiveKind::kAllReduce, .in = in, .out = out, .op = op, .options = options};
  // What is exact has the same bits in any order.
  if (caps_.same_bits || size() == 1 || !in.defined() || !IsFloating(in.dtype())) {
    return Run(std::move(call));
  }
  absl::StatusOr<Work> work = AllReduceInTwo(std::move(call));
  return work.ok() ? *std::move(work) : Work(work.status());
}

Work Comm::AllGather(const Tensor& in, const Tensor& out, std::vector<int64_t> counts,
                     CommOptions options) {
  return Run({.kind = CollectiveKind::kAllGather,
              .in = in,
              .out = out,
              .counts = std::move(counts),
              .options = options});
}

Work Comm::ReduceScatter(const Tensor& in, const Tensor& out, std::vector<int64_t> counts,
                         ReduceOp op, CommOptions options) {
  return Run({.kind = CollectiveKind::kReduceScatter,
              .in = in,
              .out = out,
              .counts = std::move(counts),
              .op = op,
              .options = options});
}

Work Comm::Exchange(std::vector<Piece> sends, std::vector<Piece> recvs, CommOptions options) {
  return Run({.kind = CollectiveKind::kExchange,
              .in = NoTensor(),
              .out = NoTensor(),
              .sends = std::move(sends),
              .recvs = std::move(recvs),
              .options = options});
}

Work Comm::Broadcast(const Tensor& tensor, int root) {
  return Run({.kind = CollectiveKind::kBroadcast, .in = tensor, .out = tensor, .root = root});
}

Work Comm::Send(const Tensor& tensor, int peer) {
  return Run({.kind = CollectiveKind::kSend, .in = tensor, .out = NoTensor(), .root = peer});
}

Work Comm::Recv(const Tensor& tensor, int peer) {
  return Run({.kind = CollectiveKind::kRecv, .in = NoTensor(), .out = tensor, .root = peer});
}

Work Comm::Barrier() {
  return Run({.kind = CollectiveKind::kBarrier, .in = NoTensor(), .out = NoTensor()});
}

absl::Status Comm::Health() {
  absl::Status health = backend_->Health();
  if (context_ && !health.ok()) context_->HearOfFailure();
  return health;
}

absl::Status Comm::Quiesce() { return backend_->Quiesce(); }

void Comm::Abort(absl::Status why) {
  if (context_) context_->HearOfFailure();
  backend_->Abort(FailureOf(ranks_[index_], why));
}

std::string Comm::Where(CollectiveKind kind) const {
  return absl::StrCat("[comm ", label_, "] ", View(Name(kind)));
}
absl::Status Comm::Bad(CollectiveKind kind, const std::string& what) const {
  return absl::InvalidArgumentError(absl::StrCat(Where(kind), ": ", what));
}

// `part` holds this rank's rows of `whole`; fills in even counts.
absl::Status Comm::ValidateRows(const Tensor& whole, const Tensor& part,
                                CollectiveCall* call) const {
  if (whole.ndim() == 0 || whole.ndim() != part.ndim() ||
      !std::equal(whole.shape().begin() + 1, whole.shape().end(), part.shape().begin() + 1)) {
    return Bad(call->kind,
               absl::StrCat("shapes ", ToString(call->in.shape()), " and ",
                            ToString(call->out.shape()), " must agree but for the size of dim 0"));
  }
  if (call->counts.empty()) {
    if (whole.size(0) % size() != 0) {
      return Bad(call->kind, absl::StrCat(whole.size(0), " rows do not divide among ", size(),
                                          " ranks and no counts are given"));
    }
    call->counts.assign(size(), whole.size(0) / size());
  }
  if (static_cast<int>(call->counts.size()) != size()) {
    return Bad(call->kind, absl::StrCat(call->counts.size(), " counts for ", size(), " ranks"));
  }
  int64_t total = 0;
  for (int64_t count : call->counts) {
    if (count < 0) return Bad(call->kind, absl::StrCat("count ", count, " is negative"));
    total += count;
  }
  if (total != whole.size(0) || call->counts[index_] != part.size(0)) {
    return Bad(call->kind,
               absl::StrCat("counts [", JoinSome(call->counts), "] do not fit rows ", part.size(0),
                            " of ", whole.size(0), " on group index ", index_));
  }
  return absl::OkStatus();
}

ABSL_ATTRIBUTE_ALWAYS_INLINE inline absl::Status Comm::ValidatePieces(
    const std::vector<Piece>& pieces) const {
  for (const Piece& p : pieces) {
    if (p.peer < 0 || p.peer >= size()) {
      return Bad(CollectiveKind::kExchange,
                 absl::StrCat("peer ", p.peer, " is not in the group of ", size()));
    }
    if (!p.view.defined()) return Bad(CollectiveKind::kExchange, "a piece is a null tensor");
  }
  return absl::OkStatus();
}

absl::Status Comm::Validate(CollectiveCall* call) const {
  const CollectiveKind kind = call->kind;
  if (kind == CollectiveKind::kBarrier) return absl::OkStatus();
  if (kind == CollectiveKind::kExchange) {
    DT_RETURN_IF_ERROR(ValidatePieces(call->sends));
    return ValidatePieces(call->recvs);
  }
  if ((kind != CollectiveKind::kRecv && !call->in.defined()) ||
      (kind != CollectiveKind::kSend && !call->out.defined())) {
    return Bad(kind, "null tensor");
  }
  if (kind == CollectiveKind::kBroadcast || IsPointToPoint(kind)) {
    if (call->root < 0 || call->root >= size() || (IsPointToPoint(kind) && call->root == index_)) {
      return Bad(kind, absl::StrCat(IsPointToPoint(kind) ? "peer " : "root ", call->root,
                                    " is not another member of the group of ", size()));
    }
    return absl::OkStatus();
  }
  if (call->in.dtype() != call->out.dtype()) {
    return Bad(kind, absl::StrCat("dtypes differ: in ", TensorName(call->in), ", out ",
                                  TensorName(call->out)));
  }
  if (IsReduction(kind) && call->op == ReduceOp::kAvg && !IsFloating(call->in.dtype())) {
    return Bad(kind, absl::StrCat("avg needs a floating dtype, got ", TensorName(call->in)));
  }
  if (kind == CollectiveKind::kAllGather) return ValidateRows(call->out, call->in, call);
  if (kind == CollectiveKind::kReduceScatter) return ValidateRows(call->in, call->out, call);
  if (call->in.shape() != call->out.shape()) {
    return Bad(kind, absl::StrCat("shapes differ: in ", TensorName(call->in), ", out ",
                                  TensorName(call->out)));
  }
  return absl::OkStatus();
}

void Comm::Trace(const CollectiveCall& call) const {
  const int64_t bytes = ReceivedBytes(call, size(), index_);
  const CostModel* cost = context_->trace().cost;
  if (cost == nullptr && context_->simulated()) cost = &context_->cost_model();
  context_->trace().Record(call.kind, label_, bytes, PayloadBytes(call),
                           cost == nullptr ? 0 : cost->CollectiveUs(call.kind, bytes, ranks_));
}

// Whoever reduces a part of it gives all others the bits that it got.
absl::StatusOr<Work> Comm::AllReduceInTwo(CollectiveCall&& call) {
  DT_RETURN_IF_ERROR(Validate(&call));
  if (restricted_) DT_RETURN_IF_ERROR(Within(call));
  const auto flat = [](const Tensor& contiguous) {
    return contiguous.AsStrided({contiguous.numel()}, {1}, contiguous.offset());
  };
  const int64_t numel = call.in.numel();
  std::vector<int64_t> counts(size(), numel / size());
  for (int64_t r = 0; r < numel % size(); ++r) ++counts[r];
  DT_ASSIGN_OR_RETURN(const Tensor terms, call.in.Contiguous());
  DT_ASSIGN_OR_RETURN(const Tensor part,
                      Tensor::Empty({counts[index_]}, terms.dtype(), terms.device()));
  DT_RETURN_IF_ERROR(ReduceScatter(flat(terms), part, counts, call.op).Wait());
  if (call.out.is_contiguous()) return AllGather(part, flat(call.out), counts, call.options);
  DT_ASSIGN_OR_RETURN(const Tensor whole, Tensor::Empty({numel}, terms.dtype(), terms.device()));
  DT_RETURN_IF_ERROR(AllGather(part, whole, counts).Wait());
  DT_ASSIGN_OR_RETURN(const Tensor shaped, whole.View(call.out.shape()));
  Copy(shaped, call.out);
  return Work();
}

absl::Status Comm::Within(const CollectiveCall& call) const {
  const std::string excess = Excess(call, caps_);
  return excess.empty() ? absl::OkStatus() : Bad(call.kind, excess);
}

absl::Status Comm::MayBeCaptured() const {
  if (!caps_.graphs_together) {
    return DeviceGraph::Allows("its ranks meet where their programs run, not on the device");
  }
  for (const int64_t rank : ranks_) {
    if (DeviceGraph::Current()->Holds(rank)) continue;
    return DeviceGraph::Allows(
        absl::StrCat("rank ", rank, " takes part in it, and has no part in the graph"));
  }
  return absl::OkStatus();
}

Work Comm::Run(CollectiveCall&& call) {
  absl::Status valid = Validate(&call);
  if (!valid.ok()) return Work(std::move(valid));
  if (size() == 1) return Work(RunAlone(call, label_));
  if (!caps_.graphs && DeviceGraph::Current() != nullptr) [[unlikely]] {
    const absl::Status captured = MayBeCaptured();
    if (!captured.ok()) return Work(Prefixed(Where(call.kind), captured));
  }
  if (restricted_) {
    absl::Status within = Within(call);
    if (!within.ok()) return Work(std::move(within));
  }
  if (context_ && context_->trace().active()) Trace(call);
  // A plan without data: nothing to move, nobody to wait for.
  const bool watched = TimelineTrack::Current() != nullptr;
  const Span span(SpanKind::kCollective, watched ? View(Name(call.kind)) : "", [&] {
    return absl::StrCat(label_, ", ", ReceivedBytes(call, size(), index_), " bytes received");
  });
  if (SomeOnMeta(call, true)) return Work();
  if (context_ && context_->rehearses()) {  // peers do not know of it
    if (!SomeOnMeta(call, false)) return Work();
    return Work(Bad(call.kind, "in a rehearsal (Explain) there are no peers to move data to"));
  }
  call.options.overlap &= caps_.overlap;
  if (!IsPointToPoint(call.kind)) backend_->Number(&call);
  if (context_) call.tag = &context_->call_tag();
  if (caps_.peers && !IsPointToPoint(call.kind)) call.fingerprint = Fingerprint(call, label_hash_);
  constexpr size_t kNone = ~size_t{0};
  size_t place = kNone;
  Work work = [&] {
    const TimedComm timed(context_);
    return backend_->Start(call, [&] { return place = flight_.Begin(call, flight_label_); });
  }();
  if (place == kNone) place = flight_.Begin(call, flight_label_);  // it failed before
  if (!work.GoesOn()) {
    const absl::Status status = work.Wait();
    flight_.End(place, status.code());
    if (context_ && !status.ok()) context_->HearOfFailure();
  } else {
    // Of a deferred pull this rank's part is done when it is posted.
    if (caps_.deferred_pull) flight_.End(place, absl::StatusCode::kOk);
    if (context_ && !work.Done()) context_->Lend(work.TheLoan());
  }
  return work;
}

std::string Comm::FlightLog(int count) const {
  std::string text;
  for (const FlightEntry& e : flight_.Last(static_cast<size_t>(std::max(count, 0)))) {
    const std::string tag = e.tag.ToString();
    absl::StrAppend(&text, "#", e.sequence, " ", CallText(e, ranks_), tag.empty() ? "" : " for ",
                    tag, ": ", e.done ? absl::StatusCodeToString(e.code) : "started", "\n");
  }
  return text;
}

}  // namespace dtensor
