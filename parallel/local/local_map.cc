#include "dtensor/parallel/local/local_map.h"

#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "dtensor/errors.h"
#include "dtensor/intercept.h"
#include "dtensor/local_check.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/local/region.h"
#include "dtensor/recompute.h"
#include "dtensor/rng/generator.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

using internal::kI;
using internal::kP;
using internal::kR;
using internal::kV;
using internal::LocalTypes;
using internal::TypedLocal;

[[noreturn]] void Refuse(const std::string& why) { internal::RefuseLocal("local_map", why); }

LocalType TypeOfLayout(const LocalLayout& layout) {
  if (layout.placement.is_partial()) return kP;
  if (layout.placement.cuts()) return kV;
  return layout.invariant ? kI : kR;
}

// The placement of a gradient of a value that stands so: R's is pending, P's is whole.
Placement GradientOf(const LocalLayout& layout) {
  switch (TypeOfLayout(layout)) {
    case kV:
      return layout.placement;
    case kR:
      return Partial();
    case kP:
    case kI:
      return Replicate();
  }
  return Replicate();
}

}  // namespace

class LocalMapRun {
 public:
  LocalMapRun(const Values& inputs, const LocalMapOptions& options)
      : inputs_(inputs), options_(options), mesh_(MeshOf(inputs, options)), region_(mesh_) {}

  Values Run(const LocalFn& fn) {
    const Values parts = Enter();
    Values results;
    {
      const Generator& generator = DefaultGenerator();
      seed_ = generator.seed();
      offset_ = generator.offset();
      enters_in_backward_ = InBackward();
      InterceptCalls checked([this](InterceptedCall& call) { return Checked(call); });
      checked.OnMade([this](const DTensor& result, const DTensor& of) {
        region_.state_->types.Made(result, of);
      });
      results = fn(region_, parts);
    }
    if (Drew()) RefuseDraw("the region ended");
    return Leave(results);
  }

 private:
  static DeviceMesh MeshOf(const Values& inputs, const LocalMapOptions& options) {
    DeviceMesh mesh = options.mesh;
    if (!mesh.defined() && !inputs.empty() && inputs[0].defined()) mesh = inputs[0].mesh();
    if (!mesh.defined() || mesh.is_self()) {
      Refuse("needs a mesh: give options.mesh, or a first input on one");
    }
    RankContext& context = RankContext::Current();
    if (context.rehearses() && !mesh.Contains(context.rank())) {
      Refuse(absl::StrCat("rank ", context.rank(), " is not in mesh ", mesh.ToString(),
                          " and rehearses what its ranks do, as all ranks of a pipeline do with "
                          "every stage: a region is not for stages of pipelines"));
    }
    if (!mesh.Contains(context.rank())) {
      Refuse(absl::StrCat("rank ", context.rank(), " is not in mesh ", mesh.ToString(),
                          ", and a region runs on the ranks of its mesh only: ",
                          "call it where mesh.Contains(rank)"));
    }
    if (options.in.size() > inputs.size()) {
      Refuse(absl::StrCat(options.in.size(), " layouts for ", inputs.size(), " inputs"));
    }
    return mesh;
  }

  LocalLayouts LayoutsOf(const std::vector<LocalLayouts>& all, size_t i,
                         absl::string_view what) const {
    const auto ndim = static_cast<size_t>(mesh_.ndim());
    if (i >= all.size() || all[i].empty()) return LocalLayouts(ndim, LocalLayout(Replicate()));
    if (all[i].size() != ndim) {
      Refuse(absl::StrCat(what, " ", i, " has ", all[i].size(), " layouts for mesh ",
                          mesh_.ToString()));
    }
    for (const LocalLayout& l : all[i]) {
      if (l.placement.is_partial() && l.placement.reduce_op() != ReduceOp::kSum) {
        Refuse(
            absl::StrCat(what, " ", i, " is ", l.placement.ToString(), "; a P is a term of a sum"));
      }
    }
    return all[i];
  }

  static Placements PlacementsOf(const LocalLayouts& layouts) {
    Placements p;
    for (const LocalLayout& l : layouts) p.push_back(l.placement);
    return p;
  }
  static Placements GradientsOf(const LocalLayouts& layouts) {
    Placements p;
    for (const LocalLayout& l : layouts) p.push_back(GradientOf(l));
    return p;
  }

  Values Enter() {
    Values parts = inputs_;  // with their names
    for (size_t i = 0; i < inputs_.size(); ++i) {
      if (!inputs_[i].defined()) continue;
      if (inputs_[i].mesh() != mesh_) {
        Refuse(absl::StrCat("input ", i, " is on mesh ", inputs_[i].mesh().ToString(),
                            ", the region on ", mesh_.ToString()));
      }
      const LocalLayouts layouts = LayoutsOf(options_.in, i, "input");
      const DTensor placed = inputs_[i].Redistribute(PlacementsOf(layouts), {.shared = true});
      const bool records = placed.requires_grad();
      parts[i] = placed.ToLocal(records ? GradientsOf(layouts) : Placements());
      // Types are kept by memory, and two inputs may be one tensor. And a part that is a view must
      // not be written to: a rank would change its copy of a replicated input.
      const bool view = !(placed.spec_ref() == inputs_[i].spec_ref()) && parts[i].defined() &&
                        parts[i].local().buffer().SharesWith(inputs_[i].local().buffer());
      if (view || region_.state_->types.Find(parts[i]) != nullptr) parts[i] = clone(parts[i]);
      TypedLocal typed = {{}, absl::StrCat("input ", i, " of the region")};
      for (const LocalLayout& l : layouts) typed.types.push_back(TypeOfLayout(l));
      region_.state_->types.Set(parts[i], std::move(typed));
    }
    return parts;
  }

  // Whether the rank's generator moved since it was looked at last. A stream has another seed.
  bool Drew() {
    const Generator& generator = DefaultGenerator();
    if (generator.seed() != seed_) return false;
    const uint64_t before = std::exchange(offset_, generator.offset());
    return before != offset_;
  }
  [[noreturn]] static void RefuseDraw(absl::string_view before) {
    Refuse(absl::StrCat(
        "random numbers were drawn before ", before,
        ". The rank's generator gives every rank of a region the same ones, which is right for "
        "dropout of what is R, I or P alone: draw on the DTensor outside and give it to LocalMap "
        "as an input, or open an RngTracker::Fork in the region with a stream of the rank's own"));
  }
  // Numbers are drawn before the op that takes them: of this call's operands, or nobody knows
  // whose.
  void CheckDraw(const InterceptedCall& call) {
    if (!Drew()) return;
    bool typed = false, varies = region_.state_->types.WritesBesideOps();
    for (const DTensor& t : call.inputs) {
      const TypedLocal* const of = region_.state_->types.Find(t);
      typed |= of != nullptr;
      varies |= of != nullptr && absl::c_linear_search(of->types, kV);
    }
    if (!typed || varies) RefuseDraw(call.op.name());
  }

  static bool InBackward() {
    return RankContext::Current().trace().phase == CommPhase::kBackward && !internal::RunsAgain();
  }

  // A call of the region's function: of local tensors, forward, for the first time or again.
  Values Checked(InterceptedCall& call) {
    const bool backward = InBackward();
    if (backward && !enters_in_backward_) {
      Throw(InFunction("local_map", absl::UnimplementedError(
                                        "Backward inside of the region: its gradients would have "
                                        "no types; call it outside")));
    }
    for (const DTensor& t : call.inputs) {
      if (backward || !t.defined() || !t.mesh().is_self()) return call.Proceed();
    }
    const absl::Status outside = region_.state_->CheckRecompute();
    if (!outside.ok()) Throw(InFunction("local_map", outside));
    CheckDraw(call);
    LocalTypes& types = region_.state_->types;
    absl::StatusOr<TypedLocal> typed = types.Check(call.op, call.inputs, call.attrs);
    if (!typed.ok()) Throw(InFunction("local_map", typed.status()));
    Values made = call.Proceed();
    if (!typed->types.empty()) {
      for (const DTensor& t : made) types.Set(t, *typed);
    }
    return made;
  }

  Values Leave(const Values& results) {
    if (options_.out.size() > results.size()) {
      Refuse(absl::StrCat(options_.out.size(), " layouts for ", results.size(), " results"));
    }
    Values out = results;
    for (size_t i = 0; i < results.size(); ++i) {
      if (!results[i].defined()) Refuse(absl::StrCat("result ", i, " is null"));
      const LocalLayouts layouts = LayoutsOf(options_.out, i, "result");
      CheckResult(i, results[i], layouts);
      FromLocalOptions how = {.run_check = options_.check_bits,
                              .grad_placements = GradientsOf(layouts)};
      const Placements placements = PlacementsOf(layouts);
      if (i < options_.out_shapes.size()) how.shape = options_.out_shapes[i];
      if (how.shape.empty() && results[i].mesh().is_self()) {
        absl::StatusOr<Shape> shape = internal::ShapeOfParts(results[i].local(), mesh_, placements);
        if (!shape.ok()) {
          Throw(TellPeers(mesh_, InFunction("local_map",
                                            Prefixed(absl::StrCat("result ", i), shape.status()))));
        }
        how.shape = *std::move(shape);
      }
      out[i] = FromLocal(results[i], mesh_, placements, how);
    }
    return out;
  }

  void CheckResult(size_t i, const DTensor& result, const LocalLayouts& layouts) const {
    const TypedLocal* typed = region_.state_->types.Find(result);
    if (typed == nullptr && result.requires_grad()) {
      Refuse(absl::StrCat("result ", i,
                          " takes a gradient and is from outside of the "
                          "region; give it as an input"));
    }
    for (int m = 0; m < mesh_.ndim(); ++m) {
      const LocalType want = TypeOfLayout(layouts[m]);
      const LocalType have = typed == nullptr ? kR : typed->types[m];
      const bool same_here = !result.requires_grad();  // R and I, without a gradient
      const auto whole = [](LocalType t) { return t == kR || t == kI; };
      if (have == want || (same_here && whole(have) && whole(want))) continue;
      const absl::string_view hint = have == kP   ? "AllReduce or ReduceScatter it"
                                     : have == kV ? "AllGather it, or say which dim Shard cuts"
                                     : have == kI
                                         ? "Convert it to R, or let the layout be Invariant()"
                                     : want == kI ? "AllReduce and AllGather give an I on request"
                                                  : "Convert it";
      Refuse(absl::StrCat("result ", i, " over ", mesh_.names()[m], " is ", Name(have), " (",
                          typed == nullptr ? "made from numbers" : typed->made_by,
                          "), its layout says ", Name(want), "; ", hint));
    }
  }

  const Values& inputs_;
  const LocalMapOptions& options_;
  const DeviceMesh mesh_;
  LocalRegion region_;
  uint64_t seed_ = 0, offset_ = 0;  // of the rank's generator
  bool enters_in_backward_ = false;
};

Values LocalMap(const LocalFn& fn, const Values& inputs, const LocalMapOptions& options) {
  if (!fn) Throw(absl::InvalidArgumentError("[local_map] the function is null"));
  return LocalMapRun(inputs, options).Run(fn);
}

}  // namespace dtensor
