#include "dtensor/parallel/local/local_map.h"

#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/autograd.h"
#include "dtensor/errors.h"
#include "dtensor/intercept.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/local/types.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

using internal::LocalTypes;
using internal::TypedLocal;

constexpr LocalType kV = LocalType::kVarying, kP = LocalType::kPartial, kR = LocalType::kReplicate,
                    kI = LocalType::kInvariant;

[[noreturn]] void Refuse(absl::string_view function, const std::string& why) {
  Throw(InFunction(function, absl::InvalidArgumentError(why)));
}

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

// Its own part of a dim that Shard cuts.
DTensor OwnPart(const DTensor& x, int dim, int64_t n, int64_t index) {
  const Interval mine = ShardInterval(x.size(dim), 1, n, index);
  return slice(x, dim, mine.start, mine.end);
}

// x among zeros along `dim`, which has `size`.
DTensor AmongZeros(const DTensor& x, int dim, int64_t size, int64_t n, int64_t index) {
  const Interval mine = ShardInterval(size, 1, n, index);
  if (mine.length() != x.size(dim)) {
    Refuse("convert",
           absl::StrCat("this rank has ", x.size(dim), " of dim ", dim, ", of ", size, " among ", n,
                        " ranks it would have ", mine.length(), "; give the size of the whole"));
  }
  Shape before = x.shape(), after = x.shape();
  before[dim] = mine.start;
  after[dim] = size - mine.end;
  const TensorOptions like = {.dtype = x.dtype()};
  return cat({zeros(before, like), x, zeros(after, like)}, dim);
}

// x on coordinate 0, zeros elsewhere; so is its gradient.
DTensor KeptByTheFirst(const DTensor& x, bool first) {
  const auto keep = [first](const DTensor& t) {
    return first ? clone(t) : zeros(t.shape(), {.dtype = t.dtype()});
  };
  const DTensor value = x.Detach();
  return CustomFunction(
      "convert", {x}, [&]() -> Values { return {keep(value)}; },
      [keep](const Values& grads) -> Values { return {keep(grads[0])}; })[0];
}

}  // namespace

// --- regions -------------------------------------------------------------------------------------

struct LocalRegion::State {
  explicit State(const DeviceMesh& mesh) : types(mesh) {}
  LocalTypes types;

  int DimOf(absl::string_view function, absl::string_view mesh_dim) const {
    absl::StatusOr<int> m = types.mesh().DimIndex(mesh_dim);
    if (!m.ok()) Throw(InFunction(function, m.status()));
    return *m;
  }

  // What a call changes: x on mesh dim m, from one of `from`.
  struct Step {
    absl::string_view function;
    std::string mesh_dim;
    int m;
    DeviceMesh line;  // of the ranks of the mesh dim
    int64_t n, index;
    TypedLocal typed;
    LocalType type() const { return typed.types[m]; }
  };
  Step Begin(absl::string_view function, const DTensor& x, absl::string_view mesh_dim,
             std::initializer_list<LocalType> from, absl::string_view hint) const {
    if (!x.defined() || !x.mesh().is_self()) {
      Refuse(function, x.defined()
                           ? absl::StrCat("takes a tensor on Self, got ", x.spec().ToString())
                           : std::string("the tensor is null"));
    }
    const int m = DimOf(function, mesh_dim);
    const int64_t rank = RankContext::Current().rank();
    const DeviceMesh& mesh = types.mesh();
    Dims coordinate;
    mesh.Coordinate(rank, &coordinate);
    Step step = {
        function,     std::string(mesh_dim), m, ValueOrThrow(mesh.SubMeshByDims({m}, rank)),
        mesh.size(m), coordinate[m],         {}};
    const TypedLocal* typed = types.Find(x);
    if (typed != nullptr) {
      step.typed = *typed;
    } else if (x.requires_grad()) {
      Refuse(function,
             "the tensor takes a gradient and is from outside of the region; give it to "
             "LocalMap as an input");
    } else {
      step.typed = {{static_cast<size_t>(mesh.ndim()), kR}, false, "made from numbers"};
    }
    for (const LocalType t : from) {
      if (step.type() == t) return step;
    }
    const std::string wanted = absl::StrJoin(from, " or ", [](std::string* out, LocalType t) {
      absl::StrAppend(out, absl::string_view(Name(t)));
    });
    Refuse(function, absl::StrCat("over ", mesh_dim, ": the tensor is ", Name(step.type()), " (",
                                  step.typed.made_by, "), not ", wanted, "; ", hint));
  }

  // The result, which is `to` on the step's mesh dim, in memory of its own: types are kept by it.
  DTensor End(Step step, const DTensor& x, DTensor y, LocalType to) {
    if (y.local().buffer().SharesWith(x.local().buffer())) y = clone(y);
    step.typed.types[step.m] = to;
    step.typed.made_by = absl::StrCat("made by ", step.function);
    types.Set(y, std::move(step.typed));
    return y;
  }

  // From one placement on the step's ranks to another, and the placements of the gradients there:
  // what leaves with `to`, what returns with `from`.
  DTensor Move(const Step& step, const DTensor& x, const Placement& from, const Placement& to,
               const Placement& grad_from, const Placement& grad_to, const Shape& whole) {
    const DTensor on_line = FromLocal(
        x, step.line, {from}, {.shape = whole, .run_check = false, .grad_placements = {grad_from}});
    const Placements target = {to}, grad = {grad_to};
    return on_line.Redistribute(target).ToLocal(grad);
  }
};

namespace {

void RequireReplicated(absl::string_view function, LocalType to) {
  if (to == kR || to == kI) return;
  Refuse(function, absl::StrCat("gives R or I, not ", Name(to)));
}

int DimIn(absl::string_view function, const DTensor& x, int dim) {
  const absl::StatusOr<int> d = NormalizeDim(dim, x.ndim());
  if (!d.ok()) Throw(InFunction(function, d.status()));
  return *d;
}

Shape WithSize(Shape shape, int dim, int64_t size) {
  shape[dim] = size;
  return shape;
}

}  // namespace

LocalRegion::LocalRegion(const DeviceMesh& mesh) : state_(std::make_unique<State>(mesh)) {}
LocalRegion::~LocalRegion() = default;

const DeviceMesh& LocalRegion::mesh() const { return state_->types.mesh(); }
int64_t LocalRegion::Size(absl::string_view mesh_dim) const {
  return mesh().size(state_->DimOf("size", mesh_dim));
}
int64_t LocalRegion::Index(absl::string_view mesh_dim) const {
  Dims coordinate;
  mesh().Coordinate(RankContext::Current().rank(), &coordinate);
  return coordinate[state_->DimOf("index", mesh_dim)];
}
LocalType LocalRegion::TypeOf(const DTensor& x, absl::string_view mesh_dim) const {
  const int m = state_->DimOf("type_of", mesh_dim);
  const TypedLocal* typed = state_->types.Find(x);
  return typed == nullptr ? kR : typed->types[m];
}

DTensor LocalRegion::AllReduce(const DTensor& x, absl::string_view mesh_dim, LocalType to) const {
  RequireReplicated("all_reduce", to);
  const State::Step step =
      state_->Begin("all_reduce", x, mesh_dim, {kP},
                    "what is R or I is reduced already; Reinterpret a V whose parts are terms");
  const Placement grad = to == kR ? Partial() : Replicate();
  return state_->End(
      step, x, state_->Move(step, x, Partial(), Replicate(), Replicate(), grad, x.shape()), to);
}

DTensor LocalRegion::AllGather(const DTensor& x, absl::string_view mesh_dim, int dim, LocalType to,
                               int64_t size) const {
  RequireReplicated("all_gather", to);
  const State::Step step = state_->Begin("all_gather", x, mesh_dim, {kV},
                                         "all_gather puts parts together; AllReduce sums terms");
  const int d = DimIn("all_gather", x, dim);
  const Shape whole = WithSize(x.shape(), d, size >= 0 ? size : x.size(d) * step.n);
  const Placement grad = to == kR ? Partial() : Replicate();
  return state_->End(step, x, state_->Move(step, x, Shard(d), Replicate(), Shard(d), grad, whole),
                     to);
}

DTensor LocalRegion::ReduceScatter(const DTensor& x, absl::string_view mesh_dim, int dim) const {
  const State::Step step = state_->Begin(
      "reduce_scatter", x, mesh_dim, {kP},
      "Convert takes the own part of an R or I; Reinterpret a V whose parts are terms");
  const int d = DimIn("reduce_scatter", x, dim);
  return state_->End(
      step, x, state_->Move(step, x, Partial(), Shard(d), Replicate(), Shard(d), x.shape()), kV);
}

DTensor LocalRegion::AllToAll(const DTensor& x, absl::string_view mesh_dim, int split_dim,
                              int concat_dim) const {
  const State::Step step =
      state_->Begin("all_to_all", x, mesh_dim, {kV}, "all_to_all exchanges parts");
  const int split = DimIn("all_to_all", x, split_dim), joined = DimIn("all_to_all", x, concat_dim);
  const Shape whole = WithSize(x.shape(), joined, x.size(joined) * step.n);
  return state_->End(
      step, x,
      state_->Move(step, x, Shard(joined), Shard(split), Shard(joined), Shard(split), whole), kV);
}

DTensor LocalRegion::Convert(const DTensor& x, absl::string_view mesh_dim, LocalType to, int dim,
                             int64_t size) const {
  const State::Step step = state_->Begin("convert", x, mesh_dim, {kR, kI, kV},
                                         "a sum is reduced by AllReduce or "
                                         "ReduceScatter");
  const LocalType from = step.type();
  const int d = x.ndim() == 0 ? 0 : DimIn("convert", x, dim);
  if (from == kI && to == kR) {
    return state_->End(
        step, x, state_->Move(step, x, Replicate(), Replicate(), Replicate(), Partial(), x.shape()),
        to);
  }
  if (from == kI && to == kV) {
    return state_->End(
        step, x, state_->Move(step, x, Replicate(), Shard(d), Replicate(), Shard(d), x.shape()),
        to);
  }
  if (from == kR && to == kV) return state_->End(step, x, OwnPart(x, d, step.n, step.index), to);
  if (from == kV && to == kP) {
    const int64_t whole = size >= 0 ? size : x.size(d) * step.n;
    return state_->End(step, x, AmongZeros(x, d, whole, step.n, step.index), to);
  }
  if (from == kR && to == kP) return state_->End(step, x, KeptByTheFirst(x, step.index == 0), to);
  Refuse("convert", absl::StrCat("over ", mesh_dim, ": ", Name(from), " (", step.typed.made_by,
                                 ") to ", Name(to), " is no conversion; ",
                                 from == kV ? "AllGather makes an R or I of parts"
                                 : from == kI && to == kP
                                     ? "go by R: Convert to R, then to P"
                                     : "an R was made from an I, or comes into the region as one"));
}

DTensor LocalRegion::Reinterpret(const DTensor& x, absl::string_view mesh_dim, LocalType to) const {
  const State::Step step =
      state_->Begin("reinterpret", x, mesh_dim, {kV, kR}, "it reads a V as P, or an R as V");
  if ((step.type() == kV && to == kP) || (step.type() == kR && to == kV)) {
    return state_->End(step, x, x, to);
  }
  Refuse("reinterpret",
         absl::StrCat("over ", mesh_dim, ": ", Name(step.type()), " (", step.typed.made_by, ") as ",
                      Name(to), ": it reads a V as P, or an R as V"));
}

// --- running one ---------------------------------------------------------------------------------

class LocalMapRun {
 public:
  LocalMapRun(const Values& inputs, const LocalMapOptions& options)
      : inputs_(inputs), options_(options), mesh_(MeshOf(inputs, options)), region_(mesh_) {}

  Values Run(const LocalFn& fn) {
    const Values parts = Enter();
    Values results;
    {
      const InterceptCalls checked([this](InterceptedCall& call) { return Checked(call); });
      results = fn(region_, parts);
    }
    return Leave(results);
  }

 private:
  static DeviceMesh MeshOf(const Values& inputs, const LocalMapOptions& options) {
    DeviceMesh mesh = options.mesh;
    if (!mesh.defined() && !inputs.empty() && inputs[0].defined()) mesh = inputs[0].mesh();
    if (!mesh.defined() || mesh.is_self()) {
      Refuse("local_map", "needs a mesh: give options.mesh, or a first input on one");
    }
    if (!mesh.Contains(RankContext::Current().rank())) {
      Refuse("local_map", absl::StrCat("rank ", RankContext::Current().rank(), " is not in mesh ",
                                       mesh.ToString()));
    }
    if (options.in.size() > inputs.size()) {
      Refuse("local_map",
             absl::StrCat(options.in.size(), " layouts for ", inputs.size(), " inputs"));
    }
    return mesh;
  }

  LocalLayouts LayoutsOf(const std::vector<LocalLayouts>& all, size_t i,
                         absl::string_view what) const {
    const auto ndim = static_cast<size_t>(mesh_.ndim());
    if (i >= all.size() || all[i].empty()) return LocalLayouts(ndim, LocalLayout(Replicate()));
    if (all[i].size() != ndim) {
      Refuse("local_map", absl::StrCat(what, " ", i, " has ", all[i].size(), " layouts for mesh ",
                                       mesh_.ToString()));
    }
    for (const LocalLayout& l : all[i]) {
      if (l.placement.is_partial() && l.placement.reduce_op() != ReduceOp::kSum) {
        Refuse("local_map", absl::StrCat(what, " ", i, " is ", l.placement.ToString(),
                                         "; a P is a term of a sum"));
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
        Refuse("local_map", absl::StrCat("input ", i, " is on mesh ", inputs_[i].mesh().ToString(),
                                         ", the region on ", mesh_.ToString()));
      }
      const LocalLayouts layouts = LayoutsOf(options_.in, i, "input");
      const DTensor placed = inputs_[i].Redistribute(PlacementsOf(layouts), {.shared = true});
      const bool records = placed.requires_grad();
      parts[i] = placed.ToLocal(records ? GradientsOf(layouts) : Placements());
      // Types are kept by memory, and two inputs may be one tensor.
      if (region_.state_->types.Find(parts[i]) != nullptr) parts[i] = clone(parts[i]);
      TypedLocal typed = {{}, records, absl::StrCat("input ", i, " of the region")};
      for (const LocalLayout& l : layouts) typed.types.push_back(TypeOfLayout(l));
      region_.state_->types.Set(parts[i], std::move(typed));
    }
    return parts;
  }

  // A call of the region's function: of local tensors, forward.
  Values Checked(InterceptedCall& call) {
    const bool backward = RankContext::Current().trace().phase == CommPhase::kBackward;
    for (const DTensor& t : call.inputs) {
      if (backward || !t.defined() || !t.mesh().is_self()) return call.Proceed();
    }
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
      Refuse("local_map",
             absl::StrCat(options_.out.size(), " layouts for ", results.size(), " results"));
    }
    Values out = results;
    for (size_t i = 0; i < results.size(); ++i) {
      if (!results[i].defined()) Refuse("local_map", absl::StrCat("result ", i, " is null"));
      const LocalLayouts layouts = LayoutsOf(options_.out, i, "result");
      CheckResult(i, results[i], layouts);
      FromLocalOptions how = {.run_check = options_.check_bits,
                              .grad_placements = GradientsOf(layouts)};
      if (i < options_.out_shapes.size()) how.shape = options_.out_shapes[i];
      out[i] = FromLocal(results[i], mesh_, PlacementsOf(layouts), how);
    }
    return out;
  }

  void CheckResult(size_t i, const DTensor& result, const LocalLayouts& layouts) const {
    const TypedLocal* typed = region_.state_->types.Find(result);
    if (typed == nullptr && result.requires_grad()) {
      Refuse("local_map", absl::StrCat("result ", i,
                                       " takes a gradient and is from outside of the "
                                       "region; give it as an input"));
    }
    for (int m = 0; m < mesh_.ndim(); ++m) {
      const LocalType want = TypeOfLayout(layouts[m]);
      const LocalType have = typed == nullptr ? kR : typed->types[m];
      const bool same_here = typed == nullptr || !typed->grad;  // R and I, without a gradient
      const auto whole = [](LocalType t) { return t == kR || t == kI; };
      if (have == want || (same_here && whole(have) && whole(want))) continue;
      const absl::string_view hint = have == kP   ? "AllReduce or ReduceScatter it"
                                     : have == kV ? "AllGather it, or say which dim Shard cuts"
                                     : have == kI
                                         ? "Convert it to R, or let the layout be Invariant()"
                                     : want == kI ? "AllReduce and AllGather give an I on request"
                                                  : "Convert it";
      Refuse("local_map",
             absl::StrCat("result ", i, " over ", mesh_.names()[m], " is ", Name(have), " (",
                          typed == nullptr ? "made from numbers" : typed->made_by,
                          "), its layout says ", Name(want), "; ", hint));
    }
  }

  const Values& inputs_;
  const LocalMapOptions& options_;
  const DeviceMesh mesh_;
  LocalRegion region_;
};

Values LocalMap(const LocalFn& fn, const Values& inputs, const LocalMapOptions& options) {
  return LocalMapRun(inputs, options).Run(fn);
}

}  // namespace dtensor
