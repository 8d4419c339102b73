// Simulated ranks: the plain op (its kernel or view) on the parts that every rank of a mesh would
// hold, one rank after the other, without threads, peers or dispatch. What the judge (verify.h)
// compares with the op on whole tensors.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dtensor/factors.h"
#include "dtensor/op.h"
#include "dtensor/verify/draws.h"
#include "dtensor/verify/verify.h"

namespace dtensor::internal {

// How a call is placed on a mesh. `ranges`: per rank those of the NeedsOffset factors.
struct PlacedCall {
  std::vector<Placements> inputs, outputs;
  std::vector<absl::InlinedVector<FactorRange, 2>> ranges;
};

// The op and the values of one sample. Use inside a rank whose world holds the meshes given.
class Simulation {
 public:
  // Runs the op on whole tensors. Errors: those of the op.
  static absl::StatusOr<std::unique_ptr<Simulation>> Create(const OpDef& op,
                                                            const VerifySample& sample, Draw draw);

  // What each rank's op gives, [rank][output]. Errors: InvalidArgument where the placements ask the
  // kernel for something that it cannot be called with; what the kernel reports.
  using Parts = std::vector<std::vector<WholeValues>>;
  absl::StatusOr<Parts> Run(const DeviceMesh& mesh, const PlacedCall& call) const;

  // "" if the parts of output `o`, read as `placements`, are the whole; else the first difference.
  std::string Differs(const DeviceMesh& mesh, int o, const Placements& placements,
                      const Parts& parts) const;
  // Run and Differs for all outputs.
  std::string Check(const DeviceMesh& mesh, const PlacedCall& call) const;

  // The call with the ranges of each factor string that fits its placements: on every rank the
  // factors have one local size each. An op without factors takes anything, without ranges.
  std::vector<PlacedCall> Callable(const DeviceMesh& mesh, const PlacedCall& call) const;

  // False if no placement of the operands after the first `chosen.size()` ones (inputs, then
  // outputs) on one mesh dim can make a call. Saves a search from trying them.
  bool MayBeCallable(const DeviceMesh& mesh, const std::vector<Placement>& chosen) const;

  const OpDef& op() const { return op_; }
  const VerifySample& sample() const { return sample_; }
  const Attrs& attrs() const { return attrs_; }
  const std::vector<Shape>& out_shapes() const { return out_shapes_; }
  const std::vector<DType>& out_dtypes() const { return out_dtypes_; }

 private:
  std::vector<Shape> ShapesOf(const std::vector<Shape>& inputs) const;
  Simulation(const OpDef& op, const VerifySample& sample);
  absl::Status Truth(Draw draw);

  const OpDef& op_;
  const VerifySample& sample_;
  Attrs attrs_;
  Draw draw_ = Draw::kSigned;
  std::vector<FactorMap> maps_;
  std::vector<WholeValues> truth_;
  std::vector<Shape> out_shapes_;
  std::vector<DType> out_dtypes_;
};

// What the coordinate of a mesh holds of input `i` of a sample under these placements: its part, or
// its term of a pending value. Values depend on (i, draw) only. Errors: those of a bad placement.
absl::StatusOr<Tensor> PartOf(const VerifyInput& in, size_t i, Draw draw, const DeviceMesh& mesh,
                              const Placements& placements, IntSpan coordinate);

// Whether the sample has what the op takes: so many inputs, attributes, values. Errors:
// InvalidArgument.
absl::Status CheckSample(const OpDef& op, const VerifySample& sample);
// Whether each input has as many values as elements, or none. Errors: InvalidArgument.
absl::Status CheckValues(const std::vector<VerifyInput>& inputs);

// The specs of a sample's inputs. Errors: those of a bad placement.
absl::StatusOr<std::vector<SpecRef>> SpecsOf(const DeviceMesh& mesh, const VerifySample& sample,
                                             const std::vector<Placements>& placements);
// The sample's attributes; the list among them stays the sample's.
Attrs AttrsOf(const VerifySample& sample);

}  // namespace dtensor::internal
