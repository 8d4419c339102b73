// The calls that random programs are made of, each with what it means for the numbers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/common/random_layout.h"
#include "tests/ops/programs.h"

namespace dtensor::testing {

// Arguments out of a step's raw numbers; the log gets what they were taken for.
class Args {
 public:
  Args(const Step& step, const DeviceMesh& mesh, std::string* log)
      : step_(step), mesh_(mesh), log_(log) {}

  // In [low, high]; `low` if there is nothing between.
  int64_t Pick(const char* what, int64_t low, int64_t high) {
    const int64_t n = high - low + 1;
    const int64_t v = n <= 0 ? low : low + static_cast<int64_t>(Next() % static_cast<uint64_t>(n));
    if (log_ != nullptr) absl::StrAppend(log_, ", ", what, "=", v);
    return v;
  }
  int64_t Dim(const DTensor& x) { return Pick("dim", 0, x.ndim() - 1); }
  int64_t SizeAt(const DTensor& x, int64_t dim) { return dim < x.ndim() ? x.shape()[dim] : 0; }
  double Number() { return static_cast<double>(Pick("number", -1, 3)); }
  // A layout of the mesh; the same number draws others on other meshes.
  Placements Layout(const Shape& shape, bool partial) {
    Dice dice(Next());
    Dims mesh;
    for (int m = 0; m < mesh_.ndim(); ++m) mesh.push_back(mesh_.size(m));
    Placements p = IsAnyLayout(dice) ? RandomLayout(dice, shape, mesh)
                                     : RandomPlacements(dice, shape, mesh, true);
    for (Placement& one : p) {
      if (one.is_partial() && !(partial && dice.Chance(50))) one = Replicate();
    }
    if (log_ != nullptr) absl::StrAppend(log_, ", ", ToString(p));
    return p;
  }
  const DeviceMesh& mesh() const { return mesh_; }
  // Whether the layout that a step begins its arguments with may wait for another reduction than a
  // sum, on whatever mesh.
  static bool MayReduceOtherwise(const Step& step) {
    Dice dice(step.raw[0]);
    return IsAnyLayout(dice);
  }

 private:
  static bool IsAnyLayout(Dice& dice) { return dice.Chance(15); }
  uint64_t Next() { return at_ < step_.raw.size() ? step_.raw[at_++] : 0; }
  const Step& step_;
  const DeviceMesh& mesh_;
  std::string* log_;
  size_t at_ = 0;
};

enum Property : uint32_t {
  kLinear = 1,      // a pending sum may pass
  kSums = 2,        // adds elements: the result may be a pending sum
  kProduct = 4,     // multiplies operands
  kWrites = 8,      // the first operand, in place
  kInexact = 16,    // results are no whole numbers
  kView = 32,       // shares memory with the first operand where it can
  kMoves = 64,      // what comes out may be a pending sum
  kSettles = 128,   // into one that is not
  kSnapshot = 256,  // shares memory or not, as the placements have it: nobody may write to it
  kFills = 512,     // writes the same to every term
  kScales = 1024,   // every term by itself
};

struct OpEntry {
  const char* name;
  int inputs;
  uint32_t is;
  // Operands that an op does not take are null.
  Values (*run)(Args&, const DTensor& x, const DTensor& y, const DTensor& z);
};

// x in another layout, in memory of its own.
DTensor MovedCopy(const DTensor& x, const Placements& p, bool async = false);

const std::vector<OpEntry>& ProgramOps();
const OpEntry& ProgramOp(const std::string& name);

}  // namespace dtensor::testing
