// Pipeline schedules: which forward and backward of which stage and microbatch every rank of a
// pipeline does, in which order. Pure functions; parallel/pipeline/pipeline.h runs them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace dtensor {

struct PipelineAction {
  // The last four are put in between the others by WithTransfers.
  enum class Kind : uint8_t {
    kForward,
    kBackward,
    kSendForward,   // the stage's results to the next stage
    kRecvForward,   // the stage's inputs from the stage before
    kSendBackward,  // their gradients to the stage before
    kRecvBackward,  // the gradients of the stage's results from the next one
  };
  Kind kind;
  int stage;
  int64_t microbatch;
  friend bool operator==(const PipelineAction&, const PipelineAction&) = default;
};

// Stage s is on rank s % ranks.size(): with more stages than ranks every rank has several, which
// come one after the other in loops.
struct PipelineSchedule {
  int stages = 0;
  int64_t microbatches = 0;
  std::vector<std::vector<PipelineAction>> ranks;  // forwards and backwards only
  int RankOf(int stage) const { return stage % static_cast<int>(ranks.size()); }
};

// With p ranks, m microbatches and v stages per rank:
//   GPipe            all forwards, then all backwards. Keeps m * v microbatches' values. With
//                    several stages per rank LoopedBFS, but backwards come in ascending order.
//   1F1B             min(p - 1 - r, m) forwards on rank r, then a forward and a backward in turn.
//                    Keeps min(p - r, m). One stage per rank.
//   Interleaved1F1B  the same with v > 1 stages per rank, p microbatches of a stage at a time: a
//                    rank waits (p - 1) / v forwards and backwards of its stages, not p - 1.
//   Errors: InvalidArgument naming the nearest name, or what must be positive, for a number of
//   stages that the schedule does not have, and for more than 2^26 forwards and backwards.
//   Source: GPipe (arXiv 1811.06965); PipeDream-flush and interleaving, Megatron-LM (arXiv
//   2104.04473); torch.distributed.pipelining.
absl::StatusOr<PipelineSchedule> MakePipelineSchedule(absl::string_view name, int ranks,
                                                      int64_t microbatches,
                                                      int stages_per_rank = 1);
std::vector<std::string> PipelineScheduleNames();

// A line per rank of "<stage>F<microbatch>" and "<stage>B<microbatch>".
std::string ToString(const PipelineSchedule& schedule);
// Of such text; empty lines and what follows a # are passed over. Errors: InvalidArgument naming
// line and word; those of CheckPipelineSchedule.
absl::StatusOr<PipelineSchedule> ParsePipelineSchedule(absl::string_view text);

// Whether every microbatch goes forward and then back once through every stage, on the stage's
// rank, and no rank waits for ever.
//   Errors: InvalidArgument naming the action that is missing, repeated, misplaced or waited for.
absl::Status CheckPipelineSchedule(const PipelineSchedule& schedule);

struct PipelineTimes {
  double makespan = 0;        // until the last rank is done
  std::vector<double> busy;   // per rank
  std::vector<int64_t> peak;  // per rank: microbatches of a stage whose values are kept
};
// What it takes where a forward of a stage takes `forward`, a backward `backward`, and sending
// nothing. Errors: InvalidArgument for negative times; those of CheckPipelineSchedule.
absl::StatusOr<PipelineTimes> SimulatePipeline(const PipelineSchedule& schedule, double forward = 1,
                                               double backward = 2);

// What every rank does with what it sends and receives in between. All transfers have one order,
// in which every rank posts its own: so ranks that carry out what they posted one after the other,
// as a device does on its stream, do not wait for each other in a ring. What a rank will need is
// posted as early as that allows.
//   Errors: those of CheckPipelineSchedule.
absl::StatusOr<std::vector<std::vector<PipelineAction>>> WithTransfers(
    const PipelineSchedule& schedule);

// Cuts a sequence of `weights` (of layers) into `parts` runs, none empty, so that the heaviest is
// as light as can be, and of those cuts the one whose lightest is heaviest; where several are, the
// later cut. Returns where each run begins, and the end.
//   Errors: InvalidArgument for fewer layers than parts, and weights that are negative or no
//   number.
absl::StatusOr<std::vector<int64_t>> CutEvenly(absl::Span<const double> weights, int64_t parts);

}  // namespace dtensor
