// What the ops of this family share: arguments per spatial dim, the attribute `window`, factors.
#pragma once

#include <string>
#include <vector>

#include "dtensor/ops/conv/window.h"
#include "dtensor/ops/rules.h"

namespace dtensor {

using WindowDims = std::vector<WindowDim>;
inline constexpr int64_t kMostWindowNumber = int64_t{1} << 31;

// One number per spatial dim, each at least `least`; a list of one counts for all.
DimList PerDim(absl::string_view op, absl::string_view what, const DimList& list, int dims,
               int64_t least);
// Throws unless x is [c, s...] or [n, c, s...] with so many spatial dims.
void RequireSpatial(absl::string_view op, const DTensor& x, int dims);
// Size of spatial dim d of `dims`.
inline int64_t SpatialSize(const DTensor& x, int dims, int d) { return x.size(d - dims); }

// Behind the IntsAttr of a call.
DimList Packed(const WindowDims& windows);
// Of a call in a rule, whose numbers may be anything.
absl::StatusOr<Windows> CheckedWindows(const OpCall& call);

// "[i0] [i1]": dims that are read whole.
std::string WholeDims(absl::string_view name, int dims);
// The sizes of input, result and kernel dims as factors i0, t0, k0, ...
std::vector<std::pair<std::string, int64_t>> WindowSizes(const Windows& windows);
// For ops that read windows of any leading dims: "... [i0] -> ... [t0]" (one result or two of that
// shape), and for their gradients, which read one or two of those.
absl::StatusOr<FactorText> WindowFactors(const OpCall& call);
absl::StatusOr<FactorText> WindowBackwardFactors(const OpCall& call);

}  // namespace dtensor
