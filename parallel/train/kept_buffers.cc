#include "dtensor/parallel/train/kept_buffers.h"

#include "absl/status/status.h"
#include "dtensor/autograd.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/io/checkpoint_parts.h"

namespace dtensor::internal {
namespace {

// This rank's part, in its memory.
DTensor PartOf(const DTensor& tensor) { return OnSelf(tensor.Detach().local()); }
uint64_t VersionOf(const DTensor& tensor) { return tensor.local().buffer().version(); }

}  // namespace

bool KeptBuffers::Kept::Changed() const {
  const DTensor& now = parameter->tensor();
  return now.impl() != tensor.impl() || VersionOf(now) != version;
}

KeptBuffers::KeptBuffers(const Module& model) {
  for (const NamedParameter& p : model.NamedBuffers()) buffers_.push_back({p.parameter});
}

void KeptBuffers::Keep() {
  const NoGrad no_grad;
  for (Kept& b : buffers_) {
    b.tensor = b.copy = {};
    const DTensor& now = b.parameter->tensor();
    if (!now.spec().in_mesh() || now.mesh().device() == DeviceType::kMeta) continue;
    b.tensor = now;
    b.version = VersionOf(now);
    if (b.changes) b.copy = clone(PartOf(now));
  }
}

void KeptBuffers::Restore() const {
  for (const Kept& b : buffers_) {
    if (!b.copy.defined()) continue;
    Guarded([&] {
      const NoGrad no_grad;
      if (b.Changed()) copy_(PartOf(b.parameter->tensor()), b.copy);
      return absl::OkStatus();
    }).IgnoreError();
  }
}

void KeptBuffers::Pass() {
  for (Kept& b : buffers_) {
    if (b.tensor.defined()) b.changes = (passed_ && b.changes) || b.Changed();
    b.tensor = b.copy = {};
  }
  passed_ = true;
}

}  // namespace dtensor::internal
