#include "examples/verify.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

Comparison Compare(const TrainResult& got, const TrainResult& reference) {
  Comparison diff;
  DT_CHECK(got.losses.size() == reference.losses.size());
  for (size_t i = 0; i < got.losses.size(); ++i) {
    const double a = got.losses[i], b = reference.losses[i];
    const double d = a == b ? 0 : std::fabs(a - b) / std::fabs(b);
    if (d > diff.loss_rel_diff || std::isnan(d)) diff.loss_rel_diff = d;
    if (std::isnan(d)) break;  // counts as a difference, whatever follows
  }
  DT_CHECK(got.parameters.size() == reference.parameters.size());
  double largest = 0, worst = 0;
  for (size_t p = 0; p < got.parameters.size(); ++p) {
    const auto& [name, a] = got.parameters[p];
    const auto& [other, b] = reference.parameters[p];
    DT_CHECK(name == other && a.size() == b.size());
    if (absl::EndsWith(name, "attn.wk.bias")) continue;
    for (size_t i = 0; i < a.size(); ++i) {
      largest = std::max(largest, std::fabs(b[i]));
      if (!std::isnan(worst) && !(std::fabs(a[i] - b[i]) <= worst)) {  // NaN stays
        worst = std::fabs(a[i] - b[i]);
        diff.worst = name;
      }
    }
  }
  diff.param_rel_diff = largest > 0 ? worst / largest : worst;
  return diff;
}

absl::Status Judge(const Comparison& diff, DType dtype) {
  const double tolerance = dtype == DType::kF64 ? 1e-10 : 1e-4;
  std::printf(
      "against one rank: losses differ by at most %.3g (relative), parameters by at most %.3g of "
      "the "
      "largest parameter%s%s; tolerance %.0e\n"
      "(attn.wk.bias is left out: its true gradient is zero, and Adam turns rounding noise into "
      "full-size steps)\n",
      diff.loss_rel_diff, diff.param_rel_diff, diff.worst.empty() ? "" : ", in ",
      diff.worst.c_str(), tolerance);
  if (diff.loss_rel_diff <= tolerance && diff.param_rel_diff <= tolerance) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("--verify: the mesh does not agree with one rank within ", tolerance));
}

}  // namespace dtensor
