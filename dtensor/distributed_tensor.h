// DTensor: a local tensor + a Spec. The one tensor type of users.
//
// A cheap counted handle, belonging to the rank (thread) that made it: but for the spec, everything
// asked of another rank's or world's tensor is InvalidArgument. A "local" tensor is a DTensor on
// the 0-dimensional mesh DeviceMesh::Self(). Functions here throw Error.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "dtensor/index.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/mesh/spec.h"
#include "dtensor/tensor/status.h"
#include "dtensor/tensor/tensor.h"

namespace dtensor {

class DTensor;

namespace internal {
struct DTensorImpl;
void Destroy(DTensorImpl* impl);
// The whole value as this rank has it once it is gathered.
Tensor FullLocal(const DTensor& t);
// What every DTensorImpl begins with: what handles use.
struct DTensorHead {
  int64_t refs = 1;
  // The id of the rank, or rehearsal, that made it. 0 where a reader has to look first (Rare in
  // impl.h: communication is pending, or a copy may be out of date): so the op path, which compares
  // it anyway, needs no check of its own.
  uint64_t context_id = 0;
  SpecRef spec;
};
inline DTensorHead* Head(DTensorImpl* impl) { return reinterpret_cast<DTensorHead*>(impl); }
[[noreturn]] void ThrowNull(const char* function);
[[noreturn]] void ThrowBadDim(int dim, int ndim);
[[noreturn]] void ThrowNoInt64(uint64_t number);
}  // namespace internal

// How a result of Redistribute comes.
struct RedistributeOptions {
  // Waits for no peer: the result is pending, and its first reader (an op, ToLocal, local()) waits
  // and takes what it needs. Several may be pending, and one that is never read costs its peers
  // nothing. The source may be changed or dropped meanwhile, by ops or through a fresh local(). All
  // ranks of the mesh must ask for it, in the same order as their other communication on the mesh
  // dims. Backward communicates as without.
  //   Comm:   starts the last collective; where there are two (a reduction whose results end
  //           elsewhere) the first runs at once. On the CPU no thread works in between: what is
  //           overlapped is waiting for peers. On a device whoever starts it last queues it on a
  //           stream beside the others, and the reader's stream comes after it.
  //   Errors: those of the communication, at every read.
  bool async = false;
  // Several readers share one result, as implicit redistributions do: it is kept with the source,
  // may be a view of it and must not be written to. Not together with async.
  bool shared = false;
};

class DTensor {
 public:
  DTensor() = default;  // null
  DTensor(const DTensor& o) : impl_(o.impl_) {
    if (impl_) ++internal::Head(impl_)->refs;
  }
  DTensor(DTensor&& o) noexcept : impl_(std::exchange(o.impl_, nullptr)) {}
  DTensor& operator=(DTensor o) & noexcept {  // to a name: what a function returns is no place
    std::swap(impl_, o.impl_);
    return *this;
  }
  ~DTensor() {
    if (impl_ && --internal::Head(impl_)->refs == 0) internal::Destroy(impl_);
  }

  // A tensor of which this rank holds nothing, made elsewhere: for Redistribute to this rank's mesh
  // and for Backward. It is the same on every rank that names it; where a gradient is to come back
  // to those who hold the tensor, all say so. Errors: InvalidArgument on a rank of the mesh.
  static DTensor Absent(const Spec& spec, bool requires_grad = false);
  static DTensor Absent(const DeviceMesh& mesh, absl::Span<const Placement> placements,
                        IntSpan shape, DType dtype, bool requires_grad = false);

  bool defined() const { return impl_ != nullptr; }
  const Spec& spec() const { return *spec_ref(); }
  const SpecRef& spec_ref() const {
    if (impl_ == nullptr) internal::ThrowNull("spec");
    return internal::Head(impl_)->spec;
  }
  const Shape& shape() const { return spec().shape(); }  // global
  int ndim() const { return spec().ndim(); }
  int64_t size(int dim) const {  // negative dims count from the end
    const int n = ndim();
    if (dim < -n || dim >= n) internal::ThrowBadDim(dim, n);
    return shape()[dim < 0 ? dim + n : dim];
  }
  int64_t numel() const { return spec().numel(); }
  DType dtype() const { return spec().dtype(); }
  const DeviceMesh& mesh() const { return spec().mesh(); }
  absl::Span<const Placement> placements() const { return spec().placements(); }
  // This rank's data as a plain array, outside autograd; null on ranks outside the mesh. Waits for
  // pending communication. May be written to until the next asynchronous Redistribute; after a
  // write through its data(), local().buffer().BumpVersion() tells shared results and saved values
  // of it.
  const Tensor& local() const;
  // Whether the calling rank is in the mesh and has data: not on meta, not in a rehearsal.
  bool has_values() const;
  // Value of a one-element tensor (reduced or gathered as needed). Errors: InvalidArgument
  // otherwise. All ranks of the mesh must call it.
  double Item() const;
  // Global values, row-major (T = double, float, int64_t). All ranks of the mesh must call it.
  template <class T>
  std::vector<T> ToVector() const {
    return internal::FullLocal(*this).ToVector<T>();
  }
  std::string ToString() const;  // spec and, when local or replicated, values

  // --- indexing; views, recorded by autograd (ops/view/view.h: index) ---
  // x[1], x[-1], x[Slice(0, 8)], x[{Slice(), 2, kEllipsis, kNewDim}]. What is taken of a sharded
  // dim moves as select and slice say. x[i] = y does not compile: write copy_(x[i], y); x[i] += y
  // does. Where y has a history, or x: select_scatter and slice_scatter, which give a new tensor.
  DTensor operator[](const Index& at) const;
  DTensor operator[](std::initializer_list<Index> at) const;

  // --- distribution; recorded by autograd ---
  // Same global value in other placements, in memory of its own unless `shared`. A new Partial(sum
  // | prod) holds the value on coordinate 0 and the neutral element elsewhere. Errors:
  // InvalidArgument for bad placements.
  DTensor Redistribute(absl::Span<const Placement> placements,
                       RedistributeOptions options = {}) const;
  DTensor Redistribute(std::initializer_list<Placement> placements,
                       RedistributeOptions options = {}) const {
    return Redistribute(absl::MakeConstSpan(placements.begin(), placements.size()), options);
  }
  // The same on another mesh of the world, of any ranks. All ranks of both must call it, those that
  // are not in this tensor's mesh on its Absent handle; the result is absent outside `mesh`. Ranks
  // in neither may call it and do nothing. Gradients come back the same way.
  //   Comm:   between meshes of other ranks: pending sums are reduced on this tensor's mesh, then
  //           one exchange among the ranks of both brings what `mesh` lacks; backward likewise.
  //   Errors: InvalidArgument if the devices differ or one mesh is Self; FailedPrecondition if
  //           ranks disagree on specs or on whether a gradient comes back.
  DTensor Redistribute(const DeviceMesh& mesh, absl::Span<const Placement> placements,
                       RedistributeOptions options = {}) const;
  DTensor Redistribute(const DeviceMesh& mesh, std::initializer_list<Placement> placements,
                       RedistributeOptions options = {}) const {
    return Redistribute(mesh, absl::MakeConstSpan(placements.begin(), placements.size()), options);
  }
  // This rank's part as a DTensor on Self. Gradients are taken to have `grad_placements`; default:
  // Shard -> the same Shard, Replicate -> Replicate, Partial -> Replicate (n times that of a term
  // of an average of n).
  DTensor ToLocal(absl::Span<const Placement> grad_placements = {}) const;
  // Redistribute to Replicate, then ToLocal.
  DTensor FullTensor() const;

  // --- autograd ---
  bool requires_grad() const;
  // Makes a leaf record gradients. Errors: InvalidArgument for integer dtypes and non-leaves.
  DTensor& RequiresGrad(bool value = true);
  bool is_leaf() const;
  // How gradients of this leaf are kept (one that is there moves): cast to `dtype` before they are
  // added up, over uses, microbatches and ranks, and brought to `placements` (default: the leaf's)
  // by the end of Backward. Errors: InvalidArgument for tensors that record none, integer dtypes,
  // pending placements and those that do not fit.
  DTensor& SetGradLayout(DType dtype, absl::Span<const Placement> placements = {});
  // Accumulated gradient of a leaf in the placement of the leaf, or as SetGradLayout says (reduced
  // now if NoGradSync left it pending: then all ranks of the mesh must call it); null if there is
  // none.
  DTensor grad() const;
  // Brought to the placement and dtype that gradients of this leaf have. Errors: InvalidArgument
  // for another shape or mesh, and for a dtype that is neither that nor the leaf's.
  void SetGrad(DTensor grad);
  void ZeroGrad();
  // Same data without history.
  DTensor Detach() const;
  // Gradients of this one-element tensor into all leaves. Errors: InvalidArgument for another
  // number of elements, FailedPrecondition for a tensor without history or a second backward.
  void Backward() const;
  // With the gradient given (same shape). Both are absent on a rank outside the mesh: it takes part
  // in what comes back to it.
  void Backward(const DTensor& gradient) const;

  internal::DTensorImpl* impl() const { return impl_; }
  // Takes over one reference.
  static DTensor Adopt(internal::DTensorImpl* impl) {
    DTensor t;
    t.impl_ = impl;
    return t;
  }

 private:
  internal::DTensorImpl* impl_ = nullptr;
};

// Tensors in order, as ops and modules take and give them; for modules they may have names.
class Values : public absl::InlinedVector<DTensor, 2> {
 public:
  using InlinedVector::InlinedVector;
  // Appends a tensor with a name: module(Values{x}.Add("mask", mask)).
  Values& Add(absl::string_view name, DTensor value);
  // The tensor of that name, or else the one at `position`, if that is there and has no name; null
  // if there is none.
  DTensor Named(absl::string_view name, size_t position = static_cast<size_t>(-1)) const;
  // "" for a tensor without.
  absl::string_view name(size_t position) const;

 private:
  std::vector<std::string> names_;  // of the first ones
};

// A C++ number in an expression: bool, integer or floating (type promotion depends on which).
struct Scalar {
  Scalar(double v) : d(v), i(Truncated(v)), is_float(true) {}
  Scalar(float v) : Scalar(static_cast<double>(v)) {}
  // Throws InvalidArgument for what no int64 holds.
  template <class T, std::enable_if_t<std::is_integral_v<T>, int> = 0>
  Scalar(T v)
      : d(static_cast<double>(v)),
        i(static_cast<int64_t>(v)),
        is_float(false),
        is_bool(std::is_same_v<T, bool>) {
    if (std::is_unsigned_v<T> && i < 0) internal::ThrowNoInt64(static_cast<uint64_t>(v));
  }
  double d;
  int64_t i;  // 0 for a floating one that no int64 holds
  bool is_float, is_bool = false;

 private:
  static int64_t Truncated(double v) {
    return v >= -9.2e18 && v <= 9.2e18 ? static_cast<int64_t>(v) : 0;  // false for NaN
  }
};

// --- scopes of the calling rank ---------------------------------------------------------------
// No recording.
class NoGrad {
 public:
  NoGrad();
  ~NoGrad();
  NoGrad(const NoGrad&) = delete;

 private:
  bool previous_;
};
// Recording, inside of a NoGrad (for functions that run again in backward).
class EnableGrad {
 public:
  EnableGrad();
  ~EnableGrad();
  EnableGrad(const EnableGrad&) = delete;

 private:
  bool previous_;
};
// Backward brings no leaf's gradient to its placement over these mesh dims (by name; default: over
// any): they wait as they came, often whole and Partial, and so do the gradients of parameters that
// were redistributed before their use. They are reduced when grad() or an optimizer reads them, or
// at the end of a later Backward outside of the scope that reaches the leaf. Scopes add up.
class NoGradSync {
 public:
  explicit NoGradSync(std::vector<std::string> mesh_dims = {});
  ~NoGradSync();
  NoGradSync(const NoGradSync&) = delete;

 private:
  bool all_;
  size_t names_;
};
// How many bytes of gradients are reduced by one collective at the end of Backward, at least; a
// larger gradient goes by itself. Default: so many that, by the cost model, a hundredth of the time
// is latency. The same on every rank.
class GradientBuckets {
 public:
  explicit GradientBuckets(int64_t bytes);
  ~GradientBuckets();
  GradientBuckets(const GradientBuckets&) = delete;

 private:
  int64_t previous_;
};
// Implicit redistribution that would communicate is FailedPrecondition naming op, input and
// collective. Also set by DTENSOR_STRICT=1.
class StrictRedistribute {
 public:
  explicit StrictRedistribute(bool strict = true);
  ~StrictRedistribute();
  StrictRedistribute(const StrictRedistribute&) = delete;

 private:
  bool previous_;
};
// Local tensors (on Self) in an op with distributed ones count as replicated.
class ImplicitReplication {
 public:
  ImplicitReplication();
  ~ImplicitReplication();
  ImplicitReplication(const ImplicitReplication&) = delete;

 private:
  bool previous_;
};

}  // namespace dtensor
