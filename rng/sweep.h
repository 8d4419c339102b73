// Sweeper: runs a draw kernel over the part of a plan that falls into a region, computing every
// Philox block at most once per region.
//
// The U results of thread t's call lie V elements apart. So in each call the region's runs are seen
// through U windows of V elements, shifted onto the same axis t; where t enters or leaves a run of
// one of the windows, the set of results to keep changes. Between two such places lies a piece.
#pragma once

#include <cstdint>
#include <vector>

#include "rng/draw.h"
#include "rng/planner.h"
#include "rng/region.h"

namespace dtensor {

class Sweeper {
 public:
  // `call` carries the keys and the op's parameters; `data` is the local tensor's first element.
  Sweeper(DrawFn draw, const DrawCall& call, void* data, DType dtype);
  void Fill(const Region& region, const RandomPlan& plan);

 private:
  // One result number's view of the region during a call.
  struct Window {
    RunCursor cursor;
    int64_t first, last;  // g of its first thread, and g where it ends
    int64_t begin, end;   // the current run, in threads; kNever when there is none
    void Load();
  };
  // Lanes [lane, lane + n) of the batch. Results with a bit in `mask` go to local[c].
  struct Piece {
    int lane, n;
    unsigned mask;
    int64_t local[kMaxUnroll];
  };
  static constexpr int kLanes = 512;          // of a batch of short pieces
  static constexpr int64_t kLongPiece = 256;  // written without a batch if contiguous

  void Call(const Region& region, const RandomSegment& segment, int unroll, int64_t number);
  void Emit(int64_t thread, int64_t n, unsigned mask, const Window* windows, int64_t stride);
  void AddToBatch(int64_t thread, int64_t n, unsigned mask, const int64_t* local, int64_t stride);
  void Flush(int64_t stride);

  const DrawFn draw_;
  DrawCall call_;
  char* const data_;
  const int64_t item_bytes_;
  int lanes_ = 0;  // in the batch
  std::vector<Piece> pieces_;
  alignas(64) uint32_t threads_[kLanes];
  alignas(64) char results_[kMaxUnroll][kLanes * 8];
};

}  // namespace dtensor
