// Factors: the index names of an op's loop nest, parsed from strings and bound to global sizes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dtensor/op.h"

namespace dtensor {

// One dim of an operand: its factors, major first; none for a dim of size 1 that repeats.
using FactorDim = absl::InlinedVector<int, 2>;
using FactorOperand = absl::InlinedVector<FactorDim, 4>;

// The bit of a number in a set; the late ones share one.
constexpr int kLateBit = 63;
inline uint64_t BitOf(int k) { return uint64_t{1} << (k < kLateBit ? k : kLateBit); }

// What a factor string says of a call whatever the sizes.
struct FactorNest {
  std::vector<std::string> names;
  std::vector<bool> whole;  // bracketed somewhere: never sharded
  // The parts of a joined factor, "{a b}": its range is theirs, one after the other. Parts are
  // sharded together only, by a partition of the whole.
  std::vector<FactorDim> parts;
  std::vector<int> part_of;  // the joined factor that a factor is a part of, or -1
  std::vector<FactorOperand> inputs, outputs;
  std::vector<int> cut_dims;      // by operand (inputs, then outputs) and factor: CutDim
  std::vector<uint64_t> holding;  // by factor: inputs that are cut where it is sharded
  uint64_t composed = 0;          // factors that share a dim of some operand

  const FactorOperand& Operand(size_t k) const {  // inputs, then outputs
    return k < inputs.size() ? inputs[k] : outputs[k - inputs.size()];
  }
  // The dim of an operand that is cut where the factor is sharded: that of the factor or of the
  // first part of it that the operand holds; -1 if it holds none.
  int CutDim(size_t operand, int factor) const { return cut_dims[operand * names.size() + factor]; }
  // Dim of the operand that holds the factor, or -1.
  static int DimOf(const FactorOperand& operand, int factor);
  // The factor that is cut in this operand where `factor` is sharded: itself, or the part of it
  // that the operand holds; -1 if it holds neither.
  int CutIn(const FactorOperand& operand, int factor) const;
  int IndexOf(absl::string_view name) const;  // -1 if absent
};

// A factor string bound to one call: map->names, map.sizes.
struct FactorMap {
  std::shared_ptr<const FactorNest> nest;
  std::vector<int64_t> sizes;  // by factor; global

  const FactorNest* operator->() const { return nest.get(); }
  Shape OutputShape(int output) const;
};

struct FactorToken {
  enum class Kind : uint8_t { kDim, kEllipsis, kOne };
  Kind kind = Kind::kDim;
  // kDim: one name, or the factors of a composite, as ParsedFactors::names numbers them.
  absl::InlinedVector<int, 2> names;
  absl::InlinedVector<bool, 2> whole;  // per name
  absl::InlinedVector<int, 2> parts;   // of the one name, if it is joined
};
// The dims that `...` is in an input.
struct EllipsisDims {
  int count = 0;
  uint64_t repeats = 0;  // those of size 1 that others have more of: a bit each, from the right
  friend bool operator==(const EllipsisDims&, const EllipsisDims&) = default;
};
// Factors that no input dim gives, and their sizes.
using SizedNames = std::vector<std::pair<std::string, int64_t>>;

struct ParsedFactors {
  std::vector<std::vector<FactorToken>> inputs, outputs;
  std::vector<int> fixed;  // per input: how many of its dims are no `...`
  // As they are read: that is the order of preference among strategies.
  std::vector<std::string> names;
  int of_inputs = 0;        // how many of them inputs have
  int before_ellipsis = 0;  // how many are read before the first `...` of the inputs
  // Of the call that was bound last: mostly it is that of the next.
  mutable absl::InlinedVector<EllipsisDims, 4> ellipsis;  // by input
  mutable SizedNames sized;
  mutable std::shared_ptr<const FactorNest> nest;
};

// Errors: InvalidArgument showing the place.
absl::StatusOr<ParsedFactors> ParseFactors(absl::string_view text);

// Errors: InvalidArgument naming the factor and both dims where sizes differ, or the input whose
// number of dims does not fit.
absl::StatusOr<FactorMap> BindFactors(const OpCall& call, const ParsedFactors& parsed,
                                      const SizedNames& sizes);

// Bound factor maps of all factor sources of the op (in order), texts parsed once per rank.
absl::StatusOr<std::vector<FactorMap>> FactorMapsOf(const OpCall& call);

// "x [4, 6], w [5, 8]"
std::string DescribeShapes(const OpCall& call);

}  // namespace dtensor
