// Sharding: from an op's declaration and the specs of one call to output shapes and a strategy.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "dtensor/factors.h"
#include "dtensor/op.h"
#include "dtensor/partition.h"

namespace dtensor {

// Placements of every operand on every mesh dim. Strategies compare by bytes, then by time.
struct Strategy {
  std::vector<Placements> inputs, outputs;
  double cost_bytes = 0;  // modelled bytes received per rank to redistribute the inputs
  double cost_us = 0;     // modelled time of that, and what rows given by hand say they cost
  int factor_map = -1;    // index into FactorMapsOf, -1 for rules and strategy lists
};

struct OpPlan {
  std::vector<Shape> out_shapes;
  std::vector<DType> out_dtypes;
  Strategy strategy;
  absl::InlinedVector<FactorRange, 2> offsets;  // this rank's ranges of the NeedsOffset factors
  int64_t candidates = 0;                       // strategies looked at
  bool beam = false;                            // the search was cut to a beam
};

// Of what the factor maps of a call have in common, as the first numbers it.
constexpr int kEveryMap = -1;

// One per operand.
using RowPlacements = absl::InlinedVector<Placement, 8>;

// How the factor that a row shards is cut.
struct FactorCut {
  int map = kEveryMap;               // the only factor map that has it
  int factor = -1;                   // the factor that is sharded, -1 = none
  Partition cut;                     // of the factor's range
  std::vector<Partition> part_cuts;  // instead: of the ranges of a joined factor's parts
  uint64_t cuts = 0;                 // factors whose sizes it changes
  // Elsewhere than where nothing is cut the placements depend on the sizes that are left (see
  // PlaceRow), and may not be legal even here.
  bool resolve = false;
  bool repeats = false;  // an input is cut so: a factor may be cut again for every major index
};

// One legal row for one mesh dim.
struct ShardingRow : FactorCut {
  ShardingRow() = default;
  explicit ShardingRow(FactorCut of) : FactorCut(std::move(of)) {}

  RowPlacements inputs, outputs;  // as they are where no mesh dim before cuts anything
  // Where it has to be resolved: it is legal where nothing is cut, and is placed so anywhere if no
  // mesh dim before cuts one of the factors that it depends on (a bit each: BitOf).
  bool placed = false;
  uint64_t depends = 0;
  double cost_us = 0;  // besides redistribution: StrategyRow::cost_us
};
using RowList = std::vector<ShardingRow>;

// Rows of one factor map for one mesh dim of size n, in order of preference: all-Replicate, one per
// shardable factor (and partition seen in the inputs), then those with Partial inputs, with flat
// and with pending maxima. `like`: a placement of output 0 that is asked for, or null.
RowList DeriveRows(const OpCall& call, const FactorMap& map, int mesh_dim,
                   const Spec* like = nullptr);

// The placements of a row that has to be resolved, where factors have these sizes left. False if it
// is not legal there.
bool PlaceRow(const FactorMap& map, const ShardingRow& row, const std::vector<SizeSet>& sizes,
              int64_t n, RowPlacements* inputs, RowPlacements* outputs);
// Makes the sizes of all factors those that a row leaves.
void CutSizesBy(const FactorMap& map, const ShardingRow& row, int64_t n,
                std::vector<SizeSet>* sizes);

// Chooses shapes, dtypes and the cheapest strategy. `like`: see DispatchOptions.
//   Errors: InvalidArgument (shapes, dtypes, check), FailedPrecondition for an in-place op whose
//   self would have to move, Unimplemented without a declaration.
absl::StatusOr<OpPlan> PlanOp(const OpCall& call, const Spec* like);
// The same by pricing every legal strategy, without the shortcuts: what PlanOp is judged by.
absl::StatusOr<OpPlan> PlanOpExhaustively(const OpCall& call);

// Every legal strategy of a call with factors or rows given by hand, as it is met; at most `most`.
std::vector<Strategy> LegalStrategies(const OpCall& call, size_t most = 4096);

// The part of each NeedsOffset factor that the rank at `coordinate` has under these placements; a
// factor that the map does not name has global -1.
absl::InlinedVector<FactorRange, 2> FactorRanges(const OpCall& call, const FactorMap& map,
                                                 const std::vector<Placements>& inputs,
                                                 const std::vector<Placements>& outputs,
                                                 IntSpan coordinate);

}  // namespace dtensor
