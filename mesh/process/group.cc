#include "dtensor/mesh/process/group.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/mesh/park.h"
#include "dtensor/mesh/process/process_world.h"
#include "dtensor/tensor/status.h"
#include "dtensor/tensor/text.h"
#include "dtensor/tensor/trace.h"

namespace dtensor {
namespace {

// After an abort peers that are in the same call are through with its data soon, or never.
constexpr std::chrono::milliseconds kMoment(500);

// How long a wait sleeps at a time, where it may, before it looks at what else has happened.
constexpr absl::Duration kDoze = absl::Milliseconds(1);
// How often it hears who has come after one that has not: reports name the latter alone.
constexpr std::chrono::milliseconds kHearEvery(50);

// Clocks of the day may be set: a deadline is of this one.
using Clock = std::chrono::steady_clock;

}  // namespace

ProcessGroup::ProcessGroup(ProcessWorld* world, std::vector<int64_t> ranks, int me,
                           int64_t first_channel)
    : world_(world),
      ranks_(std::move(ranks)),
      me_(me),
      first_channel_(first_channel),
      spins_(sysconf(_SC_NPROCESSORS_ONLN) >= world->endpoint().place().local_size),
      timeout_ns_(absl::ToInt64Nanoseconds(world->timeout())),
      lanes_{Lane(ranks_.size()), Lane(ranks_.size())},
      members_(ranks_.size()) {}

std::string ProcessGroup::Key() const { return absl::StrJoin(ranks_, ","); }

// Both lanes together are one order, the same on all members.
void ProcessGroup::Number(CollectiveCall* call) {
  call->sequence = ++LaneOf(*call).sequence;
  call->before = lanes_[call->options.overlap ? 0 : 1].sequence;
}

std::shared_ptr<ProcessGroup::Memory> ProcessGroup::MemoryOf(const CollectiveCall& call, Use use,
                                                             int64_t bytes) {
  constexpr int64_t kLine = 64;
  std::shared_ptr<Memory>& memory = LaneOf(call).memory[use];
  if (memory != nullptr && memory->part_bytes >= bytes) return memory;
  memory = std::make_shared<Memory>();
  memory->part_bytes = (bytes + kLine - 1) / kLine * kLine;
  const int64_t all = memory->part_bytes * size();
  memory->whole.reset(new char[static_cast<size_t>(all + kLine)]);  // untouched
  memory->at = memory->whole.get();
  while (reinterpret_cast<uintptr_t>(memory->at) % kLine != 0) ++memory->at;
  return memory;
}

uint64_t ProcessGroup::CountSend(int peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return ++mine_.sent[peer];
}

uint64_t ProcessGroup::CountReceive(int peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return ++mine_.received[peer];
}

absl::Status ProcessGroup::Await(Transfers& transfers, absl::FunctionRef<absl::Status()> left,
                                 absl::FunctionRef<absl::Status()> late, bool all_are_in,
                                 const ProgressThread::Job* job) {
  const Span span(SpanKind::kWait, "wait for peers");
  Clock::time_point deadline = Clock::time_point::max(), hear_at = Clock::now() + kHearEvery;
  for (int64_t turn = 0;; ++turn) {
    DT_ASSIGN_OR_RETURN(const bool done, transfers.Done());
    if (done) return absl::OkStatus();
    const bool slept = transfers.Sleep(kDoze);
    if (!slept && turn % 32 != 31) {
      if (job == nullptr) {
        SpinHint();
      } else {
        sched_yield();  // its rank may compute
      }
      continue;
    }
    const Clock::time_point now = Clock::now();
    if (deadline == Clock::time_point::max() && (job == nullptr || job->wanted())) {
      deadline = now + absl::ToChronoNanoseconds(timeout());
    }
    if (aborted()) {
      if (!all_are_in) return Health();
      while (Clock::now() < now + kMoment) {
        DT_ASSIGN_OR_RETURN(const bool through, transfers.Done());
        if (through) return absl::OkStatus();
        if (!transfers.Sleep(kDoze)) sched_yield();
      }
      return Health();
    }
    const bool hears = some_left_.load() || now >= hear_at;
    absl::Status wrong = hears ? left() : absl::OkStatus();
    if (hears) hear_at = now + kHearEvery;
    if (wrong.ok() && now >= deadline) wrong = late();
    if (!wrong.ok()) {
      AbortAll(wrong);
      return Health();
    }
    if (slept) continue;
    // Others may need the core: for a short wait at once again, for a long one now and then.
    if (spins_ && job == nullptr && turn < 32 * 200) continue;
    if (turn > 32 * (job == nullptr ? 2000 : 200)) {
      absl::SleepFor(absl::Microseconds(50));
    } else {
      sched_yield();
    }
  }
}

std::vector<int64_t> ProcessGroup::Missing(const Lane& lane, uint64_t sequence) const {
  std::vector<int64_t> missing;
  for (int i = 0; i < size(); ++i) {
    if (i != me_ && lane.heard[i].load() < sequence) missing.push_back(ranks_[i]);
  }
  return missing;
}

absl::Status ProcessGroup::LeftBefore(const CollectiveCall& call, const std::string& label) {
  int64_t gone = -1;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (int i = 0; i < size() && gone < 0; ++i) {
      const uint64_t came_to = members_[i].farewell.arrived[call.options.overlap ? 1 : 0];
      if (members_[i].left && came_to < call.sequence) gone = ranks_[i];
    }
  }
  if (gone < 0) return absl::OkStatus();
  const absl::string_view kind(Name(call.kind).data(), Name(call.kind).size());
  return WithReport(WithCulprit(absl::AbortedError(absl::StrCat("[comm ", label, "] rank ", gone,
                                                                " left the group before call #",
                                                                call.sequence, " (", kind, ")")),
                                gone),
                    world_->LastingReport());
}

absl::Status ProcessGroup::LateFor(const CollectiveCall& call, const std::string& text,
                                   const std::string& label, Transfers& transfers) {
  const Lane& lane = LaneOf(call);
  std::vector<int64_t> late = Missing(lane, call.sequence);
  std::string who = JoinSome(late, [&](std::string* out, int64_t rank) {
    const size_t i = std::find(ranks_.begin(), ranks_.end(), rank) - ranks_.begin();
    const uint64_t last = lane.heard[i].load();
    absl::StrAppend(out, "rank ", rank,
                    last == 0 ? " (not seen yet)" : absl::StrCat(" (last at call #", last, ")"));
  });
  bool takes = false;
  if (late.empty()) {
    DT_RETURN_IF_ERROR(transfers.Sweep());
    late = transfers.Open(/*receives=*/true);
    takes = late.empty();
    if (takes) late = transfers.Open(/*receives=*/false);
    who = takes ? absl::StrCat(RankNames(late), " did not take this rank's data")
                : absl::StrCat("the data of ", RankNames(late));
  }
  absl::StrAppend(&who, takes ? " within " : " did not arrive within ",
                  absl::FormatDuration(timeout()));
  const absl::Status status = absl::DeadlineExceededError(
      absl::StrCat("[comm ", label, "] call #", call.sequence, " ", text, ": ", who));
  return WithReport(late.size() == 1 ? WithCulprit(status, late[0]) : status,
                    world_->LastingReport());
}

absl::Status ProcessGroup::LeftBefore(int peer, bool receives, uint64_t count,
                                      const std::string& what) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Member& member = members_[peer];
    const auto& counts = receives ? member.farewell.received : member.farewell.sent;
    const auto it = counts.find(me_);
    if (!member.left || (it != counts.end() && it->second >= count)) return absl::OkStatus();
  }
  return WithReport(WithCulprit(absl::AbortedError(absl::StrCat(what, ": rank ", ranks_[peer],
                                                                " left the group before it")),
                                ranks_[peer]),
                    world_->LastingReport());
}

absl::Status ProcessGroup::LateFor(int peer, const std::string& what) {
  return WithReport(WithCulprit(absl::DeadlineExceededError(absl::StrCat(
                                    what, ": rank ", ranks_[peer], " did not come within ",
                                    absl::FormatDuration(timeout()))),
                                ranks_[peer]),
                    world_->LastingReport());
}

absl::Status ProcessGroup::Health() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return why_;
}

void ProcessGroup::AbortAll(const absl::Status& why) { world_->AbortGroup(*this, why); }

void ProcessGroup::Aborted(const absl::Status& why) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (why_.ok()) why_ = RankLocal(why);
  aborted_.store(true);
}

void ProcessGroup::MemberLeft(int64_t rank, const FarewellOfGroup& farewell) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (int i = 0; i < size(); ++i) {
    if (ranks_[i] == rank) members_[i] = {true, farewell};
  }
  some_left_.store(true);
}

FarewellOfGroup ProcessGroup::Farewell() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < lanes_.size(); ++i) mine_.arrived[i] = lanes_[i].arrived.load();
  return mine_;
}

FlightDump ProcessGroup::Dump(size_t calls, bool left) {
  FlightDump dump{ranks_[me_], left, {}};
  const int64_t now = CoarseNow();
  for (const FlightEntry& entry : flight_.Last(calls)) {
    FlightCall call;
    const Lane& lane = lanes_[entry.deferred ? 1 : 0];
    call.sequence = entry.sequence;
    call.deferred = entry.deferred;
    call.fingerprint = entry.fingerprint;
    call.group = flight_.Label(entry.label);
    call.call = CallText(entry, ranks_);
    call.tag = entry.tag.ToString();
    call.age_ms = static_cast<double>(std::max<int64_t>(0, now - entry.start_ns)) * 1e-6;
    if (entry.done) {
      call.state = entry.code == absl::StatusCode::kOk ? "done" : "failed";
      if (entry.code != absl::StatusCode::kOk) call.error = absl::StatusCodeToString(entry.code);
    } else if (entry.sequence == 0) {  // a message
      call.state = "waiting";
      call.waits_for = {ranks_[entry.root]};
    } else if (lane.arrived.load() < entry.sequence) {
      call.state = "posted";
    } else {
      call.waits_for = Missing(lane, entry.sequence);
      call.state = call.waits_for.empty() ? "moving" : "waiting";
    }
    dump.calls.push_back(std::move(call));
  }
  return dump;
}

}  // namespace dtensor
