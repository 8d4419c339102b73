// LocalMap: a region of a program that holds this rank's tensors and says its collectives itself,
// with a type per mesh dim that is checked as it runs.
//
// A local tensor (on Self) has, on every mesh dim of the region, one of four types:
//   V  differs between the ranks, each with a value of its own (its shard)
//   P  is this rank's term of a sum
//   R  is the same on all ranks; its gradient is a P: each rank's uses give a term
//   I  is the same on all ranks, and so is its gradient
// Ops take R with R to R, V with V or R to V, I with I to I. What is linear by the op's declaration
// takes P to P: P + P, P with R as a product. All else is an error where it is written, naming the
// tensors, the calls that made them and what is missing. So a forgotten all-reduce, one too many,
// or a gradient that would be counted once per rank does not run.
//   Source: meta-pytorch/spmd_types
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/strings/string_view.h"
#include "dtensor/dispatch.h"
#include "dtensor/distribute.h"
#include "dtensor/distributed_tensor.h"
#include "dtensor/mesh/mesh.h"
#include "dtensor/mesh/placement.h"

namespace dtensor {

enum class LocalType : uint8_t { kVarying, kPartial, kReplicate, kInvariant };
absl::string_view Name(LocalType type);  // "V", "P", "R", "I"

// How a value stands at the boundary on one mesh dim: Shard is V, Partial(sum) is P, Replicate is R
// or, where it says so, I.
struct LocalLayout {
  LocalLayout(Placement where, bool same_gradient = false)  // NOLINT: a placement is a layout
      : placement(std::move(where)), invariant(same_gradient) {}
  Placement placement;
  bool invariant;
};
inline LocalLayout Invariant() { return {Replicate(), true}; }
using LocalLayouts = absl::InlinedVector<LocalLayout, 3>;  // per mesh dim; empty: R on all

// What the function of a region is given: its mesh, and the only ways from one type to another.
// Every function takes a tensor on Self and returns one. All ranks of the mesh dim call it.
//   Errors: InvalidArgument for a tensor of another type, a mesh dim that is not there (NotFound)
//           and dims or sizes that do not fit.
class LocalRegion {
 public:
  const DeviceMesh& mesh() const;
  int64_t Size(absl::string_view mesh_dim) const;
  int64_t Index(absl::string_view mesh_dim) const;  // this rank's coordinate
  // The type of a tensor of the region; R for what was made in it from numbers.
  LocalType TypeOf(const DTensor& x, absl::string_view mesh_dim) const;

  // P to R (backward: all-reduce) or to I (backward: nothing).
  DTensor AllReduce(const DTensor& x, absl::string_view mesh_dim,
                    LocalType to = LocalType::kReplicate) const;
  // V, parts of `dim`, to R (backward: reduce-scatter) or I (backward: own part). `size`: of the
  // whole dim, where ranks hold uneven parts as Shard cuts it.
  DTensor AllGather(const DTensor& x, absl::string_view mesh_dim, int dim,
                    LocalType to = LocalType::kReplicate, int64_t size = -1) const;
  // P to V: this rank's part of `dim` of the sum. Backward: all-gather.
  DTensor ReduceScatter(const DTensor& x, absl::string_view mesh_dim, int dim) const;
  // V to V: from parts of `concat_dim` to parts of `split_dim`. Backward: the reverse. `size`: of
  // the whole concat_dim, where ranks hold uneven parts as Shard cuts it.
  DTensor AllToAll(const DTensor& x, absl::string_view mesh_dim, int split_dim, int concat_dim,
                   int64_t size = -1) const;
  // The same global value as another type, without communication forward:
  //   I to R       backward: all-reduce
  //   R or I to V  own part of `dim`; backward: of R nothing, of I an all-gather
  //   V to P       own part among zeros, `size` (default: that of even parts) along `dim`
  //   R to P       coordinate 0 keeps it, the others hold zeros
  DTensor Convert(const DTensor& x, absl::string_view mesh_dim, LocalType to, int dim = 0,
                  int64_t size = -1) const;
  // The same data read as another type: V to P ("these are terms"), R to V.
  DTensor Reinterpret(const DTensor& x, absl::string_view mesh_dim, LocalType to) const;

 private:
  friend class LocalMapRun;
  struct State;
  explicit LocalRegion(const DeviceMesh& mesh);
  ~LocalRegion();
  LocalRegion(const LocalRegion&) = delete;
  std::unique_ptr<State> state_;
};

struct LocalMapOptions {
  DeviceMesh mesh = {};                // null: that of the first input
  std::vector<LocalLayouts> in = {};   // per input; left out at the end: R on all mesh dims
  std::vector<LocalLayouts> out = {};  // per output; likewise
  // Global shapes of outputs. Where one is left out (or empty) and the output is a V, the ranks
  // tell each other the sizes of their parts.
  std::vector<Shape> out_shapes = {};
  bool check_bits = false;  // outputs that are R or I hold the same bits on all ranks (debugging)
};
// fn on this rank's parts of `inputs`, which are brought to the layouts first; the results, put
// together by theirs. Recorded by autograd: gradients have the types that those of the values
// imply.
// Recompute may be around a region, and not inside of one. The rank's generator draws the same
// numbers on all ranks of a region, which on DTensors no two ranks would get for their parts of a
// value: inside, dropout of what is R, I or P is all that may draw from it. For a V draw on the
// DTensor outside and give it as an input, or open an RngTracker::Fork inside with a stream of the
// rank's own.
//   Comm:   what the layouts and fn say, nothing else; a few host bytes of every rank for a V
//           without its out_shape. Explain, which has no peers to ask, takes that as even.
//   Errors: InvalidArgument for a tensor that does not fit its type, for layouts that do not fit,
//           for parts of uneven sizes that are not as Shard cuts (a rank and its sizes are named),
//           for a result of another type than its layout says, and for Recompute and other draws
//           than those inside of fn;
//           on a rank outside of the mesh, which would have to run fn to know what it gives (ops on
//           DTensors run there and do nothing); those of fn.
using LocalFn = std::function<Values(const LocalRegion& region, const Values& parts)>;
Values LocalMap(const LocalFn& fn, const Values& inputs, const LocalMapOptions& options);

}  // namespace dtensor
