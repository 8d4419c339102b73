#include "dtensor/parallel/local/region.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/autograd.h"
#include "dtensor/errors.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

void internal::RefuseLocal(absl::string_view function, const std::string& why) {
  Throw(InFunction(function, absl::InvalidArgumentError(why)));
}

namespace {

using internal::kI;
using internal::kP;
using internal::kR;
using internal::kV;
using internal::RefuseLocal;
using internal::TypedLocal;

// Its own part of a dim that Shard cuts.
DTensor OwnPart(const DTensor& x, int dim, int64_t n, int64_t index) {
  const Interval mine = ShardInterval(x.size(dim), 1, n, index);
  return slice(x, dim, mine.start, mine.end);
}

// x among zeros along `dim`, which has `size`.
DTensor AmongZeros(const DTensor& x, int dim, int64_t size, int64_t n, int64_t index) {
  const Interval mine = ShardInterval(size, 1, n, index);
  if (mine.length() != x.size(dim)) {
    RefuseLocal("convert", absl::StrCat("this rank has ", x.size(dim), " of dim ", dim, ", of ",
                                        size, " among ", n, " ranks it would have ", mine.length(),
                                        "; give the size of the whole"));
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

absl::Status LocalRegion::State::CheckRecompute() const {
  if (internal::State().recompute == recompute) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "Recompute inside of a region would run its function again when the region is gone; put the "
      "LocalMap inside of Recompute");
}

int LocalRegion::State::DimOf(absl::string_view function, absl::string_view mesh_dim) const {
  absl::StatusOr<int> m = types.mesh().DimIndex(mesh_dim);
  if (!m.ok()) Throw(InFunction(function, m.status()));
  return *m;
}

LocalRegion::State::Step LocalRegion::State::Begin(absl::string_view function, const DTensor& x,
                                                   absl::string_view mesh_dim,
                                                   std::initializer_list<LocalType> from,
                                                   absl::string_view hint) const {
  if (!x.defined() || !x.mesh().is_self()) {
    RefuseLocal(function, x.defined()
                              ? absl::StrCat("takes a tensor on Self, got ", x.spec().ToString())
                              : std::string("the tensor is null"));
  }
  const absl::Status outside = CheckRecompute();
  if (!outside.ok()) Throw(InFunction(function, outside));
  const int m = DimOf(function, mesh_dim);
  const int64_t rank = RankContext::Current().rank();
  const DeviceMesh& mesh = types.mesh();
  Dims coordinate;
  mesh.Coordinate(rank, &coordinate);
  Step step = {function,     std::string(mesh_dim), m, ValueOrThrow(mesh.SubMeshByDims({m}, rank)),
               mesh.size(m), coordinate[m],         {}};
  const TypedLocal* typed = types.Find(x);
  if (typed != nullptr) {
    step.typed = *typed;
  } else if (x.requires_grad()) {
    RefuseLocal(function,
                "the tensor takes a gradient and is from outside of the region; give it to "
                "LocalMap as an input");
  } else {
    step.typed = {{static_cast<size_t>(mesh.ndim()), kR}, "made from numbers"};
  }
  for (const LocalType t : from) {
    if (step.type() == t) return step;
  }
  const std::string wanted = absl::StrJoin(from, " or ", [](std::string* out, LocalType t) {
    absl::StrAppend(out, absl::string_view(Name(t)));
  });
  RefuseLocal(function, absl::StrCat("over ", mesh_dim, ": the tensor is ", Name(step.type()), " (",
                                     step.typed.made_by, "), not ", wanted, "; ", hint));
}

DTensor LocalRegion::State::End(Step step, const DTensor& x, DTensor y, LocalType to) {
  if (y.local().buffer().SharesWith(x.local().buffer())) y = clone(y);
  step.typed.types[step.m] = to;
  step.typed.made_by = absl::StrCat("made by ", step.function);
  types.Set(y, std::move(step.typed));
  return y;
}

DTensor LocalRegion::State::Move(const Step& step, const DTensor& x, const Placement& from,
                                 const Placement& to, const Placement& grad_from,
                                 const Placement& grad_to, const Shape& whole) {
  const DTensor on_line = FromLocal(
      x, step.line, {from}, {.shape = whole, .run_check = false, .grad_placements = {grad_from}});
  const Placements target = {to}, grad = {grad_to};
  return on_line.Redistribute(target).ToLocal(grad);
}

namespace {

void RequireReplicated(absl::string_view function, LocalType to) {
  if (to == kR || to == kI) return;
  RefuseLocal(function, absl::StrCat("gives R or I, not ", Name(to)));
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
                              int concat_dim, int64_t size) const {
  const State::Step step =
      state_->Begin("all_to_all", x, mesh_dim, {kV}, "all_to_all exchanges parts");
  const int split = DimIn("all_to_all", x, split_dim), joined = DimIn("all_to_all", x, concat_dim);
  const Shape whole = WithSize(x.shape(), joined, size >= 0 ? size : x.size(joined) * step.n);
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
  RefuseLocal("convert",
              absl::StrCat("over ", mesh_dim, ": ", Name(from), " (", step.typed.made_by, ") to ",
                           Name(to), " is no conversion; ",
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
  RefuseLocal("reinterpret",
              absl::StrCat("over ", mesh_dim, ": ", Name(step.type()), " (", step.typed.made_by,
                           ") as ", Name(to), ": it reads a V as P, or an R as V"));
}

}  // namespace dtensor
