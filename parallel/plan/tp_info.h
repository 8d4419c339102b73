// TPInfo: a plan by suffixes of module names, as ATorch writes it. It becomes a Plan, so
// placements, collectives and errors are those of plans.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "dtensor/parallel/plan/plan.h"

namespace dtensor {

// A module whose Forward reads numbers that count what one rank has (heads, sizes): what Shrink
// divides. Modules that see whole DTensors infer such numbers and need none of it.
class HasAttributes {
 public:
  virtual ~HasAttributes() = default;
  virtual std::map<std::string, int64_t*> attributes() = 0;

 private:
  friend class TPInfoRules;
  std::set<std::pair<std::string, std::string>> shrunk_;  // attributes, and over which mesh dims
};

// How features are cut.
struct TPSplit {
  // The output features are so many equal parts side by side, each cut by itself: 3 for a fused q,
  // k, v of equal sizes.
  int64_t stride = 1;
  // Parts of unequal sizes instead (grouped heads); see ParallelOptions.
  Segments segments = {};
  int64_t unit = 0;  // as in ParallelOptions; segments have units of their own
};

// Rules are suffixes of module names: "attn.c_attn" is the rule of "h.0.attn.c_attn". A module may
// have a rule of each kind: one that shards, one for its random numbers, one that shrinks.
//   Source: ATorch TPInfo
class TPInfo {
 public:
  // ColwiseParallel.
  TPInfo& ShardCol(std::string suffix, TPSplit split = {});
  // RowwiseParallel; the bias is added once, after the sum.
  TPInfo& ShardRow(std::string suffix, TPSplit split = {});  // whole input features: unit alone
  // An embedding by vocabulary. Sizes need not divide: ranks hold as many rows as of the next
  // multiple, the last ones fewer, and no row is made up.
  TPInfo& ShardVocab(std::string suffix);
  // NoParallel: whole on every rank, which a strict plan wants to hear of what nothing shards.
  TPInfo& Whole(std::string suffix);
  // Random numbers alike on all ranks of the mesh dim: what enters is brought to Replicate there.
  TPInfo& ReplicDrop(std::string suffix);
  // Random numbers of each rank's own part. Masks are those of one device, cut as the input is.
  TPInfo& ParallelDrop(std::string suffix);
  // The named attributes (HasAttributes) are divided by the size of the mesh dim; once, also where
  // rules are applied again.
  TPInfo& Shrink(std::string suffix, std::set<std::string> attributes);
  // The rule before it need not be that of any module. Throws InvalidArgument where there is none.
  TPInfo& Optional();

 private:
  friend class TPInfoRules;
  enum class Kind : uint8_t { kCol, kRow, kVocab, kWhole, kReplicDrop, kParallelDrop, kShrink };
  struct Rule {
    Kind kind;
    std::string suffix;
    TPSplit split = {};
    std::set<std::string> attributes = {};
    bool optional = false;
  };
  std::vector<Rule> rules_;
};

// Applies the rules on one mesh dim, as a plan of the modules that they name; nothing is changed
// when it fails.
//   Errors: NotFound for a rule that no module has and is not Optional, with the nearest names;
//   InvalidArgument for two
//   rules of one kind on a module (both are named), a TPSplit that means nothing, attributes that
//   are not there or do not divide; those of a plan.
absl::Status ParallelizeModule(Module& module, const DeviceMesh& mesh, const TPInfo& info,
                               const ParallelizeOptions& options = {});
// On the mesh of the innermost MeshScope (dtensor/mesh_scope.h). Errors: FailedPrecondition if none
// is open.
absl::Status ParallelizeModule(Module& module, const TPInfo& info,
                               const ParallelizeOptions& options = {});

// The modules that have rules, as a tree: a line each, children of consecutive numbers with the
// same rules below them in one. Errors: those of the rules' names.
absl::StatusOr<std::string> TensorParallelTree(Module& module, const TPInfo& info);

}  // namespace dtensor
