#include "dtensor/mesh/flight.h"

#include <mutex>

#include "absl/strings/str_cat.h"
#include "dtensor/tensor/text.h"

namespace dtensor {

int FlightRecorder::AddLabel(const std::string& label) {
  std::lock_guard<SpinLock> lock(mutex_);
  const auto [known, fresh] = numbers_.try_emplace(label, static_cast<int>(labels_.size()));
  if (fresh) labels_.push_back(label);
  return known->second;
}

std::string FlightRecorder::Label(int label) const {
  std::lock_guard<SpinLock> lock(mutex_);
  return labels_[label];
}

std::string FlightRecorder::LabelAt(size_t place) const {
  std::lock_guard<SpinLock> lock(mutex_);
  return labels_[ring_[place].entry.label];
}

size_t FlightRecorder::Begin(const CollectiveCall& call, int label) {
  const Tensor& t = call.in.defined() ? call.in : call.out;
  const int64_t now = CoarseNow();
  std::lock_guard<SpinLock> lock(mutex_);
  const size_t place = count_++ % kEntries;
  FlightEntry& e = ring_[place].entry;
  e.sequence = call.sequence;
  e.fingerprint = call.fingerprint;
  e.start_ns = now;
  e.kind = call.kind;
  e.op = call.op;
  e.root = call.root;
  e.sends = static_cast<int>(call.sends.size());
  e.recvs = static_cast<int>(call.recvs.size());
  if (t.defined()) {
    e.dtype = t.dtype();
    e.shape = t.shape();
  }
  e.label = label;
  e.deferred = call.options.overlap;
  e.tag.Keep(call.tag == nullptr ? CallTag() : *call.tag);
  ring_[place].outcome.store(kPending, std::memory_order_relaxed);
  return place;
}

std::vector<FlightEntry> FlightRecorder::Last(size_t count) const {
  std::lock_guard<SpinLock> lock(mutex_);
  const uint64_t kept = std::min<uint64_t>({count_, kEntries, count});
  std::vector<FlightEntry> entries;
  entries.reserve(kept);
  for (uint64_t i = count_ - kept; i < count_; ++i) {
    const Place& place = ring_[i % kEntries];
    entries.push_back(place.entry);
    const int outcome = place.outcome.load(std::memory_order_acquire);
    entries.back().done = outcome != kPending;
    if (outcome != kPending) entries.back().code = static_cast<absl::StatusCode>(outcome);
  }
  return entries;
}

std::string RankNames(absl::Span<const int64_t> ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", JoinSome(ranks));
}

std::string CallText(const FlightEntry& e, absl::Span<const int64_t> ranks) {
  std::string args;
  switch (e.kind) {
    case CollectiveKind::kBarrier:
    case CollectiveKind::kHostExchange:
      return absl::StrCat(View(Name(e.kind)), "()");
    case CollectiveKind::kExchange:
      args = absl::StrCat(e.sends, " sends, ", e.recvs, " receives");
      break;
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kReduceScatter:
      args = absl::StrCat(View(Name(e.op)), ", ");
      break;
    case CollectiveKind::kBroadcast:
      args = absl::StrCat("root ", ranks[e.root], ", ");
      break;
    case CollectiveKind::kSend:
      args = absl::StrCat("to rank ", ranks[e.root], ", ");
      break;
    case CollectiveKind::kRecv:
      args = absl::StrCat("from rank ", ranks[e.root], ", ");
      break;
    case CollectiveKind::kAllGather:
      break;
  }
  if (e.kind != CollectiveKind::kExchange) {
    absl::StrAppend(&args, View(Name(e.dtype)), " ", ToString(e.shape));
  }
  return absl::StrCat(e.deferred ? "deferred " : "", View(Name(e.kind)), "(", args, ")");
}

}  // namespace dtensor
