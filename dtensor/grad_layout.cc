// How the gradient of a leaf is kept, and gradients given from outside.
#include "absl/strings/str_cat.h"
#include "dtensor/autograd.h"
#include "dtensor/errors.h"
#include "dtensor/gradients.h"
#include "dtensor/impl.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

using internal::Node;
using internal::NodeRef;

namespace {
DTensor AsGradient(DTensor grad, const SpecRef& target) {
  NoGrad no_grad;
  const auto cast = ValueOrThrow(internal::Cast({std::move(grad)}, target->dtype()));
  return cast.tensor.spec_ref() == target ? cast.tensor
                                          : cast.tensor.Redistribute(target->placements());
}
}  // namespace

DTensor& DTensor::SetGradLayout(DType dtype, absl::Span<const Placement> placements) {
  const NodeRef& node = internal::Here(*this, "set_grad_layout").impl()->node;
  absl::Status status;
  if (!node || node->kind != Node::Kind::kLeaf) {
    status = absl::InvalidArgumentError("only a leaf that requires grad has a gradient");
  } else if (!IsFloating(dtype)) {
    status = absl::InvalidArgumentError("gradients are floating");
  } else {
    if (placements.empty()) placements = this->placements();
    absl::StatusOr<SpecRef> wanted =
        RankContext::Current().specs().Intern(mesh(), placements, shape(), dtype);
    status = wanted.status();
    if (status.ok() && (*wanted)->has_partial()) {
      status = absl::InvalidArgumentError("a gradient is not kept as a pending sum");
    }
    if (status.ok()) {
      DTensor old = grad();
      node->extra->grad_spec = *wanted;
      if (old.defined()) node->extra->leaf.grad = AsGradient(std::move(old), *wanted);
    }
  }
  if (!status.ok()) Throw(InFunction("set_grad_layout", status));
  return *this;
}

void DTensor::SetGrad(DTensor grad) {
  const NodeRef& node = internal::Here(*this, "set_grad").impl()->node;
  if (!node || node->kind != Node::Kind::kLeaf) {
    Throw(absl::InvalidArgumentError("[set_grad] only a leaf that requires grad has a gradient"));
  }
  if (grad.defined() && grad.shape() != shape()) {
    Throw(absl::InvalidArgumentError(
        absl::StrCat("[set_grad] gradient ", dtensor::ToString(grad.shape()),
                     " of a tensor of shape ", dtensor::ToString(shape()))));
  }
  if (grad.defined()) internal::Here(grad, "set_grad");
  DTensor placed = std::move(grad);
  if (placed.defined()) {
    const SpecRef target = ValueOrThrow(internal::GradientSpec(internal::LeafSpec(*node.get())));
    const bool known = placed.dtype() == dtype() || placed.dtype() == target->dtype();
    if (!known || !(placed.mesh() == mesh())) {
      Throw(absl::InvalidArgumentError(absl::StrCat("[set_grad] the gradient is ",
                                                    placed.spec().ToString(), ", the tensor ",
                                                    spec().ToString())));
    }
    placed = AsGradient(std::move(placed), target);
  }
  node->extra->leaf.pending.clear();
  node->extra->leaf.grad = std::move(placed);
}

}  // namespace dtensor
