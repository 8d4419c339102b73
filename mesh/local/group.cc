#include "dtensor/mesh/local/group.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/mesh/local/deferred.h"
#include "dtensor/mesh/local/thread_world.h"
#include "dtensor/tensor/status.h"
#include "dtensor/tensor/text.h"
#include "dtensor/tensor/trace.h"

namespace dtensor {

LocalGroup::LocalGroup(std::weak_ptr<ThreadWorld> world, std::vector<int64_t> ranks,
                       absl::Duration timeout, bool spin)
    : world_(std::move(world)),
      ranks_(std::move(ranks)),
      timeout_ns_(absl::ToInt64Nanoseconds(timeout)),
      spin_(spin),
      slots_(new Slot[ranks_.size()]),
      stage_memory_(new char[ranks_.size() * 2 * kStageBytes + 64]) {
  stage_ = stage_memory_.get() + (64 - reinterpret_cast<uintptr_t>(stage_memory_.get()) % 64);
}

int LocalGroup::Deserter(Phase phase, uint64_t sequence) const {
  if (!(events_.load() & kLeft)) return -1;
  for (int i = 0; i < size(); ++i) {
    // `left` first: a rank that arrived and then left has arrived.
    if (slots_[i].left.load() && (slots_[i].*phase).load() < sequence) return i;
  }
  return -1;
}

// A member that has posted a deferred call where this plain one should be, or -1. They would wait
// for each other. Posts are looked at first: a member in step arrives here before it posts more.
int LocalGroup::Deferring(const CollectiveCall& call) const {
  for (int i = 0; i < size(); ++i) {
    if (slots_[i].posted.load() > call.before && slots_[i].arrived.load() < call.sequence) return i;
  }
  return -1;
}

// "rank 1 issued deferred all_gather(...) for ..."
std::string LocalGroup::PostedText(int member, uint64_t number) const {
  std::string text = absl::StrCat("rank ", ranks_[member], " issued ");
  for (const FlightEntry& entry : slots_[member].flight.Last()) {
    if (!entry.deferred || entry.sequence != number) continue;
    const std::string what_for = entry.tag.ToString();
    return absl::StrCat(text, CallText(entry, ranks_), what_for.empty() ? "" : " for ", what_for);
  }
  return absl::StrCat(text, "a deferred call");  // more than the recorder holds ago
}

// "rank 1 (last at call #4), rank 3 (not seen yet)"
std::string LocalGroup::Absent(Phase phase, uint64_t sequence) const {
  std::vector<int> members;
  for (int i = 0; i < size(); ++i) {
    if ((slots_[i].*phase).load() < sequence) members.push_back(i);
  }
  return JoinSome(members, [&](std::string* out, int i) {
    const uint64_t last = slots_[i].arrived.load();
    absl::StrAppend(out, "rank ", ranks_[i]);
    if (last == 0) {
      absl::StrAppend(out, " (not seen yet)");
    } else {
      absl::StrAppend(out, " (last at call #", last, ")");
    }
  });
}

absl::Status LocalGroup::AwaitSlow(Phase phase, const CollectiveCall& call,
                                   const std::string& label) {
  const uint64_t sequence = call.sequence;
  if (All(phase, sequence)) {  // of the last ones to come, at least one sees this
    spot_.WakeAll();
    return absl::OkStatus();
  }
  const Span span(SpanKind::kWait,
                  phase == &Slot::arrived ? "wait for peers to come" : "wait for peers to finish");
  const absl::Duration limit = timeout();
  bool in_time = spot_.Wait(
      [&] {
        return All(phase, sequence) || aborted() || Deserter(phase, sequence) >= 0 ||
               Deferring(call) >= 0;
      },
      limit, spin_);
  if (All(phase, sequence)) return absl::OkStatus();
  const std::string where = absl::StrCat("[comm ", label, "] ");
  const int deserter = Deserter(phase, sequence), deferring = Deferring(call);
  if (deferring >= 0) {
    Abort(WithReport(
        absl::FailedPreconditionError(absl::StrCat(where, "collectives differ at call #", sequence,
                                                   ": ", PostedText(deferring, call.before + 1),
                                                   "; the others ", Describe(call, ranks_))),
        LastingReport()));
  } else if (!in_time) {
    const std::vector<int64_t> missing = Missing(phase, sequence);
    const absl::Status late = absl::DeadlineExceededError(absl::StrCat(
        where, "call #", sequence, " ", Describe(call, ranks_), ": ", Absent(phase, sequence),
        " did not arrive within ", absl::FormatDuration(limit)));
    Abort(WithReport(missing.size() == 1 ? WithCulprit(late, missing[0]) : late, LastingReport()));
  } else if (deserter >= 0) {
    const absl::Status left = absl::AbortedError(
        absl::StrCat(where, "rank ", ranks_[deserter], " left the group before call #", sequence,
                     " (", absl::string_view(Name(call.kind).data(), Name(call.kind).size()), ")"));
    Abort(WithReport(WithCulprit(left, ranks_[deserter]), LastingReport()));
  }
  return Health();
}

absl::Status LocalGroup::MeetPeer(Mailbox* box, const std::atomic<uint64_t>& counter,
                                  uint64_t count, int peer, const CollectiveCall& call,
                                  const std::string& label) {
  const Span span(SpanKind::kWait, "wait for a peer");
  auto left = [&] { return slots_[peer].left.load() && counter.load() < count; };
  const absl::Duration limit = timeout();
  bool in_time =
      box->spot.Wait([&] { return counter.load() >= count || aborted() || left(); }, limit, spin_);
  if (counter.load() >= count) return absl::OkStatus();
  const std::string what =
      absl::StrCat("[comm ", label, "] ", Describe(call, ranks_), " (message ", count, ")");
  if (!in_time) {
    const absl::Status late = absl::DeadlineExceededError(absl::StrCat(
        what, ": rank ", ranks_[peer], " did not come within ", absl::FormatDuration(limit)));
    Abort(WithReport(WithCulprit(late, ranks_[peer]), LastingReport()));
  } else if (left()) {
    const absl::Status gone = absl::AbortedError(
        absl::StrCat(what, ": rank ", ranks_[peer], " left the group before it"));
    Abort(WithReport(WithCulprit(gone, ranks_[peer]), LastingReport()));
  }
  return Health();
}

std::shared_ptr<DeferredCall> LocalGroup::DeferredOf(uint64_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Gathering& gathering = deferred_[number];
  if (!gathering.call) gathering.call = std::make_shared<DeferredCall>(size());
  std::shared_ptr<DeferredCall> call = gathering.call;
  if (++gathering.members == size()) deferred_.erase(number);
  return call;
}

absl::Status LocalGroup::AwaitPosts(const DeferredCall& shared, int me, const std::string& label,
                                    absl::Duration timeout) {
  const auto posted = [&] { return shared.posted.load() == size(); };
  if (posted() && !aborted()) return absl::OkStatus();
  const auto deserter = [&] {
    if (!(events_.load() & kLeft)) return -1;
    for (int i = 0; i < size(); ++i) {
      if (slots_[i].left.load() && !shared.parts[i].posted.load()) return i;
    }
    return -1;
  };
  const DeferredCall::Part& mine = shared.parts[me];
  const absl::Duration limit = std::min(timeout, this->timeout());
  slots_[me].awaited.store((*mine.call)->sequence);
  const bool in_time =
      spot_.Wait([&] { return posted() || aborted() || deserter() >= 0; }, limit, spin_);
  if (!(posted() && !aborted())) {
    const std::string what = absl::StrCat("[comm ", label, "] ", mine.call->Describe(ranks_), ": ");
    if (!in_time) {
      const std::vector<int64_t> missing = Missing(&Slot::posted, (*mine.call)->sequence);
      const absl::Status late = absl::DeadlineExceededError(
          absl::StrCat(what, Absent(&Slot::posted, (*mine.call)->sequence),
                       " did not start it within ", absl::FormatDuration(limit)));
      Abort(
          WithReport(missing.size() == 1 ? WithCulprit(late, missing[0]) : late, LastingReport()));
    } else if (deserter() >= 0) {
      const int64_t gone = ranks_[deserter()];
      const absl::Status left =
          absl::AbortedError(absl::StrCat(what, "rank ", gone, " left the group before it"));
      Abort(WithReport(WithCulprit(left, gone), LastingReport()));
    }
  }
  slots_[me].awaited.store(0);
  return posted() && !aborted() ? absl::OkStatus() : Health();
}

Mailbox* LocalGroup::MailboxOf(int from, int to) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::unique_ptr<Mailbox>& box = mailboxes_[static_cast<int64_t>(from) * size() + to];
  if (!box) box = std::make_unique<Mailbox>();
  return box.get();
}

bool LocalGroup::BeginPull(int me) {
  slots_[me].pulling.store(1);
  if (!aborted()) return true;  // whoever aborts later sees `pulling` and waits
  EndPull(me);
  return false;
}

void LocalGroup::EndPull(int me) { slots_[me].pulling.store(0, std::memory_order_release); }

void LocalGroup::Drain(int me) {
  DT_CHECK(aborted());
  slots_[me].through.store(slots_[me].arrived.load());
  const auto quiet = [&] {
    for (int i = 0; i < size(); ++i) {
      if (i == me) continue;
      const uint64_t arrived = slots_[i].arrived.load();
      if (slots_[i].through.load() < arrived || slots_[i].pulling.load() != 0) return false;
    }
    return true;
  };
  // Nobody wakes those who wait here: that would cost every call that goes well.
  while (!spot_.Wait(quiet, absl::Milliseconds(1), spin_)) {
  }
}

absl::Status LocalGroup::Health() {
  std::lock_guard<std::mutex> lock(mutex_);
  return why_;
}

void LocalGroup::Abort(const absl::Status& why) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (why_.ok()) why_ = RankLocal(why);
    events_.fetch_or(kAborted);
  }
  WakeEverybody();
}

void LocalGroup::MemberLeft(int64_t rank) {
  for (int i = 0; i < size(); ++i) {
    if (ranks_[i] == rank) slots_[i].left.store(true);
  }
  events_.fetch_or(kLeft);
  WakeEverybody();
}

void LocalGroup::WakeEverybody() {
  spot_.WakeAll();
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [key, box] : mailboxes_) box->spot.WakeAll();
}

std::vector<int64_t> LocalGroup::Missing(Phase phase, uint64_t sequence) const {
  std::vector<int64_t> missing;
  for (int i = 0; i < size(); ++i) {
    if ((slots_[i].*phase).load() < sequence) missing.push_back(ranks_[i]);
  }
  return missing;
}

// A call that is not done is where the protocol says it is: nothing is recorded on the way.
FlightCall LocalGroup::FlightOf(int member, const FlightEntry& entry, int64_t now) const {
  const Slot& slot = slots_[member];
  FlightCall call;
  call.sequence = entry.sequence;
  call.deferred = entry.deferred;
  call.fingerprint = entry.fingerprint;
  call.group = slot.flight.Label(entry.label);
  call.call = CallText(entry, ranks_);
  call.tag = entry.tag.ToString();
  call.age_ms = static_cast<double>(std::max<int64_t>(0, now - entry.start_ns)) * 1e-6;
  const bool message = entry.sequence == 0;
  if (entry.done || (!message && !entry.deferred && slot.described.load() >= entry.sequence)) {
    const auto code = entry.done ? entry.code : absl::StatusCode::kFailedPrecondition;
    call.state = code == absl::StatusCode::kOk ? "done" : "failed";
    if (code != absl::StatusCode::kOk) call.error = absl::StatusCodeToString(code);
    return call;
  }
  call.state = "waiting";
  if (message) {
    call.waits_for = {ranks_[entry.root]};
  } else if (slot.arrived.load() < entry.sequence) {
    call.state = "posted";
  } else {
    call.waits_for = Missing(&Slot::arrived, entry.sequence);
    if (call.waits_for.empty() && slot.finished.load() >= entry.sequence) {
      call.waits_for = Missing(&Slot::finished, entry.sequence);
    }
    if (call.waits_for.empty()) call.state = "moving";
  }
  return call;
}

FlightGroup LocalGroup::Report(size_t calls) const {
  std::vector<FlightDump> dumps;
  std::string label;
  const int64_t now = CoarseNow();
  for (int i = 0; i < size(); ++i) {
    FlightDump dump{ranks_[i], slots_[i].left.load(), {}};
    const uint64_t awaited = slots_[i].awaited.load();
    FlightCall reading;  // a deferred call was done when it was posted; here its reader waits
    for (const FlightEntry& entry : slots_[i].flight.Last(calls)) {
      dump.calls.push_back(FlightOf(i, entry, now));
      if (awaited != 0 && entry.deferred && entry.sequence == awaited) reading = dump.calls.back();
    }
    if (reading.sequence != 0) {
      reading.sequence = 0;
      reading.state = "waiting";
      reading.waits_for = Missing(&Slot::posted, awaited);
      dump.calls.push_back(std::move(reading));
    }
    if (label.empty() && !dump.calls.empty()) label = dump.calls.back().group;
    dumps.push_back(std::move(dump));
  }
  return MergeDumps(std::move(label), std::move(dumps));
}

std::string LocalGroup::ReportOnce(const void* where, uint64_t number) {
  const std::shared_ptr<ThreadWorld> world = world_.lock();
  return world != nullptr ? world->ReportOnce(where, number) : OwnReport();
}
std::string LocalGroup::LastingReport() {
  const std::shared_ptr<ThreadWorld> world = world_.lock();
  return world != nullptr ? world->LastingReport() : OwnReport();
}
std::string LocalGroup::OwnReport() const {
  FlightReport report;
  report.groups.push_back(Report(FlightRecorder::kEntries));
  return absl::StrCat("\nflight report:\n", report.Summary());
}

}  // namespace dtensor
