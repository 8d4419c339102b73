// Explain and Describe: what an op call would do before it runs, and which rank owns which block.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "dtensor/dispatch.h"
#include "dtensor/mesh/comm_trace.h"
#include "dtensor/mesh/cost.h"

namespace dtensor {

// One legal strategy for a call.
struct Alternative {
  std::vector<Placements> inputs, outputs;
  double bytes = 0;        // modelled bytes that a rank receives to bring the inputs there
  double modelled_us = 0;  // of these redistributions, collective by collective (CostModel)
};
struct Explanation {
  std::string op;
  std::vector<std::string> input_specs, output_specs;
  Alternative chosen;
  std::vector<Alternative> alternatives;  // all legal ones, cheapest first, the chosen among them
  std::vector<CommEvent> events;          // what CommTrace would record in a run
  std::vector<std::string> made_of;       // the ops that dispatch would make it of, if it would
  bool beam = false;                      // more candidates than were tried
  std::string why;                        // in a sentence
  // A table: the chosen strategy, then at most `most` alternatives.
  std::string ToString(int most = 12) const;
};

// Rehearses the call (dtensor/rehearsal.h): strategy, redistributions, those found on an input from
// an earlier call and decompositions are what a run at this place would have.
// Times are those of `cost`; without one, of the world's.
//   Errors: those of the call.
absl::StatusOr<Explanation> Explain(const OpDef& op, Inputs inputs,
                                    absl::Span<const Attr> attrs = {},
                                    const std::optional<CostModel>& cost = {});

// Which rank holds which block of a tensor with this spec, one line per rank.
//   "rank 1 (dp=0 tp=1): [0:4, 3:6]"
std::string Describe(const Spec& spec, int64_t most_ranks = 64);
inline std::string Describe(const DTensor& x) { return Describe(x.spec()); }
// The same as an SVG picture. Errors: InvalidArgument unless the tensor has one or two dims.
absl::StatusOr<std::string> DescribeSvg(const Spec& spec);

}  // namespace dtensor
