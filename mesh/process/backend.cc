#include "dtensor/mesh/process/backend.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/mesh/backends.h"
#include "dtensor/mesh/call_difference.h"
#include "dtensor/mesh/call_tag.h"
#include "dtensor/mesh/flight.h"
#include "dtensor/mesh/host_exchange.h"
#include "dtensor/mesh/local/group.h"
#include "dtensor/mesh/local/move.h"
#include "dtensor/mesh/process/move.h"
#include "dtensor/mesh/process/process_world.h"
#include "dtensor/mesh/process/text.h"
#include "dtensor/tensor/status.h"
#include "dtensor/tensor/trace.h"

namespace dtensor {

using nlohmann::json;

namespace {

// What a member says when it comes to a call. Small data follows it at once.
struct Arrival {
  uint64_t sequence, fingerprint, balance;
  uint64_t host_bytes;  // of World::Exchange
  alignas(64) char stage[kStageBytes];
};
constexpr int64_t kArrivalHead = offsetof(Arrival, stage);

// A message that somebody offers: what it is, for the receiver to compare.
struct Offer {
  uint32_t dtype;
  uint32_t ndim;
  int64_t shape[kMaxDims];
  char text[2048];
};

// Why it is not taken; empty: it is.
struct Answer {
  char error[4096];
};

void CopyText(const std::string& text, absl::Span<char> to) {
  const size_t n = std::min(text.size(), to.size() - 1);
  std::memcpy(to.data(), text.data(), n);
  to[n] = '\0';
}

Offer OfferOf(const CollectiveCall& call, absl::Span<const int64_t> ranks) {
  const Tensor& t = call.in.defined() ? call.in : call.out;
  Offer offer = {};
  offer.dtype = static_cast<uint32_t>(t.dtype());
  offer.ndim = static_cast<uint32_t>(t.ndim());
  for (uint32_t d = 0; d < offer.ndim; ++d) offer.shape[d] = t.size(static_cast<int>(d));
  CopyText(Describe(call, ranks), absl::MakeSpan(offer.text));
  return offer;
}

bool SameTensor(const Offer& a, const Offer& b) {
  return a.dtype == b.dtype && a.ndim == b.ndim && std::equal(a.shape, a.shape + a.ndim, b.shape);
}

class ProcessBackend : public CommBackend {
 public:
  ProcessBackend(std::shared_ptr<ProcessGroup> group, std::string label)
      : group_(std::move(group)), me_(group_->me()), label_(std::move(label)) {}

  const CommCaps& caps() const override {
    static constexpr CommCaps kCaps = {
        .peers = true, .many_pieces = true, .rank_order = true, .same_bits = true};
    return kCaps;
  }
  Work Start(const CollectiveCall& call, Record record) override {
    record();
    if (group_->aborted()) return Work(Over());
    try {
      if (call.kind == CollectiveKind::kSend) return Work(Send(call));
      if (call.kind == CollectiveKind::kRecv) return Work(Recv(call));
      return Work(Collective(call));
    } catch (...) {
      const absl::Status why = CurrentException();
      group_->AbortAll(FailureOf(group_->ranks()[me_], why));
      return Work(why);
    }
  }
  absl::Status Health() override { return group_->Health(); }
  void Abort(absl::Status why) override { group_->AbortAll(why); }
  void Number(CollectiveCall* call) override { call->sequence = group_->NextSequence(); }
  FlightRecorder& flight() override { return group_->flight(); }

 private:
  using Arrivals = std::vector<Arrival>;  // by group index
  absl::Status Collective(const CollectiveCall& call);
  absl::Status Meet(const CollectiveCall& call, const std::shared_ptr<Arrivals>& arrivals);
  bool Agree(const CollectiveCall& call, const Arrivals& arrivals) const;
  absl::Status Mismatch(const CollectiveCall& call, const Arrivals& arrivals);
  std::string Difference(const CollectiveCall& call, bool pieces,
                         const std::vector<json>& issued) const;
  absl::Status Send(const CollectiveCall& call);
  absl::Status Recv(const CollectiveCall& call);
  // Waits for messages of a send or receive.
  absl::Status AwaitPeer(const CollectiveCall& call, uint64_t count, Transfers& transfers);
  int64_t World(int peer) const { return group_->ranks()[static_cast<size_t>(peer)]; }
  // Present calls end with the group's status, later ones with its message.
  absl::Status Over() const { return Recoded(group_->Health(), absl::StatusCode::kAborted); }

  const std::shared_ptr<ProcessGroup> group_;
  const int me_;
  const std::string label_;
};

absl::Status ProcessBackend::Collective(const CollectiveCall& call) {
  const auto arrivals = std::make_shared<Arrivals>(group_->size());
  DT_RETURN_IF_ERROR(Meet(call, arrivals));
  if (!Agree(call, *arrivals)) return Mismatch(call, *arrivals);
  const bool host = call.kind == CollectiveKind::kHostExchange;
  if (IsStaged(call) && !host) {
    const Span span(SpanKind::kMove, "read");
    std::vector<const char*> stages;
    for (const Arrival& a : *arrivals) stages.push_back(a.stage);
    ReadStages(call, me_, stages);
    return absl::OkStatus();
  }
  if (host) {
    ProcessGroup::HostBytes& bytes = *group_->host_bytes;
    for (const Arrival& a : *arrivals) bytes.all.emplace_back(a.host_bytes, '\0');
    bytes.all[static_cast<size_t>(me_)] = bytes.mine;
  }
  const Span span(SpanKind::kMove, "move");
  const auto await = [&](Transfers& transfers) {
    return group_->Await(
        transfers, [] { return absl::OkStatus(); },
        [&] { return group_->LateFor(call, label_, transfers); }, /*all_are_in=*/true);
  };
  return MoveBetweenProcesses(call, *group_, await);
}

// Every member hears from every other one.
absl::Status ProcessBackend::Meet(const CollectiveCall& call,
                                  const std::shared_ptr<Arrivals>& arrivals) {
  Arrival& mine = (*arrivals)[me_];
  mine.sequence = call.sequence;
  mine.fingerprint = call.fingerprint;
  mine.balance = call.kind == CollectiveKind::kExchange ? ExchangeBalance(call, me_) : 0;
  mine.host_bytes =
      call.kind == CollectiveKind::kHostExchange ? group_->host_bytes->mine.size() : 0;
  int64_t bytes = kArrivalHead;
  if (IsStaged(call)) {
    WriteStage(call, me_, mine.stage);
    bytes += std::min<int64_t>(kStageBytes, std::max<int64_t>(PayloadBytes(call), 1));
  }
  Transfers transfers(group_->world().endpoint(), arrivals);
  const int64_t channel = group_->channel(ProcessGroup::kCalls);
  std::vector<int> peers;
  for (int r = 0; r < group_->size(); ++r) {
    if (r != me_) peers.push_back(r);
  }
  for (const int r : peers) {
    DT_RETURN_IF_ERROR(transfers.Recv(World(r), channel, &(*arrivals)[r], sizeof(Arrival), true));
  }
  for (const int r : peers) {
    DT_RETURN_IF_ERROR(transfers.Send(World(r), channel, &mine, bytes, true));
  }
  group_->Arrive(call.sequence);
  const auto hear = [&] {
    for (size_t k = 0; k < peers.size(); ++k) {
      if (transfers.done(k)) group_->Hear(peers[k], call.sequence);
    }
  };
  absl::Status met = group_->Await(
      transfers,
      [&] {
        hear();
        return group_->LeftBefore(call, label_);
      },
      [&] {
        hear();
        return group_->LateFor(call, label_, transfers);
      },
      /*all_are_in=*/false);
  hear();
  return met;
}

bool ProcessBackend::Agree(const CollectiveCall& call, const Arrivals& arrivals) const {
  uint64_t balance = 0;
  for (const Arrival& a : arrivals) {
    if (a.fingerprint != call.fingerprint || a.sequence != call.sequence) return false;
    balance += a.balance;
  }
  return balance == 0;
}

// All members saw the same, so all come here; nothing was moved and the group stays in step. They
// write what they issued into the store, the first compares and writes what all shall be told.
absl::Status ProcessBackend::Mismatch(const CollectiveCall& call, const Arrivals& arrivals) {
  Store& store = group_->world().StoreOf(group_->world().rank());
  const std::string key = absl::StrCat("dtensor/differ/", group_->channel(ProcessGroup::kCalls),
                                       "/", call.sequence, "/");
  const json mine = {{"text", Describe(call, group_->ranks())},
                     {"label", label_},
                     {"before", call.before},
                     {"fingerprint", call.fingerprint},
                     {"sends", process::ToJson(call.sends)},
                     {"recvs", process::ToJson(call.recvs)}};
  DT_RETURN_IF_ERROR(store.Set(absl::StrCat(key, me_), process::Dump(mine)));
  const absl::Time deadline = absl::Now() + group_->world().timeout();
  if (me_ == 0) {
    std::vector<json> issued;
    for (int r = 0; r < group_->size(); ++r) {
      DT_ASSIGN_OR_RETURN(const std::string text, store.Get(absl::StrCat(key, r), deadline));
      issued.push_back(process::Parse(text));
    }
    const bool pieces = std::all_of(arrivals.begin(), arrivals.end(), [&](const Arrival& a) {
      return a.fingerprint == call.fingerprint;
    });
    const absl::Status status =
        WithReport(absl::FailedPreconditionError(
                       absl::StrCat("[comm ", label_, "] collectives differ at call #",
                                    call.sequence, ": ", Difference(call, pieces, issued))),
                   group_->world().ReportText());
    DT_RETURN_IF_ERROR(store.Set(key + "told", process::Dump(process::ToJson(status))));
  }
  DT_ASSIGN_OR_RETURN(const std::string told, store.Get(key + "told", deadline));
  return process::StatusOf(process::Parse(told));
}

std::string ProcessBackend::Difference(const CollectiveCall&, bool pieces,
                                       const std::vector<json>& issued) const {
  if (!pieces) {
    std::vector<IssuedCall> calls;
    for (const json& i : issued) {
      calls.push_back({i.at("fingerprint").get<uint64_t>(), i.at("text").get<std::string>(),
                       i.at("label").get<std::string>(), i.at("before").get<uint64_t>()});
    }
    return CallDifference(calls, group_->ranks());
  }
  const Tensor none;
  std::vector<CollectiveCall> calls;
  calls.reserve(issued.size());
  std::vector<const CollectiveCall*> pointers;
  for (const json& i : issued) {
    calls.push_back({.kind = CollectiveKind::kExchange,
                     .in = none,
                     .out = none,
                     .sends = process::PiecesOf(i.at("sends")),
                     .recvs = process::PiecesOf(i.at("recvs"))});
    pointers.push_back(&calls.back());
  }
  for (int r = 0; r < group_->size(); ++r) {
    const std::string text = ExchangeMismatch(pointers, r, group_->ranks());
    if (!text.empty()) return absl::StrCat("exchange, ", text);
  }
  return "exchange, but no difference was found";
}

absl::Status ProcessBackend::AwaitPeer(const CollectiveCall& call, uint64_t count,
                                       Transfers& transfers) {
  const std::string what = absl::StrCat("[comm ", label_, "] ", Describe(call, group_->ranks()),
                                        " (message ", count, ")");
  const bool sends = call.kind == CollectiveKind::kSend;
  return group_->Await(
      transfers, [&] { return group_->LeftBefore(call.root, sends, count, what); },
      [&] { return group_->LateFor(call.root, what); }, /*all_are_in=*/false);
}

// It says what it has; whoever receives it compares and answers; then the data goes.
absl::Status ProcessBackend::Send(const CollectiveCall& call) {
  const uint64_t count = group_->CountSend(call.root);
  struct Both {
    Offer offer;
    Answer answer;
  };
  const auto both = std::make_shared<Both>();
  both->offer = OfferOf(call, group_->ranks());
  Transfers first(group_->world().endpoint(), both);
  const int64_t peer = World(call.root);
  DT_RETURN_IF_ERROR(first.Recv(peer, group_->channel(ProcessGroup::kAnswers), &both->answer,
                                sizeof(Answer), true));
  DT_RETURN_IF_ERROR(
      first.Send(peer, group_->channel(ProcessGroup::kOffers), &both->offer, sizeof(Offer), true));
  DT_RETURN_IF_ERROR(AwaitPeer(call, count, first));
  if (both->answer.error[0] != '\0') return absl::FailedPreconditionError(both->answer.error);
  Transfers data(group_->world().endpoint(), nullptr, &call);
  DT_RETURN_IF_ERROR(data.Send(peer, group_->channel(ProcessGroup::kPayload), call.in.data(),
                               call.in.numel() * SizeOf(call.in.dtype())));
  return AwaitPeer(call, count, data);
}

absl::Status ProcessBackend::Recv(const CollectiveCall& call) {
  const int64_t peer = World(call.root);
  const uint64_t count = group_->CountReceive(call.root);
  const auto offer = std::make_shared<Offer>();
  Transfers first(group_->world().endpoint(), offer);
  DT_RETURN_IF_ERROR(
      first.Recv(peer, group_->channel(ProcessGroup::kOffers), offer.get(), sizeof(Offer), true));
  DT_RETURN_IF_ERROR(AwaitPeer(call, count, first));
  const Offer mine = OfferOf(call, group_->ranks());
  std::string error;
  if (!SameTensor(*offer, mine)) {
    error = absl::StrCat("[comm ", label_, "] message ", count, " differs: rank ", peer, " issued ",
                         offer->text, ", rank ", World(me_), " issued ", mine.text);
  }
  const auto answer = std::make_shared<Answer>();
  CopyText(error, absl::MakeSpan(answer->error));
  Transfers second(group_->world().endpoint(), answer, &call);
  DT_RETURN_IF_ERROR(second.Send(peer, group_->channel(ProcessGroup::kAnswers), answer.get(),
                                 static_cast<int64_t>(std::strlen(answer->error)) + 1, true));
  if (error.empty()) {
    DT_RETURN_IF_ERROR(second.Recv(peer, group_->channel(ProcessGroup::kPayload), call.out.data(),
                                   call.out.numel() * SizeOf(call.out.dtype())));
  }
  DT_RETURN_IF_ERROR(AwaitPeer(call, count, second));
  return error.empty() ? absl::OkStatus() : absl::FailedPreconditionError(error);
}

}  // namespace

BackendEntry ProcessBackendEntry() {
  return {"processes", "processes, by messages, sums in rank order",
          [](const World& world, const GroupRequest& group) {
            return world.launcher() == Launcher::kProcesses && IsHost(group.device);
          },
          [](World& world, const GroupRequest& group) -> std::unique_ptr<CommBackend> {
            auto members = ValueOrThrow(static_cast<ProcessWorld&>(world).GroupOf(group.ranks));
            return std::make_unique<ProcessBackend>(std::move(members), group.label);
          }};
}

absl::StatusOr<std::vector<std::string>> ExchangeBytes(const std::shared_ptr<ProcessGroup>& group,
                                                       const std::string& label,
                                                       absl::string_view what_for,
                                                       std::string mine) {
  ProcessBackend backend(group, label);
  DT_RETURN_IF_ERROR(RunHostExchange(backend, label, what_for, [&](const CollectiveCall&) {
    // Anew: a message that was abandoned may still write to those of an earlier call.
    group->host_bytes = std::make_shared<ProcessGroup::HostBytes>();
    group->host_bytes->mine = std::move(mine);
  }));
  return std::move(group->host_bytes->all);
}

}  // namespace dtensor
