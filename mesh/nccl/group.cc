#include "dtensor/mesh/nccl/group.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "dtensor/mesh/call_device.h"
#include "dtensor/mesh/flight.h"
#include "dtensor/tensor/device_graph.h"
#include "dtensor/tensor/status.h"
#include "dtensor/tensor/text.h"

namespace dtensor::nccl {
namespace {

constexpr int kAll = -1;

constexpr int64_t kMostArrays = 96;  // of one reduction by the device

bool Reduces(const CollectiveCall& call) {
  return call.kind == CollectiveKind::kAllReduce || call.kind == CollectiveKind::kReduceScatter;
}

// What the device does to the result of a call, beside NCCL.
class Rest {
 public:
  // Takes memory, on the current stream.
  Rest(const CollectiveCall& call, int64_t size) : call_(call), size_(size) {
    const auto make = [&](IntSpan shape) {
      return ValueOrThrow(Tensor::Empty(shape, call.out.dtype(), call.out.device()));
    };
    terms_ = NeedsTerms(call);
    // NCCL multiplies each term by 1 / size, which rounds size times more.
    const bool divides = Reduces(call) && call.op == ReduceOp::kAvg && size <= kMostArrays;
    if (terms_) memory_ = make({size, call.out.numel()});
    if (!divides) return;
    memory_ = make({1});
    Fill(memory_, 0);
  }
  const Tensor& memory() const { return memory_; }
  int Queue(const Target& to) const {
    if (terms_) return QueueTerms(to, call_, memory_);
    if (!memory_.defined()) return QueueCall(to, call_);
    CollectiveCall sum = call_;
    sum.op = ReduceOp::kSum;
    return QueueCall(to, sum);
  }
  // On the current stream, after it: the terms in rank order, or the sum and zeros, of which the
  // average is the sum divided by the ranks.
  void Finish(RankDevice& device) const {
    const int64_t numel = call_.out.defined() ? call_.out.numel() : 0;
    if (!memory_.defined() || numel == 0) return;
    static constexpr int64_t kStrides[] = {0, 1};
    const DType t = call_.out.dtype();
    const TensorRef out = {call_.out.data(), &numel, &kStrides[1], 1, t};
    std::vector<TensorRef> in;
    if (!terms_) in = {out};
    for (int64_t r = static_cast<int64_t>(in.size()); r < size_; ++r) {
      if (in.size() == kMostArrays) {  // of terms only: a part of them, and what is there so far
        Reduce(device, in, out);
        in = {out};
      }
      char* const at = static_cast<char*>(memory_.data()) + (terms_ ? r * numel * SizeOf(t) : 0);
      in.push_back({at, &numel, &kStrides[terms_ ? 1 : 0], 1, t});
    }
    Reduce(device, in, out);
  }

 private:
  void Reduce(RankDevice& device, const std::vector<TensorRef>& in, const TensorRef& out) const {
    ThrowIfError(device.device()->Check(
        device.table().reduce(device.stream(), static_cast<int>(in.size()), in.data(), 1, &out,
                              static_cast<int>(call_.op)),
        "a reduction"));
  }
  const CollectiveCall& call_;
  const int64_t size_;
  bool terms_;
  Tensor memory_;
};

}  // namespace

NcclGroup::NcclGroup(const Api& api, World& world, const GroupRequest& group,
                     std::unique_ptr<CommBackend> agreement, const Config& config)
    : api_(api),
      store_(world.StoreOf(group.ranks[static_cast<size_t>(group.index)])),
      request_(group),
      agreement_(std::move(agreement)),
      config_(config),
      timeout_(world.timeout()),
      health_(std::make_shared<const DeviceHealth>([this] {
        const std::lock_guard<std::mutex> lock(mutex_);
        return cut_;
      })) {}

RankDevice& NcclGroup::device() const {
  return *ValueOrThrow(RankDevices::Current().Get(request_.device));
}

// "dtensor/nccl/tp/0,1/what"
std::string NcclGroup::Key(absl::string_view what) const {
  return absl::StrCat("dtensor/nccl/", request_.label, "/", absl::StrJoin(ranks(), ","), "/", what);
}

absl::Status NcclGroup::Alive(absl::Time deadline) {
  DT_RETURN_IF_ERROR(agreement_->Health());
  if (absl::Now() < deadline) return absl::OkStatus();
  return RankLocal(absl::DeadlineExceededError(
      absl::StrCat("[comm ", label(), "] NCCL did not connect the ranks within ",
                   absl::FormatDuration(timeout_))));
}

// That of all members, or of a message's two: a message waits for nobody else.
absl::StatusOr<Communicator*> NcclGroup::CommunicatorOf(const CollectiveCall& call, int* me,
                                                        int* size) {
  const int peer = IsMessage(call) ? call.root : kAll;
  *me = peer == kAll ? this->me() : this->me() > peer ? 1 : 0;
  *size = peer == kAll ? this->size() : 2;
  Communicator* communicator = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::unique_ptr<Communicator>& at = communicators_[peer];
    if (at != nullptr) return at.get();
    DT_RETURN_IF_ERROR(DeviceGraph::Allows(
        "it is the first call of its ranks, which then make a communicator; call once before"));
    at = std::make_unique<Communicator>(api_);
    communicator = at.get();
    if (communicators_.size() == 1) WatchHealth(health_);
  }
  const absl::Time deadline = absl::Now() + timeout_;
  const std::string key = Key(peer == kAll ? std::string("id")
                                           : absl::StrCat("id/", std::min(peer, this->me()), "-",
                                                          std::max(peer, this->me())));
  UniqueId id;
  if (*me == 0) {
    DT_RETURN_IF_ERROR(api_.Check(api_.GetUniqueId(&id), "GetUniqueId"));
    DT_RETURN_IF_ERROR(store_.Set(key, absl::string_view(id.internal, sizeof(id.internal))));
  } else {
    DT_ASSIGN_OR_RETURN(const std::string text, store_.Get(key, deadline));
    if (text.size() != sizeof(id.internal)) {
      return absl::InternalError(absl::StrCat("the store's ", key, " is no id of NCCL"));
    }
    std::memcpy(id.internal, text.data(), text.size());
  }
  DT_RETURN_IF_ERROR(communicator->Join(id, *size, *me, config_, [&] { return Alive(deadline); }));
  return communicator;
}

absl::StatusOr<Event> NcclGroup::Queue(const CollectiveCall& call, uint64_t hash) {
  int me = 0, size = 0;
  DT_ASSIGN_OR_RETURN(Communicator* const communicator, CommunicatorOf(call, &me, &size));
  RankDevice& device = this->device();
  const Rest rest(call, size);
  Pending pending;
  pending.ready = device.Record();
  pending.queued = absl::Now();
  const absl::Time deadline = pending.queued + timeout_;
  {
    const SideStream side(device);
    device.OrderAfter(pending.ready);
    DT_RETURN_IF_ERROR(communicator->Queue(
        [&](CommHandle handle) {
          const Target to = {api_, handle, device.stream(), me, size, most_elements};
          return rest.Queue(to);
        },
        [&] { return Alive(deadline); }));
    rest.Finish(device);
    pending.done = device.Record();
  }
  rest.memory().buffer().RecordUse(pending.done);
  // What was queued may have been aborted since: nobody else would tell this rank. Until the
  // communicator is aborted too it reads and writes what the caller has again.
  const absl::Status health = agreement_->Health();
  if (!health.ok()) {
    device.OrderAfter(pending.done);
    return health;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  pending.sequence = call.sequence;
  if (DeviceGraph* const graph = DeviceGraph::Current()) {
    sequence_ = call.sequence;
    graph->AddPart({this, [this] { return agreement_->Health(); },
                    [this](const Event& before, const Event& after) { Launched(before, after); }});
    return pending.done;
  }
  if (IsMessage(call)) {
    pending.peer = call.root;
  } else {
    pending.number = ++queued_;
    hash_ = hash;
    sequence_ = call.sequence;
  }
  Prune();
  const Event done = pending.done;
  pending_.push_back(std::move(pending));
  return done;
}

// A launch of a graph counts as one collective, the last that was captured.
void NcclGroup::Launched(const Event& before, const Event& after) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Prune();
  pending_.push_back({++queued_, sequence_, 0, before, after, absl::Now()});
}

void NcclGroup::Prune() {
  while (!pending_.empty() && pending_.front().done.Done()) pending_.pop_front();
}

absl::Status NcclGroup::Quiesce() {
  while (true) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      Prune();
      if (pending_.empty()) return cut_;  // what was cut is no longer pending
    }
    DT_RETURN_IF_ERROR(agreement_->Health());
    std::this_thread::yield();
  }
}

void NcclGroup::Close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  bool orderly = agreement_->Health().ok();
  try {
    if (orderly) Prune();
    orderly &= pending_.empty();
  } catch (const Error&) {  // the device has failed: what is queued will not be done
    orderly = false;
  }
  for (const auto& [peer, communicator] : communicators_) {
    if (orderly) communicator->Destroy();
  }
  communicators_.clear();  // aborts the others
}

// --- the watchdog's ------------------------------------------------------------------------------

void NcclGroup::Look() {
  try {
    absl::Status health = agreement_->Health();
    if (health.ok()) {
      absl::Status fault;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (const auto& [peer, communicator] : communicators_) {
          fault.Update(communicator->Fault());
        }
      }
      if (!fault.ok()) agreement_->Abort(FailureOf(rank(), fault));
      if (fault.ok()) {
        const absl::Status late = Late();
        if (!late.ok()) agreement_->Abort(late);
      }
      health = agreement_->Health();
    }
    if (!health.ok()) return End(health);
    Say();
  } catch (...) {
    agreement_->Abort(FailureOf(rank(), CurrentException()));
  }
}

void NcclGroup::End(const absl::Status& why) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Prune();
  if (!pending_.empty() && cut_.ok()) cut_ = Recoded(why, absl::StatusCode::kAborted);
  for (const auto& [peer, communicator] : communicators_) communicator->TryAbort();
}

absl::Status NcclGroup::Late() {
  Pending oldest;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const absl::Time now = absl::Now();
    // Events are asked late: asking one costs, and is not allowed where a graph is captured.
    if (pending_.empty() || now - pending_.front().queued < timeout_ / 4) return absl::OkStatus();
    Prune();
    if (pending_.empty()) return absl::OkStatus();
    Pending& first = pending_.front();
    if (first.reached == absl::InfiniteFuture() && first.ready.Done()) first.reached = now;
    if (first.reached == absl::InfiniteFuture() || now - first.reached < timeout_) {
      return absl::OkStatus();
    }
    oldest = first;
  }
  return TooLate(oldest);
}

absl::Status NcclGroup::TooLate(const Pending& call) {
  const std::string within = absl::StrCat(" within ", absl::FormatDuration(timeout_));
  if (call.number == 0) {
    const int64_t peer = ranks()[static_cast<size_t>(call.peer)];
    return RankLocal(WithCulprit(absl::DeadlineExceededError(absl::StrCat(
                                     "[comm ", label(), "] a message between ranks ", rank(),
                                     " and ", peer, ": rank ", peer, " did not come", within)),
                                 peer));
  }
  // How far the members are: "number hash text", as each has said.
  struct Place {
    int64_t rank;
    uint64_t number = 0, hash = 0;
    std::string text;
  };
  std::vector<Place> places, behind;
  for (int r = 0; r < size(); ++r) {
    Place place{ranks()[static_cast<size_t>(r)], 0, 0, ""};
    const absl::StatusOr<std::string> said =
        store_.Get(Key(absl::StrCat("at/", r)), absl::InfinitePast());
    const std::vector<std::string> parts =
        absl::StrSplit(said.ok() ? *said : "", absl::MaxSplits(' ', 2));
    if (parts.size() == 3 && absl::SimpleAtoi(parts[0], &place.number) &&
        absl::SimpleAtoi(parts[1], &place.hash)) {
      place.text = parts[2];
    }
    places.push_back(place);
    if (r != me() && place.number < call.number) behind.push_back(place);
  }
  const std::string what =
      absl::StrCat("[comm ", label(), "] call #", call.sequence, " ", TextOf(call.sequence), ": ");
  if (!behind.empty()) {
    const absl::Status late = absl::DeadlineExceededError(absl::StrCat(
        what,
        JoinSome(behind,
                 [](std::string* out, const Place& p) {
                   absl::StrAppend(out, "rank ", p.rank,
                                   p.number == 0 ? " (not seen yet)" : " (last at " + p.text + ")");
                 }),
        " did not queue it", within));
    return RankLocal(behind.size() == 1 ? WithCulprit(late, behind[0].rank) : late);
  }
  for (const Place& other : places) {
    const Place& mine = places[static_cast<size_t>(me())];
    if (other.number != mine.number || other.hash == mine.hash) continue;
    return RankLocal(absl::FailedPreconditionError(
        absl::StrCat("[comm ", label(), "] collectives differ, at this one or before: rank ",
                     mine.rank, " queued ", mine.text, ", rank ", other.rank, " queued ",
                     other.text, "; DTENSOR_CHECK=each compares every call before it begins")));
  }
  return RankLocal(absl::DeadlineExceededError(absl::StrCat(
      what, "all ranks have queued it, and it is not done", within,
      ": a device is stuck, or ranks' calls differ (DTENSOR_CHECK=each compares every call)")));
}

// "all_reduce(sum, float32 [10])"
std::string NcclGroup::TextOf(uint64_t sequence) {
  for (const FlightEntry& entry : agreement_->flight().Last()) {
    if (entry.sequence == sequence) return CallText(entry, ranks());
  }
  return "a collective";  // more than the recorder holds ago
}

void NcclGroup::Say() {
  uint64_t number = 0, hash = 0, sequence = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    number = queued_;
    hash = hash_;
    sequence = sequence_;
  }
  const absl::Time now = absl::Now();
  if (number == said_ || now - said_at_ < std::min(timeout_ / 8, absl::Seconds(1))) return;
  const absl::Status set =
      store_.Set(Key(absl::StrCat("at/", me())),
                 absl::StrCat(number, " ", hash, " #", sequence, " ", TextOf(sequence)));
  if (!set.ok()) return;  // the world ends, and says so itself
  said_ = number;
  said_at_ = now;
}

}  // namespace dtensor::nccl
