// Timeline: what each rank did when, as a file for ui.perfetto.dev or chrome://tracing.
//
//   Timeline timeline;                       // shared by the ranks
//   RunSpmd(4, [&](RankContext&) {
//     const RecordTimeline record(timeline);   // dtensor/timeline.h; each rank opens its own
//     Step(model);
//     ...
//   timeline.Write("step.json");
//
// Modules, ops, backward steps and collectives are spans that nest; in a collective, waiting for
// peers and moving data are told apart. What a thread does for a rank beside it has a row of its
// own (TimelineLane). While nothing records a span costs two loads.
//
// Where the rank has a device that measures, a further row has what ops queued there, in the
// device's time, and every span is a range of the device's profiler (NVTX).
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/attributes.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "dtensor/tensor/rank_state.h"

namespace dtensor {

class RankDevice;

enum class SpanKind : uint8_t { kStep, kPhase, kModule, kOp, kBackward, kCollective, kMove, kWait };

class Timeline {
 public:
  // Chrome's trace event format: a process per rank, begin and end events in microseconds. Only
  // what tracks that are closed have recorded.
  std::string ToJson() const;
  // Errors: Unavailable if the file cannot be written.
  absl::Status Write(const std::string& path) const;

 private:
  friend class TimelineTrack;
  friend class TimelineLane;
  struct Event {
    bool begin;
    SpanKind kind;
    int64_t ns;
    std::string name, detail;
  };
  struct Recorded {
    int64_t rank;
    const void* lane;  // null: the rank's own
    const char* row;   // what a lane is called
    std::vector<Event> events;
  };
  struct Shared {
    const std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
    std::mutex mutex;
    std::vector<Recorded> recorded;  // guarded by mutex
  };
  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

// Where a thread records that works for a rank beside it, which may go on when the rank records no
// more; then, and where the rank did not record, nobody sees it.
class TimelineLane {
 public:
  TimelineLane() = default;  // of nobody
  // Of the rank whose code runs, as it records now. `key` tells its lanes apart.
  static TimelineLane OfCurrent(const void* key);
  bool records() const { return shared_ != nullptr; }

 private:
  friend class TimelineTrack;
  std::shared_ptr<Timeline::Shared> shared_;
  int64_t rank_ = 0;
  const void* key_ = nullptr;
};

// What the rank whose code runs records, from construction to destruction; the innermost one
// counts.
class TimelineTrack {
 public:
  // The rank's tracks see nothing of a scope.
  class Pause {
   public:
    Pause() : state_(RankState::Current()), paused_(std::exchange(state_.timeline, nullptr)) {}
    ~Pause() { state_.timeline = paused_; }
    Pause(const Pause&) = delete;

   private:
    RankState& state_;
    TimelineTrack* const paused_;
  };
  TimelineTrack(Timeline& timeline, int64_t rank);
  explicit TimelineTrack(const TimelineLane& lane);  // of the calling thread; lane.records()
  ~TimelineTrack();
  TimelineTrack(const TimelineTrack&) = delete;
  static TimelineTrack* Current() {
    const RankState* state = RankState::IfAny();
    return state == nullptr ? nullptr : state->timeline;
  }

  void Begin(SpanKind kind, absl::string_view name, std::string detail);
  void End();

 private:
  friend class TimelineLane;
  TimelineTrack(std::shared_ptr<Timeline::Shared> shared, int64_t rank, const void* lane);
  // An event among the device's work, where what an op queued begins or ends.
  struct Mark {
    void* event;
    bool begin;
    std::string name;
  };
  struct OpenSpan {
    bool ranged = false;  // a range of the profiler was opened with it
    bool marked = false;  // its begin is a mark
  };
  int64_t Now() const;
  RankDevice* Device() const;
  bool AddMark(RankDevice& device, bool begin, absl::string_view name);
  std::vector<Timeline::Event> ReadMarks();
  RankState& state_;
  const std::shared_ptr<Timeline::Shared> shared_;
  const int64_t rank_;
  const void* const lane_;
  TimelineTrack* const outer_;
  std::vector<OpenSpan> open_;
  std::vector<Mark> marks_;
  int64_t first_mark_ns_ = 0;  // when the host queued the first of them
  bool marks_fit_ = true;      // none is missing
  std::vector<Timeline::Event> events_;
};

// A piece of work, from construction to destruction.
class Span {
 public:
  ABSL_ATTRIBUTE_ALWAYS_INLINE Span(SpanKind kind, absl::string_view name)
      : track_(TimelineTrack::Current()) {
    if (track_ != nullptr) track_->Begin(kind, name, {});
  }
  // `detail()` gives text for the viewer; it is called only where something records.
  template <class F>
  Span(SpanKind kind, absl::string_view name, const F& detail) : track_(TimelineTrack::Current()) {
    if (track_ != nullptr) track_->Begin(kind, name, detail());
  }
  ~Span() {
    if (track_ != nullptr && track_ == TimelineTrack::Current()) track_->End();
  }
  Span(const Span&) = delete;

 private:
  TimelineTrack* track_;
};

}  // namespace dtensor
