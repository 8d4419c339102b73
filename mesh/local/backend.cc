// Protocol only; see group.h for its idea.
#include "dtensor/mesh/local/backend.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "absl/container/fixed_array.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/mesh/backends.h"
#include "dtensor/mesh/call_device.h"
#include "dtensor/mesh/call_difference.h"
#include "dtensor/mesh/flight.h"
#include "dtensor/mesh/host_exchange.h"
#include "dtensor/mesh/local/deferred.h"
#include "dtensor/mesh/local/group.h"
#include "dtensor/mesh/local/move.h"
#include "dtensor/mesh/local/thread_world.h"
#include "dtensor/tensor/device.h"
#include "dtensor/tensor/status.h"
#include "dtensor/tensor/trace.h"

namespace dtensor {
namespace {

using Slot = LocalGroup::Slot;

RankDevice& ThisDevice(const Tensor& t) { return ThisDevice(t.device()); }

class LocalBackend : public CommBackend {
 public:
  // `device`: where the tensors of its calls are.
  LocalBackend(std::shared_ptr<LocalGroup> group, int index, std::string label, DeviceType device,
               std::unique_ptr<Transport> transport)
      : group_(std::move(group)),
        me_(index),
        label_(std::move(label)),
        device_(device),
        transport_(std::move(transport)) {}

  const CommCaps& caps() const override {
    if (transport_ != nullptr) return transport_->caps();
    return IsRemote(device_) ? kQueuedCaps : kCaps;
  }
  Work Start(const CollectiveCall& call, Record record) override {
    const bool message = IsMessage(call);
    size_t place = 0;
    if (message || call.options.overlap) place = record();
    // An exception here (no memory for a list) must not unwind the caller's tensors while peers
    // read them.
    try {
      if (message) return Work(call.kind == CollectiveKind::kSend ? Send(call) : Recv(call));
      if (call.options.overlap) {
        Work work = Post(call);
        // This rank's part is done.
        if (!caps().deferred_pull && !work.Done()) flight().End(place, absl::StatusCode::kOk);
        return work;
      }
      if (IsRemote(device_) && !OnHost(call)) return Work(Queue(call, record));
      return Work(Collective(call, record));
    } catch (...) {
      const absl::Status why = CurrentException();
      group_->Abort(FailureOf(group_->ranks()[me_], why));
      group_->EndPull(me_);
      group_->Drain(me_);
      return Work(why);
    }
  }
  absl::Status Health() override { return group_->Health(); }
  void Abort(absl::Status why) override { group_->Abort(why); }
  void Number(CollectiveCall* call) override {
    Slot& mine = group_->slot(me_);
    if (!call->options.overlap) PrefetchForWrite(&mine.arrived);
    call->sequence = ++(call->options.overlap ? mine.deferred : mine.sequence);
    call->before = call->options.overlap ? mine.sequence : mine.deferred;
  }
  FlightRecorder& flight() override { return group_->slot(me_).flight; }

 private:
  static constexpr CommCaps kCaps = {.peers = true,
                                     .strided = true,
                                     .many_pieces = true,
                                     .overlap = true,
                                     .deferred_pull = true,
                                     .rank_order = true,
                                     .same_bits = true};
  // On a device a call is queued where the rank's other work is, or beside it.
  static constexpr CommCaps kQueuedCaps = {.peers = true,
                                           .strided = true,
                                           .many_pieces = true,
                                           .overlap = true,
                                           .rank_order = true,
                                           .same_bits = true,
                                           .graphs_together = true};
  Work Post(const CollectiveCall& call) {
    if (group_->aborted()) return Work(Over());
    const bool exchange = call.kind == CollectiveKind::kExchange;
    return PostDeferred(group_, me_, label_, call, exchange ? ExchangeBalance(call, me_) : 0,
                        device_);
  }
  absl::Status Collective(const CollectiveCall& call, Record record);
  absl::Status Queue(const CollectiveCall& call, Record record);
  void Publish(const CollectiveCall& call);
  bool MovePlain(const CollectiveCall& call, const ReducedPart& cut) const;
  absl::Status MoveAndMeet(const CollectiveCall& call, const ReducedPart& cut);
  bool Agree(const CollectiveCall& call) const;
  absl::Status Mismatch(const CollectiveCall& call);
  std::string PieceDifference() const;
  std::string Difference(const CollectiveCall& call) const;
  absl::Status Send(const CollectiveCall& call);
  absl::Status Recv(const CollectiveCall& call);

  const LocalGroup::Posted& SideOf(int rank, const CollectiveCall& call) const {
    return group_->slot(rank).side[call.sequence & 1];
  }
  const LocalGroup::Rest& RestOf(int rank, const CollectiveCall& call) const {
    return group_->slot(rank).rest[call.sequence & 1];
  }
  std::vector<const CollectiveCall*> Calls(const CollectiveCall& call) const {
    std::vector<const CollectiveCall*> calls(group_->size());
    for (int r = 0; r < group_->size(); ++r) calls[r] = RestOf(r, call).call;
    return calls;
  }
  // Present calls end with the group's status, later ones with its message.
  absl::Status Over() const { return Recoded(group_->Health(), absl::StatusCode::kAborted); }
  absl::Status LeaveWith(absl::Status status) {
    group_->Drain(me_);
    return status;
  }
  // The same on a device, where a peer may have queued the call all the same: what this rank does
  // to its memory from here on comes after `done`, which is an earlier call's, or empty, if not.
  absl::Status LeaveAfter(const Event& done, absl::Status status) {
    status = LeaveWith(std::move(status));  // `done` is written by now
    ThisDevice(device_).OrderAfter(done);
    return status;
  }

  std::shared_ptr<LocalGroup> group_;
  int me_;
  std::string label_;
  const DeviceType device_;
  const std::unique_ptr<Transport> transport_;  // null: the ranks' memory
};

absl::Status LocalBackend::Collective(const CollectiveCall& call, Record record) {
  if (group_->aborted()) {
    record();
    return Over();
  }
  const bool staged = transport_ == nullptr && IsStaged(call);
  if (transport_ != nullptr) ThrowIfError(transport_->Give(call));
  if (staged) {
    const Span span(SpanKind::kMove, "write");
    WriteStage(call, me_, group_->stage(me_, call.sequence));
  }
  Publish(call);
  group_->Reach(me_, &Slot::arrived, call);
  PrefetchForWrite(&group_->slot(me_).finished);
  record();
  ReducedPart cut;
  if (call.kind == CollectiveKind::kAllReduce) cut = PartOfAllReduce(call.in, group_->size(), me_);
  absl::Status met = group_->Await(&Slot::arrived, call, label_);
  if (!met.ok()) return LeaveWith(std::move(met));
  if (!Agree(call)) return Mismatch(call);
  if (!staged) return MoveAndMeet(call, cut);
  absl::InlinedVector<const char*, 16> stages;
  for (int r = 0; r < group_->size(); ++r) stages.push_back(group_->stage(r, call.sequence));
  const Span span(SpanKind::kMove, "read");
  ReadStages(call, me_, stages);
  group_->Through(me_, call);
  return absl::OkStatus();
}

// Tensors on a device: all ranks say what they want and from which place of their streams on, the
// first of them queues the whole on its stream, and the others' later work comes after that. Hosts
// wait for each other's hosts, nobody for data.
absl::Status LocalBackend::Queue(const CollectiveCall& call, Record record) {
  if (group_->aborted()) {
    record();
    return Over();
  }
  RankDevice& device = ThisDevice(device_);
  LocalGroup::Rest& rest = group_->slot(me_).rest[call.sequence & 1];
  rest.ready = device.Record();
  Publish(call);
  group_->Reach(me_, &Slot::arrived, call);
  record();
  const auto leave = [&](absl::Status status) {
    return LeaveAfter(RestOf(0, call).done, std::move(status));
  };
  absl::Status met = group_->Await(&Slot::arrived, call, label_);
  if (!met.ok()) return leave(std::move(met));
  if (!Agree(call)) return Mismatch(call);
  if (group_->aborted()) return leave(group_->Health());
  if (me_ == 0) {
    for (int r = 1; r < group_->size(); ++r) device.OrderAfter(RestOf(r, call).ready);
    QueueData(Calls(call));
    rest.done = device.Record();
  }
  group_->Through(me_, call);
  met = group_->Meet(me_, &Slot::finished, call, label_);
  if (!met.ok()) return leave(std::move(met));
  if (me_ != 0) device.OrderAfter(RestOf(0, call).done);
  return absl::OkStatus();
}

void LocalBackend::Publish(const CollectiveCall& call) {
  Slot& slot = group_->slot(me_);
  LocalGroup::Rest& rest = slot.rest[call.sequence & 1];
  if (call.kind == CollectiveKind::kExchange) rest.balance = ExchangeBalance(call, me_);
  rest.call = &call;
  const bool plain = call.kind == CollectiveKind::kAllReduce && IsHost(call.in.device()) &&
                     call.in.is_contiguous() && call.out.is_contiguous();
  // Last, and at once: peers that wait read this cache line all the time.
  LocalGroup::Posted& side = slot.side[call.sequence & 1];
  side.fingerprint = call.fingerprint;
  side.in = plain ? call.in.data_as<char>() : nullptr;
  side.out = plain ? call.out.data_as<char>() : nullptr;
}

// An all-reduce of tensors that are contiguous on every rank; false if this is none.
bool LocalBackend::MovePlain(const CollectiveCall& call, const ReducedPart& cut) const {
  const int n = group_->size();
  absl::FixedArray<const void*, 16> in(n);
  absl::FixedArray<void*, 16> out(n);
  const int64_t start = cut.start << LogSizeOf(call.in.dtype());
  for (int r = 0; r < n; ++r) {
    const LocalGroup::Posted& side = SideOf(r, call);
    if (side.in == nullptr) return false;
    in[r] = side.in + start;
    out[r] = side.out + start;
  }
  AllReduceData(call, cut.count, in, out);
  return true;
}

absl::Status LocalBackend::MoveAndMeet(const CollectiveCall& call, const ReducedPart& cut) {
  if (group_->aborted()) return LeaveWith(group_->Health());
  {
    const Span span(SpanKind::kMove, "move");
    if (transport_ != nullptr) {
      ThrowIfError(transport_->Take(call));
    } else if (!MovePlain(call, cut)) {
      MoveData(Calls(call), me_);
    }
  }
  group_->Through(me_, call);
  absl::Status met = group_->Meet(me_, &Slot::finished, call, label_);
  return met.ok() ? met : LeaveWith(std::move(met));
}

bool LocalBackend::Agree(const CollectiveCall& call) const {
  for (int r = 0; r < group_->size(); ++r) {
    if (SideOf(r, call).fingerprint != call.fingerprint) return false;
  }
  if (call.kind != CollectiveKind::kExchange) return true;
  uint64_t balance = 0;
  for (int r = 0; r < group_->size(); ++r) balance += RestOf(r, call).balance;
  return balance == 0;
}

// All ranks saw the same fingerprints, so all come here; nothing was moved and the group stays in
// step.
absl::Status LocalBackend::Mismatch(const CollectiveCall& call) {
  bool alike = true;
  for (int r = 0; r < group_->size(); ++r) {
    alike &= SideOf(r, call).fingerprint == SideOf(0, call).fingerprint;
  }
  Slot& mine = group_->slot(me_);
  if (alike) {  // exchanges whose pieces differ
    if (group_->aborted()) return LeaveWith(group_->Health());
    mine.text = ExchangeMismatch(Calls(call), me_, group_->ranks());
  } else {
    mine.text = Describe(call, group_->ranks());
  }
  group_->Through(me_, call);
  absl::Status met = group_->Meet(me_, &Slot::described, call, label_);
  if (!met.ok()) return LeaveWith(std::move(met));
  std::string what = alike ? PieceDifference() : Difference(call);
  return WithReport(
      absl::FailedPreconditionError(absl::StrCat("[comm ", label_, "] collectives differ at call #",
                                                 call.sequence, ": ", what)),
      group_->ReportOnce(group_.get(), call.sequence));
}

std::string LocalBackend::PieceDifference() const {
  for (int r = 0; r < group_->size(); ++r) {
    if (!group_->slot(r).text.empty()) return absl::StrCat("exchange, ", group_->slot(r).text);
  }
  return "exchange, but no difference was found";
}

std::string LocalBackend::Difference(const CollectiveCall& call) const {
  std::vector<IssuedCall> calls;
  for (int r = 0; r < group_->size(); ++r) {
    const Slot& slot = group_->slot(r);
    const FlightRecorder& flight = slot.flight;
    calls.push_back({SideOf(r, call).fingerprint, slot.text, flight.Label(flight.Last(1)[0].label),
                     slot.posted.load()});
  }
  return CallDifference(calls, group_->ranks());
}

absl::Status LocalBackend::Send(const CollectiveCall& call) {
  if (group_->aborted()) return Over();
  Mailbox* box = group_->MailboxOf(me_, call.root);
  const uint64_t count = ++group_->slot(me_).sent[call.root];
  if (transport_ != nullptr) ThrowIfError(transport_->Give(call));
  const bool queues = transport_ == nullptr && IsRemote(call.in.device());
  if (queues) box->ready = ThisDevice(call.in).Record();
  box->call = &call;
  box->posted.store(count);
  box->spot.WakeAll();
  absl::Status met = group_->MeetPeer(box, box->taken, count, call.root, call, label_);
  if (!met.ok()) {
    return queues ? LeaveAfter(box->done, std::move(met)) : LeaveWith(std::move(met));
  }
  if (queues) ThisDevice(call.in).OrderAfter(box->done);
  return box->error.empty() ? absl::OkStatus() : absl::FailedPreconditionError(box->error);
}

absl::Status LocalBackend::Recv(const CollectiveCall& call) {
  if (group_->aborted()) return Over();
  Mailbox* box = group_->MailboxOf(call.root, me_);
  const uint64_t count = ++group_->slot(me_).received[call.root];
  DT_RETURN_IF_ERROR(group_->MeetPeer(box, box->posted, count, call.root, call, label_));
  if (!group_->BeginPull(me_)) return group_->Health();
  const Tensor& from = box->call->in;
  std::string error;
  if (from.dtype() == call.out.dtype() && from.shape() == call.out.shape()) {
    const Span span(SpanKind::kMove, "move");
    const bool queues = transport_ == nullptr && IsRemote(from.device());
    if (queues) ThisDevice(from).OrderAfter(box->ready);
    if (transport_ != nullptr) {
      ThrowIfError(transport_->Take(call));
    } else {
      Copy(from, call.out);
    }
    if (queues) box->done = ThisDevice(from).Record();
  } else {
    error =
        absl::StrCat("[comm ", label_, "] message ", count, " differs: rank ",
                     group_->ranks()[call.root], " issued ", Describe(*box->call, group_->ranks()),
                     ", rank ", group_->ranks()[me_], " issued ", Describe(call, group_->ranks()));
  }
  group_->EndPull(me_);
  box->error = error;
  box->taken.store(count);
  box->spot.WakeAll();
  return error.empty() ? absl::OkStatus() : absl::FailedPreconditionError(error);
}

}  // namespace

BackendEntry LocalBackendEntry() {
  return {"local", "threads of one process, through each other's memory",
          [](const World& world, const GroupRequest&) {
            return world.launcher() == Launcher::kThreads;
          },
          [](World& world, const GroupRequest& group) {
            return MakeLocalBackend(world, group, nullptr);
          }};
}

std::unique_ptr<CommBackend> MakeLocalBackend(World& world, const GroupRequest& group,
                                              std::unique_ptr<Transport> transport) {
  return std::make_unique<LocalBackend>(static_cast<ThreadWorld&>(world).GroupOf(group.ranks),
                                        group.index, group.label, group.device,
                                        std::move(transport));
}

namespace {

// Others see to the data, once all agree.
class NoData : public Transport {
 public:
  const CommCaps& caps() const override {
    static constexpr CommCaps kNone = {.peers = true, .strided = true, .many_pieces = true};
    return kNone;
  }
  absl::Status Give(const CollectiveCall&) override { return absl::OkStatus(); }
  absl::Status Take(const CollectiveCall&) override { return absl::OkStatus(); }
};

}  // namespace

std::unique_ptr<CommBackend> MakeLocalAgreement(World& world, const GroupRequest& group) {
  // No stream has a part in it.
  return MakeLocalBackend(world, group.OnHost(), std::make_unique<NoData>());
}

absl::StatusOr<std::vector<std::string>> ExchangeBytes(std::shared_ptr<LocalGroup> group, int index,
                                                       const std::string& label,
                                                       absl::string_view what_for,
                                                       std::string mine) {
  LocalBackend backend(group, index, label, DeviceType(), nullptr);
  uint64_t sequence = 0;
  const auto bytes = [&](int r) -> std::string& { return group->slot(r).bytes[sequence & 1]; };
  DT_RETURN_IF_ERROR(RunHostExchange(backend, label, what_for, [&](const CollectiveCall& call) {
    sequence = call.sequence;
    bytes(index) = std::move(mine);
  }));
  std::vector<std::string> all;
  for (int r = 0; r < group->size(); ++r) all.push_back(bytes(r));
  return all;
}

}  // namespace dtensor
