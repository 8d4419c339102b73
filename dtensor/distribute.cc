#include "dtensor/distribute.h"

#include <cmath>
#include <functional>
#include <numeric>
#include <optional>

#include "absl/strings/str_cat.h"
#include "dtensor/autograd.h"
#include "dtensor/dispatch.h"
#include "dtensor/errors.h"
#include "dtensor/impl.h"
#include "dtensor/local_check.h"
#include "dtensor/recompute.h"
#include "dtensor/redistribute.h"
#include "dtensor/rehearsal.h"
#include "dtensor/rng/fill.h"
#include "dtensor/rng/planner.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

using internal::MakeDTensor;

// The value, or its error thrown in the name of a function on `mesh`.
template <class T>
T Named(const char* name, const DeviceMesh& mesh, absl::StatusOr<T> value) {
  if (!value.ok()) Throw(TellPeers(mesh, InFunction(name, value.status())));
  return *std::move(value);
}

absl::StatusOr<SpecRef> InternHere(const DeviceMesh& mesh, PlacementSpan placements, IntSpan shape,
                                   DType dtype) {
  if (!mesh.defined()) return absl::InvalidArgumentError("the mesh is null");
  RankContext& context = RankContext::Current();
  if (mesh.device() != DeviceType::kMeta && mesh.MaxRank() >= context.world_size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("mesh ", mesh.ToString(), " needs ranks 0 to ", mesh.MaxRank(),
                     ", the world has ", context.world_size(),
                     ": start more ranks with RunSpmd, or "
                     "make the mesh smaller (for planning alone a mesh on DeviceType::kMeta)"));
  }
  return context.specs().Intern(mesh, placements, shape, dtype);
}

// The tensor on the mesh's device; itself where one of the two has no data.
absl::StatusOr<Tensor> OnDeviceOf(const DeviceMesh& mesh, Tensor tensor) {
  if (mesh.device() == DeviceType::kMeta || !tensor.defined()) return tensor;
  if (!tensor.has_data()) {
    if (RankContext::Current().rehearses()) return tensor;
    return absl::InvalidArgumentError(
        "the tensor has no values (it is on a meta mesh); give one that has");
  }
  return tensor.To(mesh.device());
}

absl::Status BroadcastFull(const DeviceMesh& mesh, int64_t src_rank, const Tensor& full) {
  if (src_rank >= mesh.size()) {
    return absl::InvalidArgumentError(absl::StrCat("src_rank ", src_rank, " is not in mesh ",
                                                   mesh.ToString(), " of ", mesh.size(), " ranks"));
  }
  std::vector<int> dims(mesh.ndim());
  std::iota(dims.begin(), dims.end(), 0);
  DT_ASSIGN_OR_RETURN(Comm * comm, RankContext::Current().CommFor(mesh, dims));
  return comm->Broadcast(full, static_cast<int>(src_rank)).Wait();
}

absl::StatusOr<DTensor> Distribute(const Tensor& full, const DeviceMesh& mesh,
                                   PlacementSpan placements, int64_t src_rank) {
  if (!full.defined()) return absl::InvalidArgumentError("the tensor is null");
  DT_ASSIGN_OR_RETURN(SpecRef target, InternHere(mesh, placements, full.shape(), full.dtype()));
  const Placements replicate(mesh.ndim());
  DT_ASSIGN_OR_RETURN(SpecRef source, InternHere(mesh, replicate, full.shape(), full.dtype()));
  RankContext& context = RankContext::Current();
  if (!target->in_mesh()) return MakeDTensor(context, target, Tensor());
  Tensor have = internal::RehearsedLocal(full);
  if (src_rank >= 0) {
    DT_ASSIGN_OR_RETURN(have, OnDeviceOf(mesh, std::move(have)));
    DT_ASSIGN_OR_RETURN(have, have.Clone());
    DT_RETURN_IF_ERROR(BroadcastFull(mesh, src_rank, have));
  }
  const ScopedCallTag tag(&context.call_tag(), *source, *target);
  DT_ASSIGN_OR_RETURN(Tensor local, RedistributeLocal(have, *source, *target));
  DT_ASSIGN_OR_RETURN(local, OnDeviceOf(mesh, std::move(local)));
  // In memory of its own: not the caller's, nor what holds the whole.
  const bool part = local.numel() != have.numel();
  if (local.buffer().SharesWith(full.buffer()) ||
      (part && local.buffer().SharesWith(have.buffer()))) {
    DT_ASSIGN_OR_RETURN(local, local.Clone());
  }
  return MakeDTensor(context, target, std::move(local));
}

// Global shape of a local one under even shards.
absl::StatusOr<Shape> EvenGlobalShape(const Tensor& local, const DeviceMesh& mesh,
                                      PlacementSpan placements) {
  Shape shape = local.shape();
  for (size_t m = 0; m < placements.size(); ++m) {
    const Placement& p = placements[m];
    if (p.cuts() && !p.is_shard()) {
      return absl::InvalidArgumentError(absl::StrCat("the global shape cannot be derived for ",
                                                     p.ToString(), "; give options.shape"));
    }
    if (!p.is_shard()) continue;
    DT_ASSIGN_OR_RETURN(const int d, NormalizeDim(p.dim(), local.ndim()));
    shape[d] *= mesh.size(static_cast<int>(m));
  }
  return shape;
}

// As the part of a row-major tensor of shape `whole` is: also in what a rank that has one row has
// for its stride, so that ranks which have more of it come to the same answer.
bool IsRowMajor(const Tensor& part, const Shape& whole) {
  const bool by_dims = part.ndim() == static_cast<int>(whole.size());  // flat pieces are not
  int64_t expected = 1;
  for (int d = part.ndim(); d-- > 0;) {
    if ((!by_dims || whole[d] != 1) && part.strides()[d] != expected) return false;
    expected *= std::max<int64_t>(part.size(d), 1);
  }
  return true;
}

absl::StatusOr<DTensor> WrapLocal(const DTensor& given, const DeviceMesh& mesh,
                                  PlacementSpan placements, const FromLocalOptions& options) {
  if (!given.defined() || !given.mesh().is_self()) {
    return absl::InvalidArgumentError(
        absl::StrCat("needs a local tensor (on Self), got ",
                     given.defined() ? given.spec().ToString() : std::string("null")));
  }
  const DTensor* here = &given;
  if (given.impl()->context_id != RankContext::Current().id()) {
    DT_ASSIGN_OR_RETURN(here, internal::Entered(given));
  }
  const DTensor& local = *here;
  if (!mesh.defined()) return absl::InvalidArgumentError("the mesh is null");
  if (static_cast<int>(placements.size()) != mesh.ndim()) {
    return absl::InvalidArgumentError(absl::StrCat(placements.size(), " placements for mesh ",
                                                   mesh.ToString(), " of ", mesh.ndim(), " dims"));
  }
  if (local.mesh().device() != mesh.device() && mesh.device() != DeviceType::kMeta) {
    return absl::InvalidArgumentError(absl::StrCat("the local tensor is on ",
                                                   DeviceName(local.mesh().device()),
                                                   ", the mesh is of ", DeviceName(mesh.device())));
  }
  Shape shape = options.shape;
  // Flat pieces that sum to one are those of a value without dims, whose shape is empty.
  const auto one_value = [](const Placement& p) {
    if (!p.is_flat()) return false;
    const IntSpan lengths = p.lengths();
    return std::count(lengths.begin(), lengths.end(), 1) == 1 &&
           std::count(lengths.begin(), lengths.end(), 0) + 1 ==
               static_cast<int64_t>(lengths.size());
  };
  const bool no_dims = std::any_of(placements.begin(), placements.end(), one_value);
  if (shape.empty() && local.ndim() > 0 && !no_dims) {
    DT_ASSIGN_OR_RETURN(shape, EvenGlobalShape(local.local(), mesh, placements));
  }
  DT_ASSIGN_OR_RETURN(SpecRef spec, InternHere(mesh, placements, shape, local.dtype()));
  RankContext& context = RankContext::Current();
  const internal::EngineState& state = context.Slot<internal::EngineState>();
  if (state.grad_enabled) DT_RETURN_IF_ERROR(internal::CheckFresh(*local.impl()));
  if (!spec->in_mesh()) return MakeDTensor(context, spec, Tensor());
  absl::Status fits;
  if (spec->local_shape() != local.shape()) {
    fits = RankLocal(absl::InvalidArgumentError(absl::StrCat(
        "local shape ", ToString(local.shape()), " on rank ", context.rank(), " is not the ",
        ToString(spec->local_shape()), " that ", spec->ToString(), " gives it; ",
        options.shape.empty() ? "pass the global shape in options.shape"
                              : "options.shape is the global shape, alike on all ranks")));
  }
  if (options.run_check && local.local().has_data()) {
    DT_RETURN_IF_ERROR(internal::CheckLocals(local.local(), *spec, fits));
  }
  DT_RETURN_IF_ERROR(fits);
  const Tensor& part = local.impl()->local;
  DTensor result = MakeDTensor(context, spec, part);
  if (part.strides() == IntSpan(spec->local_strides()) || IsRowMajor(part, shape)) {
    result.impl()->is_view = true;
    result.impl()->unrecorded = internal::StaysUnrecorded(*local.impl(), state);
    result.impl()->born_version = part.buffer().version();
    internal::KeepCopyOf(*local.impl(), result.impl());
  } else {
    DT_ASSIGN_OR_RETURN(result.impl()->local, part.Clone());
  }
  if (!local.impl()->requires_grad || !state.grad_enabled) return result;
  internal::NodeRef node = internal::NewNode(internal::Node::Kind::kFromLocal);
  node->edges.push_back(internal::EdgeOf(local));
  node->in_specs.push_back(local.spec_ref());
  node->out_specs.push_back(spec);
  node->extra = std::make_unique<internal::Node::Extra>();
  node->extra->grad_placements = options.grad_placements;
  if (!options.grad_placements.empty()) {
    const auto grads = InternHere(mesh, options.grad_placements, shape, local.dtype());
    if (!grads.ok()) return Prefixed("grad_placements", grads.status());
  }
  internal::SetHistory(result, node, 0);
  return result;
}

// A tensor that is distributed already, where that is as asked.
absl::StatusOr<DTensor> AsItIs(const DTensor& t, const DeviceMesh& mesh, PlacementSpan placements) {
  DT_ASSIGN_OR_RETURN(const SpecRef wanted, InternHere(mesh, placements, t.shape(), t.dtype()));
  if (t.mesh() == mesh && t.placements() == wanted->placements()) return t;
  return absl::InvalidArgumentError(absl::StrCat("the tensor is distributed already, as ",
                                                 t.spec().ToString(), "; ", wanted->ToString(),
                                                 " of it is Redistribute's"));
}

absl::StatusOr<DTensor> MakeEmpty(IntSpan shape, const TensorOptions& options) {
  if (!options.mesh.defined()) return absl::InvalidArgumentError("the mesh is null");
  Placements placements = options.placements;
  if (placements.empty()) placements.resize(options.mesh.ndim());
  const DType dtype = options.dtype.value_or(DType::kF32);
  DT_ASSIGN_OR_RETURN(SpecRef spec, InternHere(options.mesh, placements, shape, dtype));
  Tensor local;
  if (spec->in_mesh()) {
    const DeviceType device =
        RankContext::Current().rehearses() ? DeviceType::kMeta : options.mesh.device();
    DT_ASSIGN_OR_RETURN(local, Tensor::Empty(spec->local_shape(), dtype, device));
  }
  return MakeDTensor(RankContext::Current(), std::move(spec), std::move(local));
}

DTensor Constant(const char* name, IntSpan shape, Scalar value, const TensorOptions& options) {
  DTensor t = Named(name, options.mesh, MakeEmpty(shape, options));
  if (!t.local().defined()) return t;
  if (const auto neutral = t.spec().NeutralHere()) {
    FillInt(t.local(), *neutral);
  } else if (value.is_float || IsFloating(t.dtype())) {
    Fill(t.local(), value.d);
  } else {
    FillInt(t.local(), value.i);
  }
  return t;
}

absl::Status CheckDrawnOnto(const DTensor& t) {
  DT_RETURN_IF_ERROR(internal::CheckWritable(*t.impl()));
  if (GradEnabled()) {
    DT_RETURN_IF_ERROR(internal::CheckFresh(*t.impl()));
    if (t.impl()->unrecorded) return internal::ViewIsUnrecorded();
  }
  if (!t.requires_grad() || t.is_leaf()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "the tensor has a history, which would no longer be true; use Detach() or clone() first");
}

// `anew`: a factory just made t. A pending max of equal terms is legal there, but not to draw onto
// terms that a program gave a meaning.
void RandomInPlace(const char* name, const DTensor& t, const RandomOp& op, bool anew = false) {
  random_fill_(name, t, [&op, anew](const DTensor& self) -> absl::Status {
    if (!anew) DT_RETURN_IF_ERROR(RefuseMaxAndMin(self.spec(), op.name));
    return FillRandom(self.local(), self.spec(), op, nullptr,
                      internal::MemoryStrides(*self.impl()));
  });
}

}  // namespace

void random_fill_(const char* name, const DTensor& given, FillFn draw,
                  absl::Span<const NamedInput> inputs) {
  if (!given.defined()) {
    ThrowIfError(ExplainError(name, {}, absl::InvalidArgumentError("input self is null")));
  }
  const DTensor& t = internal::Here(given, name);
  for (const NamedInput& in : inputs) internal::Here(in.value, name);
  absl::Status status = CheckDrawnOnto(t);
  if (status.ok()) status = draw(t);
  if (!status.ok()) {
    const std::optional<ErrorOrigin> origin = OriginOf(status);
    std::vector<NamedInput> all = {{"self", t}};
    for (const NamedInput& in : inputs) all.push_back(in);
    Throw(TellPeers(t.mesh(), ExplainError(name, all, origin ? origin->cause : status)));
  }
  t.local().buffer().BumpVersion();
  if (internal::State().recompute != nullptr) internal::RecomputeRegion::NoteWrite(*t.impl());
}

DTensor DistributeTensor(const Tensor& full, const DeviceMesh& mesh, PlacementSpan placements,
                         int64_t src_rank) {
  return Named("distribute_tensor", mesh, Distribute(full, mesh, placements, src_rank));
}

DTensor DistributeTensor(const DTensor& full, const DeviceMesh& mesh, PlacementSpan placements) {
  const auto wrapped = [&]() -> absl::StatusOr<DTensor> {
    if (!full.defined()) return absl::InvalidArgumentError("the tensor is null");
    if (!mesh.defined()) return absl::InvalidArgumentError("the mesh is null");
    if (!full.mesh().is_self()) return AsItIs(full, mesh, placements);
    return WrapLocal(full, mesh, Placements(mesh.ndim()), {full.shape(), false, {}});
  };
  const DTensor x = Named("distribute_tensor", mesh, wrapped());
  return full.mesh().is_self() ? x.Redistribute(placements) : x;
}

DTensor OnSelf(const Tensor& tensor) {
  if (!tensor.defined()) {
    Throw(InFunction("on_self", absl::InvalidArgumentError("the tensor is null")));
  }
  const DeviceMesh& self = DeviceMesh::Self();
  SpecRef spec = Named("on_self", self, InternHere(self, {}, tensor.shape(), tensor.dtype()));
  return MakeDTensor(RankContext::Current(), std::move(spec),
                     Named("on_self", self, OnDeviceOf(self, tensor)));
}

DTensor FromLocal(const DTensor& local, const DeviceMesh& mesh, PlacementSpan placements,
                  const FromLocalOptions& options) {
  return Named("from_local", mesh, WrapLocal(local, mesh, placements, options));
}

DTensor zeros(IntSpan shape, const TensorOptions& options) {
  return Constant("zeros", shape, 0, options);
}
DTensor ones(IntSpan shape, const TensorOptions& options) {
  return Constant("ones", shape, 1, options);
}
DTensor full(IntSpan shape, Scalar value, const TensorOptions& options) {
  TensorOptions typed = options;
  if (!typed.dtype && !value.is_float) typed.dtype = value.is_bool ? DType::kBool : DType::kI64;
  const std::string misfit = typed.dtype ? Misfit(value, *typed.dtype) : "";
  if (!misfit.empty()) Throw(InFunction("full", absl::InvalidArgumentError(misfit)));
  return Constant("full", shape, value, typed);
}
DTensor empty(IntSpan shape, const TensorOptions& options) {
  return Named("empty", options.mesh, MakeEmpty(shape, options));
}

// Number of elements of arange; exact for integers of any size.
static int64_t RangeLength(const Scalar& start, const Scalar& end, const Scalar& step) {
  const bool exact = !start.is_float && !end.is_float && !step.is_float;
  const double length = step.d == 0 ? -1 : std::ceil((end.d - start.d) / step.d);
  if (!(length >= 0) || length > 0x1p62) {
    Throw(InFunction("arange", absl::InvalidArgumentError(absl::StrCat(
                                   "start ", start.d, ", end ", end.d, ", step ", step.d,
                                   ": the step must be non-zero and lead from start to end in a "
                                   "finite number of steps"))));
  }
  if (!exact) return static_cast<int64_t>(length);
  const __int128 way = static_cast<__int128>(end.i) - start.i, one = step.i;
  return static_cast<int64_t>((way + one + (one > 0 ? -1 : 1)) / one);
}

DTensor arange(Scalar start, Scalar end, Scalar step, TensorOptions options) {
  const bool fractions = start.is_float || end.is_float || step.is_float;
  if (!options.dtype && !fractions) options.dtype = DType::kI64;
  // Integers: start and step are truncated first.
  const bool integral = !IsFloating(options.dtype.value_or(DType::kF32));
  const int64_t n = RangeLength(start, end, step);
  DTensor t = empty({n}, options);
  if (!DrawsHere(t.spec(), t.local())) return t;
  const auto neutral = t.spec().NeutralHere();
  std::vector<Interval> index = std::move(LocalIndex(t.spec(), t.spec().coordinate())[0]);
  const auto count_of = [](const std::vector<Interval>& runs) {
    int64_t count = 0;
    for (const Interval& run : runs) count += run.length();
    return count;
  };
  for (int m = 0; m < t.mesh().ndim(); ++m) {  // pieces of what is left
    if (!t.placements()[m].is_flat()) continue;
    std::vector<Interval> piece;
    LocalIntervals(t.placements()[m], count_of(index), t.mesh().size(m), t.spec().coordinate()[m],
                   &piece);
    index = ComposeIntervals(index, piece);
  }
  const int64_t count = count_of(index);
  const Tensor values =
      Named("arange", t.mesh(), Tensor::Empty({count}, integral ? DType::kI64 : DType::kF64));
  auto* ints = static_cast<int64_t*>(values.data());
  auto* floats = static_cast<double*>(values.data());
  for (const Interval& run : index) {
    for (int64_t k = run.start; k < run.end; ++k) {
      if (integral) {
        // As the machine counts: no number of the range overflows, but a truncated step may.
        *ints++ =
            neutral
                ? *neutral
                : static_cast<int64_t>(static_cast<uint64_t>(start.i) +
                                       static_cast<uint64_t>(k) * static_cast<uint64_t>(step.i));
      } else {
        *floats++ =
            neutral ? static_cast<double>(*neutral) : start.d + static_cast<double>(k) * step.d;
      }
    }
  }
  Copy(values, t.local());
  return t;
}

void random_fill_(const DTensor& t, const RandomOp& op) { RandomInPlace(op.name.c_str(), t, op); }
DTensor empty_like(const DTensor& given, std::optional<DType> dtype) {
  const DTensor& x = internal::Here(given, "empty_like");
  const DTensor t =
      empty(x.shape(), {dtype.value_or(x.dtype()), x.mesh(), WithoutPending(x.placements())});
  const IntSpan strides = MemoryStrides(x);
  if (strides.empty()) return t;
  absl::StatusOr<Strides> order = IterationStrides(x.shape(), strides);
  if (order.ok() && *order != ContiguousStrides(x.shape())) {  // an expanded one: row-major
    internal::RareOf(*t.impl()).memory_strides = *std::move(order);
  }
  return t;
}
IntSpan MemoryStrides(const DTensor& x) {
  return internal::MemoryStrides(*internal::Here(x, "memory_strides").impl());
}

DTensor rand(IntSpan shape, const TensorOptions& options) {
  DTensor t = Named("rand", options.mesh, MakeEmpty(shape, options));
  RandomInPlace("rand", t, UniformOp(), true);
  return t;
}
DTensor randn(IntSpan shape, const TensorOptions& options) {
  DTensor t = Named("randn", options.mesh, MakeEmpty(shape, options));
  RandomInPlace("randn", t, NormalOp(), true);
  return t;
}
void uniform_(const DTensor& t, double from, double to) {
  RandomInPlace("uniform_", t, UniformOp(from, to));
}
void normal_(const DTensor& t, double mean, double std) {
  RandomInPlace("normal_", t, NormalOp(mean, std));
}

}  // namespace dtensor
