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
  // decoded token under a sequence-parallel plan). Not where the value goes on as a local tensor:
  // the first rank has the one then.
  Placement placement;
  // An input may come as a tensor on Self: then it is this rank's part here, and on other mesh dims
  // as ParallelizeOptions::local_layouts says. An output leaves as one.
  bool local;
  // What a tensor on Self is taken as before it is brought to `placement`, for inputs and outputs
  // alike. Null: `placement` for an input that is `local`; everything else on Self is refused.
  std::optional<Placement> taken_as = {};
  // Goes on as a tensor on Self: an input as the module sees it.
  bool give_local = false;
};

// What a style decides for one module, on one mesh dim.
struct ModuleLayout {
  std::vector<std::pair<Parameter*, Placement>> parameters = {};  // buffers among them
  // What inputs and outputs are redistributed to, by position; null leaves them as they come.
  std::vector<std::optional<ValueLayout>> inputs = {}, outputs = {};
  // Those with these names, whatever their position. A name that a call lacks is left alone.
  std::map<std::string, ValueLayout> kwargs = {}, named_outputs = {};
  // `inputs` (`outputs`) lists all that have no name: a call with another number is an error.
  bool all_inputs = false, all_outputs = false;
};

// How one module is spread. A user's own style is another function.
struct Style {
  // Errors: Unimplemented for a module it cannot serve.
  using LayoutFn = std::function<absl::StatusOr<ModuleLayout>(Module&)>;
  Style(std::string style_name, LayoutFn fn) : name(std::move(style_name)), layout(std::move(fn)) {}
  std::string name;
  LayoutFn layout;
  bool optional = false;  // its pattern may match nothing
};
// The same style, whose pattern may match nothing: {"lm_head", Optional(ColwiseParallel())}.
Style Optional(Style style);

struct ParallelOptions {
  // Cuts fall on multiples of `unit`: the head size where heads must stay whole. 0: as the module's
  // traits say, anywhere if they say nothing.
  int64_t unit = 0;
  // Of one that is several side by side: output features of ColwiseParallel (a fused q, k, v),
  // input features of RowwiseParallel (a concatenation) are cut as SegmentedShard cuts them, in
  // units per segment; `unit` then says nothing. On 8 query heads of size d with 2 of keys and
  // values: {{8 * d, 4 * d}, {2 * d, d}, {2 * d, d}}.
  Segments segments = {};
  // How the input comes, for one that comes as a local tensor ({Shard(1), true}); all are brought
  // to what the style computes from. What the module gives. The defaults stand with each style.
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
//   Input:   Shard of the last dim (Linear), SegmentedShard with options.segments, Replicate
//            (Embedding). Output: Replicate.
//   Comm:    one all-reduce forward, none backward; with output = Shard(d) one reduce-scatter,
//            and an all-gather backward.
//   Source:  torch.distributed.tensor.parallel.RowwiseParallel
Style RowwiseParallel(const ParallelOptions& options = {});

// The styles below serve modules of any type. Where they name a placement, a tensor on Self is this
// rank's part in it (ParallelizeOptions::local_layouts).
//
// Computes on a shard of `dim` of its inputs, as norms and dropout can; the parameters below the
// module are replicated.
//   Input:   Shard(dim) for the first. Output: Shard(dim) for the first; as a local tensor if
//   asked. Comm:    none where the input is sharded; backward one all-reduce of the parameters'
//   gradients,
//            together with those of other modules at the end.
//   Source:  torch.distributed.tensor.parallel.SequenceParallel
Style SequenceParallel(int dim = 1, bool use_local_output = false);

// What is replicated on this mesh dim although a plan is strict: parameters below the module,
// inputs and outputs. `input`, `output`: how the first comes and goes instead; it is Replicate
// between.
//   Comm:    none, but to bring the input to Replicate and the output to `output`.
//   Source:  torchtitan, NoParallel
struct NoParallelOptions {
  std::optional<Placement> input_layout = {}, output_layout = {};
  bool use_local_output = false;
};
Style NoParallel(const NoParallelOptions& options = {});

using Layouts = std::vector<std::optional<Placement>>;
using NamedLayouts = std::map<std::string, Placement>;
// What enters a module: how inputs come, by position, and where they are brought to. Null leaves
// one alone in both lists; they list all inputs without a name. Named ones are given in both maps
// or in neither.
//   Comm:    from the one to the other, and the reverse in backward.
//   Errors:  InvalidArgument for lists of unequal lengths, one without the other, names that are
//            in one map only; of the call, for another number of inputs.
//   Source:  torch.distributed.tensor.parallel.PrepareModuleInput
struct PrepareInputOptions {
  Layouts input_layouts = {}, desired_input_layouts = {};
  NamedLayouts input_kwarg_layouts = {}, desired_input_kwarg_layouts = {};
  bool use_local_output = false;  // the module gets its parts as local tensors
};
Style PrepareModuleInput(const PrepareInputOptions& options);
// The same for what leaves it.
//   Source:  torch.distributed.tensor.parallel.PrepareModuleOutput
struct PrepareOutputOptions {
  Layouts output_layouts = {}, desired_output_layouts = {};
  bool use_local_output = false;  // outputs leave as local tensors
};
Style PrepareModuleOutput(const PrepareOutputOptions& options);
// Both.
//   Source:  torch.distributed.tensor.parallel.PrepareModuleInputOutput
struct PrepareInputOutputOptions {
  PrepareInputOptions input = {};
  PrepareOutputOptions output = {};
};
Style PrepareModuleInputOutput(const PrepareInputOutputOptions& options);
// Says how values enter and leave a module, and places what `layout` names: all of the above, by
// hand.
Style PrepareModule(ModuleLayout layout);

// Patterns are cut at dots and each atom is matched with shell wildcards against names of children:
// "blocks.*.attn.w[qkv]". `*` never crosses a dot; "" is the module itself.
using Plan = std::vector<std::pair<std::string, Style>>;

// The modules that a pattern names, with their FQNs.
//   Errors: NotFound naming the atom at which matching ended and the nearest names there.
absl::StatusOr<std::vector<NamedModule>> MatchModules(Module& root, absl::string_view pattern);

// Puts every parameter and buffer that has no mesh yet on `mesh`: replicated, or, for parameters,
// as `partition` says, and for buffers, as `buffers` does; what has one stays. `input` and `output`
// then see what enters and leaves every call of the module itself, and may replace it.
//   Comm:   none for recipes; what has values already gets those of the mesh's first rank, by one
//           broadcast each.
//   Errors: InvalidArgument for placements that do not fit (naming the parameter) and for a
//   parameter on another mesh; FailedPrecondition for a `partition` where all parameters have one;
//   nothing is changed then.
//   Source: torch.distributed.tensor.distribute_module
using PartitionFn = std::function<Placements(const NamedParameter&)>;
using ValuesFn = std::function<Values(Module&, const Values&, const DeviceMesh&)>;
absl::Status DistributeModule(Module& module, const DeviceMesh& mesh,
                              const PartitionFn& partition = {}, const ValuesFn& input = {},
                              const ValuesFn& output = {}, const PartitionFn& buffers = {});

struct ParallelizeOptions {
  // The mesh dim the plan acts on. A 1-D mesh needs none.
  std::string mesh_dim = "tp";
  // Tells on stderr, once per module and op, where an op of the module redistributes an input that
  // neither the plan nor the model asked for, and ranks to which the plan gives nothing.
  bool warn = true;
  // A parameter that no style places is an error: what stays whole is said (NoParallel).
  bool strict = false;
  // Whose values a materialised module on Self has on the mesh: those of the rank with this index
  // of the mesh (row-major), by a broadcast each. -1: every rank has the same, and nothing is sent.
  int64_t src_data_rank = 0;
  // What tensors on Self that styles take or give are on the other mesh dims, by name:
  // {{"dp", Shard(0)}} where the batch is cut over dp. One that enters must be said for every other
  // mesh dim of more than one rank; one that leaves is brought there first.
  NamedLayouts local_layouts = {};
};
// Applies a plan on one mesh dim. Parameters and buffers that it does not name are replicated
// there. Nothing is changed when it fails.
//   Comm:   as DistributeModule.
//   Errors: NotFound for a pattern that matches nothing and is not Optional, or an unknown mesh
//   dim; InvalidArgument for a src_data_rank beyond the mesh; FailedPrecondition naming what a
//   strict plan leaves out; InvalidArgument for a module that two patterns match, parameters that
//   are not the module's or are sharded on this mesh dim already, names of one tied parameter that
//   styles place differently (both are named), and placements that do not fit; Unimplemented for a
//   style that cannot serve a module. Of a call of a module with a style: InvalidArgument for a
//   value that cannot be placed as its layout says, and for a tensor on Self that no layout takes,
//   that local_layouts does not say enough of, or whose sizes are not those of a part. Comm of a
//   call: what the styles say; for a tensor on Self that enters cut, a few host bytes of every
//   rank, by which parts may be uneven (Explain, which has no peers to ask, takes them as even).
absl::Status ParallelizeModule(Module& module, const DeviceMesh& mesh, const Plan& plan,
                               const ParallelizeOptions& options = {});
// One style for the module itself.
absl::Status ParallelizeModule(Module& module, const DeviceMesh& mesh, const Style& style,
                               const ParallelizeOptions& options = {});
// On the mesh of the innermost MeshScope (dtensor/mesh_scope.h). Errors: FailedPrecondition if none
// is open.
absl::Status DistributeModule(Module& module, const PartitionFn& partition = {},
                              const ValuesFn& input = {}, const ValuesFn& output = {},
                              const PartitionFn& buffers = {});
absl::Status ParallelizeModule(Module& module, const Plan& plan,
                               const ParallelizeOptions& options = {});
absl::Status ParallelizeModule(Module& module, const Style& style,
                               const ParallelizeOptions& options = {});

}  // namespace dtensor
