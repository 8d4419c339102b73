// NCCL's collectives under the library's agreement. A call that is compared first meets the hosts
// of its group, as on the backends without a device, so that absent ranks and other calls are named
// and nothing was queued; then, as all others do at once, it is queued, and no host waits. Compared
// are a group's first calls and later every 64th, by a hash of all since the last; between them the
// watchdog finds who does not come (group.h).
#include "dtensor/mesh/nccl/backend.h"

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/backends.h"
#include "dtensor/mesh/call_device.h"
#include "dtensor/mesh/comm_work.h"
#include "dtensor/mesh/flight.h"
#include "dtensor/mesh/hash.h"
#include "dtensor/mesh/kept_call.h"
#include "dtensor/mesh/local/backend.h"
#include "dtensor/mesh/nccl/config.h"
#include "dtensor/mesh/nccl/group.h"
#include "dtensor/mesh/process/backend.h"
#include "dtensor/tensor/device_graph.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

using nccl::NcclGroup;

constexpr uint64_t kFirstCompared = 64, kComparedEvery = 64;

// A call beside the rank's other work. It is queued already.
class QueuedWork : public Work::State,
                   public Loan,
                   public std::enable_shared_from_this<QueuedWork> {
 public:
  QueuedWork(std::shared_ptr<NcclGroup> group, const CollectiveCall& call, size_t place, Event done)
      : group_(std::move(group)), call_(call), place_(place), done_(std::move(done)) {
    call_.ForEachTensor([&](const Tensor& t) { t.buffer().RecordUse(done_); });
  }
  ~QueuedWork() override { End(absl::StatusCode::kOk); }
  bool Done() override {
    if (done_.Done()) End(absl::StatusCode::kOk);
    return ended_;
  }
  absl::Status Wait(absl::Duration) override {
    group_->device().OrderAfter(done_);
    absl::Status health = group_->agreement().Health();
    End(health.code());
    return health;
  }
  std::shared_ptr<Loan> TheLoan() override { return shared_from_this(); }
  bool Returned() override { return done_.Done(); }
  bool Holds(const Buffer& buffer) override { return call_.Reads(buffer); }
  absl::Status TakeBack() override {
    group_->device().OrderAfter(done_);
    return absl::OkStatus();
  }

 private:
  void End(absl::StatusCode code) {
    if (!std::exchange(ended_, true)) group_->agreement().flight().End(place_, code);
  }
  const std::shared_ptr<NcclGroup> group_;
  const KeptCall call_;
  const size_t place_;
  const Event done_;
  bool ended_ = false;
};

class NcclBackend : public CommBackend {
 public:
  // `host`: the backend of the same members for tensors in host memory. `each`: every call is
  // compared, and none overlaps others.
  NcclBackend(std::shared_ptr<NcclGroup> group, std::unique_ptr<CommBackend> host, bool each)
      : group_(std::move(group)),
        host_(std::move(host)),
        each_(each),
        caps_{.peers = true,
              .many_pieces = true,
              .overlap = !each,
              .same_bits = true,
              .graphs = true} {
    nccl::Watch(group_.get());
  }
  ~NcclBackend() override {
    nccl::Unwatch(group_.get());
    group_->Close();
  }

  const CommCaps& caps() const override { return caps_; }
  Work Start(const CollectiveCall& call, Record record) override {
    size_t place = 0;
    try {
      return Run(call, [&] { return place = record(); }, place);
    } catch (...) {
      return Failed(CurrentException());
    }
  }
  absl::Status Health() override { return agreement().Health(); }
  void Abort(absl::Status why) override { agreement().Abort(std::move(why)); }
  absl::Status Quiesce() override {
    try {
      return group_->Quiesce();
    } catch (...) {  // the device has failed
      const absl::Status why = CurrentException();
      (void)Failed(why);
      return why;
    }
  }
  // All calls count together, overlapped or not: they are queued in one order. What is not compared
  // takes two numbers, for the meetings of the group alternate between two places by theirs.
  void Number(CollectiveCall* call) override {
    const bool overlap = std::exchange(call->options.overlap, false);
    compares_ = OnHost(*call) || Compares(*call, overlap);
    agreement().Number(call);
    if (!compares_) agreement().Number(call);
    call->options.overlap = overlap;
  }
  FlightRecorder& flight() override { return agreement().flight(); }
  NcclGroup& group() { return *group_; }

 private:
  CommBackend& agreement() { return group_->agreement(); }
  bool Compares(const CollectiveCall& call, bool overlap) {
    const uint64_t number = ++calls_;
    if (overlap) return number == 1;  // the communicator is made: all must come
    return each_ || call.kind == CollectiveKind::kBarrier || number <= kFirstCompared ||
           number % kComparedEvery == 0;
  }
  bool ComparesMessage(const CollectiveCall& call) {
    const uint64_t number = ++messages_[{call.kind, call.root}];
    return each_ || number <= kFirstCompared || number % kComparedEvery == 0;
  }
  Work Run(const CollectiveCall& call, Record record, const size_t& place);
  absl::Status Agree(const CollectiveCall& call, Record record);
  const Tensor& Token();
  Work Failed(const absl::Status& why) {
    if (agreement().Health().ok()) agreement().Abort(FailureOf(group_->rank(), why));
    return Work(why);
  }

  const std::shared_ptr<NcclGroup> group_;
  const std::unique_ptr<CommBackend> host_;
  const bool each_;
  const CommCaps caps_;
  uint64_t calls_ = 0;
  std::map<std::pair<CollectiveKind, int>, uint64_t> messages_;  // by peer
  bool compares_ = false;                                        // the call that was numbered last
  uint64_t hash_ = 0;   // of the collectives since the last that was compared
  uint64_t since_ = 0;  // how many they are
  Tensor token_;
};

Work NcclBackend::Run(const CollectiveCall& call, Record record, const size_t& place) {
  if (OnHost(call)) {
    const absl::Status captured = DeviceGraph::Allows("its values are in host memory");
    if (!captured.ok()) return Work(captured);
    CollectiveCall plain = call;
    plain.options.overlap = false;
    return host_->Start(plain, record);
  }
  const bool message = IsMessage(call);
  if (!message) hash_ = HashMix(hash_, call.fingerprint);
  if (message ? ComparesMessage(call) : compares_) {
    absl::Status agreed = Agree(call, record);
    if (!agreed.ok()) return Work(std::move(agreed));
  } else {
    record();
    if (!message) ++since_;
    const absl::Status health = agreement().Health();
    if (!health.ok()) return Work(Recoded(health, absl::StatusCode::kAborted));
  }
  absl::StatusOr<Event> done{Event()};
  if (call.kind == CollectiveKind::kBarrier) {
    CollectiveCall sum = {.kind = CollectiveKind::kAllReduce, .in = Token(), .out = Token()};
    sum.sequence = call.sequence;
    done = group_->Queue(sum, hash_);
  } else {
    done = group_->Queue(call, hash_);
  }
  if (!done.ok()) return Failed(done.status());
  if (call.options.overlap) {
    return Work(std::make_shared<QueuedWork>(group_, call, place, *std::move(done)));
  }
  group_->device().OrderAfter(*done);
  return Work();
}

// Meets the hosts of all members, or of a message's two.
absl::Status NcclBackend::Agree(const CollectiveCall& call, Record record) {
  CollectiveCall asked = call;
  asked.options.overlap = false;
  if (IsMessage(call)) return agreement().Start(asked, record).Wait();
  asked.fingerprint = hash_;
  const absl::Status agreed = agreement().Start(asked, record).Wait();
  hash_ = 0;
  const uint64_t since = std::exchange(since_, 0);
  if (agreed.code() != absl::StatusCode::kFailedPrecondition || since == 0) return agreed;
  return Prefixed(absl::StrCat("at this call or one of the ", since,
                               " before, which were not compared (DTENSOR_CHECK=each)"),
                  agreed);
}

// What a barrier sums: whatever a rank queues after it comes after what all had queued before.
const Tensor& NcclBackend::Token() {
  if (!token_.defined()) {
    token_ = ValueOrThrow(Tensor::Empty({1}, DType::kI32, group_->device_type()));
    Fill(token_, 0);
  }
  return token_;
}

// Of this process; rank r has the GPU r modulo this (RankDevices).
int NumDevices() {
  const DeviceTable* const table = FindDevice(DeviceType::kCuda);
  int number = 0;
  char why[256];
  if (table == nullptr || table->count(&number, why, sizeof(why)) != 0) return 0;
  return number;
}

// Whether the members, threads that take the GPUs in turn, have more than one.
bool OnSeveral(const GroupRequest& group, int devices) {
  for (const int64_t rank : group.ranks) {
    if (rank % devices != group.ranks[0] % devices) return true;
  }
  return false;
}

bool Serves(const World& world, const GroupRequest& group) {
  if (group.device != DeviceType::kCuda || group.ranks.size() < 2) return false;
  if (world.launcher() == Launcher::kProcesses) return true;
  const int devices = world.launcher() == Launcher::kThreads ? NumDevices() : 0;
  return devices > 0 && OnSeveral(group, devices);
}

std::unique_ptr<CommBackend> Make(World& world, const GroupRequest& group) {
  const bool threads = world.launcher() == Launcher::kThreads;
  if (threads) {
    std::map<int64_t, int64_t> rank_of;  // by GPU
    for (const int64_t rank : group.ranks) {
      const auto [at, mine] = rank_of.emplace(rank % NumDevices(), rank);
      if (mine) continue;
      Throw(absl::UnimplementedError(absl::StrCat(
          "[comm ", group.label, "] ranks ", at->second, " and ", rank, " share GPU ", at->first,
          " while others of their group have another: give each rank a GPU of its own, or all one "
          "(CUDA_VISIBLE_DEVICES)")));
    }
  }
  const nccl::Api* const api = ValueOrThrow(nccl::Load());
  auto agreement = threads ? MakeLocalAgreement(world, group)
                           : MakeProcessBackend(world, group, /*moves=*/false);
  auto host = threads ? MakeLocalBackend(world, group.OnHost(), nullptr)
                      : MakeProcessBackend(world, group, /*moves=*/true);
  return std::make_unique<NcclBackend>(
      std::make_shared<NcclGroup>(*api, world, group, std::move(agreement),
                                  ValueOrThrow(nccl::ConfigOf(group.label))),
      std::move(host), ValueOrThrow(nccl::ChecksEach()));
}

}  // namespace

BackendEntry NcclBackendEntry() {
  return {"nccl", "NVIDIA's library, each rank has a GPU of its own", &Serves, &Make};
}

void LimitNcclElements(CommBackend& backend, int64_t most) {
  static_cast<NcclBackend&>(backend).group().most_elements = most;
}

}  // namespace dtensor
