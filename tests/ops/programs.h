// Random programs: lists of steps that mean the same on one rank and on any mesh, with everything
// that can share memory: ops in place, views and their bases, views of views, local(), memoised
// and deferred redistributions, expanded tensors.
//
// A program is drawn while it runs on one rank (the reference), because what is drawn next depends
// on the values: sums are only made of whole numbers that stay exact in their dtype, so that every
// order of adding gives the same bits. A mesh then repeats the steps (tests/ops/programs_test.cc).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dtensor/ops/ops.h"

namespace dtensor::testing {

// One call. `in` are numbers of values; the results get the next numbers.
struct Step {
  std::string op;
  std::vector<int> in;
  std::vector<uint64_t> raw;  // what arguments are taken from (class Args)
  // A leaf:
  std::vector<int64_t> values;  // bits of doubles for floating dtypes
  Shape shape;
  DType dtype = DType::kF64;
};

struct Program {
  bool grad = false;  // records, and ends with a backward
  std::vector<Step> steps;
};

// What a step gave: results, or the error.
struct Outcome {
  int results = 0;
  absl::Status error;
};

// The values of a tensor as bits: doubles for floating dtypes (one NaN, one zero), else int64.
using ValueBits = std::vector<int64_t>;

// Runs steps on a mesh (on one rank: Self). All ranks of the mesh must do the same.
class Machine {
 public:
  // With `copies` every op but views and what an op in place writes to gets operands of its own, so
  // that what backward saves is not changed later.
  explicit Machine(const DeviceMesh& mesh, bool copies = false) : mesh_(mesh), copies_(copies) {}

  // `log`, if given, gets the call with its arguments as text.
  Outcome Do(const Step& step, std::string* log = nullptr);
  const std::vector<DTensor>& values() const { return values_; }
  void Drop(int value) { values_[value] = {}; }
  // What the values are now, empty for dropped ones; reads that are refused are errors.
  absl::StatusOr<ValueBits> Read(int value) const;
  // Gradients of the leaves, by the sum of all values that have a history.
  absl::StatusOr<std::vector<ValueBits>> Backward();

 private:
  DeviceMesh mesh_;
  bool copies_;
  std::vector<DTensor> values_, leaves_;
};

// How a backward says that what it saved is no more. The one refusal that only one rank may have: a
// mesh may have saved a redistributed copy.
inline constexpr const char* kChangedSince = "was changed in place after the forward";

// A program that ran on one rank, with what it gave.
struct Reference {
  Program program;
  std::vector<Outcome> outcomes;        // of every step
  std::vector<std::vector<int>> drops;  // values that end with a step: snapshots of what it wrote
  std::vector<absl::StatusOr<ValueBits>> finals;
  absl::StatusOr<std::vector<ValueBits>> gradients;
  // Where those are refused with kChangedSince: of the values that the forward saw. An error where
  // they are not known.
  absl::StatusOr<std::vector<ValueBits>> gradients_of_copies;
  bool compare_gradients = false;
};

// 5 to 20 steps besides the leaves.
Reference DrawProgram(uint64_t seed);
// A given program on one rank. Errors: FailedPrecondition where a step is not admissible (its sums
// are not exact, a pending sum meets what is not finite, a snapshot is written).
absl::StatusOr<Reference> RunReference(const Program& program);
// The program without step `step` and what depends on it.
Program Without(const Program& program, const std::vector<Outcome>& outcomes, size_t step);

}  // namespace dtensor::testing
