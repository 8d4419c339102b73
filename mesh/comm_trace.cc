#include "dtensor/mesh/comm_trace.h"

#include <algorithm>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/launch.h"

namespace dtensor {

std::string_view Name(CommPhase phase) {
  constexpr std::string_view kNames[] = {"forward", "backward", "optimizer", "other"};
  return kNames[static_cast<int>(phase)];
}

namespace {

// Columns as wide as their widest cell; the last `numbers` of them end at the right.
std::string Table(const std::vector<std::vector<std::string>>& lines, size_t numbers) {
  std::vector<size_t> widths(lines[0].size());
  for (const std::vector<std::string>& cells : lines) {
    for (size_t c = 0; c < cells.size(); ++c) widths[c] = std::max(widths[c], cells[c].size());
  }
  std::string text;
  for (const std::vector<std::string>& cells : lines) {
    for (size_t c = 0; c < cells.size(); ++c) {
      const std::string space(widths[c] - cells[c].size(), ' ');
      const char* const gap = c == 0 ? "" : "  ";
      absl::StrAppend(&text, gap, c + numbers < cells.size() ? cells[c] + space : space + cells[c]);
    }
    text += "\n";
  }
  return text;
}

}  // namespace

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

std::vector<CommRow> CommTrace::Rows(CommBy by) const {
  const auto alike = [by](const CommRow& row, const CommEvent& e) {
    return row.kind == e.kind && row.mesh_dims == e.mesh_dims && row.phase == e.phase &&
           (by < CommBy::kModule || row.module == e.module) &&
           (by < CommBy::kOp || (row.op == e.op && row.implicit == e.implicit));
  };
  std::vector<CommRow> rows;
  std::vector<std::string> modules;  // in the order of their first events
  for (const CommEvent& e : events_) {
    auto it =
        std::find_if(rows.begin(), rows.end(), [&](const CommRow& row) { return alike(row, e); });
    if (it == rows.end()) {
      it = rows.insert(rows.end(), {e.kind, e.mesh_dims, e.phase});
      if (by >= CommBy::kModule) it->module = e.module;
      if (by >= CommBy::kOp) {
        it->op = e.op;
        it->implicit = e.implicit;
      }
      if (std::find(modules.begin(), modules.end(), it->module) == modules.end()) {
        modules.push_back(it->module);
      }
    }
    ++it->count;
    it->bytes += e.bytes;
    it->modelled_us += e.modelled_us;
  }
  const auto key = [&](const CommRow& r) {
    const auto place = std::find(modules.begin(), modules.end(), r.module) - modules.begin();
    const CommPhase first = by >= CommBy::kModule ? r.phase : CommPhase::kForward;
    return std::make_tuple(place, first, r.kind, r.mesh_dims, r.phase);
  };
  std::stable_sort(rows.begin(), rows.end(),
                   [&](const CommRow& a, const CommRow& b) { return key(a) < key(b); });
  return rows;
}

std::string CommTrace::ToString(CommBy by) const {
  std::vector<std::vector<std::string>> lines;
  const auto add = [&](std::string module, std::string op, std::string implicit, auto... rest) {
    std::vector<std::string>& cells = lines.emplace_back();
    if (by >= CommBy::kModule) cells.push_back(std::move(module));
    if (by >= CommBy::kOp) cells.insert(cells.end(), {std::move(op), std::move(implicit)});
    (cells.push_back(absl::StrCat(rest)), ...);
  };
  add("module", "op", "", "collective", "mesh dims", "phase", "count", "bytes");
  for (const CommRow& row : Rows(by)) {
    add(row.module.empty() ? "-" : row.module, row.op, row.implicit ? "implicit" : "",
        std::string(Name(row.kind)), row.mesh_dims, std::string(Name(row.phase)), row.count,
        row.bytes);
  }
  return Table(lines, /*numbers=*/2);
}

void TraceState::Record(CollectiveKind kind, const std::string& mesh_dims, int64_t bytes,
                        int64_t payload_bytes, double modelled_us) {
  for (CommTrace* scope : scopes_) {
    scope->events_.push_back({kind, mesh_dims, phase, implicit, bytes, payload_bytes, modelled_us,
                              module == nullptr ? "" : *module, std::string(op)});
  }
}

ScopedPhase::ScopedPhase(CommPhase phase)
    : previous_(RankContext::Current().trace().phase),
      span_(SpanKind::kPhase, absl::string_view(Name(phase).data(), Name(phase).size())) {
  RankContext::Current().trace().phase = phase;
}

ScopedPhase::~ScopedPhase() { RankContext::Current().trace().phase = previous_; }

}  // namespace dtensor
