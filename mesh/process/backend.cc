#include "dtensor/mesh/process/backend.h"

#include <algorithm>
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
struct alignas(64) Arrival {
  uint64_t sequence, fingerprint, balance;
  uint64_t host_bytes;  // of World::Exchange
  char* stage() { return reinterpret_cast<char*>(this + 1); }
};

constexpr int64_t kHeadBytes = sizeof(Arrival);

// What WriteStage writes.
int64_t StagedBytes(const CollectiveCall& call, int me) {
  if (!call.in.defined() || (call.kind == CollectiveKind::kBroadcast && call.root != me)) return 0;
  return call.in.nbytes();
}

// Everybody sends its data to everybody: cheaper than a second round of messages up to about this
// many bytes for all.
constexpr int64_t kRidingBytes = 32 << 10;

// A message that somebody offers: what it is, for the receiver to compare.
struct Offer {
  uint32_t dtype;
  uint32_t ndim;
  int64_t shape[kMaxDims];
  char text[2048];
};

// Why it is not taken; empty: it is.
struct Objection {
  char error[4096];
};

void CopyText(const std::string& text, absl::Span<char> to) {
  const size_t n = std::min(text.size(), to.size() - 1);
  std::copy_n(text.data(), n, to.data());
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
  // `moves`: whether the data of its calls goes with them; else they only agree.
  ProcessBackend(std::shared_ptr<ProcessGroup> group, std::string label, bool moves = true)
      : group_(std::move(group)), me_(group_->me()), label_(std::move(label)), moves_(moves) {}

  const CommCaps& caps() const override {
    static constexpr CommCaps kCaps = {
        .peers = true, .many_pieces = true, .overlap = true, .rank_order = true, .same_bits = true};
    return kCaps;
  }
  Work Start(const CollectiveCall& call, Record record) override {
    const size_t place = record();
    if (group_->aborted()) return Work(Over());
    if (call.options.overlap) {
      // By one of its own: this one may be gone before.
      const auto carry = [own = *this](Job& job) mutable {
        return own.Collective(job.call(), &job);
      };
      return group_->progress().Post(call, flight(), place, carry);
    }
    try {
      if (call.kind == CollectiveKind::kSend) return Work(Send(call));
      if (call.kind == CollectiveKind::kRecv) return Work(Recv(call));
      return Work(Collective(call, nullptr));
    } catch (...) {
      return Work(FailedHere());
    }
  }
  absl::Status Health() override { return group_->Health(); }
  void Abort(absl::Status why) override { group_->AbortAll(why); }
  absl::Status Quiesce() override { return group_->progress().Quiesce(); }
  void Number(CollectiveCall* call) override { group_->Number(call); }
  FlightRecorder& flight() override { return group_->flight(); }

 private:
  using Job = ProgressThread::Job;
  using Memory = ProcessGroup::Memory;
  Arrival& ArrivalOf(const Memory& meeting, int member) const {
    return *reinterpret_cast<Arrival*>(meeting.part(member));
  }
  // `job`: null unless the progress thread carries the call out.
  absl::Status Collective(const CollectiveCall& call, Job* job);
  std::string Text(const CollectiveCall& call, const Job* job) const {
    return job == nullptr ? Describe(call, group_->ranks()) : job->Describe(group_->ranks());
  }
  // Whether the data rides with the arrivals; how much of it may.
  bool Rides(const CollectiveCall& call) const { return moves_ && IsStaged(call, MostRiding()); }
  // Whether each peer gets only what it adds up, in a message of its own.
  static bool IsCut(const CollectiveCall& call) {
    return call.kind == CollectiveKind::kReduceScatter;
  }
  int64_t MostRiding() const { return std::max(kStageBytes, kRidingBytes / group_->size()); }
  absl::Status Move(const CollectiveCall& call, Job* job, const Memory& meeting);
  void SayArrival(const CollectiveCall& call, Job* job, Arrival& mine) const;
  absl::Status Meet(const CollectiveCall& call, Job* job, const std::shared_ptr<Memory>& meeting);
  bool Agree(const CollectiveCall& call, const Memory& meeting) const;
  absl::Status Mismatch(const CollectiveCall& call, const Job* job, const Memory& meeting);
  absl::Status FailedHere();  // in an exception
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
  const bool moves_;
};

absl::Status ProcessBackend::FailedHere() {
  const absl::Status why = CurrentException();
  group_->AbortAll(FailureOf(group_->ranks()[me_], why));
  return why;
}

absl::Status ProcessBackend::Collective(const CollectiveCall& call, Job* job) try {
  if (group_->aborted()) return Over();
  // Others may come to it with more than this member thinks.
  const auto meeting = group_->MemoryOf(call, ProcessGroup::kArrivals, kHeadBytes + MostRiding());
  absl::Status done = Meet(call, job, meeting);
  if (done.ok()) {
    done = Agree(call, *meeting) ? Move(call, job, *meeting) : Mismatch(call, job, *meeting);
  }
  if (!done.ok()) group_->DropMemory(call);
  return done;
} catch (...) {
  return FailedHere();
}

// All agree.
absl::Status ProcessBackend::Move(const CollectiveCall& call, Job* job, const Memory& meeting) {
  if (!moves_) return absl::OkStatus();
  if (call.kind == CollectiveKind::kHostExchange) {
    ProcessGroup::HostBytes& bytes = *group_->host_bytes;
    for (int r = 0; r < group_->size(); ++r) {
      bytes.all.emplace_back(ArrivalOf(meeting, r).host_bytes, '\0');
    }
    bytes.all[static_cast<size_t>(me_)] = bytes.mine;
  } else if (Rides(call)) {
    const Span span(SpanKind::kMove, "read");
    absl::InlinedVector<const char*, 16> stages;
    for (int r = 0; r < group_->size(); ++r) stages.push_back(ArrivalOf(meeting, r).stage());
    if (IsCut(call)) stages[me_] += ScatterStartBytes(call, me_);  // its own is whole
    ReadStages(call, me_, stages, IsCut(call));
    return absl::OkStatus();
  }
  const Span span(SpanKind::kMove, "move");
  const auto await = [&](Transfers& transfers) {
    return group_->Await(
        transfers, [] { return absl::OkStatus(); },
        [&] { return group_->LateFor(call, Text(call, job), label_, transfers); },
        /*all_are_in=*/true, job);
  };
  return MoveBetweenProcesses(job == nullptr ? call : job->BeginReading(), *group_, await);
}

// What this member says to all others.
void ProcessBackend::SayArrival(const CollectiveCall& call, Job* job, Arrival& mine) const {
  mine.sequence = call.sequence;
  mine.fingerprint = call.fingerprint;
  mine.balance = call.kind == CollectiveKind::kExchange ? ExchangeBalance(call, me_) : 0;
  mine.host_bytes =
      call.kind == CollectiveKind::kHostExchange ? group_->host_bytes->mine.size() : 0;
  if (!Rides(call)) return;
  WriteStage(job == nullptr ? call : job->BeginReading(), me_, mine.stage());
  if (job != nullptr) job->EndReading();
}

// Every member hears from every other one.
absl::Status ProcessBackend::Meet(const CollectiveCall& call, Job* job,
                                  const std::shared_ptr<Memory>& meeting) {
  Arrival& mine = ArrivalOf(*meeting, me_);
  SayArrival(call, job, mine);
  const int64_t bytes = kHeadBytes + (Rides(call) ? StagedBytes(call, me_) : 0);
  const bool cut = Rides(call) && IsCut(call);
  const auto mine_cut =
      cut ? group_->MemoryOf(call, ProcessGroup::kCutArrivals, kHeadBytes + MostRiding()) : nullptr;
  struct Both {
    std::shared_ptr<Memory> whole, cut;
  };
  Transfers transfers(
      group_->world().endpoint(),
      cut ? std::make_shared<Both>(Both{meeting, mine_cut}) : std::shared_ptr<void>(meeting));
  const int64_t channel = group_->channel(ProcessGroup::kCalls, call);
  const int n = group_->size();
  for (int k = 1; k < n; ++k) {
    const int r = (me_ + k) % n;
    DT_RETURN_IF_ERROR(
        transfers.Recv(World(r), channel, &ArrivalOf(*meeting, r), meeting->part_bytes, true));
  }
  for (int k = 1; k < n; ++k) {
    const int r = (me_ + k) % n;
    const void* from = &mine;
    int64_t size = bytes;
    if (cut) {
      Arrival& to = ArrivalOf(*mine_cut, r);
      const int64_t start = ScatterStartBytes(call, r);
      size = ScatterStartBytes(call, r + 1) - start;
      std::memcpy(&to, &mine, sizeof(Arrival));
      std::memcpy(to.stage(), mine.stage() + start, static_cast<size_t>(size));
      from = &to;
      size += kHeadBytes;
    }
    DT_RETURN_IF_ERROR(transfers.Send(World(r), channel, from, size, true));
  }
  group_->Arrive(call);
  const auto hear = [&] {
    for (int k = 1; k < n; ++k) {
      if (transfers.done(static_cast<size_t>(k - 1))) group_->Hear((me_ + k) % n, call);
    }
  };
  const auto after_all = [&](auto status) -> absl::Status {
    DT_RETURN_IF_ERROR(transfers.Sweep());
    hear();
    return status();
  };
  const absl::Status met = group_->Await(
      transfers, [&] { return after_all([&] { return group_->LeftBefore(call, label_); }); },
      [&] {
        return after_all([&] { return group_->LateFor(call, Text(call, job), label_, transfers); });
      },
      /*all_are_in=*/false, job);
  hear();
  return met;
}

bool ProcessBackend::Agree(const CollectiveCall& call, const Memory& meeting) const {
  uint64_t balance = 0;
  for (int r = 0; r < group_->size(); ++r) {
    const Arrival& a = ArrivalOf(meeting, r);
    if (a.fingerprint != call.fingerprint || a.sequence != call.sequence) return false;
    balance += a.balance;
  }
  return balance == 0;
}

// All members saw the same, so all come here; nothing was moved and the group stays in step. They
// write what they issued into the store, the first compares and writes what all shall be told.
absl::Status ProcessBackend::Mismatch(const CollectiveCall& call, const Job* job,
                                      const Memory& meeting) {
  Store& store = group_->world().StoreOf(group_->world().rank());
  const std::string key = absl::StrCat(
      "dtensor/differ/", group_->channel(ProcessGroup::kCalls, call), "/", call.sequence, "/");
  const json mine = {{"text", Text(call, job)},
                     {"label", label_},
                     {"before", call.before},
                     {"fingerprint", call.fingerprint},
                     {"sends", process::ToJson(call.sends)},
                     {"recvs", process::ToJson(call.recvs)}};
  DT_RETURN_IF_ERROR(store.Set(absl::StrCat(key, me_), process::Dump(mine)));
  const absl::Time deadline = absl::Now() + group_->timeout();
  if (me_ == 0) {
    std::vector<json> issued;
    for (int r = 0; r < group_->size(); ++r) {
      DT_ASSIGN_OR_RETURN(const std::string text, store.Get(absl::StrCat(key, r), deadline));
      issued.push_back(process::Parse(text));
    }
    bool pieces = true;
    for (int r = 0; r < group_->size(); ++r) {
      pieces &= ArrivalOf(meeting, r).fingerprint == call.fingerprint;
    }
    const absl::Status status = WithReport(
        absl::FailedPreconditionError(absl::StrCat(
            "[comm ", label_, "] ", call.options.overlap ? "deferred " : "",
            "collectives differ at call #", call.sequence, ": ", Difference(call, pieces, issued))),
        group_->world().ReportText());
    DT_RETURN_IF_ERROR(store.Set(key + "told", process::Dump(process::ToJson(status))));
  }
  DT_ASSIGN_OR_RETURN(const std::string told, store.Get(key + "told", deadline));
  return process::StatusOf(process::Parse(told));
}

std::string ProcessBackend::Difference(const CollectiveCall& call, bool pieces,
                                       const std::vector<json>& issued) const {
  if (!pieces) {
    std::vector<IssuedCall> calls;
    for (const json& i : issued) {
      calls.push_back({i.at("fingerprint").get<uint64_t>(), i.at("text").get<std::string>(),
                       i.at("label").get<std::string>(), i.at("before").get<uint64_t>()});
    }
    return CallDifference(calls, group_->ranks(), call.options.overlap ? "plain" : "deferred");
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
    Objection answer;
  };
  const auto both = std::make_shared<Both>();
  both->offer = OfferOf(call, group_->ranks());
  Transfers first(group_->world().endpoint(), both);
  const int64_t peer = World(call.root);
  DT_RETURN_IF_ERROR(first.Recv(peer, group_->channel(ProcessGroup::kAnswers), &both->answer,
                                sizeof(Objection), true));
  DT_RETURN_IF_ERROR(
      first.Send(peer, group_->channel(ProcessGroup::kOffers), &both->offer, sizeof(Offer), true));
  DT_RETURN_IF_ERROR(AwaitPeer(call, count, first));
  if (both->answer.error[0] != '\0') return absl::FailedPreconditionError(both->answer.error);
  if (!moves_) return absl::OkStatus();
  Transfers data(group_->world().endpoint(), nullptr, &call);
  DT_RETURN_IF_ERROR(
      data.Send(peer, group_->channel(ProcessGroup::kPayload), call.in.data(), call.in.nbytes()));
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
  const auto answer = std::make_shared<Objection>();
  CopyText(error, absl::MakeSpan(answer->error));
  Transfers second(group_->world().endpoint(), answer, &call);
  DT_RETURN_IF_ERROR(second.Send(peer, group_->channel(ProcessGroup::kAnswers), answer.get(),
                                 static_cast<int64_t>(std::strlen(answer->error)) + 1, true));
  if (error.empty() && moves_) {
    DT_RETURN_IF_ERROR(second.Recv(peer, group_->channel(ProcessGroup::kPayload), call.out.data(),
                                   call.out.nbytes()));
  }
  DT_RETURN_IF_ERROR(AwaitPeer(call, count, second));
  return error.empty() ? absl::OkStatus() : absl::FailedPreconditionError(error);
}

}  // namespace

BackendEntry ProcessBackendEntry() {
  return {"processes", "processes, by messages, sums in rank order",
          [](const World& world, const GroupRequest& group) {
            return world.launcher() == Launcher::kProcesses &&
                   (IsHost(group.device) || group.ranks.size() == 1);
          },
          [](World& world, const GroupRequest& group) {
            return MakeProcessBackend(world, group, /*moves=*/true);
          }};
}

std::unique_ptr<CommBackend> MakeProcessBackend(World& world, const GroupRequest& group,
                                                bool moves) {
  auto members = ValueOrThrow(static_cast<ProcessWorld&>(world).GroupOf(group.ranks));
  return std::make_unique<ProcessBackend>(std::move(members), group.label, moves);
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
