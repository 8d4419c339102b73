// Mutation of declarations: how good is the judge? Each mutant is the op with one thing declared
// otherwise; a judge that lets it pass does not look at that thing.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "dtensor/op.h"
#include "dtensor/verify/verify.h"

namespace dtensor {

struct Mutant {
  std::string what;                    // "c no longer read whole"
  std::unique_ptr<OpDef> declaration;  // null: the parser refuses it
};

// A factor's bracket removed or added, a factor renamed in one operand, two merged, a factor string
// dropped; a linear form or its condition dropped, a product dropped, an operand of one dropped,
// made a parameter or the reverse, a term added, a product made a sum and the reverse, a form given
// to an output that has none; Reduces dropped, changed or added; Monotone dropped, flipped, added;
// an offset not handed over. The samples give the names that factor functions use.
//   Errors: those of a factor function.
absl::StatusOr<std::vector<Mutant>> MutantsOf(const OpDef& op,
                                              const std::vector<VerifySample>& samples);

struct MutationReport {
  int64_t wrong = 0;       // killed: claims what is not true
  int64_t missing = 0;     // killed: does not offer what the op offers and is true
  int64_t refused = 0;     // killed by the parser, or refuses a sample of the op
  int64_t equivalent = 0;  // derives the same strategies and kernel ranges for every sample
  // Not wrong at all: claim all that the op does and more, all of it true (its missing rows).
  std::vector<std::string> modest;
  std::vector<std::string> survivors;
  int64_t killed() const { return wrong + missing + refused; }
  void Add(const MutationReport& other);
};
// Has the judge look at every mutant of the op.
//   Errors: those of VerifyOp on the op itself; FailedPrecondition if it is wrong already.
absl::StatusOr<MutationReport> MutateOp(const OpDef& op, const std::vector<VerifySample>& samples);

}  // namespace dtensor
