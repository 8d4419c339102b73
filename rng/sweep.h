// Sweeper: runs a draw kernel over the part of a plan that falls into a box, computing every
// Philox block at most once per box.
//
// The U results of thread t's call lie V elements apart. So in each call the box's runs are seen
// through U windows of V elements, shifted onto the same axis t; where t enters or leaves a run of
// one of the windows, the set of results to keep changes. Between two such places lies a piece.
// Runs that follow each other at equal distances (rows) make a pattern of pieces that is found
// once. docs/map.md draws it.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "dtensor/rng/draw.h"
#include "dtensor/rng/planner.h"
#include "dtensor/rng/runs.h"

namespace dtensor {

class Sweeper {
 public:
  // `call` carries the keys and the op's parameters; `data` is the local tensor's first element.
  Sweeper(DrawFn draw, const DrawCall& call, void* data, int64_t item_bytes);
  void Fill(const RunBox& box, const RandomPlan& plan);

 private:
  // One result number's view of the box during a call.
  struct Window {
    RunCursor cursor;
    int64_t first, last;  // g of its first thread, and g where it ends
    int64_t begin, end;   // the current run, in threads; kNever when there is none
    void Load();
    // Whole periods from `thread` on in which this window looks the same in each. 0 if unknown.
    int64_t Periods(int64_t thread, int64_t period) const;
  };
  using Windows = absl::InlinedVector<Window, kMaxUnroll>;
  // Threads [thread, thread + n): results with a bit in `mask` go to local[c] and following.
  struct Stretch {
    int64_t thread, n;
    unsigned mask;
    std::array<int64_t, kMaxUnroll> local;
  };
  static constexpr int kLanes = 512;          // of a batch of short pieces
  static constexpr int64_t kLongPiece = 256;  // written without a batch if contiguous

  void Call(const RunBox& box, const RandomSegment& segment, int unroll, int64_t number);
  // Emits what lies before thread `limit`; returns the thread to go on from.
  int64_t Walk(Windows* windows, int64_t thread, int64_t limit, std::vector<Stretch>* pattern);
  // As many whole periods from `thread` on as look alike; none if that is fewer than two.
  int64_t WalkPeriods(Windows* windows, int64_t thread);
  void Emit(const Stretch& piece);
  // The `runs` pieces that follow `piece` at distances of `period` threads, their results in one
  // stretch each.
  void EmitRuns(Stretch piece, int64_t period, int64_t runs);
  void DrawTo(const Stretch& piece, int64_t n);
  void AddToBatch(Stretch piece);
  void Flush();

  const DrawFn draw_;
  DrawCall call_;
  char* const data_;
  const int64_t item_bytes_;
  int64_t stride_ = 1;  // of a run, in the local tensor
  int lanes_ = 0;       // in the batch
  std::vector<Stretch> pieces_, pattern_;
  alignas(64) uint32_t threads_[kLanes];
  alignas(64) char results_[kMaxUnroll][kLanes * 8];
};

}  // namespace dtensor
