#include "mesh/comm_trace.h"

#include <algorithm>
#include <tuple>

#include "absl/strings/str_format.h"
#include "mesh/launch.h"

namespace dtensor {

std::string_view Name(CommPhase phase) {
  constexpr std::string_view kNames[] = {"forward", "backward", "optimizer", "other"};
  return kNames[static_cast<int>(phase)];
}

CommTrace::CommTrace() { RankContext::Current().trace().scopes_.push_back(this); }

CommTrace::~CommTrace() {
  std::vector<CommTrace*>& scopes = RankContext::Current().trace().scopes_;
  scopes.erase(std::remove(scopes.begin(), scopes.end(), this), scopes.end());
}

int64_t CommTrace::Count(CollectiveKind kind) const {
  return std::count_if(events_.begin(), events_.end(),
                       [&](const CommEvent& e) { return e.kind == kind; });
}

int64_t CommTrace::Count(CollectiveKind kind, CommPhase phase) const {
  return std::count_if(events_.begin(), events_.end(),
                       [&](const CommEvent& e) { return e.kind == kind && e.phase == phase; });
}

int64_t CommTrace::TotalBytes() const {
  int64_t bytes = 0;
  for (const CommEvent& e : events_) bytes += e.bytes;
  return bytes;
}

int64_t CommTrace::MaxPayloadBytes() const {
  int64_t bytes = 0;
  for (const CommEvent& e : events_) bytes = std::max(bytes, e.payload_bytes);
  return bytes;
}

double CommTrace::ModelledUs() const {
  double us = 0;
  for (const CommEvent& e : events_) us += e.modelled_us;
  return us;
}

std::vector<CommRow> CommTrace::Rows() const {
  auto key = [](const auto& x) { return std::tie(x.kind, x.mesh_dims, x.phase); };
  std::vector<CommRow> rows;
  for (const CommEvent& e : events_) {
    auto it = std::find_if(rows.begin(), rows.end(),
                           [&](const CommRow& row) { return key(row) == key(e); });
    if (it == rows.end()) it = rows.insert(rows.end(), {e.kind, e.mesh_dims, e.phase});
    ++it->count;
    it->bytes += e.bytes;
  }
  std::sort(rows.begin(), rows.end(),
            [&](const CommRow& a, const CommRow& b) { return key(a) < key(b); });
  return rows;
}

std::string CommTrace::ToString() const {
  std::string text = absl::StrFormat("%-16s%-12s%-12s%8s%16s\n", "collective", "mesh dims", "phase",
                                     "count", "bytes");
  for (const CommRow& row : Rows()) {
    absl::StrAppendFormat(&text, "%-16s%-12s%-12s%8d%16d\n", std::string(Name(row.kind)),
                          row.mesh_dims, std::string(Name(row.phase)), row.count, row.bytes);
  }
  return text;
}

void TraceState::Record(CollectiveKind kind, const std::string& mesh_dims, int64_t bytes,
                        int64_t payload_bytes, double modelled_us) {
  for (CommTrace* scope : scopes_) {
    scope->events_.push_back({kind, mesh_dims, phase, implicit, bytes, payload_bytes, modelled_us});
  }
}

ScopedPhase::ScopedPhase(CommPhase phase) : previous_(RankContext::Current().trace().phase) {
  RankContext::Current().trace().phase = phase;
}

ScopedPhase::~ScopedPhase() { RankContext::Current().trace().phase = previous_; }

}  // namespace dtensor
