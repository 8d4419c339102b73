// VerifyOp: the judge of sharding declarations. A declaration cannot reveal that its form is a lie,
// or that it says less than is true; running the op on simulated ranks does.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "dtensor/op.h"
#include "dtensor/tensor/shape.h"

namespace dtensor {

// One call of an op: what its inputs are. Values are drawn (five times: with a sign, positive,
// small whole numbers that tie, and with infinities, NaN and the ends of integer types) unless
// given, as indices must be.
struct VerifyInput {
  Shape shape;
  DType dtype = DType::kF64;
  std::vector<double> values = {};  // row-major
};
struct VerifySample {
  std::vector<VerifyInput> inputs;
  Attrs attrs = {};
  std::vector<int64_t> ints = {};  // storage of the one attribute of kind kInts, if any
  int ints_attr = -1;              // which attribute that is
  // A row is missing if it is true for all samples of a group: those for which the declaration's
  // conditions (MonotoneIf, LinearIf) say the same and that are of one number here. For what makes
  // other rows true and is no condition.
  int group = 0;
  bool finite =
      false;           // no infinities, NaN or ends of types: the kernel may multiply what it masks
  bool exact = false;  // floats are compared to the last bit: what the op does is below tolerances
};

struct VerifyFinding {
  std::string row;         // "x [4, 6] S(1), w [6, 5] R -> P(sum) on mesh 2"
  std::string pattern;     // "x S(1), w R -> P(sum)", the same for all samples
  std::string why;         // wrong: what came out; missing: how often it was found true
  std::string reproducer;  // a statement for a test: EXPECT_TRUE(VerifyStrategy(...).ok());
  std::vector<std::string> follows;  // missing: patterns that would be offered with it
};

struct VerifyReport {
  int64_t combinations = 0;            // claimed strategies run on all simulated ranks and compared
  int64_t candidates = 0;              // rows tried in search of missing ones
  std::vector<VerifyFinding> wrong;    // claimed, but the numbers are others
  std::vector<VerifyFinding> missing;  // true for every sample and world, but not offered
  // What was claimed, kernel ranges included: declarations with the same text say the same.
  std::string claims;
  std::string ToString(const std::string& op) const;
};

struct VerifyOptions {
  int64_t most = 400;          // strategies per sample and mesh, evenly thinned
  bool stop_at_wrong = false;  // the first is enough
};

// The judge of one op: what is true of its kernel is found once, for any number of declarations.
class Verifier {
 public:
  // `op` is what the kernel is called for: its factor strings say which parts are a call at all.
  static std::unique_ptr<Verifier> Create(const OpDef& op, std::vector<VerifySample> samples);
  virtual ~Verifier() = default;

  // Judges `declaration`: the op itself, or another with the same inputs, attributes and outputs.
  //   Errors: those of the op, or of the declaration, on a sample.
  virtual absl::StatusOr<VerifyReport> Verify(const OpDef& declaration,
                                              const VerifyOptions& options = {}) = 0;
};

// Judges an op by its samples.
//
// Claimed but wrong: every strategy that takes inputs as they are, on meshes of 2, 3, 4, 2 x 2,
// 2 x 3 and (some of them) 2 x 2 x 2 simulated ranks (no threads, no peers); inputs Replicate,
// Shard (also with a unit, nested, empty), SegmentedShard (also with a unit), FlatShard, Partial
// (sum, max, min; terms differ from rank to rank); all outputs compared with the op on whole
// tensors, replicas with each other.
//
// True but missing: rows on one mesh dim of 2, 3 and 4 ranks with inputs of {R, S(d), one kind of
// Partial}, also with all cuts in segments, and flat, and outputs likewise, which the op's
// declaration does not offer (nor a row from which they follow without communication) although the
// plain op gives the right answer for every sample and every drawing of values, and for one sample
// with 32 more drawings of each kind.
//   Errors: those of the op on a sample; InvalidArgument without samples.
absl::StatusOr<VerifyReport> VerifyOp(const OpDef& op, const std::vector<VerifySample>& samples,
                                      const VerifyOptions& options = {});

// Whether the plain op on the parts that simulated ranks of a mesh hold under these placements
// gives the right answer.
//   Errors: FailedPrecondition saying what came out; those of the op on the sample.
absl::Status VerifyStrategy(const OpDef& op, const VerifySample& sample, const Dims& mesh,
                            const std::vector<Placements>& inputs,
                            const std::vector<Placements>& outputs);

// Runs the op and Backward on threads, 2 and 2 x 2 ranks, under every strategy that it claims, and
// compares the gradient of output 0 in every floating input with one rank's.
//   Errors: those of the op on a sample; InvalidArgument for an op without gradient.
absl::StatusOr<VerifyReport> VerifyGradients(const OpDef& op,
                                             const std::vector<VerifySample>& samples,
                                             int64_t most = 60);

}  // namespace dtensor
