// The values that the judge runs ops on (simulate.h): the same for the same seed on every machine.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "dtensor/mesh/placement.h"
#include "dtensor/verify/verify.h"

namespace dtensor::internal {

using WholeValues = std::vector<double>;  // of a whole tensor, row-major

// Where drawn values come from: with a sign; of one sign; small whole numbers, which tie; and twice
// with the ends of the type among them, where a pending maximum or minimum has ranks with nothing
// (the identity) and sums of integers wrap. A form that is true of finite numbers only is
// refuted by the last two for certain, not by luck: see Drawn and Term.
enum class Draw { kSigned, kPositive, kTies, kExtreme, kExtremeAgain };
inline constexpr Draw kDraws[] = {Draw::kSigned, Draw::kPositive, Draw::kTies, Draw::kExtreme,
                                  Draw::kExtremeAgain};
inline absl::Span<const Draw> DrawsOf(const VerifySample& sample) {
  return absl::MakeConstSpan(kDraws).first(sample.finite ? 3 : 5);
}
inline bool IsExtreme(Draw draw) { return draw >= Draw::kExtreme; }

// The values of an input, unless the sample gives them. Multiples of 2^-8 for floats, so that sums
// of a few are exact; whole numbers for integers. Where extremes are drawn:
// - floats have both infinities, NaN and zeros of both signs, integers both ends of their type:
//   those first, and as many as half of the elements are places for; of two numbers one drawing has
//   the one infinity, the next the other; a single number is an infinity in one drawing and finite
//   in the other, where the next input's is infinite. Of int64 all are multiples of 2^11, up to
//   2^63 - 2^11: doubles, which whole values are kept in, have these and their sums exactly;
// - of bools one differs from all the others, so that parts are all the same where the whole is
//   not.
WholeValues Drawn(const VerifyInput& in, uint64_t seed, Draw draw);

// Term `term` of `terms` whose reduction by `op` is `whole`; no two are alike. One term of a
// maximum or minimum owns each element, the others lose to it. Among ties every second of these
// holds 0 where that loses. Among extremes every second of them, and in the next drawing the other
// ones, holds the identity; the others hold the zero that loses beside a zero, and beside
// NaN the far infinity, which loses all the same, or NaN too. Every second NaN of a sum comes of
// infinities of unlike sign. 2^63 stands for the greatest int64, the identity of minima.
WholeValues Term(const WholeValues& whole, const VerifyInput& in, ReduceOp op, int64_t term,
                 int64_t terms, uint64_t seed, Draw draw);

// What an integer keeps of a sum of its terms; of truth values, whether there is a true one.
double Wrapped(double sum, DType dtype);

}  // namespace dtensor::internal
