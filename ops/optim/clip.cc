// Norms of many tensors together, and clipping by them.
#include <cmath>

#include "absl/strings/str_cat.h"
#include "dtensor/call_list.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"

namespace dtensor {
namespace {

void RequireOneMesh(absl::string_view op, TensorList tensors) {
  for (const DTensor& t : tensors) {
    RequireDefined(op, {{"a tensor", t}});
    if (t.mesh() == tensors[0].mesh()) continue;
    ThrowInvalid(op, absl::StrCat("tensors are on different meshes: ", tensors[0].mesh().ToString(),
                                  " and ", t.mesh().ToString()));
  }
}

}  // namespace

DTensor get_total_norm(TensorList tensors, double norm_type) {
  return AsOp("get_total_norm", {}, [&] {
    if (tensors.empty()) return zeros({}, {.dtype = DType::kF64});
    RequireOneMesh("get_total_norm", tensors);
    // Where ranks have a copy, coordinate 0 counts.
    const DeviceMesh& mesh = tensors[0].mesh();
    const Placements terms(mesh.ndim(), Partial());
    const bool largest = std::isinf(norm_type);
    std::vector<DTensor> parts;
    {
      CallList list;
      for (const DTensor& t : tensors) parts.push_back(power_sum(t, norm_type));
      list.Run();
    }
    if (largest) {
      DTensor most = parts[0];
      for (size_t i = 1; i < parts.size(); ++i) most = maximum(most, parts[i]);
      return most.Redistribute(Placements(mesh.ndim()));
    }
    std::vector<const DTensor*> pending;
    for (DTensor& part : parts) pending.push_back(&(part = part.Redistribute(terms)));
    static const OpDef& add_n = GetOp("add_n");
    const DTensor total = Call1(add_n, pending).Redistribute(Placements(mesh.ndim()));
    return norm_type == 2 ? sqrt(total) : pow(total, 1 / norm_type);
  });
}

void clip_grads_with_norm_(TensorList grads, double max_norm, const DTensor& total_norm) {
  AsOp("clip_grads_with_norm_", {{"total_norm", total_norm}}, [&] {
    if (!(max_norm >= 0)) {
      ThrowInvalid("clip_grads_with_norm_",
                   absl::StrCat("max_norm must not be negative, is ", max_norm));
    }
    // At 1 the product is exact, so nothing has to be decided here.
    const DTensor norm = to(total_norm, DType::kF64);
    scale_(grads, minimum(div(max_norm, add(norm, 1e-6)), ones_like(norm)));
  });
}

DTensor clip_grad_norm_(TensorList grads, double max_norm, double norm_type) {
  return AsOp("clip_grad_norm_", {}, [&] {
    const NoGrad no_grad;
    const DTensor norm = get_total_norm(grads, norm_type);
    clip_grads_with_norm_(grads, max_norm, norm);
    DType dtype = grads.empty() ? DType::kF32 : grads[0].dtype();
    for (const DTensor& g : grads) dtype = PromoteTypes(dtype, g.dtype());
    return to(norm, dtype);
  });
}

void clip_grad_value_(TensorList grads, double clip_value) {
  AsOp("clip_grad_value_", {}, [&] {
    if (!(clip_value >= 0)) {
      ThrowInvalid("clip_grad_value_",
                   absl::StrCat("clip_value must not be negative, got ", clip_value));
    }
    const NoGrad no_grad;
    for (const DTensor& g : grads) {
      RequireDefined("clip_grad_value_", {{"a gradient", g}});
      RequireFloating("clip_grad_value_", g);
      const DTensor clipped = clamp(g, -clip_value, clip_value);
      if (g.spec().has_partial()) {
        add_(g, sub(clipped, g));
      } else {
        copy_(g, clipped);
      }
    }
  });
}

}  // namespace dtensor
