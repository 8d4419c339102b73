// Plans: which module is spread how. A plan is data: pairs of a pattern over module FQNs and a
// Style; one function applies it, through the parameters' placements and hooks only.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dtensor/mesh/mesh.h"
#include "dtensor/mesh/placement.h"
#include "dtensor/parallel/module/module.h"

namespace dtensor {

// How a value enters or leaves a module, on one mesh dim.
struct ValueLayout {
  ValueLayout(Placement where, bool as_local = false)  // NOLINT: a placement is a layout
      : placement(std::move(where)), local(as_local) {}
  // A Shard of a dim of size 1 stands for Replicate: there is nothing to share among the ranks (one
  // decoded token under a sequence-parallel plan).
  Placement placement;
  // An input may come as a tensor on Self: then it is this rank's part, even shards, the same on
  // other mesh dims. An output leaves as one.
  bool local;
};

// What a style decides for one module, on one mesh dim.
struct ModuleLayout {
  std::vector<std::pair<Parameter*, Placement>> parameters = {};  // buffers among them
  // What inputs and outputs are redistributed to, by position; null leaves them as they come.
  std::vector<std::optional<ValueLayout>> inputs = {}, outputs = {};
  // Those with these names, whatever their position.
  std::map<std::string, ValueLayout> kwargs = {}, named_outputs = {};
};

// How one module is spread. A user's own style is another function.
struct Style {
  std::string name;
  // Errors: Unimplemented for a module it cannot serve.
  std::function<absl::StatusOr<ModuleLayout>(Module&)> layout;
};

struct ParallelOptions {
  // Cuts fall on multiples of `unit`: the head size where heads must stay whole. 0: as the module's
  // traits say, anywhere if they say nothing.
  int64_t unit = 0;
  // ColwiseParallel of one that is several side by side (a fused q, k, v): its output features
  // are cut as SegmentedShard cuts them, in units per segment; `unit` then says nothing. On 8 query
  // heads of size d with 2 key and value heads: {{8 * d, 4 * d}, {2 * d, d}, {2 * d, d}}.
  Segments segments = {};
  // What the module takes and gives; the defaults stand with each style.
  std::optional<ValueLayout> input = {}, output = {};
  // The output leaves as a local tensor: short for output = ValueLayout(..., true).
  bool use_local_output = false;
};
// The styles below serve modules with traits (ModuleTraits): Linear, Embedding, and a user's own.
//
// Output features are sharded. Linear: weight Shard(0), bias Shard(0); Embedding: weight Shard(1).
//   Input:   Replicate. Output: Shard of the last dim; SegmentedShard with options.segments.
//   Comm:    none forward; backward one all-reduce of the input's gradient, which modules that read
//            the same input share.
//   Source:  torch.distributed.tensor.parallel.ColwiseParallel
Style ColwiseParallel(const ParallelOptions& options = {});
// Input features are sharded. Linear: weight Shard(1), bias Replicate (added once); Embedding:
// weight Shard(0), the vocabulary.
//   Input:   Shard of the last dim (Linear), Replicate (Embedding). Output: Replicate.
//   Comm:    one all-reduce forward, none backward.
//   Source:  torch.distributed.tensor.parallel.RowwiseParallel
Style RowwiseParallel(const ParallelOptions& options = {});
// Says how values enter and leave a module of any type, and places what `layout` names.
//   Source:  torch.distributed.tensor.parallel.PrepareModuleInputOutput
Style PrepareModule(ModuleLayout layout);

// Patterns are cut at dots and each atom is matched with shell wildcards against names of children:
// "blocks.*.attn.w[qkv]". `*` never crosses a dot; "" is the module itself.
using Plan = std::vector<std::pair<std::string, Style>>;

// The modules that a pattern names, with their FQNs.
//   Errors: NotFound naming the atom at which matching ended and the nearest names there.
absl::StatusOr<std::vector<NamedModule>> MatchModules(Module& root, absl::string_view pattern);

// Puts every parameter and buffer that has no mesh yet on `mesh`: replicated, or, for parameters,
// as `partition` says.
//   Errors: InvalidArgument for placements that do not fit (naming the parameter) and for a
//   parameter on another mesh.
using PartitionFn = std::function<Placements(const NamedParameter&)>;
absl::Status DistributeModule(Module& module, const DeviceMesh& mesh,
                              const PartitionFn& partition = {});

struct ParallelizeOptions {
  // The mesh dim the plan acts on. A 1-D mesh needs none.
  std::string mesh_dim = "tp";
  // Tells on stderr, once per module and op, where an op of the module redistributes an input that
  // neither the plan nor the model asked for, and ranks to which the plan gives nothing.
  bool warn = true;
};
// Applies a plan on one mesh dim. Parameters and buffers that it does not name are replicated
// there. Nothing is changed when it fails.
//   Errors: NotFound for a pattern that matches nothing or an unknown mesh dim; InvalidArgument for
//   a module that two patterns match, parameters that are sharded on this mesh dim already, names
//   of one tied parameter that styles place differently (both are named), and placements that do
//   not fit; Unimplemented for a style that cannot serve a module.
absl::Status ParallelizeModule(Module& module, const DeviceMesh& mesh, const Plan& plan,
                               const ParallelizeOptions& options = {});

}  // namespace dtensor
