#include "dtensor/tensor/trace.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "dtensor/tensor/device.h"
#include "dtensor/tensor/file.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

absl::string_view Name(SpanKind kind) {
  constexpr absl::string_view kNames[] = {"step",     "phase",      "module", "op",
                                          "backward", "collective", "move",   "wait"};
  return kNames[static_cast<int>(kind)];
}

std::string Quoted(absl::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppendFormat(&out, "\\u%04x", static_cast<unsigned>(c));
    } else {
      out += c;
    }
  }
  return out + "\"";
}

}  // namespace

TimelineLane TimelineLane::OfCurrent(const void* key) {
  const TimelineTrack* track = TimelineTrack::Current();
  TimelineLane lane;
  if (track == nullptr) return lane;
  lane.shared_ = track->shared_;
  lane.rank_ = track->rank_;
  lane.key_ = key;
  return lane;
}

TimelineTrack::TimelineTrack(std::shared_ptr<Timeline::Shared> shared, int64_t rank,
                             const void* lane)
    : state_(RankState::Current()),
      shared_(std::move(shared)),
      rank_(rank),
      lane_(lane),
      outer_(std::exchange(state_.timeline, this)) {}

TimelineTrack::TimelineTrack(Timeline& timeline, int64_t rank)
    : TimelineTrack(timeline.shared_, rank, nullptr) {}

TimelineTrack::TimelineTrack(const TimelineLane& lane)
    : TimelineTrack(lane.shared_, lane.rank_, lane.key_) {}

TimelineTrack::~TimelineTrack() {
  while (!open_.empty()) End();
  state_.timeline = outer_;
  std::vector<Timeline::Event> on_device = ReadMarks();
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  shared_->recorded.push_back({rank_, lane_, "calls that overlap", std::move(events_)});
  if (!on_device.empty()) {
    shared_->recorded.push_back({rank_, Device(), "device", std::move(on_device)});
  }
}

int64_t TimelineTrack::Now() const {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now() - shared_->start).count();
}

void TimelineTrack::Begin(SpanKind kind, absl::string_view name, std::string detail) {
  events_.push_back({true, kind, Now(), std::string(name), std::move(detail)});
  OpenSpan span;
  if (RankDevice* const device = Device()) {
    if (device->table().range_push != nullptr) {
      device->table().range_push(events_.back().name.c_str());
      span.ranged = true;
    }
    span.marked = kind == SpanKind::kOp && AddMark(*device, true, name);
  }
  open_.push_back(span);
}

void TimelineTrack::End() {
  const OpenSpan span = open_.back();
  open_.pop_back();
  if (RankDevice* const device = Device()) {
    if (span.marked && !AddMark(*device, false, {})) marks_fit_ = false;
    if (span.ranged) device->table().range_pop();
  }
  events_.push_back({false, SpanKind::kOp, Now(), {}, {}});
}

// Where the rank's work goes to, if it was opened and is not the host.
RankDevice* TimelineTrack::Device() const {
  if (state_.devices == nullptr || !IsRemote(state_.devices->type())) return nullptr;
  return state_.devices->Opened(state_.devices->type());
}

// False where the device has no times, or captures.
bool TimelineTrack::AddMark(RankDevice& device, bool begin, absl::string_view name) {
  const DeviceTable& table = device.table();
  void* event = nullptr;
  if (table.timed_event == nullptr || state_.capture != nullptr) return false;
  if (table.timed_event(device.device()->handle(), &event) != 0) return false;
  if (table.record(event, device.stream()) != 0) {
    (void)table.event_free(device.device()->handle(), event);
    return false;
  }
  if (marks_.empty()) first_mark_ns_ = Now();
  marks_.push_back({event, begin, std::string(name)});
  return true;
}

// The device's spans; the first begins when the host queued it. They nest as the host's do, since
// what a rank queues runs in its order. Waits for the device, and leaves errors to who uses it
// next.
std::vector<Timeline::Event> TimelineTrack::ReadMarks() {
  std::vector<Timeline::Event> events;
  if (marks_.empty()) return events;
  RankDevice& device = *Device();
  const DeviceTable& table = device.table();
  try {
    marks_fit_ = marks_fit_ && device.Reach(device.Record()).ok();
  } catch (const Error&) {
    marks_fit_ = false;
  }
  int64_t last = first_mark_ns_;
  for (const Mark& mark : marks_) {
    float ms = 0;
    marks_fit_ = marks_fit_ && table.elapsed(marks_[0].event, mark.event, &ms) == 0;
    last = std::max(last, first_mark_ns_ + static_cast<int64_t>(1e6 * static_cast<double>(ms)));
    events.push_back({mark.begin, SpanKind::kOp, last, mark.name, {}});
  }
  for (const Mark& mark : marks_) {
    (void)table.event_free(device.device()->handle(), mark.event);
  }
  if (!marks_fit_) events.clear();
  return events;
}

std::string Timeline::ToJson() const {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  std::string text = "{\"displayTimeUnit\": \"ns\", \"traceEvents\": [";
  const char* comma = "\n";
  std::vector<int64_t> named;
  std::map<int64_t, std::vector<const void*>> lanes;  // by rank, in the order of their rows
  for (const Recorded& r : shared_->recorded) {
    if (std::find(named.begin(), named.end(), r.rank) == named.end()) {
      named.push_back(r.rank);
      absl::StrAppend(&text, comma, R"({"ph": "M", "name": "process_name", "pid": )", r.rank,
                      R"(, "tid": 0, "args": {"name": "rank )", r.rank, "\"}},\n",
                      R"({"ph": "M", "name": "process_sort_index", "pid": )", r.rank,
                      R"(, "tid": 0, "args": {"sort_index": )", r.rank, "}}");
      comma = ",\n";
    }
    size_t row = 0;
    if (r.lane != nullptr) {
      std::vector<const void*>& of_rank = lanes[r.rank];
      row = 1 + std::find(of_rank.begin(), of_rank.end(), r.lane) - of_rank.begin();
      if (row > of_rank.size()) {
        of_rank.push_back(r.lane);
        absl::StrAppend(&text, comma, R"({"ph": "M", "name": "thread_name", "pid": )", r.rank,
                        R"(, "tid": )", row, R"(, "args": {"name": )", Quoted(r.row), "}}");
      }
    }
    for (const Event& e : r.events) {
      absl::StrAppendFormat(&text, R"(%s{"ph": "%c", "pid": %d, "tid": %d, "ts": %d.%03d)", comma,
                            e.begin ? 'B' : 'E', r.rank, row, e.ns / 1000, e.ns % 1000);
      if (e.begin) {
        absl::StrAppend(&text, R"(, "cat": ")", Name(e.kind), R"(", "name": )", Quoted(e.name));
        if (!e.detail.empty()) {
          absl::StrAppend(&text, R"(, "args": {"detail": )", Quoted(e.detail), "}");
        }
      }
      text += "}";
    }
  }
  return text + "\n]}\n";
}

absl::Status Timeline::Write(const std::string& path) const { return WriteFile(path, ToJson()); }

}  // namespace dtensor
